"""QLLM's findings as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moestro.repro.lmetric.reporting import Claim, claims_table
from moestro.repro.qllm.claims import Figure, be_ttft, be_turnaround, ls_ttft, ls_turnaround, throughput
from moestro.repro.qllm.engines import ENGINES
from moestro.repro.qllm.experiment import Cell, Findings


def _ls_ttft_p99(cell: Cell) -> float:
    return cell.ls.ttft_ms.p99


# Title, figure, and what it is divided by to be shown.
COLUMNS: tuple[tuple[str, Figure, float], ...] = (
    ("LS TTFT, s", ls_ttft, 1e3),
    ("P99", _ls_ttft_p99, 1e3),
    ("LS turnaround, s", ls_turnaround, 1e3),
    ("BE TTFT, s", be_ttft, 1e3),
    ("BE turnaround, s", be_turnaround, 1e3),
    ("requests/s", throughput, 1.0),
)


def print_findings(console: Console, findings: Findings, claims: Sequence[Claim]) -> None:
    """Every load and rate, then the paper's claims beside ours."""
    for load in findings.loads:
        for rate in findings.rates(load):
            console.print(_table(findings, load, rate))
    for name, engine in ENGINES.items():
        console.print(f"{name}: {engine.about}", highlight=False)
    console.print(claims_table(claims))


def _table(findings: Findings, load: str, rate: float) -> Table:
    title = f"{load}, {rate:g} requests/s; lengths {findings.lengths}"
    caption = "simulated; means over seeds, in brackets the least and the most of them"
    table = Table("engine", *(title for title, _, _ in COLUMNS), title=title, caption=caption)
    for engine in ENGINES:
        row = []
        for _, of, unit in COLUMNS:
            values = findings.values(load, rate, engine, of) / unit
            if len(values) == 0:
                break
            spread = f" ({values.min():.3g}, {values.max():.3g})" if len(values) > 1 else ""
            row.append(f"{values.mean():.3g}{spread}")
        if row:
            table.add_row(engine, *row)
    return table
