"""Results of an experiment: its runs, the paper's claims beside them, and the file that holds both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from moestro.config.run_record import RunRecord
from moestro.errors import ConfigError


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a grid. A paper adds the figures of its runs.

    Attributes:
        rate: requests a second.
        system: name of the policy or engine that served the load.
    """

    load: str
    rate: float
    system: str
    seed: int


CellT = TypeVar("CellT", bound=Cell)


class Findings(msgspec.Struct, Generic[CellT], kw_only=True):
    """All runs. `kind` is the kind of evidence. A paper adds what it finds outside the grid, as lists or dicts."""

    kind: str = "simulated"
    cells: list[CellT] = []

    def values(self, load: str, rate: float, system: str, of: Callable[[CellT], float]) -> NDArray[np.float64]:
        """One figure of each run, float64[seeds]; empty if there was no such run."""
        return np.array([of(c) for c in self.cells if (c.load, c.rate, c.system) == (load, rate, system)])

    def rates(self, load: str) -> list[float]:
        """The rates of a load, ascending."""
        return sorted({cell.rate for cell in self.cells if cell.load == load})

    @property
    def loads(self) -> list[str]:
        """The loads in the order in which they were run."""
        return list(dict.fromkeys(cell.load for cell in self.cells))


FindingsT = TypeVar("FindingsT", bound=Findings[Any])


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence of a paper beside our figure.

    Attributes:
        source: where the paper says it, and of which load.
        paper: the sentence.
        ours: what was found.
        holds: the verdict. None means that the claim is not judged.
        why: reasons of the difference where the claim does not hold, or remarks.
    """

    source: str
    paper: str
    ours: str
    holds: bool | None
    why: str = ""


class StoredClaim(msgspec.Struct, frozen=True, kw_only=True):
    """One claim of the stored run, as the package keeps it.

    Attributes:
        source, paper, ours, holds: those of its `Claim`.
    """

    source: str
    paper: str
    ours: str
    holds: bool | None


class LoadPart(msgspec.Struct, frozen=True):
    """Findings of one load, kept so that a long run can be stopped and go on, or be spread over processes.

    Attributes:
        plan: everything that decides the findings besides the code.
        findings: JSON of the experiment's findings.
    """

    conditions: RunRecord
    plan: object
    findings: msgspec.Raw


class Reproduced(msgspec.Struct, Generic[FindingsT], frozen=True, kw_only=True):
    """The result file.

    Attributes:
        conditions: conditions of the run that wrote the file.
        parts: by load, the conditions of the run that made its findings, which may be an earlier one.
        renewed: by "load: system", the conditions of a run that made this system's runs anew.
        findings: all runs.
        claims: the paper's claims, judged by the findings.
    """

    conditions: RunRecord
    parts: dict[str, RunRecord] = {}
    renewed: dict[str, RunRecord] = {}
    findings: FindingsT
    claims: list[Claim]


def merged(parts: Sequence[FindingsT]) -> FindingsT:
    """The findings of several loads as one. There is at least one part."""
    whole = msgspec.structs.replace(parts[0])
    for part in parts[1:]:
        for field in msgspec.structs.fields(whole):
            first, second = getattr(whole, field.name), getattr(part, field.name)
            if isinstance(first, list):
                setattr(whole, field.name, first + second)
            elif isinstance(first, dict):
                setattr(whole, field.name, first | second)
    return whole


def write_result(what: msgspec.Struct, path: Path) -> None:
    """Write a struct as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(what), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"--out {path.parent} cannot be written: {error}") from error


# Tables that experiments share: a grid's figures, and the paper's claims beside ours.

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
