"""How long this process did not run. No clock: the time is handed in."""

from __future__ import annotations


class PauseMeter:
    """Tells a periodic task how long its own process was stopped: by a signal, a suspension, or a blocked loop.

    Whoever judges others by their silence must leave that time out: what they said meanwhile has not been read.

    Args:
        now_ns: the present time.
        longest_ns: time between two ticks that is no pause.
    """

    def __init__(self, now_ns: int, longest_ns: int) -> None:
        self._last_ns = now_ns
        self._longest_ns = longest_ns

    def tick(self, now_ns: int) -> int:
        """Nanoseconds since the last tick beyond `longest_ns`; 0 in normal operation."""
        pause_ns = now_ns - self._last_ns - self._longest_ns
        self._last_ns = now_ns
        return max(pause_ns, 0)
