"""Limits of request bodies: the memory of all, the share of each client, and the rate of arrival. Has no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from moestro.errors import RequestError

MAX_HELD_BYTES = 256 << 20
SMALL_BYTES = 64 << 10  # Uncounted bytes of each body, so that large bodies never crowd out ordinary requests.
MIN_BYTES_PER_S = 4 << 10  # A slow mobile network sends ten times as much.
MAX_SILENCE_S = 10.0  # Time for which a body may be behind the minimum rate.


class BodiesFullError(RequestError):
    """The bodies of a client, or of all clients, hold too much memory."""

    http_status = 503
    error_type = "service_unavailable"
    retry_after_s = 1

    def __init__(self, num_client_bytes: int, num_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"Request bodies hold {num_bytes} of {max_bytes} bytes, those of this client {num_client_bytes}."
            " A client may hold as much as is free. Retry later, or send smaller requests.",
            code="overloaded",
        )


class BodyMemory:
    """Counts the bytes that bodies hold, beyond the first 64 KiB of each, and divides the memory among clients.

    A client may hold at most as many bytes as stay free. One client can therefore take half of the memory, two can take
    a third each, and there is always room for another one. Source: Choudhury and Hahne, Dynamic Queue Length Thresholds
    for Shared-Memory Packet Switches, 1998, with a factor of 1.

    Attributes:
        max_bytes: Most bytes of all bodies.
        num_bytes: Present bytes of all bodies.
    """

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._of_client: Counter[Hashable] = Counter()  # Only clients that hold something.

    def grow(self, client: Hashable, num_bytes: int) -> None:
        """Count further bytes of a client.

        Raises:
            BodiesFullError: The client would hold more than stays free; nothing is counted.
        """
        held, total = self._of_client[client] + num_bytes, self.num_bytes + num_bytes
        if held > self.max_bytes - total:
            raise BodiesFullError(self._of_client[client], self.num_bytes, self.max_bytes)
        self._of_client[client], self.num_bytes = held, total

    def shrink(self, client: Hashable, num_bytes: int) -> None:
        """Stop counting bytes of a client."""
        self._of_client[client] -= num_bytes
        self.num_bytes -= num_bytes
        if not self._of_client[client]:
            del self._of_client[client]


class BodyHold:
    """Memory that one body of `client` holds."""

    __slots__ = ("_client", "_memory", "_num_counted")

    def __init__(self, memory: BodyMemory, client: Hashable) -> None:
        self._memory = memory
        self._client = client
        self._num_counted = 0

    def resize(self, num_bytes: int) -> None:
        """Count the body with its present size.

        Raises:
            BodiesFullError: The client would hold more than its share; the count stays as it is.
        """
        growth = max(0, num_bytes - SMALL_BYTES) - self._num_counted
        if growth > 0:
            self._memory.grow(self._client, growth)
        elif growth:
            self._memory.shrink(self._client, -growth)
        self._num_counted += growth

    def release(self) -> None:
        """Stop counting the body. A second call has no effect."""
        self.resize(0)


class BodyDeadline:
    """Time at which a body is too late. Each `MIN_BYTES_PER_S` bytes move it by a second.

    Args:
        now_s: Present time.
        limit_s: Time for the whole body, in seconds.

    Attributes:
        due_s: Time at which the body ends unless more of it arrives.
    """

    __slots__ = ("_end_s", "due_s")

    def __init__(self, now_s: float, limit_s: float) -> None:
        self._end_s = now_s + limit_s
        self.due_s = min(now_s + MAX_SILENCE_S, self._end_s)

    def arrived(self, num_bytes: int, now_s: float) -> float:
        """Count a part of the body, and return the new deadline."""
        self.due_s = min(self.due_s + num_bytes / MIN_BYTES_PER_S, now_s + MAX_SILENCE_S, self._end_s)
        return self.due_s

    def paused(self, pause_s: float) -> None:
        """Extend the deadline by the time for which this process stood still."""
        self.due_s += pause_s
        self._end_s += pause_s
