"""What operators see of live placement, as JSON, and the prices by which its plans are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from moestro.config.idle_flags import may_have_gpu
from moestro.config.serve_settings import ServeSettings
from moestro.core.clock import NS_PER_S
from moestro.core.experts.expert_table import OTHER_NODE, SAME_NODE
from moestro.cost.gpus import gpu_named
from moestro.cost.links import link_named
from moestro.cost.networks import NetworkShape
from moestro.cost.settings import link_within, read_network
from moestro.placement.contract import PlacePrices, place_prices
from moestro.placement.live.control import PlacementControl
from moestro.placement.live.plan import GroupPlaces, PlacementPlan
from moestro.placement.payback import Payback
from moestro.placement.placement_file import figures
from moestro.placement.score import NOT_HELD

_DEFAULT_GPU, _CPU = "h100", "cpu"  # the first as in `moestro place`
_BYTES = {"float32": 4, "float64": 8}  # of a weight, where it is not 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePrices:
    """Prices by which plans of a running group are judged.

    Attributes:
        network: Sizes of the model.
        gpu, link, link_across: Names of the GPU, and of the links between GPUs within a machine and between machines.
        prices: The prices.
    """

    network: NetworkShape
    gpu: str
    link: str
    link_across: str
    prices: PlacePrices


def live_prices(settings: ServeSettings, dtype: str) -> LivePrices:
    """Return the prices of the model on the paced GPU, on the one that `--placement-gpu` names, or on CPUs.

    Engines that compute on CPUs are priced as CPUs: with a GPU's prices, plans would give up balance to read fewer
    experts.

    Args:
        settings: Settings of the server.
        dtype: Type of the served weights. Experts of 2 bytes a weight move in that type; packed ones move packed.

    Raises:
        ConfigError: The model has no experts or unknown sizes, or the GPU needs the name of a link.
    """
    live, paced = settings.placement, settings.paced
    is_priced = paced is not None and paced.table is None
    name = paced.gpu if paced is not None and is_priced else _DEFAULT_GPU
    if paced is None and not may_have_gpu(settings):
        name = _CPU
    link_name = paced.paced_link if paced is not None and is_priced else None
    gpu = gpu_named(live.placement_gpu or name)
    link = link_within(live.placement_link or link_name, gpu, "--placement-link")
    network = read_network(paced.network if paced is not None and is_priced else settings.model.model)
    across = link_named(live.placement_link_across)
    prices = place_prices(network, gpu, link, across)
    if not is_priced and network.experts is not None and network.experts.bytes_per_weight == 2:
        prices = replace(prices, expert_bytes=prices.expert_bytes * _BYTES.get(dtype, 2) // 2)
    return LivePrices(network=network, gpu=gpu.name, link=link.name, link_across=across.name, prices=prices)


class ProgressView(msgspec.Struct, kw_only=True):
    """The present migration, or the last one."""

    is_running: bool
    num_layers: int
    num_committed: int
    num_bytes: int
    error: str


class DecisionView(msgspec.Struct, kw_only=True):
    """The last decision, and its age in seconds."""

    trigger: str
    outcome: str
    reason: str
    age_s: float
    num_steps: int


class PricesView(msgspec.Struct, kw_only=True):
    """Prices by which plans are judged.

    Attributes:
        network, gpu, link, link_across: Whose figures these are; they are priced, not measured.
        token_s, expert_s: Seconds of a token at an expert, and of an activated expert.
        row_s, row_across_s: Seconds of a row between workers of a machine, and between machines.
        expert_bytes: Weights of one expert in one layer.
        move_s, move_across_s: Seconds in which they move, within a machine and between machines.
    """

    network: str
    gpu: str
    link: str
    link_across: str
    token_s: float
    expert_s: float
    row_s: float
    row_across_s: float
    expert_bytes: int
    move_s: float
    move_across_s: float


class PlanView(msgspec.Struct, kw_only=True):
    """A plan, and what it is worth.

    Attributes:
        policy: The policy, or where the table came from.
        base_version: Version of the table from which it starts.
        changes_anything: Whether it moves an expert or changes a share.
        num_moves, num_layers, num_bytes: Copies that move, layers of them, and their weights.
        move_s: Seconds in which the busiest worker receives its copies.
        before, after: Costs by the traffic model; None means that no load was counted.
        saved_s_per_step: Seconds by which a step is shorter.
        payback_steps: Steps after which the move has paid; None means never.
        refused: Why the loop would not follow the plan; "" means that it would.
        moves: (layer of the network, expert, source, target) with ?arrays=true; source -1 means loaded.
        table: Experts by layer, worker and slot, with ?arrays=true; -1 means empty.
    """

    policy: str
    base_version: int
    changes_anything: bool
    num_moves: int
    num_layers: int
    num_bytes: int
    move_s: float
    before: dict[str, float] | None
    after: dict[str, float] | None
    saved_s_per_step: float | None
    payback_steps: float | None
    refused: str
    prices: PricesView
    moves: list[tuple[int, int, int, int]] | None = None
    table: list[list[list[int]]] | None = None


class PlacementView(msgspec.Struct, kw_only=True):
    """Answer of GET /admin/placement.

    Attributes:
        policy: Policy that plans by itself, or none.
        workers: Workers that hold experts, as numbers in the table.
        machines: Machine of each of them, as a number from 0.
        num_slots: Slots of a worker in a layer.
        balance_of_sums, mean_balance: Balance of the present placement under the last load, as vLLM and as SGLang
            define it; None means that nothing was counted.
        before, predicted: Costs before and after the last plan that was followed, when it was made.
        saved_s_per_step: What that plan saves, predicted, and found under the load since.
        plan_age_s: Age of the last plan; None means none yet.
        num_steps, steps_since_decision: Steps since the start of the server, and since the last decision.
        stall: What stands still; "" means nothing.
        migrations, decisions: Ended migrations and decisions, by outcome.
        prices: Prices by which plans are judged.
        table: Experts by layer, worker and slot, with ?arrays=true; -1 means empty.
        shares: Part of its expert's tokens that each slot gets, with ?arrays=true.
    """

    policy: str
    is_frozen: bool
    is_planning: bool
    stall: str
    table_version: int
    num_layers: int
    num_experts: int
    workers: list[int]
    machines: list[int]
    num_slots: int
    balance_of_sums: float | None
    mean_balance: float | None
    before: dict[str, float] | None
    predicted: dict[str, float] | None
    saved_s_per_step: dict[str, float | None]
    plan_age_s: float | None
    num_steps: int
    progress: ProgressView
    moved_bytes: int
    migrations: dict[str, int]
    decisions: dict[str, int]
    decision: DecisionView | None
    prices: PricesView
    table: list[list[list[int]]] | None = None
    shares: list[list[list[float]]] | None = None


def prices_view(prices: LivePrices) -> PricesView:
    """Return prices as operators see them."""
    costs = prices.prices
    _, within, across = costs.move_bytes_per_s
    return PricesView(
        network=prices.network.name,
        gpu=prices.gpu,
        link=prices.link,
        link_across=prices.link_across,
        token_s=costs.token_s,
        expert_s=costs.expert_s,
        row_s=costs.row_s[SAME_NODE],
        row_across_s=costs.row_s[OTHER_NODE],
        expert_bytes=costs.expert_bytes,
        move_s=costs.expert_bytes / within,
        move_across_s=costs.expert_bytes / across,
    )


def plan_view(
    plan: PlacementPlan, layers: Sequence[int], prices: LivePrices, horizon_steps: float, *, has_arrays: bool
) -> PlanView:
    """Return a plan as operators see it.

    Args:
        plan: The plan.
        layers: The network's layer of each layer of the table.
        prices: Prices by which the plan was judged.
        horizon_steps: Steps within which the loop wants it to pay.
        has_arrays: Whether to list all moves and slots.
    """
    moves, change, held = plan.moves, plan.change, plan.places.holders
    columns = (np.array(layers)[moves.layer], moves.expert, held[moves.target])
    source = [NOT_HELD if at == NOT_HELD else int(held[at]) for at in moves.source.tolist()]
    layer, expert, target = (column.tolist() for column in columns)
    return PlanView(
        policy=plan.policy,
        base_version=plan.base.version,
        changes_anything=plan.changes_anything,
        num_moves=len(moves),
        num_layers=len(set(layer)),
        num_bytes=plan.num_bytes,
        move_s=plan.move_s,
        before=None if change is None else figures(change.before),
        after=None if change is None else figures(change.after),
        saved_s_per_step=None if change is None else change.saved_s,
        payback_steps=None if change is None else change.steps,
        refused=plan.why_not(horizon_steps) if plan.changes_anything else "",
        prices=prices_view(prices),
        moves=list(zip(layer, expert, source, target, strict=True)) if has_arrays else None,
        table=plan.target.logical_of.swapaxes(0, 1).tolist() if has_arrays else None,
    )


def placement_view(
    control: PlacementControl, places: GroupPlaces, prices: LivePrices, now_ns: int, *, has_arrays: bool
) -> PlacementView:
    """Return the state of live placement as operators see it.

    Args:
        control: The state.
        places: Workers that hold experts, and their machines.
        prices: Prices by which plans are judged.
        now_ns: Time.
        has_arrays: Whether to list all slots.
    """
    table, progress, decision = control.migration.table, control.migration.progress, control.decision
    score = None if control.measured is None else control.measured.score
    change = _followed(control)
    return PlacementView(
        policy=control.settings.placement_policy,
        is_frozen=control.is_frozen,
        is_planning=control.is_planning,
        stall=control.stall,
        table_version=table.version,
        num_layers=table.logical_of.shape[1],
        num_experts=table.num_experts,
        workers=places.holders.tolist(),
        machines=places.holder_machines.tolist(),
        num_slots=table.logical_of.shape[2],
        balance_of_sums=None if score is None else score.balance_of_sums,
        mean_balance=None if score is None else score.mean_balance,
        before=None if change is None else figures(change.before),
        predicted=None if change is None else figures(change.after),
        saved_s_per_step={"predicted": predicted_s(control), "found": found_s(control)},
        plan_age_s=None if control.plan is None else (now_ns - control.plan_ns) / NS_PER_S,
        num_steps=control.num_steps,
        progress=ProgressView(
            is_running=progress.is_running,
            num_layers=progress.num_layers,
            num_committed=progress.num_committed,
            num_bytes=progress.num_bytes,
            error=progress.error,
        ),
        moved_bytes=control.moved_bytes,
        migrations={outcome.value: count for outcome, count in sorted(control.num_migrations.items())},
        decisions={outcome.value: count for outcome, count in sorted(control.num_decisions.items())},
        prices=prices_view(prices),
        decision=None
        if decision is None
        else DecisionView(
            trigger=decision.trigger,
            outcome=decision.outcome,
            reason=decision.reason,
            age_s=(now_ns - decision.at_ns) / NS_PER_S,
            num_steps=decision.num_steps,
        ),
        table=table.logical_of.swapaxes(0, 1).tolist() if has_arrays else None,
        shares=table.slot_parts.swapaxes(0, 1).tolist() if has_arrays else None,
    )


def _followed(control: PlacementControl) -> Payback | None:
    """Return costs before and after the plan that is being followed, or was followed last."""
    plan = control.active or control.applied
    return None if plan is None else plan.change


def predicted_s(control: PlacementControl) -> float | None:
    """Seconds per step that the last completed plan was to save; None means that there is none."""
    change = None if control.applied is None else control.applied.change
    return None if change is None else change.saved_s


def found_s(control: PlacementControl) -> float | None:
    """Seconds per step that it saves under the load since, by the same prices."""
    return None if control.measured is None else control.measured.found_s
