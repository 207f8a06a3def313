"""The frame of an experiment: what a paper declares, what every experiment does, and a grid of runs.

A grid has loads x seeds x rates x systems, and its tables and pictures follow from its columns and panels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rich.console import RenderableType

from moestro.errors import ConfigError
from moestro.repro import ReproSettings
from moestro.repro.results import Cell, CellT, Claim, Column, FindingsT, grid_table

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


# An experiment over a grid of runs: loads x seeds x rates x systems.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad:
    """One load of a grid.

    Attributes:
        name: the load's name in tables and on the command line.
        num_requests: number of requests of a run.
        rates: requests a second, one run each.
        systems: systems that serve it. None means all systems of the plan.
    """

    name: str
    num_requests: int
    rates: tuple[float, ...]
    systems: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlan:
    """The extent of a grid: its loads, systems and seeds.

    Attributes:
        systems: names of the policies or engines that are compared.
        seeds: the systems of a load serve it at every rate under each of them.
    """

    loads: tuple[PlannedLoad, ...]
    systems: tuple[str, ...]
    seeds: tuple[int, ...]

    def chosen(self, names: Sequence[str] | None) -> GridPlan:
        """The plan with the loads of these names alone. None means all loads.

        Raises:
            ConfigError: no load has one of the names.
        """
        return self if names is None else replace(self, loads=chosen_parts(self.loads, names))


@dataclass(frozen=True, slots=True)
class Panel(Generic[CellT]):
    """One panel of a picture: a figure over the rate, a line for each system.

    Attributes:
        title: the figure and its unit.
        of: the figure of a run.
        unit: divisor of the figure.
        is_log: whether the figure's axis is logarithmic.
        objective: a bound to draw, in units of the panel. None means no bound.
    """

    title: str
    of: Callable[[CellT], float]
    unit: float = 1.0
    is_log: bool = False
    objective: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """The appearance of a system in pictures: label, colour and style."""

    label: str
    colour: str | None = None
    style: str = "-"


class GridExperiment(Experiment[FindingsT]):
    """An experiment that serves every load at each of its rates by each of its systems under every seed.

    A paper gives `served`, `claims`, `findings_type`, and `columns`; the rest has defaults.

    Args:
        plan: how much is run.

    Attributes:
        columns: figures of the tables.
        panels: figures of the pictures. The default is the columns.
        lines: by system, how pictures draw it. The default is a colour each.
        caption: the first words of a picture's title.
    """

    drawing = "moestro.repro.curves"
    columns: Sequence[Column[Any]]
    panels: Sequence[Panel[Any]] = ()
    lines: Mapping[str, Line] = {}
    caption = "simulated"

    def __init__(self, plan: GridPlan) -> None:
        self.plan = plan

    @abstractmethod
    def served(self, load: PlannedLoad, seed: int) -> Callable[[float, str], Cell]:
        """Make the requests of a load under a seed; the function returned serves them at a rate by a system."""

    def empty_findings(self) -> FindingsT:
        """Findings without a run."""
        return self.findings_type()

    @property
    def loads(self) -> Sequence[str]:
        """The names of the plan's loads."""
        return [load.name for load in self.plan.loads]

    def plan_of(self, load: str) -> object:
        """The plan with this load alone."""
        return self.plan.chosen((load,))

    def num_runs(self, load: str) -> int:
        """One for each seed, rate and system."""
        planned = self._planned(load)
        return len(self._systems(planned)) * len(self.plan.seeds) * len(planned.rates)

    def run(self, load: str, step: Callable[[str], None]) -> FindingsT:
        """Run the grid of one load, one simulation after the other."""
        planned, findings = self._planned(load), self.empty_findings()
        for seed in self.plan.seeds:
            serve = self.served(planned, seed)
            for rate in planned.rates:
                for system in self._systems(planned):
                    step(f"{load} at {rate:g}/s: {system}")
                    findings.cells.append(serve(rate, system))
        return findings

    def tables(self, findings: FindingsT) -> Iterator[RenderableType]:
        """A table for each load and rate."""
        for load in findings.loads:
            for rate in findings.rates(load):
                table = grid_table(findings, load, rate, self._systems(self._planned(load)), self.columns)
                table.title = self.table_title(findings, load, rate)
                yield table

    def table_title(self, findings: FindingsT, load: str, rate: float) -> str:
        """The title of a table."""
        del findings
        return f"{load}, {rate:g} requests/s"

    def _planned(self, load: str) -> PlannedLoad:
        [planned] = self.plan.chosen((load,)).loads
        return planned

    def _systems(self, load: PlannedLoad) -> tuple[str, ...]:
        return self.plan.systems if load.systems is None else load.systems


def plan_for(settings: ReproSettings, whole: GridPlan, quick: GridPlan) -> GridPlan:
    """The plan that the settings ask for.

    Raises:
        ConfigError: --loads names one that is not in the plan.
    """
    return (quick if settings.quick else whole).chosen(settings.loads)
