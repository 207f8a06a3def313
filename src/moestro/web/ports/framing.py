"""Limits of what surrounds the bodies of requests, the same on all ports: heads, chunk framing, trailers, times."""

from __future__ import annotations

from moestro.web.errors import HttpError

MAX_HEAD_BYTES = 64 << 10  # Of one message; only tokens in cookies and traces are long.
MAX_HEADERS = 128  # Clients and proxies send fewer than 50.
IDLE_S = 75.0  # Time for the next head. Pools of common clients and proxies keep idle connections for less time.
WRITE_S = 60.0  # Time that a client may leave its answer unread.
LINGER_S = 3.0  # Time for a client that is refused in the middle of its body to notice the refusal.


class FramingCount:
    """Counts the received bytes of a connection that belong to no body.

    Heads and trailers may have 64 KiB each. The framing of chunks may have 64 KiB plus the size of the body, which
    allows any number of chunks of 6 bytes and more.

    Attributes:
        num_body_bytes: Bytes of the current message's body.
    """

    __slots__ = ("_num_between", "_num_read", "num_body_bytes")

    def __init__(self) -> None:
        self._num_between = 0  # Since the last byte of a body: heads, chunk framing, trailers.
        self._num_read = 0  # Since the head or the previous message.
        self.num_body_bytes = 0

    @property
    def is_over(self) -> bool:
        """Whether a limit is exceeded."""
        return self._num_between > MAX_HEAD_BYTES or self._num_read > MAX_HEAD_BYTES + 2 * self.num_body_bytes

    def read(self, num_bytes: int) -> None:
        """Count bytes as framing; `body` and `restart` correct this."""
        self._num_between += num_bytes
        self._num_read += num_bytes

    def body(self, num_bytes: int) -> None:
        """Count a part of the body."""
        self._num_between = 0
        self.num_body_bytes += num_bytes

    def restart(self) -> None:
        """Begin to count again, after a head or a message. The rest of the same read is not counted."""
        self._num_between = self._num_read = 0


def head_too_large() -> HttpError:
    """Return the refusal of a head, of trailers or of chunk framing above a limit."""
    rule = (
        f"A head may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers, and trailers may have {MAX_HEAD_BYTES}"
        " bytes; to frame chunks, as many more as they carry."
    )
    return HttpError(431, rule, "head_too_large")
