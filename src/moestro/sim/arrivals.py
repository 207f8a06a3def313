"""Arrival times of requests: fixed ones, or times that depend on the end of an earlier turn."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Arrivals(Protocol):
    """The order and times in which requests arrive; `workload.sessions.Sessions` implements it for conversations."""

    @property
    def first_rows(self) -> Int64s:
        """Rows of the requests whose arrival depends on no other request, int64[m]."""
        ...

    @property
    def start_ns(self) -> Int64s:
        """Arrival times of `first_rows`, int64[m], ascending."""
        ...

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """Return the request that follows `row` and its arrival time; None means no request follows.

        Args:
            row: a request that has ended.
            ended_ns: time of its end.
        """
        ...


class AtTimes:
    """Open loop: every request arrives at a fixed time.

    Args:
        start_ns: arrival times, int64[n], ascending.
    """

    def __init__(self, start_ns: Int64s) -> None:
        self.start_ns = start_ns

    @property
    def first_rows(self) -> Int64s:
        """Rows of all requests, int64[n]."""
        return np.arange(len(self.start_ns))

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """Return None, because no request depends on another."""
        return None
