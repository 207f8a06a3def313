"""A grid of runs: loads x seeds x rates x systems, with its tables and pictures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from rich.console import RenderableType

from moestro.repro.experiment import Experiment, chosen_parts
from moestro.repro.results import Cell, CellT, Column, FindingsT, grid_table
from moestro.repro.settings import ReproSettings


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
