"""Terminal output of simulations: tables on standard output."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table

from moestro.sim.group_figures import GroupFigures
from moestro.sim.outcome import PolicyOutcome, SimReport
from moestro.workload.report import Spread

REQUESTS_PER_UPDATE = 256  # of a progress bar: one update costs as much as routing a request


def print_report(console: Console, report: SimReport) -> None:
    """Print a table with a column for each policy, then notes and failures."""
    origin = "generated" if report.is_generated else "recorded"
    console.print(
        f"simulated: {report.workload} ({origin}), {report.outcomes[0].report.num_requests:,} requests",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(report.outcomes))
    if any(outcome.group is not None for outcome in report.outcomes):
        console.print(_stall_table(report.outcomes))
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    for outcome in report.outcomes:
        for word, failure in outcome.report.failures.items():
            console.print(f"{outcome.title}: {failure.count} {word}: {failure.example}", markup=False, soft_wrap=True)


def _table(outcomes: Sequence[PolicyOutcome]) -> Table:
    table = Table(title="Latency in ms; in brackets, the ratio to the first policy", title_justify="left")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.title, justify="right")
    figures = [_figures(outcome) for outcome in outcomes]
    if any(outcome.group is not None for outcome in outcomes):
        figures = [some | _group_figures(outcome) for some, outcome in zip(figures, outcomes, strict=True)]
    for name, base in figures[0].items():
        table.add_row(name, _cell(base), *(_cell(each[name]) + _ratio(each[name], base) for each in figures[1:]))
    return table


def _figures(outcome: PolicyOutcome) -> dict[str, float | None]:
    report = outcome.report
    figures = {
        "TTFT mean": _of(report.ttft_ms, "mean"),
        "TTFT p99": _of(report.ttft_ms, "p99"),
        "TPOT mean": _of(report.tpot_ms, "mean"),
        "TPOT p99": _of(report.tpot_ms, "p99"),
        "E2E mean": _of(report.e2e_ms, "mean"),
        "requests/s": report.requests_per_s,
        "hit ratio": report.cached_share,
        "imbalance": outcome.load_imbalance,
        "max queue": float(outcome.max_queue_depth),
        "preempted": float(outcome.num_preemptions),
    }
    if outcome.ls_ttft_ms is not None and outcome.be_ttft_ms is not None:
        figures |= {"TTFT mean, LS": outcome.ls_ttft_ms.mean, "TTFT mean, BE": outcome.be_ttft_ms.mean}
    return figures if report.goodput is None else figures | {"goodput": report.goodput.share}


def _group_figures(outcome: PolicyOutcome) -> dict[str, float | None]:
    group = outcome.group
    sent = None if group is None or group.num_bytes is None else group.num_bytes / 1e9
    return {
        "output tokens/s": outcome.report.output_tokens_per_s,
        "bound, same hot ids": None if group is None else group.bound_same,
        "bound, permuted": None if group is None else group.bound_permuted,
        "share of its bound": None if group is None else group.share_of_bound,
        "mean stall": None if group is None else fmean(group.stall_shares),
        "messages": None if group is None or group.num_messages is None else float(group.num_messages),
        "GB sent": sent,
    }


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


def _of(spread: Spread | None, name: str) -> float | None:
    return None if spread is None else float(getattr(spread, name))


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.4g}"


def _ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or not base else f" ({value / base:.3f})"
