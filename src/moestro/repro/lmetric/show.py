"""Findings as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moestro.repro.lmetric.experiment import FIGURES, Cell, Findings
from moestro.repro.lmetric.reporting import Claim, claims_table

_VERDICTS = {"better": "[green]better[/]", "undecided": "[dim]undecided[/]", "worse": "[red]worse[/]"}


def print_findings(console: Console, findings: Findings, claims: Sequence[Claim]) -> None:
    """Every load and rate, then the paper's claims beside ours."""
    groups: dict[tuple[str, str, float], list[Cell]] = {}
    for cell in findings.cells:
        if cell.seed == 0:
            groups.setdefault((cell.load, cell.network, cell.share), []).append(cell)
    for cells in groups.values():
        console.print(_table(cells))
    if findings.pairs:
        console.print(_pairs(findings))
    console.print(claims_table(claims))


def _table(cells: Sequence[Cell]) -> Table:
    first = cells[0]
    origin = "generated sessions" if first.is_generated else "trace"
    title = f"{first.load} ({origin}), {first.network}: {first.rate:.1f} requests/s, {first.share:.0%} of saturation"
    columns = ("policy", *(f"{name}, ms" for name in FIGURES), "TTFT P50, ms", "hits", "requests, max/mean")
    table = Table(*columns, title=title, caption="simulated; the least of each column in bold")
    best = {name: min(of(cell.measured) for cell in cells) for name, of in FIGURES.items()}
    for cell in cells:
        figures = cell.measured
        values = {name: of(figures) for name, of in FIGURES.items()}
        shown = [f"[bold]{v:.1f}[/]" if v == best[name] else f"{v:.1f}" for name, v in values.items()]
        spread = (f"{figures.ttft_ms.p50:.1f}", f"{figures.hit_ratio:.3f}", f"{figures.request_imbalance:.2f}")
        table.add_row(cell.policy, *shown, *spread)
    return table


def _pairs(findings: Findings) -> Table:
    title = "Ours against the best rival, more seeds: difference and its 95 % interval (below 0: ours is less)"
    table = Table("load", "share", "figure", "best rival", "difference", "interval", "", title=title)
    for pair in findings.pairs:
        interval = f"{pair.low:+.1%} .. {pair.high:+.1%}"
        cells = (pair.load, f"{pair.share:.0%}", pair.figure, pair.other, f"{pair.mean:+.1%}", interval)
        table.add_row(*cells, _VERDICTS[pair.verdict])
    return table
