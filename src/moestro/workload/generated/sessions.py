"""Conversations: a turn's prompt is the conversation so far plus new input, and follows the answer after a while."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moestro.core.clock import NS_PER_S
from moestro.workload.rows import Int64s, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Assumed duration of answers where no engine computes them. Results state this guess.

    Attributes:
        ttft_s: seconds to the first token.
        tpot_s: seconds for each further token.
    """

    ttft_s: float = 0.5
    tpot_s: float = 0.02

    def service_ns(self, num_output_tokens: Int64s) -> Int64s:
        """int64[n], from arrival to the end of the answer."""
        guess: Int64s = np.rint((self.ttft_s + self.tpot_s * num_output_tokens) * NS_PER_S).astype(np.int64)
        return guess


@dataclass(frozen=True, slots=True, eq=False)
class Sessions:
    """s sessions with n turns in all, in closed loop: a turn arrives `think_ns` after the end of the turn before it.

    Attributes:
        rows: the turns, ordered by session and then by turn, without times; `rows.session` numbers from 0.
        start_ns: int64[s], arrival of each first turn, not decreasing.
        think_ns: int64[n], time from the end of the previous turn; 0 for a first turn.
    """

    rows: Rows
    start_ns: Int64s
    think_ns: Int64s

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def first_rows(self) -> Int64s:
        """int64[s], the row of each session's first turn."""
        assert self.rows.session is not None, "turns belong to sessions"
        return np.searchsorted(self.rows.session, np.arange(len(self)))

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """Row and arrival of the turn after `row`, which ended at `ended_ns`; None after the last turn."""
        session = self.rows.session
        assert session is not None, "turns belong to sessions"
        if row + 1 == len(session) or session[row + 1] != session[row]:
            return None
        return row + 1, ended_ns + int(self.think_ns[row + 1])

    def open_loop(self, pace: Pace) -> Rows:
        """The turns at fixed times, as if every answer lasted as long as `pace` guesses.

        Where answers last longer, turns arrive before their predecessors end, which no user does. Use the closed loop
        wherever the driver supports it.
        """
        arrival_ns = self.arrival_ns(pace)
        timed = replace(self.rows, timestamp_ns=arrival_ns)
        return timed.select(np.argsort(arrival_ns, kind="stable"))

    def arrival_ns(self, pace: Pace) -> Int64s:
        """int64[n], arrival of each turn if every answer lasts as long as `pace` guesses."""
        session = self.rows.session
        assert session is not None, "turns belong to sessions"
        steps = self.think_ns.copy()
        steps[1:] += pace.service_ns(self.rows.num_output_tokens)[:-1]
        steps[self.first_rows] = 0
        since_all = np.cumsum(steps)
        times: Int64s = self.start_ns[session] + since_all - since_all[self.first_rows][session]
        return times

    def window(self, begin: int, end: int, pace: Pace) -> Sessions:
        """Turns `begin` .. `end` - 1 in the order of `arrival_ns(pace)`, still in closed loop, the first at 0.

        A session that the window cuts continues with its first turn inside, at the time that `pace` guesses, and
        without knowledge of its earlier turns.
        """
        arrival_ns, session = self.arrival_ns(pace), self.rows.session
        assert session is not None, "turns belong to sessions"
        kept = np.sort(np.argsort(arrival_ns, kind="stable")[begin:end])
        kept = kept[np.argsort(arrival_ns[kept][_firsts(session[kept])], kind="stable")]
        firsts = _firsts(session[kept]) == np.arange(len(kept))
        think_ns, start_ns = self.think_ns[kept], arrival_ns[kept][firsts]
        think_ns[firsts] = 0
        rows = replace(self.rows.select(kept), session=np.cumsum(firsts) - 1)
        return Sessions(rows, start_ns - start_ns[0], think_ns)


def _firsts(session: Int64s) -> Int64s:
    """int64[n], for each of n turns, ordered by session, the position of its session's first turn."""
    changes = np.append(True, session[1:] != session[:-1])
    places: Int64s = np.flatnonzero(changes)[np.cumsum(changes) - 1]
    return places


def prompt_lengths(
    session: Int64s, num_head_tokens: Int64s, num_new_tokens: Int64s, num_output_tokens: Int64s
) -> Int64s:
    """int64[n], prompt length of each turn: the session's head, and all inputs and answers up to the turn's own input.

    Args:
        session: int64[n], 0, 0, …, 1, …: the session of each turn.
        num_head_tokens: int64[s].
        num_new_tokens, num_output_tokens: int64[n].
    """
    first = np.searchsorted(session, np.arange(len(num_head_tokens)))
    total = np.cumsum(num_new_tokens + num_output_tokens)
    before = (total - num_new_tokens - num_output_tokens)[first]
    return num_head_tokens[session] + total - num_output_tokens - before[session]
