"""Terminal output of simulations: tables on standard output."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moestro.sim.figures.intervals import FigureInterval
from moestro.sim.figures.outcome import PolicyChange, PolicyOutcome, SimReport, TrafficGroup
from moestro.sim.figures.shown_figures import shown_figures
from moestro.sim.groups.group_figures import GroupFigures

REQUESTS_PER_UPDATE = 256  # of a progress bar: one update costs as much as routing a request


def print_report(console: Console, report: SimReport) -> None:
    """Print a table with a column for each policy, then notes and failures."""
    origin = "generated" if report.is_generated else "recorded"
    first = report.outcomes[0]
    console.print(
        f"simulated: {report.workload} ({origin}), {first.report.num_requests:,} requests",
        highlight=False,
        soft_wrap=True,
    )
    if report.saturation is not None:
        console.print(report.saturation.sentence(first.report.num_requests), highlight=False, soft_wrap=True)
    of_first = [outcome for outcome in report.outcomes if outcome.seed == first.seed]
    console.print(_interval_table(report) if report.intervals else _table(of_first))
    if any(outcome.group is not None for outcome in of_first):
        console.print(_stall_table(of_first))
    for title, groups in report.changes.items():
        console.print(_change_table(title, groups))
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    for outcome in report.outcomes:
        where = f"{outcome.title}, seed {outcome.seed}" if report.intervals else outcome.title
        for word, failure in outcome.report.failures.items():
            console.print(f"{where}: {failure.count} {word}: {failure.example}", markup=False, soft_wrap=True)


def _table(outcomes: Sequence[PolicyOutcome]) -> Table:
    figures = shown_figures(outcomes)
    table = _empty_table(
        [outcome.title for outcome in outcomes], "Latency in ms; in brackets, the ratio to the first policy"
    )
    for name, base in figures[0].items():
        table.add_row(name, _cell(base), *(_cell(each[name]) + _ratio(each[name], base) for each in figures[1:]))
    return table


def _interval_table(report: SimReport) -> Table:
    seeds = sorted({outcome.seed for outcome in report.outcomes})
    title = (
        f"Mean and 95 % interval over {len(seeds)} seeds, {seeds[0]} to {seeds[-1]}; latency in ms; in brackets, the"
        " ratio to the first policy, seed by seed"
    )
    table = _empty_table(list(report.intervals), title)
    columns = list(report.intervals.values())
    for name in shown_figures(report.outcomes)[0]:
        found = [each.get(name) for each in columns]
        table.add_row(name, _interval_cell(found[0], None), *(_interval_cell(each, each) for each in found[1:]))
    return table


def _empty_table(titles: Sequence[str], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for each in titles:
        table.add_column(each, justify="right")
    return table


def _interval_cell(interval: FigureInterval | None, compared: FigureInterval | None) -> str:
    if interval is None:
        return "-"
    text = _cell(interval.mean) + _half(interval.half_width)
    if compared is None or compared.ratio is None:
        return text
    half = "" if compared.ratio_half_width is None else f" ±{compared.ratio_half_width:.3f}"
    return f"{text} ({compared.ratio:.3f}{half})"


def _half(half_width: float | None) -> str:
    return "" if half_width is None else f" ±{half_width:.2g}" if half_width < 100 else f" ±{half_width:,.0f}"


def _stall_table(outcomes: Sequence[PolicyOutcome]) -> Table:
    table = Table(title="Stall share of each worker; A: attention, E: experts, AE: both", title_justify="left")
    table.add_column("worker")
    with_groups = [(outcome.title, outcome.group) for outcome in outcomes if outcome.group is not None]
    for title, _ in with_groups:
        table.add_column(title, justify="right")
    for worker in range(max(len(group.stall_shares) for _, group in with_groups)):
        table.add_row(str(worker), *(_stall(group, worker) for _, group in with_groups))
    return table


def _stall(group: GroupFigures, worker: int) -> str:
    if not group.num_expert_workers:
        kind = "AE"
    else:
        num_workers = group.num_attention_workers + group.num_expert_workers
        kind = "A" if worker % num_workers < group.num_attention_workers else "E"
    return f"{kind} {group.stall_shares[worker]:.3f}"


def _change_table(title: str, groups: Sequence[TrafficGroup]) -> Table:
    text = f"What {title} would change; ± is the 95 % interval of the traffic, without errors of the model"
    table = Table("", "requests", "moved", "hits", "TTFT, ms", "change", title=text, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for group in groups:
        hits, ttft = group.hit_ratio, group.ttft_ms
        change = "-" if ttft is None else f"{ttft.change:+.1%}" + _half_share(ttft)
        moved = f"{group.moved:.1%}"
        table.add_row(group.name, f"{group.num_requests:,}", moved, _share(hits), _from_to(ttft), change)
    return table


def _share(change: PolicyChange | None) -> str:
    if change is None:
        return "-"
    was, now = change.shown
    return f"{was:.1%} -> {now:.1%}" + _half_share(change)


def _from_to(change: PolicyChange | None) -> str:
    if change is None:
        return "-"
    was, now = change.shown
    return f"{was:.1f} -> {now:.1f}" + (" (simulated)" if change.measured is None else "")


def _half_share(change: PolicyChange) -> str:
    return "" if change.half_width is None else f" ±{change.half_width:.1%}"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.4g}"


def _ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or not base else f" ({value / base:.3f})"
