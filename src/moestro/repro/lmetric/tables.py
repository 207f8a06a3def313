"""LmetricFindings as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from moestro.repro.lmetric.findings import FIGURES, LmetricCell, LmetricFindings

_VERDICTS = {"better": "[green]better[/]", "undecided": "[dim]undecided[/]", "worse": "[red]worse[/]"}


def tables_of(findings: LmetricFindings) -> Iterator[Table]:
    """A table for each load and rate, then the comparison of `moestro` with its rivals."""
    groups: dict[tuple[str, str, float], list[LmetricCell]] = {}
    for cell in findings.cells:
        if cell.seed == 0:
            groups.setdefault((cell.load, cell.network, cell.share), []).append(cell)
    for cells in groups.values():
        yield _table(cells)
    if findings.pairs:
        yield _pairs(findings)


def _table(cells: Sequence[LmetricCell]) -> Table:
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
        table.add_row(cell.system, *shown, *spread)
    return table


def _pairs(findings: LmetricFindings) -> Table:
    title = "Ours against the best rival, more seeds: difference and its 95 % interval (below 0: ours is less)"
    table = Table("load", "share", "figure", "best rival", "difference", "interval", "", title=title)
    for pair in findings.pairs:
        interval = f"{pair.low:+.1%} .. {pair.high:+.1%}"
        cells = (pair.load, f"{pair.share:.0%}", pair.figure, pair.other, f"{pair.mean:+.1%}", interval)
        table.add_row(*cells, _VERDICTS[pair.verdict])
    return table
