"""Asks placement policies, and prices their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moestro.cli.placing.placements import Ints, filled_slots, present_copies, table_of_rows
from moestro.cli.placing.question import PlaceQuestion
from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import ExpertTable
from moestro.errors import ConfigError, MoestroError
from moestro.placement.payback import Payback, payback
from moestro.placement.placement_file import VERSION, PlacementFile, figures
from moestro.placement.registry import PLACE_POLICIES, PlacementError, PlaceView, check_answer
from moestro.workload.experts.expert_profile import CREATED_BY

SHARE_DIGITS = 6  # of a share in our file


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaceAnswer:
    """The placement of one policy.

    Attributes:
        policy: The policy, as the operator wrote it.
        table: New placement.
        change: Costs before and after, moves, and their payback.
        rows: int32[layers, slots], experts in the slots of all live devices end to end, for engines that have one in
            every slot. None means that no engine loads the placement.
    """

    policy: str
    table: ExpertTable
    change: Payback
    rows: Ints | None = None


def mean_sources(load: ExpertLoad) -> ExpertLoad:
    """Return the load as if all sources sent the same mix: what one of them sends by chance then moves no copy."""
    totals, tokens = load.tokens.sum(axis=(1, 2)), load.total
    parts = totals / max(float(totals.sum()), 1e-300)
    return replace(load, tokens=parts[:, None, None] * tokens)


def ask(policy: str, view: PlaceView, *, fills_slots: bool = False, mixes_sources: bool = False) -> PlaceAnswer:
    """Ask one policy.

    Args:
        policy: The policy, as the operator wrote it.
        view: What it sees.
        fills_slots: Whether the placement is for an engine that has an expert in every slot and divides tokens evenly
            among copies. Then leaving a slot empty saves nothing, so the policy plans twice: without a price for
            reading an expert, and with it. Empty slots are filled afterwards, within the limits, and of the two
            placements the one with the shorter step, moves included, is the answer.
        mixes_sources: Whether the policy sees the mean of all sources. The answer is priced with each source's tokens.

    Raises:
        ConfigError: No policy has this name, a setting is wrong, or no placement within the limits fills every slot.
        PlacementError: The policy fails, or its placement does not fit the devices.
    """
    decide = PLACE_POLICIES.make(policy)
    present = present_copies(view) if fills_slots else None
    seen = view
    if present is not None:
        try:
            limits = present.limits_beside_filling(view.table.num_experts)
        except ValueError as error:
            raise ConfigError(
                f"SGLang and TensorRT-LLM need an expert in every slot: {error}; raise that limit, or give fewer"
                " --slots-per-device"
            ) from None
        seen = replace(view, limits=limits, fills_slots=True)
    if mixes_sources:
        seen = replace(seen, load=mean_sources(seen.load))
    try:
        tables = [decide(seen)]
        if present is not None and view.prices.expert_s > 0:
            tables.append(decide(replace(seen, prices=replace(view.prices, expert_s=0.0))))
        for table in tables:
            check_answer(view, table)
    except MoestroError:
        raise
    except Exception as error:  # a policy of a user's file may raise anything
        raise PlacementError(f"policy {policy} found no placement: {type(error).__name__}: {error}") from error
    if present is None:
        return PlaceAnswer(policy=policy, table=tables[0], change=payback(view, tables[0]))
    answers = []
    for table in tables:
        rows = filled_slots(table, view.devices, view.load.total, present)
        filled = table_of_rows(rows, table, view.devices)
        answers.append(PlaceAnswer(policy=policy, table=filled, change=payback(view, filled), rows=rows))
    return min(answers, key=lambda each: each.change.after.step_s + each.change.move_s / view.limits.horizon_steps)


def ask_all(
    view: PlaceView, advance: Callable[[], None], *, fills_slots: bool = False, mixes_sources: bool = False
) -> dict[str, PlaceAnswer | str]:
    """Ask every registered policy under its default settings; in place of an answer, a failed one has its reason.

    Args:
        view: What the policies see.
        advance: Called after each policy.
        fills_slots, mixes_sources: As in `ask`.
    """
    found: dict[str, PlaceAnswer | str] = {}
    for name in PLACE_POLICIES.names():
        try:
            found[name] = ask(name, view, fills_slots=fills_slots, mixes_sources=mixes_sources)
        except (ConfigError, PlacementError) as error:
            found[name] = str(error)
        advance()
    return found


def placement_file(question: PlaceQuestion, answer: PlaceAnswer) -> PlacementFile:
    """Return the contents of our file."""
    devices, profile, moves = question.view.devices, question.profile, answer.change.moves
    columns = zip(
        moves.layer.tolist(), moves.expert.tolist(), moves.source.tolist(), moves.target.tolist(), strict=True
    )
    table, layers = answer.table, profile.layers
    return PlacementFile(
        moestro_placement=VERSION,
        policy=answer.policy,
        created_by=CREATED_BY,
        model=profile.model,
        num_experts=profile.num_experts,
        layers=list(layers),
        num_model_layers=profile.num_model_layers,
        devices=[
            {"node": int(node), "slots": int(slots), "speed": float(speed), "alive": bool(alive)}
            for node, slots, speed, alive in zip(
                devices.node_of, devices.num_slots, devices.speed, devices.is_alive, strict=True
            )
        ],
        table=table.logical_of.swapaxes(0, 1).tolist(),
        shares=None if table.shares is None else table.shares.swapaxes(0, 1).round(SHARE_DIGITS).tolist(),
        moves=[(layers[layer], expert, source, target) for layer, expert, source, target in columns],
        before=figures(answer.change.before),
        after=figures(answer.change.after),
        move_s=answer.change.move_s,
        payback_steps=answer.change.steps,
    )
