"""Measures how long this process did not run. Has no clock: callers pass the time."""

from __future__ import annotations


class PauseMeter:
    """Measures how long a periodic task's process was stopped: by a signal, a suspension, or a blocked event loop.

    A task that judges other processes by their silence must exclude that time: their messages have not been read.

    Args:
        now_ns: Present time.
        longest_ns: Longest interval between two ticks that is not a pause.
    """

    def __init__(self, now_ns: int, longest_ns: int) -> None:
        self._last_ns = now_ns
        self._longest_ns = longest_ns

    def tick(self, now_ns: int) -> int:
        """Return the nanoseconds since the last tick beyond `longest_ns`; 0 means no pause."""
        pause_ns = now_ns - self._last_ns - self._longest_ns
        self._last_ns = now_ns
        return max(pause_ns, 0)
