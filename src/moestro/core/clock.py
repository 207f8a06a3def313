"""Units of time, and definitions of latencies. Time is an integer number of nanoseconds, given by the caller."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

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


Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Timelines:
    """Arrival and token times of answered requests, one row each.

    Inter-token latencies are not kept here: the recorder stores each gap between deliveries in a flat list, since one
    delivery may hold several tokens.

    Attributes:
        arrival_ns: int64[n].
        first_token_ns, last_token_ns: int64[n], delivery of the first and the last token.
        num_tokens: int64[n], tokens generated, at least 1.
    """

    arrival_ns: Int64s
    first_token_ns: Int64s
    last_token_ns: Int64s
    num_tokens: Int64s

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def ttft_ns(self) -> Int64s:
        """int64[n], time from arrival to the first token."""
        return self.first_token_ns - self.arrival_ns

    @property
    def e2e_ns(self) -> Int64s:
        """int64[n], time from arrival to the last token."""
        return self.last_token_ns - self.arrival_ns

    @property
    def tpot_ns(self) -> NDArray[np.float64]:
        """float64[n], mean gap between the tokens of a request; NaN for a single token."""
        gaps = self.num_tokens - 1
        mean = np.full(len(self), np.nan)
        np.divide(self.last_token_ns - self.first_token_ns, gaps, out=mean, where=gaps > 0)
        return mean
