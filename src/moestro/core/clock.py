"""Units of time. Inside Moestro time is an integer number of nanoseconds, given by the caller."""

from __future__ import annotations

import msgspec

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
FOREVER_NS = 1 << 62  # a time that never comes; a time or a duration may still be added to it


def to_ns(seconds: float) -> int:
    """Convert a duration from a setting, neither negative nor NaN, to nanoseconds. Infinity gives FOREVER_NS."""
    return min(round(min(seconds, FOREVER_NS) * NS_PER_S), FOREVER_NS)


class ClockPair(msgspec.Struct, frozen=True):
    """One moment on two clocks, which makes times of a record comparable with those of another process.

    Attributes:
        wall_ns: nanoseconds since 1970, UTC.
        monotonic_ns: the same moment on the clock of the record's other times.
    """

    wall_ns: int
    monotonic_ns: int

    @property
    def offset_ns(self) -> int:
        """Offset to add to a monotonic time to get wall-clock time."""
        return self.wall_ns - self.monotonic_ns


def earliest(*times_ns: int | None) -> int | None:
    """Return the earliest of some times. None means no time."""
    known = [each for each in times_ns if each is not None]  # a list: half the time of a generator
    return min(known) if known else None
