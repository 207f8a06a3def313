"""The search over the times of requests: how many servers of each kind hold the objectives, and up to which load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from moestro.planner.over_time.choices import ServerChoice
from moestro.planner.over_time.figures import DayFigures, figures_of
from moestro.planner.over_time.load import DayLoad
from moestro.planner.settings import PlanSettings
from moestro.planner.systems import ServedSystem
from moestro.sim.cluster import Workload
from moestro.sim.engine_prices import make_prices
from moestro.sim.prices import Prices
from moestro.sim.scenario import Scenario, make_bounds, run
from moestro.sim.settings import PolicySettings
from moestro.workload.requests import RequestForm

_BRACKET = 1.05  # between the load that holds and the one that breaks
_MOST_FACTOR = 64.0


@dataclass(slots=True, eq=False)
class ChoiceFindings:
    """What was found of one kind of server.

    Attributes:
        choice: the server.
        num_servers: servers: the fewest that hold the objectives, or all that the GPUs make.
        figures: figures with them. None means that they were not simulated.
        is_larger: whether one has more GPUs than another kind needs in all.
        load_held, load_broken: multiples of the load that hold and that break the objectives. None means unknown, or
            that none was found within a factor of 64.
        broken_by: what breaks at `load_broken`.
    """

    choice: ServerChoice
    num_servers: int
    figures: DayFigures | None
    is_larger: bool = False
    load_held: float | None = None
    load_broken: float | None = None
    broken_by: str | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs of all servers."""
        return self.num_servers * self.choice.num_gpus

    @property
    def holds(self) -> bool:
        """Whether the objectives hold at the given load."""
        return self.figures is not None and self.figures.broken is None


@dataclass(slots=True, eq=False)
class TimedSearch:
    """Simulates numbers of servers and multiples of the load.

    Args:
        settings: the question.
        system: the server whose scheduler is simulated.
        load: the requests.
        seconds_left: returns the seconds that are left. The answer decides only which simulations are made.
        on_step: receives a line about each step, for a progress bar.
    """

    settings: PlanSettings
    system: ServedSystem
    load: DayLoad
    seconds_left: Callable[[], float] = lambda: math.inf
    on_step: Callable[[str], None] = lambda _: None
    _runs: dict[tuple[str, int, float], DayFigures] = field(default_factory=dict)
    _prices: dict[str, Prices] = field(default_factory=dict)
    _workloads: dict[RequestForm, Workload] = field(default_factory=dict)

    def run(self, choices: Sequence[ServerChoice]) -> list[ChoiceFindings]:
        """Return what was found of each kind of server, the best first.

        The best needs the fewest GPUs, and of those with equally many it holds the highest load. Where the number of
        GPUs is given, it is the one that holds the highest load.
        """
        is_fewest = self.settings.finds == "fewest-gpus"
        found, least = [], self.settings.hardware.num_gpus
        for choice in sorted(choices, key=lambda each: each.num_gpus):
            found.append(self._fewest(choice, least) if is_fewest else self._all_gpus(choice))
            least = min(least, found[-1].num_gpus) if found[-1].holds else least
        for each in found:
            if each.figures is not None and (not is_fewest or (each.holds and each.num_gpus == least)):
                self._find_limit(each)
        return sorted(
            found,
            key=lambda each: (
                not each.holds,
                each.figures is None,
                each.num_gpus if is_fewest and each.holds else 0,
                -(each.load_held or 0),
            ),
        )

    @property
    def _is_late(self) -> bool:
        return self.seconds_left() <= 0

    def figures(self, choice: ServerChoice, num_servers: int, factor: float = 1.0) -> DayFigures:
        """Simulate a number of servers at a multiple of the load, unless this was done before."""
        key = (choice.title, num_servers, factor)
        if key not in self._runs:
            self.on_step(f"{num_servers} x {choice.title}" + ("" if factor == 1 else f", load {factor:.2f}"))
            self._runs[key] = self._simulate(choice, num_servers, factor)
        return self._runs[key]

    def _simulate(self, choice: ServerChoice, num_servers: int, factor: float) -> DayFigures:
        engines = replace(choice.engines, count=num_servers)
        form = RequestForm(block_size=engines.block_size, names_blocks=engines.enable_prefix_caching)
        if choice.title not in self._prices:
            self._prices[choice.title] = make_prices(engines)
        if form not in self._workloads:
            self._workloads[form] = self.load.workload(form)
        scenario = Scenario(
            workload=self._workloads[form],
            arrivals=self.load.arrivals(factor),
            engines=engines,
            bounds=make_bounds(engines),
            prices=self._prices[choice.title],
            source=self.load.source,
            is_generated=self.load.is_generated,
            seed=self.settings.search.seed,
        )
        policy = PolicySettings(batch_policy=self.system.batch_policy)
        return figures_of(run(scenario, policy), self.settings.objectives)

    def notes(self) -> list[str]:
        """Return what limits the prices of these runs."""
        return list(dict.fromkeys(note for prices in self._prices.values() for note in prices.notes()))

    # --- numbers of servers -----------------------------------------------------------------------------------------

    def _all_gpus(self, choice: ServerChoice) -> ChoiceFindings:
        number = self.settings.hardware.num_gpus // choice.num_gpus
        return ChoiceFindings(choice, number, None if self._is_late else self.figures(choice, number))

    def _fewest(self, choice: ServerChoice, num_gpus: int) -> ChoiceFindings:
        """Double the servers until they hold the objectives or use `num_gpus`, then bisect."""
        most, low, high = num_gpus // choice.num_gpus, 0, 1
        if not most:
            return ChoiceFindings(choice, 1, None, is_larger=True)
        while True:
            if self._is_late:
                return ChoiceFindings(choice, high, None)
            if self.figures(choice, high).broken is None:
                break
            low = high
            if high == most:
                return ChoiceFindings(choice, most, self.figures(choice, most))
            high = min(2 * high, most)
        while high - low > 1 and not self._is_late:
            middle = (low + high) // 2
            low, high = (low, middle) if self.figures(choice, middle).broken is None else (middle, high)
        return ChoiceFindings(choice, high, self.figures(choice, high))

    # --- multiples of the load --------------------------------------------------------------------------------------

    def _find_limit(self, found: ChoiceFindings) -> None:
        """Find the multiples of the load between which the objectives break."""
        held, broken = (1.0, None) if found.holds else (None, 1.0)
        while not self._is_late:
            factor = _next_factor(held, broken)
            if factor is None:
                break
            if self.figures(found.choice, found.num_servers, factor).broken is None:
                held = factor
            else:
                broken = factor
        found.load_held, found.load_broken = held, broken
        if broken is not None:
            found.broken_by = self.figures(found.choice, found.num_servers, broken).broken


def _next_factor(held: float | None, broken: float | None) -> float | None:
    """Return the next multiple of the load to try. None means that the bracket is narrow or the factor extreme."""
    if broken is None:
        assert held is not None, "one of them is known"
        return 2 * held if held < _MOST_FACTOR else None
    if held is None:
        return broken / 2 if broken > 1 / _MOST_FACTOR else None
    return math.sqrt(held * broken) if broken > held * _BRACKET else None
