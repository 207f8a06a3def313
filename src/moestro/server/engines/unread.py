"""Memory of answers that their clients have not read: bounded for all, and the client with most gives way."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from moestro.core.request import Output
from moestro.server.engines.request_state import InboxEvent

# Outputs of the engines that wait for slow clients. Text of 1,024 choices over a minute takes a tenth of it.
MAX_UNREAD_BYTES = 256 << 20
_EVENT_BYTES = 384  # of an output of one token: the object, its request id and its tokens
_SCORE_BYTES = 96  # of one log probability: two numbers and their tuple


class UnreadMemory:
    """Counts the outputs that wait for clients which read more slowly than the engines generate.

    An engine does not pause a sequence for a slow client. Where all outputs that wait exceed the bound, the stream with
    most of them is cut, among those of the client that has most in all.

    Args:
        max_bytes: Most bytes of all streams.

    Attributes:
        num_bytes: Present bytes of all streams.
    """

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._of_client: dict[Hashable, set[UnreadStream]] = {}  # Streams that hold something.

    def count(self, stream: UnreadStream, num_bytes: int) -> None:
        """Count further bytes of a stream, and cut streams until all are within the bound."""
        if num_bytes:
            self._of_client.setdefault(stream.client, set()).add(stream)
        stream.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._largest().cut()

    def forget(self, stream: UnreadStream) -> None:
        """Stop counting the bytes of a stream."""
        self.num_bytes -= stream.num_bytes
        stream.num_bytes = 0
        if (streams := self._of_client.get(stream.client)) is not None:
            streams.discard(stream)
            if not streams:
                del self._of_client[stream.client]

    def _largest(self) -> UnreadStream:
        most = max(self._of_client.values(), key=lambda streams: sum(each.num_bytes for each in streams))
        return max(most, key=lambda each: each.num_bytes)


class UnreadStream:
    """Outputs that wait for one client's connection. As a context manager it forgets them at the end.

    Args:
        client: Name of the client (`Access.client_of`).
        cut: Closes the connection, which ends the request.

    Attributes:
        num_bytes: Counted bytes.
    """

    __slots__ = ("_cut", "_is_over", "_memory", "client", "num_bytes")

    def __init__(self, memory: UnreadMemory, client: Hashable, cut: Callable[[], None]) -> None:
        self._memory = memory
        self._cut = cut
        self._is_over = False
        self.client = client
        self.num_bytes = 0

    def __enter__(self) -> UnreadStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def is_over(self) -> bool:
        """Whether nothing waits for the connection any more."""
        return self._is_over

    def waits(self, event: InboxEvent) -> None:
        """Count an event that the connection does not take yet, for which this or another stream may be cut."""
        if not self._is_over:
            self._memory.count(self, _size_of(event))

    def taken(self, event: InboxEvent) -> None:
        """Stop counting an event that waited."""
        if not self._is_over:
            self._memory.count(self, -_size_of(event))
            if not self.num_bytes:
                self._memory.forget(self)

    def cut(self) -> None:
        """Close the connection, and count its outputs no longer."""
        self._end()
        self._cut()

    def _end(self) -> None:
        self._is_over = True
        self._memory.forget(self)


def _size_of(event: InboxEvent) -> int:
    """Return the approximate bytes of an event of the engine."""
    if not isinstance(event, Output) or not event.logprobs:
        return _EVENT_BYTES
    return _EVENT_BYTES + _SCORE_BYTES * sum(1 + len(entry.top) for entry in event.logprobs)
