"""The routing policies that look at nothing but the router's own counts."""

from __future__ import annotations

import numpy as np

from moestro.core.rng import Draws
from moestro.policy.routing.contract import Choice, RouteEvent, RouteView


class Stateless:
    """A policy that has nothing to remember."""

    needs_hits = False

    def observe(self, event: RouteEvent) -> None:
        """Nothing."""


class RoundRobin(Stateless):
    """The routable engines in turn."""

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """The next one."""
        routable = np.flatnonzero(view.engines.routable)
        turn = view.decision_id % len(routable)
        return Choice(int(routable[turn]), float(turn), f"turn {turn} of {len(routable)}")


class LeastLoaded(Stateless):
    """Join the engine with the fewest requests in flight; ties are drawn for, so that none is favoured."""

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """One of the emptiest."""
        load = np.where(view.engines.routable, view.engines.num_in_flight, np.inf)
        tied = np.flatnonzero(load == load.min())
        engine = int(tied[draws.below(len(tied))])
        return Choice(engine, float(load[engine]), f"{load[engine]:.0f} in flight, the fewest", load)
