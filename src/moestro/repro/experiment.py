"""The contract between the frame and a paper's experiment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rich.console import RenderableType

from moestro.errors import ConfigError
from moestro.repro.paper_setup import ClaimRow, PaperFigure, SetupRow
from moestro.repro.results import Claim, FindingsT


def show_no_step(what: str) -> None:
    """Show no step of a run. A function of a module, because experiments travel between processes."""


class Experiment(ABC, Generic[FindingsT]):
    """One paper's experiment under given settings. The frame runs it load by load.

    Attributes:
        findings_type: type of the findings, with which kept parts are read.
        drawing: module with `pictures(experiment, findings)`, which returns matplotlib figures by name. The frame
            imports it only to draw, since matplotlib is optional.
        setup: set-up of the paper beside that of the whole experiment.
        figures: figures of the paper by which claims are judged.
        claim_rows: claims of the paper, where they are rows of a table.
    """

    findings_type: type[FindingsT]
    drawing: str
    setup: ClassVar[Sequence[SetupRow]] = ()
    figures: ClassVar[Sequence[PaperFigure]] = ()
    claim_rows: ClassVar[Sequence[ClaimRow[Any, Any]]] = ()

    @property
    @abstractmethod
    def loads(self) -> Sequence[str]:
        """The names of the loads, in the order in which they are run."""

    @abstractmethod
    def plan_of(self, load: str) -> object:
        """Everything that decides the findings of a load besides the code, as a value that JSON can hold."""

    @abstractmethod
    def num_runs(self, load: str) -> int:
        """The number of simulations of a load."""

    @abstractmethod
    def run(self, load: str, step: Callable[[str], None]) -> FindingsT:
        """Make the findings of one load.

        Args:
            step: called once for each simulation, with its description, as the simulation begins.
        """

    @abstractmethod
    def claims(self, findings: FindingsT) -> list[Claim]:
        """The paper's claims, judged by the findings of all loads."""

    @abstractmethod
    def tables(self, findings: FindingsT) -> Iterator[RenderableType]:
        """The findings as tables for a terminal."""


class NamedPart(Protocol):
    """A load with everything that decides its findings besides the code."""

    @property
    def name(self) -> str:
        """Name of the load."""
        ...


PartT = TypeVar("PartT", bound=NamedPart)


class PartsExperiment(Experiment[FindingsT], Generic[FindingsT, PartT]):
    """An experiment whose loads are parts, each with a plan of its own.

    Args:
        parts: what is run.

    Attributes:
        parts: parts by name.
    """

    def __init__(self, parts: Sequence[PartT]) -> None:
        self.parts = {part.name: part for part in parts}

    @property
    def loads(self) -> list[str]:
        """The names of the parts."""
        return list(self.parts)

    def plan_of(self, load: str) -> object:
        """The part."""
        return self.parts[load]


def chosen_parts(parts: Sequence[PartT], names: Sequence[str] | None) -> tuple[PartT, ...]:
    """Return the parts with these names, in the order of the names. None means all parts.

    Raises:
        ConfigError: no part has one of the names.
    """
    if names is None:
        return tuple(parts)
    known = {part.name: part for part in parts}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no load {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(known[name] for name in names)
