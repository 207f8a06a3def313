"""Terminal output of simulations: tables on standard output."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

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


def _of(spread: Spread | None, name: str) -> float | None:
    return None if spread is None else float(getattr(spread, name))


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.4g}"


def _ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or not base else f" ({value / base:.3f})"
