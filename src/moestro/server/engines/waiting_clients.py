"""Requests without a token by client, which decide whose request a full queue still takes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator

Client = Hashable


class WaitingClients:
    """Counts the requests of each client that are prepared, or that wait in an engine for their first token.

    A full queue has an equal share for each client. A request of a client with less than that is sent to the engine
    all the same, and the engine takes a place from the client that has most (`engine.policies.admission`).
    The queues on the way to an engine thus have at most twice the places of one.

    Args:
        num_engines: Number of engines.
        num_places: Places of each engine's queue; None means no limit, so that no queue is ever full.
    """

    def __init__(self, num_engines: int, num_places: int | None) -> None:
        self._num_places = num_places or 0
        self._coming: Counter[Client] = Counter()
        self._waiting: list[Counter[Client]] = [Counter() for _ in range(num_engines)]
        self._place_of: dict[str, tuple[int, Client]] = {}

    @property
    def num_coming(self) -> int:
        """Number of requests that are being prepared."""
        return self._coming.total()

    @contextlib.contextmanager
    def coming(self, client: Client) -> Iterator[None]:
        """Count a request that is being prepared."""
        self._coming[client] += 1
        try:
            yield
        finally:
            _count_down(self._coming, client)

    def add(self, engine: int, client: Client, request_id: str) -> None:
        """Count a request that was sent to an engine."""
        self._place_of[request_id] = engine, client
        self._waiting[engine][client] += 1

    def discard(self, request_id: str) -> None:
        """Stop counting a request. A request that is not counted is ignored."""
        place = self._place_of.pop(request_id, None)
        if place is not None:
            engine, client = place
            _count_down(self._waiting[engine], client)

    def may_come(self, client: Client) -> bool:
        """Return whether a request of `client` is worth its preparation although all queues are full."""
        return _has_share(sum(self._waiting, self._coming), client, self._num_places * len(self._waiting))

    def makes_room_for(self, client: Client) -> list[int]:
        """Return the engines in whose full queues another client gives way to `client`."""
        return [engine for engine, held in enumerate(self._waiting) if _has_share(held, client, self._num_places)]


def _has_share(held: Counter[Client], client: Client, num_places: int) -> bool:
    """Return whether `client` has less than an equal share, and another client more than it would have."""
    num_own = held[client]
    others = [count for other, count in held.items() if other != client]
    share = max(1, num_places // (len(others) + 1))
    return num_own < share and max(others, default=0) > num_own + 1


def _count_down(counts: Counter[Client], client: Client) -> None:
    counts[client] -= 1
    if not counts[client]:
        del counts[client]
