"""The router: keeps what it knows of each engine, asks the policy, remembers the answer. No sockets, no clock."""

from __future__ import annotations

import numpy as np

from moestro.core.request import Request
from moestro.core.views import EngineTable
from moestro.errors import ConfigError, InvariantError, NoEngineError
from moestro.policy.routing.basic import ROUTING, RouteDecision


class Router:
    """Chooses an engine for each request and counts what is in flight on each.

    Args:
        num_engines: engines, numbered from 0; none is routable until `set_routable`.
        policy: a name in `ROUTING`.

    Invariant: `num_in_flight[e]` is the number of requests submitted to `e` and not `ended` since.
    """

    def __init__(self, num_engines: int, policy: str) -> None:
        if policy not in ROUTING:
            raise ConfigError(f"unknown route policy {policy!r}; known: {', '.join(ROUTING)}")
        self._policy = ROUTING[policy]
        self._routable = np.zeros(num_engines, np.bool_)
        self._num_in_flight = np.zeros(num_engines, np.int32)
        self._num_decisions = 0

    def submit(self, request: Request) -> RouteDecision:
        """Choose an engine and count the request there.

        Raises:
            NoEngineError: no engine is routable.
        """
        if not self._routable.any():
            raise NoEngineError
        table = EngineTable(self._routable.copy(), self._num_in_flight.copy())
        decision = self._policy(request, table, self._num_decisions)
        self._num_decisions += 1
        self._num_in_flight[decision.engine] += 1
        return decision

    def ended(self, engine: int) -> None:
        """One request of `engine` came to its end, whatever it was."""
        if self._num_in_flight[engine] == 0:
            raise InvariantError(f"engine {engine} ended a request it did not have")
        self._num_in_flight[engine] -= 1

    def set_routable(self, engine: int, *, routable: bool) -> None:
        """Take `engine` into rotation, or out of it (what is in flight stays counted)."""
        self._routable[engine] = routable

    @property
    def num_in_flight(self) -> int:
        """Requests on all engines."""
        return int(self._num_in_flight.sum())

    @property
    def num_routable(self) -> int:
        """Engines in rotation."""
        return int(self._routable.sum())
