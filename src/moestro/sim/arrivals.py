"""When requests arrive: at given times, or after what they answer to."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Arrivals(Protocol):
    """Which request arrives when. `workload.sessions.Sessions` is one: a turn comes after the answer before it."""

    @property
    def first_rows(self) -> Int64s:
        """int64[m], those that arrive whatever becomes of others."""
        ...

    @property
    def start_ns(self) -> Int64s:
        """int64[m], when; not decreasing."""
        ...

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """The request that follows `row`, which ended then, and when it arrives; None: none does."""
        ...


class AtTimes:
    """Open loop: every request has its time, whatever becomes of the others.

    Args:
        start_ns: int64[n], not decreasing.
    """

    def __init__(self, start_ns: Int64s) -> None:
        self.start_ns = start_ns

    @property
    def first_rows(self) -> Int64s:
        """int64[n], all."""
        return np.arange(len(self.start_ns))

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """None."""
        return None
