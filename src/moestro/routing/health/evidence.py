"""Evidence against an engine: failures of requests that differ in client and in body. Callers pass in the time."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class Origin(NamedTuple):
    """Where a request comes from, as far as its failure is judged.

    Attributes:
        client: Name of the client, as rate limits count it. A client cannot choose it at will.
        body: Digest of the body.
    """

    client: Hashable
    body: Hashable


class Evidence:
    """Failures of one engine since its last success.

    A failure that follows a request from engine to engine is the request's own. A failure is the engine's if requests
    of different clients with different bodies have it too, and none succeeds meanwhile. So the failures of one client,
    or of one body, count as one witness, however many they are. The memory is bounded by `max_witnesses`.

    Args:
        max_witnesses: Largest number of witnesses that a caller needs.
    """

    def __init__(self, max_witnesses: int) -> None:
        self._max_witnesses = max_witnesses
        self._clients: set[Hashable] = set()
        self._bodies: set[Hashable] = set()
        self._since_ns: int | None = None  # First failure since the last success.
        self._num_failures = 0

    def failed(self, origin: Origin, now_ns: int) -> None:
        """Record the failure of a request."""
        if self._since_ns is None:
            self._since_ns = now_ns
        self._num_failures += 1
        is_new = origin.client not in self._clients and origin.body not in self._bodies
        if is_new and len(self._clients) < self._max_witnesses:
            self._clients.add(origin.client)
            self._bodies.add(origin.body)

    def clear(self) -> None:
        """Forget all failures, because the engine has answered a request since."""
        if self._since_ns is not None:
            self._since_ns, self._num_failures = None, 0
            self._clients.clear()
            self._bodies.clear()

    @property
    def num_witnesses(self) -> int:
        """Failures that differ pairwise in client and in body, at most `max_witnesses`."""
        return len(self._clients)

    @property
    def num_failures(self) -> int:
        """Failures since the last success, of whatever origin."""
        return self._num_failures

    def age_ns(self, now_ns: int) -> int:
        """Nanoseconds since the first failure that no success has followed; 0 without any failure."""
        return 0 if self._since_ns is None else now_ns - self._since_ns
