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
        rows: request of each time, int64[n]. None means that request i has time i.

    Attributes:
        first_rows: rows of all requests, int64[n].
    """

    def __init__(self, start_ns: Int64s, rows: Int64s | None = None) -> None:
        self.start_ns = start_ns
        self.first_rows: Int64s = np.arange(len(start_ns)) if rows is None else rows

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """Return None, because no request depends on another."""
        return None


class ClosedLoop:
    """Closed loop over recorded conversations: a turn arrives a think time after the end of the turn before it.

    Args:
        session: conversation of each request, int64[n].
        arrival_ns: arrivals, int64[n], ascending. Only those of first turns hold.
        think_ns: time to think before each request, int64[n]; of no meaning for first turns.

    Attributes:
        first_rows: rows of each conversation's first turn, int64[s].
        start_ns: their arrivals, int64[s].
    """

    def __init__(self, session: Int64s, arrival_ns: Int64s, think_ns: Int64s) -> None:
        before, after = _turns(session)
        self._next = np.full(len(session), -1)
        self._next[before] = after
        self._think_ns = think_ns
        is_first = np.ones(len(session), np.bool_)
        is_first[after] = False
        self.first_rows: Int64s = np.flatnonzero(is_first)
        self.start_ns: Int64s = arrival_ns[self.first_rows]

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """Return the next turn of the conversation and its arrival; None after the last one."""
        following = int(self._next[row])
        return None if following < 0 else (following, ended_ns + int(self._think_ns[following]))


def think_times(session: Int64s, arrival_ns: Int64s, ended_ns: Int64s) -> Int64s:
    """Return the time from the end of the turn before to each request, at least 0; 0 for first turns.

    Args:
        session, arrival_ns: as in `ClosedLoop`.
        ended_ns: end of each answer, recorded or assumed, int64[n].
    """
    before, after = _turns(session)
    think_ns = np.zeros(len(session), np.int64)
    think_ns[after] = np.maximum(arrival_ns[after] - ended_ns[before], 0)
    return think_ns


def _turns(session: Int64s) -> tuple[Int64s, Int64s]:
    """Return the rows of consecutive turns of a conversation as pairs, int64[m] each."""
    order = np.argsort(session, kind="stable")  # turns of a conversation stay in order of arrival
    follows = session[order][1:] == session[order][:-1]
    return order[:-1][follows], order[1:][follows]
