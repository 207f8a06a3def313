"""`moestro place`: reads, asks, shows, and writes files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moestro.cli.app import require_extra
from moestro.cli.placing.question import (
    Ints,
    PlaceQuestion,
    all_model_layers,
    apply_placement,
    filled_slots,
    idle_layers,
    load_to_check,
    make_question,
    present_copies,
    table_of_rows,
    write_json,
    write_tensorrt_llm,
)
from moestro.cli.placing.settings import EVEN_POLICY, PlacePolicySettings, PlaceSettings
from moestro.config.user_files import check_files
from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import ExpertTable
from moestro.errors import ConfigError, MoestroError
from moestro.placement.contract import PLACE_POLICIES, PlacementError, PlaceView, check_answer
from moestro.placement.kernel.choice import placement_kernel
from moestro.placement.payback import STAY, Payback, cheapest_rows, live_table, payback, peer_tables
from moestro.placement.placement_file import VERSION, PlacementFile, figures
from moestro.placement.score import PlaceScore, share_moved
from moestro.placement.search.filling import PresentCopies
from moestro.workload.experts.expert_profile import CREATED_BY, write_profile
from moestro.workload.progress import progress, progress_bar

# Asks placement policies, and prices their answers.

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
            reading an expert, and with it. Empty slots are filled afterwards, within the limits. Of these placements
            and those of the policy's peers, the one with the shortest step, moves included, is the answer.
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
    views = [seen]
    if present is not None and view.prices.expert_s > 0:
        views.append(replace(seen, prices=replace(view.prices, expert_s=0.0)))
    try:
        tables = [check_answer(view, decide(each)) for each in views]
    except MoestroError:
        raise
    except Exception as error:  # a policy of a user's file may raise anything
        raise PlacementError(f"policy {policy} found no placement: {type(error).__name__}: {error}") from error
    table, rows = tables[0], None
    if present is not None:
        rows = _filled(view, tables, [peer_tables(decide, each) for each in views], present)
        table = table_of_rows(rows, table, view.devices)
    return PlaceAnswer(policy=policy, table=table, change=payback(view, table), rows=rows)


def _filled(
    view: PlaceView, tables: list[ExpertTable], peers: list[dict[str, ExpertTable]], present: PresentCopies
) -> Ints:
    """Return the best placement once all slots are filled, of a policy's own and those of its peers."""

    def fill(table: ExpertTable) -> Ints:
        return filled_slots(table, view.devices, view.load.total, present)

    found = [fill(table) for table in (*tables, *(table for each in peers for table in each.values()))]
    kept = fill(peers[0][STAY]) if STAY in peers[0] else None
    best = cheapest_rows(view, found, lambda rows: table_of_rows(rows, tables[0], view.devices), kept)
    return best.astype(np.int32)


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


_SHOWN_LAYERS, _SHOWN_DEVICES = 5, 8
_ANY_WIDTH = 10_000  # columns; more than any table has


def line(console: Console, text: str) -> None:
    """Print one line as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_question(console: Console, question: PlaceQuestion) -> None:
    """Print what was read, and what was assumed."""
    profile, devices = question.profile, question.view.devices
    origin = f" ({profile.origin})" if profile.origin else ""
    line(
        console,
        f"Profile: {_number(profile.num_layers, 'layer')} with {_number(profile.num_experts, 'expert')},"
        f" {_number(profile.num_sources, 'source')}, {_number(round(profile.load.num_steps), 'step')}{origin}",
    )
    slots = sorted(set(devices.num_slots.tolist()))
    num_dead = int((~devices.is_alive).sum())
    line(
        console,
        f"Devices: {devices.num_devices} on {_number(len(set(devices.node_of.tolist())), 'node')},"
        f" {' to '.join(str(each) for each in dict.fromkeys((slots[0], slots[-1])))}"
        f" {'slot' if slots[-1] == 1 else 'slots'} each in a layer"
        + (f", {num_dead} of them dead" if num_dead else ""),
    )
    for note in question.notes:
        line(console, f"- {note}")


def _number(count: int, noun: str, plural: str = "") -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"


def print_answer(console: Console, question: PlaceQuestion, answer: PlaceAnswer) -> None:
    """Print the table before and after, the slowest layers, and the plan of moves."""
    change = answer.change
    line(console, f"Policy: {answer.policy}")
    lost = _num_lost(question)
    if lost.any():
        line(
            console,
            f"- experts without a live copy: up to {lost.max():,} a layer, in"
            f" {_number(int((lost > 0).sum()), 'layer')}; their tokens are missing in the column before",
        )
    _print_table(console, _figures_table(change))
    _print_table(console, _layers_table(question, change))
    _print_moves(console, question, answer)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(columns[0], no_wrap=True)
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _print_table(console: Console, table: Table) -> None:
    """Print a table whole, also where it is wider than the terminal or file: a figure that is cut off is none."""
    columns = console.width
    console.width = max(columns, console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum)
    console.print(table, crop=False)
    console.width = columns


def _num_lost(question: PlaceQuestion) -> NDArray[np.int64]:
    """Return int64[layers], experts that only dead devices hold."""
    copies = question.view.table.num_copies[question.view.devices.is_alive]
    lost: NDArray[np.int64] = (copies.sum(axis=0) == 0).sum(axis=1)
    return lost


def _figures_table(change: Payback) -> Table:
    table = _table("Priced by the traffic model", "", "before", "after")

    def row(name: str, figure: str, unit: float = 1.0, form: str = ".4f") -> None:
        before, after = _figure(change.before, figure), _figure(change.after, figure)
        table.add_row(name, f"{before * unit:{form}}", f"{after * unit:{form}}")

    row("balance, ratio of sums (vLLM)", "balance_of_sums")
    row("balance, mean of ratios (SGLang)", "mean_balance")
    row("step, ms", "step_s", 1e3)
    row("  experts, ms", "compute_s", 1e3)
    row("  rows and answers, ms", "exchange_s", 1e3)
    row("experts read, busiest devices", "activated", 1.0, ".1f")
    row("rows that stay, %", "stay", 100, ".1f")
    row("rows within a node, %", "within", 100, ".1f")
    row("rows between nodes, %", "between", 100, ".1f")
    return table


def _figure(score: PlaceScore, name: str) -> float:
    rows = score.rows / max(float(score.rows.sum()), 1e-300)
    special = {
        "compute_s": float(score.compute_s.sum()),
        "exchange_s": float(score.exchange_s.sum()),
        "activated": float(score.activated.max(axis=1).mean()),
        "stay": float(rows[0]),
        "within": float(rows[1]),
        "between": float(rows[2]),
    }
    return special[name] if name in special else float(getattr(score, name))


def _layers_table(question: PlaceQuestion, change: Payback) -> Table:
    table = _table("Slowest layers before", "layer", "µs before", "µs after", "max/mean before", "max/mean after")
    before_s = change.before.compute_s + change.before.exchange_s
    after_s = change.after.compute_s + change.after.exchange_s
    for layer in np.argsort(-before_s, kind="stable")[:_SHOWN_LAYERS].tolist():
        table.add_row(
            str(question.profile.layers[layer]),
            f"{before_s[layer] * 1e6:.1f}",
            f"{after_s[layer] * 1e6:.1f}",
            f"{_imbalance(change.before, layer):.2f}",
            f"{_imbalance(change.after, layer):.2f}",
        )
    return table


def _imbalance(score: PlaceScore, layer: int) -> float:
    mean = float(score.tokens[layer].mean())
    return float(score.tokens[layer].max()) / mean if mean else 1.0


def _print_moves(console: Console, question: PlaceQuestion, answer: PlaceAnswer) -> None:
    moves, prices, change = answer.change.moves, question.view.prices, answer.change
    if not len(moves):
        line(console, f"Moves: none; {_unmoved_change(question, answer)}.")
        return
    size, part = len(moves) * prices.expert_bytes, share_moved(moves, answer.table)
    line(
        console,
        f"Moves: {_number(len(moves), 'copy', 'copies')} of experts ({part:.1%} of the filled slots) in"
        f" {_number(len(np.unique(moves.layer)), 'layer')}, {_bytes(size)}, {change.move_s:.3g} s for the busiest"
        " device.",
    )
    line(console, _payback(change))
    received = np.bincount(moves.target, minlength=question.view.devices.num_devices)
    sent = np.bincount(moves.source[moves.source >= 0], minlength=len(received))
    table = _table("Moves by device", "device", "receives", "sends", "bytes received")
    order = np.argsort(-received, kind="stable")
    for device in order[:_SHOWN_DEVICES].tolist():
        table.add_row(
            str(device), f"{received[device]:,}", f"{sent[device]:,}", _bytes(received[device] * prices.expert_bytes)
        )
    _print_table(console, table)
    if len(order) > _SHOWN_DEVICES:
        line(console, f"{len(order) - _SHOWN_DEVICES} more devices receive at most {received[order[_SHOWN_DEVICES]]:,}")
    loaded = int((moves.source < 0).sum())
    if loaded:
        line(console, f"Copies that no live device holds come from the checkpoint: {loaded:,}.")


def _unmoved_change(question: PlaceQuestion, answer: PlaceAnswer) -> str:
    """Return what a change without moves does: it can give up copies, or give copies other shares."""
    view = question.view
    before, after = live_table(view.table, view.devices) or view.table, answer.table
    given_up = (before.num_copies > 0) & (after.num_copies == 0)
    layers = (np.abs(before.parts - after.parts) >= 10.0**-SHARE_DIGITS).any(axis=(0, 2))
    if not given_up.any() and not layers.any():
        return "the present placement stays"
    what = [f"{_number(int(given_up.sum()), 'copy', 'copies')} are given up"] if given_up.any() else []
    if layers.any():
        what.append(f"copies get other shares of their experts' tokens in {_number(int(layers.sum()), 'layer')}")
    return f"{', and '.join(what)}: {_step_change(answer.change)}"


def _step_change(change: Payback) -> str:
    micros = change.saved_s * 1e6
    if not change.saved_s:
        return "a step takes as long as before"
    return f"a step is {abs(micros):,.1f} µs {'shorter' if micros > 0 else 'longer'}"


def _payback(change: Payback) -> str:
    if change.steps is None:
        return f"Payback: never; {_step_change(change)}."
    if not change.steps:
        return "Payback: at once, because experts have no live copy now."
    return f"Payback: {change.steps:,.0f} steps, each {change.saved_s * 1e6:.1f} µs shorter."


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def print_check(console: Console, name: str, before: PlaceScore, after: PlaceScore) -> None:
    """Print what both placements cost under the load of another profile."""
    line(
        console,
        f"Under the load of {name}: balance {before.mean_balance:.4f} before, {after.mean_balance:.4f} after;"
        f" step {before.step_s * 1e3:.4f} ms before, {after.step_s * 1e3:.4f} ms after.",
    )


def print_comparison(console: Console, answers: Mapping[str, PlaceAnswer | str], horizon_steps: float) -> None:
    """Print all policies in a table, the reasons of those that failed, and which one is priced lowest."""
    table = _table(
        "This policy, and all under their default settings",
        "policy", "balance\n(vLLM)", "balance\n(SGLang)", "step\nms", "between\nnodes %", "moved\n%", "payback\nsteps",
    )  # fmt: skip
    for name, answer in answers.items():
        if isinstance(answer, str):
            table.add_row(name, "failed", "", "", "", "", "")
            continue
        after, change = answer.change.after, answer.change
        is_worse = change.steps is None and (len(change.moves) > 0 or change.saved_s < 0)
        table.add_row(
            name,
            f"{after.balance_of_sums:.4f}",
            f"{after.mean_balance:.4f}",
            f"{after.step_s * 1e3:.4f}",
            f"{after.far_share * 100:.1f}",
            f"{share_moved(change.moves, answer.table) * 100:.1f}",
            "never" if is_worse else f"{change.steps or 0:,.0f}",
        )
    _print_table(console, table)
    for name, answer in answers.items():
        if isinstance(answer, str):
            line(console, f"{name} failed: {answer}")
    if advice := better_policy(answers, horizon_steps):
        line(console, advice)


WORTH_ANOTHER = 0.001  # of a step; a smaller difference is no reason to take another policy


def better_policy(answers: Mapping[str, PlaceAnswer | str], horizon_steps: float) -> str:
    """Return which policy is priced below the first one, its moves included, in a sentence; "" means none.

    Args:
        answers: Answers of policies, the chosen one first.
        horizon_steps: Steps over which the seconds of the moves are spread.
    """
    costs = {
        name: answer.change.after.step_s + answer.change.move_s / max(horizon_steps, 1.0)
        for name, answer in answers.items()
        if not isinstance(answer, str)
    }
    chosen = next(iter(answers))
    if chosen not in costs:
        return ""
    best = min(costs, key=lambda name: costs[name])
    saved = 1 - costs[best] / costs[chosen] if costs[chosen] else 0.0
    if saved < WORTH_ANOTHER:
        return f"{chosen} is priced lowest, its moves spread over {horizon_steps:,.0f} steps included."
    return (
        f"{best} is priced {saved:.1%} lower than {chosen}, its moves spread over {horizon_steps:,.0f} steps included:"
        f" --policy {best}"
    )


COMPILED_WITHIN_S = 10.0  # the placement kernel takes 1 s of a core, and a loaded machine has less than one


def run_place(settings: PlaceSettings, console: Console) -> None:
    """Answer the question of `settings`, print the answer, and write the files that it asks for.

    Raises:
        ConfigError: A name is unknown, a file cannot be read or written, or a library is not installed.
        PlacementError: The policy finds no placement.
    """
    if settings.output.png is not None:
        require_extra("plots", "--png")
    settings.output.check_folders()
    check_files({"--save-profile": settings.profile.save_profile})
    with progress_bar(Console(stderr=True)) as bar:
        bar.add_task("reading the profile", total=None)
        question = make_question(settings)
        check = settings.policy.check
        later = None if check is None else load_to_check(question, check)
    print_question(console, question)
    if settings.profile.offline is not None:
        _compare_offline(console, question, settings.profile.offline)
    if settings.profile.save_profile is not None:
        write_profile(settings.profile.save_profile, question.profile)
        line(console, f"written: {settings.profile.save_profile}")
    policy, fills_slots = settings.policy.policy, settings.output.is_for_engines
    if fills_slots:
        line(console, "- every slot gets an expert, and copies share evenly, as SGLang and TensorRT-LLM have it")
        policy = EVEN_POLICY if policy == PlacePolicySettings().policy else policy
    mixes_sources = (settings.policy.sources or ("mean" if fills_slots else "own")) == "mean"
    if mixes_sources and question.profile.num_sources > 1:
        line(console, "- plans see the mean of all sources (--sources own: those of each)")
    with progress_bar(Console(stderr=True)) as bar:
        bar.add_task("placing", total=None)
        answer = ask(policy, question.view, fills_slots=fills_slots, mixes_sources=mixes_sources)
    print_answer(console, question, answer)
    if check is not None and later is not None:
        change = payback(replace(question.view, load=later), answer.table)
        print_check(console, check.name, change.before, change.after)
    if settings.policy.compare:
        with progress("comparing policies", len(PLACE_POLICIES.names())) as advance:
            others = ask_all(question.view, advance, fills_slots=fills_slots, mixes_sources=mixes_sources)
        print_comparison(console, {answer.policy: answer} | others, question.view.limits.horizon_steps)
    _write(console, question, answer)
    placement_kernel.wait(COMPILED_WITHIN_S)  # Otherwise each further process would begin to compile it.


def _compare_offline(console: Console, question: PlaceQuestion, model: str) -> None:
    require_extra("serve", "--offline")
    from moestro.calibrate.shapes import RandomInput
    from moestro.cli.placing.offline import compare_offline, offline_load

    with progress_bar(Console(stderr=True)) as bar:
        bar.add_task("random tokens", total=None)
        load = offline_load(model, RandomInput())
    line(console, str(compare_offline(question.profile, load)))


def _write(console: Console, question: PlaceQuestion, answer: PlaceAnswer) -> None:
    output = question.settings.output
    if output.out is not None:
        write_json("--out", output.out, placement_file(question, answer))
        line(console, f"written: {output.out}")
    if answer.rows is not None:
        _write_for_engines(console, question, answer.rows)
    if output.png is not None:
        from moestro.cli.placing.draw import save_placement

        save_placement(output.png, question, answer)
        line(console, f"written: {output.png}")
    if output.apply is not None:
        line(console, apply_placement(output.apply, output.admin_api_key, placement_file(question, answer)))


def _write_for_engines(console: Console, question: PlaceQuestion, rows: Ints) -> None:
    view, profile, output = question.view, question.profile, question.settings.output
    if output.sglang is not None:
        slots = all_model_layers(rows, profile.layers, profile.num_model_layers, profile.num_experts)
        write_json("--sglang", output.sglang, {"physical_to_logical_map": slots})
        line(
            console,
            f"written: {output.sglang}, for --init-expert-location with --ep-size {int(view.devices.is_alive.sum())}"
            f" --ep-num-redundant-experts {rows.shape[1] - profile.num_experts}",
        )
    if output.tensorrt_llm is not None:
        idle = idle_layers(profile, question.network)
        write_tensorrt_llm(output.tensorrt_llm, rows, profile, output.mtp_layers, idle)
        hint = "" if output.mtp_layers else "; with multi-token prediction it needs rows of --mtp-layers too"
        line(console, f"written: {output.tensorrt_llm}, for moe_config.load_balancer{hint}")
        if idle:
            line(
                console, f"- {_number(len(idle), 'layer')} of {question.network.name} without a load: experts in order"
            )
