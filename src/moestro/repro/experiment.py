"""The contract between the frame and a paper's experiment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rich.console import RenderableType

from moestro.errors import ConfigError
from moestro.repro.results import Claim, FindingsT

# A paper as declared tables: its set-up beside the experiment's, its figures, and its claims with their rules.


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupRow:
    """One value of a paper's set-up.

    Attributes:
        what: what is set.
        where: section, figure or table of the paper.
        quote: the paper's own words.
        value: the value of the experiment. It is the paper's unless `differs` is set.
        ours: reads the value from the whole experiment, and from requests that it draws where they decide.
        differs: reason why the experiment has another value than the paper, or a value that the paper does not state.
            "" means that it has the paper's.
    """

    what: str
    where: str
    quote: str
    value: object
    ours: Callable[[Any], object]
    differs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigure:
    """A figure that a paper states.

    Attributes:
        what: the figure.
        where: section or figure of the paper.
        quote: the paper's own words; "" where no text of the paper has the figure.
        value: the figure; a change is negative where the paper has a decrease.
        least: value that ours must exceed in the paper's direction; 0 where the direction alone is judged.
    """

    what: str
    where: str
    quote: str
    value: float
    least: float

    def is_reached(self, found: float) -> bool:
        """Return whether a figure of ours counts as the paper's."""
        return (found if self.value > 0 else -found) > self.least

    def __str__(self) -> str:
        """A change as a page shows it, and any other figure as it is."""
        return f"{self.value:+.3g}" if abs(self.value) >= 1 else f"{100 * self.value:+.3g} %"


CaseT = TypeVar("CaseT")
FoundT = TypeVar("FoundT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRow(Generic[FoundT, CaseT]):
    """One sentence of a paper, with the rule that judges it by each case of the findings.

    Attributes:
        where: section or figure of the paper.
        sentence: what the paper states.
        cases: reads the cases with their labels, such as a load each, from the findings.
        ours: writes our figures of a case.
        holds: judges a case. None as its result means that the case is not judged.
        figures: figures of the paper in the sentence.
        quote: the paper's own words where the sentence has figures that no rule compares; "" elsewhere.
        why: what decides.
    """

    where: str
    sentence: str
    cases: Callable[[FoundT], Iterable[tuple[str, CaseT]]]
    ours: Callable[[CaseT], str]
    holds: Callable[[CaseT], bool | None]
    figures: tuple[PaperFigure, ...] = ()
    quote: str = ""
    why: str | Callable[[CaseT], str] = ""

    def judged(self, findings: FoundT) -> Iterator[Claim]:
        """Judge each case."""
        for label, case in self.cases(findings):
            yield Claim(
                source=", ".join(filter(None, (self.where, label))),
                paper=self.sentence,
                ours=self.ours(case),
                holds=self.holds(case),
                why=self.why if isinstance(self.why, str) else self.why(case),
            )


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
