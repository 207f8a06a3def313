"""The router: keeps what it knows of each engine, asks the policy, remembers the answer. No sockets, no clock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.request import Request
from moestro.core.views import EngineTable
from moestro.errors import ConfigError, InvariantError, NoEngineError, QueueFullError
from moestro.policy.routing.basic import ROUTING, RouteDecision


class Router:
    """Chooses an engine for each request and counts what is in flight on each.

    Args:
        num_engines: engines, numbered from 0; none is routable until `set_routable`.
        policy: a name in `ROUTING`.
        max_num_queued: requests that may wait in one engine; None: no bound here. The engines keep the same bound, but
            answer between two steps, which is late for a refusal.

    Invariant: `num_in_flight[e]` is the number of requests submitted to `e` and not `ended` since.
    """

    def __init__(self, num_engines: int, policy: str, max_num_queued: int | None = None) -> None:
        if policy not in ROUTING:
            raise ConfigError(f"unknown route policy {policy!r}; known: {', '.join(ROUTING)}")
        self._policy = ROUTING[policy]
        self._routable = np.zeros(num_engines, np.bool_)
        self._num_in_flight = np.zeros(num_engines, np.int32)
        self._num_running = np.zeros(num_engines, np.int32)
        self._max_num_queued = max_num_queued
        self._num_decisions = 0

    def submit(self, request: Request) -> RouteDecision:
        """Choose an engine and count the request there.

        Raises:
            NoEngineError: no engine is routable.
            QueueFullError: each that is has as many waiting requests as it may have.
        """
        table = EngineTable(self._with_room(), self._num_in_flight.copy())
        decision = self._policy(request, table, self._num_decisions)
        self._num_decisions += 1
        self._num_in_flight[decision.engine] += 1
        return decision

    def check_room(self) -> None:
        """Raise what `submit` would raise now: a flood is refused before anybody reads what it sends."""
        self._with_room()

    def _with_room(self) -> NDArray[np.bool_]:
        """bool[n], the routable engines whose queues are not full."""
        if not self._routable.any():
            raise NoEngineError
        if self._max_num_queued is None:
            return self._routable.copy()
        num_waiting = self._num_in_flight - self._num_running
        has_room = self._routable & (num_waiting < self._max_num_queued)
        if not has_room.any():
            raise QueueFullError(int(num_waiting[self._routable].sum()))
        return has_room

    def ended(self, engine: int) -> None:
        """One request of `engine` came to its end, whatever it was."""
        if self._num_in_flight[engine] == 0:
            raise InvariantError(f"engine {engine} ended a request it did not have")
        self._num_in_flight[engine] -= 1

    def set_routable(self, engine: int, *, routable: bool) -> None:
        """Take `engine` into rotation, or out of it (what is in flight stays counted)."""
        self._routable[engine] = routable

    def set_num_running(self, engine: int, num_running: int) -> None:
        """`engine` said how many of its requests wait no more."""
        self._num_running[engine] = num_running

    @property
    def num_engines(self) -> int:
        """In rotation or not."""
        return len(self._routable)

    def is_routable(self, engine: int) -> bool:
        """Whether `engine` is in rotation."""
        return bool(self._routable[engine])

    def num_in_flight_on(self, engine: int) -> int:
        """Requests on one engine."""
        return int(self._num_in_flight[engine])

    @property
    def num_in_flight(self) -> int:
        """Requests on all engines."""
        return int(self._num_in_flight.sum())

    @property
    def num_routable(self) -> int:
        """Engines in rotation."""
        return int(self._routable.sum())
