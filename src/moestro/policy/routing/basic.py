"""The routing policies that look at nothing but counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moestro.core.request import Request
from moestro.core.views import EngineTable


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """Which engine, with what score (lower is better), and why."""

    engine: int
    score: float
    reason: str


# (request, table, number of decisions so far) -> decision. At least one row is routable.
RoutePolicy = Callable[[Request, EngineTable, int], RouteDecision]


def round_robin(request: Request, table: EngineTable, decision_id: int) -> RouteDecision:
    """The routable engines in turn."""
    routable = np.flatnonzero(table.routable)
    turn = decision_id % len(routable)
    return RouteDecision(int(routable[turn]), float(turn), f"turn {turn} of {len(routable)}")


def least_loaded(request: Request, table: EngineTable, decision_id: int) -> RouteDecision:
    """Join the engine with the fewest requests in flight; ties go round, so that none is favoured."""
    load = np.where(table.routable, table.num_in_flight, np.iinfo(np.int32).max)
    tied = np.flatnonzero(load == load.min())
    engine = int(tied[decision_id % len(tied)])
    return RouteDecision(engine, float(load[engine]), f"{load[engine]} in flight, the fewest")


ROUTING: dict[str, RoutePolicy] = {"round_robin": round_robin, "least_loaded": least_loaded}
