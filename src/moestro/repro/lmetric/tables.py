"""Tables of LMetric's findings for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from moestro.repro.lmetric.findings import FIGURES, LmetricCell, LmetricFindings, percent

_VERDICTS = {"better": "[green]better[/]", "undecided": "[dim]undecided[/]", "worse": "[red]worse[/]"}


def tables_of(findings: LmetricFindings) -> Iterator[Table]:
    """A table for each load and rate, the tuned parameters, then the comparison of `moestro` with its rivals."""
    groups: dict[tuple[str, str, float], list[LmetricCell]] = {}
    for cell in findings.cells:
        groups.setdefault((cell.load, cell.network, cell.share), []).append(cell)
    for cells in groups.values():
        yield _table(cells)
    if findings.sweeps:
        yield _sweeps(findings)
    if findings.ages:
        yield _ages(findings)
    if findings.pairs:
        yield _pairs(findings)


def _table(cells: Sequence[LmetricCell]) -> Table:
    first = cells[0]
    origin = "generated sessions" if first.is_generated else "trace"
    title = f"{first.load} ({origin}), {first.network}: {first.rate:.1f} requests/s, {first.share:.0%} of the capacity,"
    title += f" {first.measured.num_counted:,} requests counted, which arrived in {first.measured.span_s:,.0f} s"
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


def _ages(findings: LmetricFindings) -> Table:
    title = "Figures of engines that come at intervals, at half of the capacity; change from figures of every step"
    table = Table(
        "load", "policy", "every, ms", "TTFT mean, ms", "", "TPOT mean, ms", "", title=title, caption="simulated"
    )
    for aged in findings.ages:
        row = [aged.load, aged.policy, f"{aged.period_ms:g}"]
        for name in ("TTFT mean", "TPOT mean"):
            value = FIGURES[name](aged.measured)
            row += [f"{value:.1f}", percent(value / FIGURES[name](findings.fresh(aged)) - 1)]
        table.add_row(*row)
    return table


def _pairs(findings: LmetricFindings) -> Table:
    title = "Ours against the best rival of each cell: difference and its 95 % interval (below 0: ours is less)"
    table = Table("load", "share", "figure", "best rival", "difference", "", title=title)
    for pair in findings.pairs:
        cells = (pair.load, f"{pair.share:.0%}", pair.figure, pair.other, str(pair.difference))
        table.add_row(*cells, _VERDICTS[pair.difference.verdict])
    return table


def _sweeps(findings: LmetricFindings) -> Table:
    columns = ("load", "policy", "parameter", "tried", "best", "TTFT mean, ms", "TPOT mean, ms")
    table = Table(*columns, title="Parameters tuned at half of the capacity, on other requests than the scored ones")
    for load, by_policy in findings.sweeps.items():
        for sweep in by_policy.values():
            value, figures = sweep.best
            tried = ", ".join(f"{each:g}" for each, _ in sweep.values)
            latencies = (f"{figures.ttft_ms.mean:.1f}", f"{figures.tpot_ms.mean:.1f}")
            table.add_row(load, sweep.policy, sweep.parameter, tried, f"{value:g}", *latencies)
    return table
