"""The search: estimates order and cut the deployments, simulations of the rest find the best within the objectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moestro.planner.curves import Curve, OperatingPoint, excess
from moestro.planner.divisions import GpuDivision, divisions_of
from moestro.planner.estimate import EstimatedPoint, Estimator
from moestro.planner.memory import MemoryUse, memory_of
from moestro.planner.question import PlanQuestion
from moestro.planner.settings import ObjectiveSettings
from moestro.planner.simulated import FittingDivision, SimulatedPoint

# A deployment is left out if its estimate, times this, is below a simulated throughput. The largest quotients of the
# two were 1.05 in lock-step, in 219 runs, and 0.77 in `async`, in 11 (bench/simulator/plan_estimates.py).
ALLOWANCE, ASYNC_ALLOWANCE = 1.15, 0.9
_NUM_RUNGS = 6  # estimates per factor of 8 in the number of requests; curves are smooth
# A bracket around the objective: numbers of requests that differ by less give nearly the same throughput. Runs of
# `async` take a hundred times as long.
_BRACKET, _ASYNC_BRACKET = 1.2, 1.6
_MOST_STEPS = 8
# `async` had about half of its estimate in these trials; a first run far beyond it takes a minute.
_ASYNC_SHARE = 0.5
_COMPARISON_SHARE = 0.4  # of the time, kept for the comparison under several seeds
_LOWER_POINTS = (0.5, 0.2, 0.05)  # shares of the best number of requests at which the curves of the best are completed
_SHOWN_CURVES = 4


@dataclass(slots=True, eq=False)
class SearchFindings:
    """Everything that the search found.

    Attributes:
        memory: memory of each deployment, in the order in which they were listed.
        curves: deployments that fit, by estimate, the best first.
        left_out: deployments that were not simulated because their estimate is below `best_tokens_per_s`.
        not_reached: deployments for which the time did not suffice.
        pairs: throughput of the best two at the same numbers of requests, by seed.
    """

    memory: dict[GpuDivision, MemoryUse]
    curves: list[Curve] = field(default_factory=list)
    left_out: list[Curve] = field(default_factory=list)
    not_reached: list[Curve] = field(default_factory=list)
    pairs: list[tuple[SimulatedPoint, SimulatedPoint]] = field(default_factory=list)

    def ranked(self, objectives: ObjectiveSettings) -> list[tuple[Curve, OperatingPoint]]:
        """Return the deployments that meet the objectives, the highest throughput first."""
        found = [(curve, best) for curve in self.curves if (best := curve.best(objectives)) is not None]
        return sorted(found, key=lambda each: -each[1].tokens_per_s)


class PlanSearch:
    """Searches under one seed, then compares the best two under others.

    Args:
        question: hardware, network, load and objectives.
        seconds_left: returns the seconds that are left. The answer decides only which simulations are made.
        on_step: receives a line about each step, for a progress bar.
    """

    def __init__(
        self,
        question: PlanQuestion,
        seconds_left: Callable[[], float] = lambda: float("inf"),
        on_step: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._question, self._objectives = question, question.settings.objectives
        self._seed = question.settings.search.seed
        self._seconds_left, self._on_step = seconds_left, on_step
        self._estimator = Estimator(self._seed)
        self._kept_s = 0.0  # seconds that the search leaves for the comparison
        self.found = SearchFindings({each: memory_of(question, each) for each in divisions_of(question)})

    def run(self) -> SearchFindings:
        """Search until everything is known or the time is over; the first deployment is simulated in any case."""
        seconds = self._seconds_left()
        self._kept_s = seconds * _COMPARISON_SHARE if seconds < float("inf") else 0.0
        fitting = [
            FittingDivision(self._question, division, memory)
            for division, memory in self.found.memory.items()
            if memory.why_not is None
        ]
        curves = [Curve(each, self._estimated(each)) for each in fitting]
        curves.sort(key=lambda curve: -curve.estimated_tokens_per_s)
        # Modes in lock-step take a hundredth of the time, so they come first and set the mark for `async`.
        quick = [curve for curve in curves if curve.fitting.division.mode != "async"]
        for curve in [*quick, *(curve for curve in curves if curve not in quick)]:
            self._try(curve)
        self.found.curves.sort(key=lambda curve: -self._reached(curve))
        self._kept_s = 0.0
        self._compare()
        self._complete()
        return self.found

    @property
    def _is_late(self) -> bool:
        """Whether the time of this part of the search is over."""
        return self._seconds_left() <= self._kept_s

    @property
    def best_tokens_per_s(self) -> float:
        """Highest simulated throughput within the objectives; 0 if none is."""
        return max((self._reached(curve) for curve in self.found.curves), default=0.0)

    def _reached(self, curve: Curve) -> float:
        best = curve.best(self._objectives)
        return 0.0 if best is None else best.tokens_per_s

    # --- estimates --------------------------------------------------------------------------------------------------

    def _estimated(self, fitting: FittingDivision) -> float:
        """Estimate of the throughput within the objective of ITL; of one request an engine if it is never kept."""
        return self._estimated_best(fitting, self._objectives.max_itl).tokens_per_s

    def _estimated_best(self, fitting: FittingDivision, max_itl: float) -> EstimatedPoint:
        rungs = ladder(fitting)
        best = self._estimator.estimate(fitting, rungs[0])
        for number in rungs[1:]:
            point = self._estimator.estimate(fitting, number)
            if point.itl_ms > max_itl:
                break
            if point.tokens_per_s > best.tokens_per_s:
                best = point
        return best

    # --- simulations ------------------------------------------------------------------------------------------------

    def _try(self, curve: Curve) -> None:
        allowance = ASYNC_ALLOWANCE if curve.fitting.division.mode == "async" else ALLOWANCE
        if curve.estimated_tokens_per_s * allowance < self.best_tokens_per_s:
            self.found.left_out.append(curve)
            return
        if self._is_late and self.found.curves:
            self.found.not_reached.append(curve)
            return
        self.found.curves.append(curve)
        self._trace(curve)

    def _trace(self, curve: Curve) -> None:
        """Simulate a deployment around the largest number of requests that keeps the objectives."""
        fitting, is_async = curve.fitting, curve.fitting.division.mode == "async"
        bracket = _ASYNC_BRACKET if is_async else _BRACKET
        least, most = fitting.num_engines, max(ladder(fitting)[-1], fitting.num_engines)
        low, high = 0, most + 1  # numbers of requests that keep and that miss the objectives
        max_itl = self._objectives.max_itl * (_ASYNC_SHARE if is_async else 1)
        number = self._estimated_best(fitting, max_itl).num_requests
        for step in range(_MOST_STEPS):
            if step and self._is_late:
                return
            self._on_step(f"{fitting.division.title}: {number:,} requests")
            point = curve.run(number, self._seed)
            over = excess(point, self._objectives)
            if over <= 1:
                low = max(low, number)
            else:
                high = min(high, number)
                if point.tokens_per_s < self.best_tokens_per_s:  # with fewer requests, it is less
                    curve.is_dominated = True
                    return
            if low >= most or high <= least or (low and high <= low * bracket):
                return
            number = _next_number(number, over, (low, high), (least, most))
            if number in (low, high):
                return

    def _compare(self) -> None:
        """Run the best two under further seeds, each at its number of requests."""
        ranked = self.found.ranked(self._objectives)[:2]
        if len(ranked) < 2:
            return
        search = self._question.settings.search
        for seed in range(self._seed, self._seed + search.num_seeds):
            if self._is_late:
                return
            self._on_step(f"{ranked[0][0].fitting.division.title} and the runner-up: seed {seed}")
            first, second = (curve.fitting.run(best.num_requests, seed) for curve, best in ranked)
            self.found.pairs.append((first, second))

    def _complete(self) -> None:
        """Complete the curves of the best for the picture."""
        for curve, best in self.found.ranked(self._objectives)[:_SHOWN_CURVES]:
            is_async = curve.fitting.division.mode == "async"  # few requests make as many items, and take as long
            for share in _LOWER_POINTS[:1] if is_async else _LOWER_POINTS:
                number = round(best.num_requests * share)
                if number >= curve.fitting.num_engines and not self._is_late:
                    self._on_step(f"{curve.fitting.division.title}: {number:,} requests")
                    curve.run(number, self._seed)


def ladder(fitting: FittingDivision) -> list[int]:
    """Return numbers of requests for estimates, ascending: from one for each engine up to what fits the KV caches."""
    most, least = fitting.most_requests, fitting.num_engines
    rungs, number = [least], float(least)
    factor = 8 ** (1 / _NUM_RUNGS)
    while (number := number * factor) < most:
        rungs.append(round(number / least) * least)
    return sorted({*rungs, max(most, least)})


def _next_number(number: int, over: float, bracket: tuple[int, int], limits: tuple[int, int]) -> int:
    """Choose the next number of requests.

    Args:
        number: the last one.
        over: its largest latency as a multiple of the objective.
        bracket: largest number that keeps the objectives, 0 if none is known, and smallest that misses them.
        limits: smallest and largest number allowed.
    """
    low, high = bracket
    if low and high <= limits[1]:
        return round(math.sqrt(low * high))
    # Latency grows more slowly than the number, so this goes beyond the objective, but by less than twice.
    factor = min(1 / over * 1.1, 3.0) if over <= 1 else max(0.9 / over, 0.2)
    moved = round(number * max(factor, 1.25) if over <= 1 else number * factor)
    return max(min(moved, limits[1]), limits[0])


def measured_of(pairs: Sequence[tuple[SimulatedPoint, SimulatedPoint]]) -> list[float]:
    """Return the throughput of the first as a multiple of the second, for each pair of runs with equal seeds."""
    return [first.tokens_per_s / second.tokens_per_s for first, second in pairs]
