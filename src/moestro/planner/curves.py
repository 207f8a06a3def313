"""Curves of a deployment: runs with ever more requests, and what they say about the objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from moestro.planner.settings import ObjectiveSettings
from moestro.planner.simulated import FittingDivision, SimulatedPoint


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The most that a deployment gives within the objectives, read between two runs.

    Attributes:
        num_requests: requests in progress in all groups.
        tokens_per_s: output tokens a second.
        itl_ms, ttft_ms: mean latencies; of TTFT, NaN means that it is unknown.
    """

    num_requests: int
    tokens_per_s: float
    itl_ms: float
    ttft_ms: float


@dataclass(slots=True, eq=False)
class Curve:
    """Runs of one deployment under one seed.

    Attributes:
        fitting: the deployment.
        estimated_tokens_per_s: estimate of the throughput within the objectives.
        points: runs, in ascending order of requests.
        is_dominated: whether the search left it because it cannot be the best.
    """

    fitting: FittingDivision
    estimated_tokens_per_s: float
    points: list[SimulatedPoint] = field(default_factory=list)
    is_dominated: bool = False

    def run(self, num_requests: int, seed: int) -> SimulatedPoint:
        """Simulate a number of requests, unless this was done before."""
        for known in self.points:
            if known.num_requests == num_requests:
                return known
        point = self.fitting.run(num_requests, seed)
        if all(known.num_requests != point.num_requests for known in self.points):
            self.points.append(point)
            self.points.sort(key=lambda each: each.num_requests)
        return point

    def best(self, objectives: ObjectiveSettings) -> OperatingPoint | None:
        """Return the highest throughput within the objectives; None if no run keeps them."""
        return best_within(self.points, objectives)


def excess(point: SimulatedPoint, objectives: ObjectiveSettings) -> float:
    """Return the largest of the latencies as a multiple of its objective; above 1, an objective is missed."""
    ratios = [point.itl_ms / objectives.max_itl]
    for value, most in ((point.ttft_ms, objectives.max_ttft), (point.ttft_p99_ms, objectives.max_ttft_p99)):
        if most is not None and not math.isnan(value):
            ratios.append(value / most)
    return max(ratios)


def best_within(points: Sequence[SimulatedPoint], objectives: ObjectiveSettings) -> OperatingPoint | None:
    """Return the highest throughput within the objectives, on the line between neighbouring runs; None if none is.

    Args:
        points: runs, in ascending order of requests.
    """
    found = [_between(point, point, 0.0) for point in points if excess(point, objectives) <= 1]
    for low, high in pairwise(points):
        before, after = excess(low, objectives), excess(high, objectives)
        if before <= 1 < after:
            found.append(_between(low, high, (1 - before) / (after - before)))
    return max(found, key=lambda each: each.tokens_per_s, default=None)


def _between(low: SimulatedPoint, high: SimulatedPoint, share: float) -> OperatingPoint:
    def at(first: float, second: float) -> float:
        return first + share * (second - first)

    return OperatingPoint(
        num_requests=int(at(low.num_requests, high.num_requests)),
        tokens_per_s=at(low.tokens_per_s, high.tokens_per_s),
        itl_ms=at(low.itl_ms, high.itl_ms),
        ttft_ms=at(low.ttft_ms, high.ttft_ms) if share else low.ttft_ms,
    )
