"""Tables that experiments share: a grid's figures, and the paper's claims beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from rich.table import Table

from moestro.repro.results import CellT, Claim, Findings, StoredClaim

_VERDICTS = {True: "[green]holds[/]", False: "[red]does not[/]", None: "[dim]not judged[/]"}


@dataclass(frozen=True, slots=True)
class Column(Generic[CellT]):
    """One figure of a table.

    Attributes:
        title: the head of the column.
        of: the figure of a run.
        unit: divisor of the figure.
    """

    title: str
    of: Callable[[CellT], float]
    unit: float = 1.0


def grid_table(
    findings: Findings[CellT], load: str, rate: float, systems: Sequence[str], columns: Sequence[Column[CellT]]
) -> Table:
    """The figures of a load at a rate: a row for each system, means over seeds and their spread."""
    caption = "simulated; means over seeds, in brackets the least and the most of them"
    table = Table("system", *(column.title for column in columns), caption=caption)
    for system in systems:
        row = []
        for column in columns:
            values = findings.values(load, rate, system, column.of) / column.unit
            if len(values) == 0:
                break
            spread = f" ({values.min():.3g}, {values.max():.3g})" if len(values) > 1 else ""
            row.append(f"{values.mean():.3g}{spread}")
        if row:
            table.add_row(system, *row)
    return table


def claims_table(claims: Sequence[Claim]) -> Table:
    """The paper's claims beside our figures."""
    table = Table("where", "the paper", "simulated here", "", title="What the paper says, and what was found")
    for claim in claims:
        ours = f"{claim.ours}\n[dim]{claim.why}[/]" if claim.why and claim.holds is False else claim.ours
        table.add_row(claim.source, claim.paper, ours, _VERDICTS[claim.holds])
    return table


def quick_claims_table(claims: Sequence[Claim], stored: Sequence[StoredClaim]) -> Table:
    """The figures of a quick run, which are not judged, beside those of the stored run with its verdicts."""
    columns = ("where", "the paper", "this quick run (not judged)", "the stored run", "verdict of the stored run")
    title = "A quick run shows that the machinery works; the stored run, which is larger, judges the paper"
    table = Table(*columns, title=title, caption="simulated")
    by_claim = {(claim.source, claim.paper): claim for claim in stored}
    for claim in claims:
        kept = by_claim.get((claim.source, claim.paper))
        judged = ("no such claim", "") if kept is None else (kept.ours, _VERDICTS[kept.holds])
        table.add_row(claim.source, claim.paper, claim.ours, *judged)
    return table
