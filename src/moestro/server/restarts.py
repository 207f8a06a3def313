"""When a rank that ended is started again, and when it is not. No clock: the time is handed in."""

from __future__ import annotations

FIRST_DELAY_S = 1.0
LAST_DELAY_S = 60.0
STEADY_S = 120.0  # a rank that served this long has earned a fresh start
MAX_FAILED_STARTS = 5


class RestartRule:
    """Decides for one rank.

    A rank that was ready is always started again, after a delay that doubles with every end, so that one which crashes
    at once cannot keep the machine busy. One that ends `MAX_FAILED_STARTS` times in a row before it is ready is given
    up, for the next start would end the same way.
    """

    def __init__(self) -> None:
        self._ready_ns: int | None = None
        self._num_ends = 0  # since it last served for long
        self._num_failed_starts = 0  # in a row

    def ready(self, now_ns: int) -> None:
        """The rank takes requests."""
        self._ready_ns = now_ns
        self._num_failed_starts = 0

    def ended(self, now_ns: int) -> float | None:
        """Seconds to wait before the next start; None: give it up."""
        if self._ready_ns is None:
            self._num_failed_starts += 1
        elif now_ns - self._ready_ns >= STEADY_S * 1e9:
            self._num_ends = 0
        self._ready_ns = None
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            return None
        self._num_ends += 1
        return min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._num_ends - 1))
