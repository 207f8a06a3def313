"""What every reproduction ends with: the paper's sentences beside our figures, on the screen and in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moestro.errors import ConfigError
from moestro.repro.conditions import Conditions

FindingsT = TypeVar("FindingsT")

_VERDICTS = {True: "[green]holds[/]", False: "[red]does not[/]", None: "[dim]not judged[/]"}


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence of a paper beside our figure.

    Attributes:
        source: where the paper says it, and of which load.
        paper, ours: the sentence, and what was found.
        holds: None: it is not judged.
        why: what is behind the difference where it does not hold, or what else is to be known.
    """

    source: str
    paper: str
    ours: str
    holds: bool | None
    why: str = ""


class Reproduced(msgspec.Struct, Generic[FindingsT], frozen=True, kw_only=True):
    """What is written to the result file.

    Attributes:
        conditions: of the run that wrote it.
        parts: by load, the conditions of what was made on its own, and maybe before.
        findings, claims: what was found, and what the paper says of it.
    """

    conditions: Conditions
    parts: dict[str, Conditions] = {}
    findings: FindingsT
    claims: list[Claim]


def claims_table(claims: Sequence[Claim]) -> Table:
    """The paper's sentences beside our figures."""
    table = Table("where", "the paper", "simulated here", "", title="What the paper says, and what was found")
    for claim in claims:
        ours = f"{claim.ours}\n[dim]{claim.why}[/]" if claim.why and claim.holds is False else claim.ours
        table.add_row(claim.source, claim.paper, ours, _VERDICTS[claim.holds])
    return table


def bar(console: Console) -> Progress:
    """A progress bar over simulations."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def write_result(what: msgspec.Struct, path: Path) -> None:
    """Write it as JSON.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(what), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"--out {path.parent} cannot be written: {error}") from error
