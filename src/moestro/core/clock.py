"""Where time comes from. Inside Moestro time is an integer number of nanoseconds, and somebody hands it in."""

from __future__ import annotations

import msgspec

NS_PER_S = 1_000_000_000
FOREVER_NS = 1 << 62  # a time that never comes; a time or a duration may still be added to it


def to_ns(seconds: float) -> int:
    """A duration from a setting, which is never negative nor NaN; infinite: FOREVER_NS."""
    return min(round(min(seconds, FOREVER_NS) * NS_PER_S), FOREVER_NS)


class ClockPair(msgspec.Struct, frozen=True):
    """One moment on two clocks: it turns times of a record into times that compare with those of another process.

    Attributes:
        wall_ns: nanoseconds since 1970, UTC.
        monotonic_ns: the clock of the record's other times.
    """

    wall_ns: int
    monotonic_ns: int

    @property
    def offset_ns(self) -> int:
        """What to add to a monotonic time to get wall-clock time."""
        return self.wall_ns - self.monotonic_ns
