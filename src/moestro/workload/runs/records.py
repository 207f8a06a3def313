"""Outcomes of the requests of one run, as columns that fill row by row."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moestro.core.timeline import Timelines

Int64s = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How one request ended.

    Attributes:
        failure: a stable word, or None for a complete answer.
        message: description of the failure.
        delivery_ns: times at which chunks with tokens arrived; empty for a failure.
        num_prompt_tokens, num_output_tokens, num_cached_tokens: counts that the server reports.
    """

    failure: str | None = None
    message: str = ""
    delivery_ns: array[int] = field(default_factory=lambda: array("q"))
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """n requests of one run, one row each.

    Attributes:
        timelines: timelines of all rows; where `is_ok` is false, only the arrival is meaningful.
        end_ns: int64[n], when the answer was complete or had failed.
        is_ok: bool[n].
        num_requested_tokens: int64[n], requested answer length.
        num_prompt_tokens, num_cached_tokens: int64[n], counts that the server reports; 0 for failures.
        itl_ns: int64[m], gaps between deliveries over all rows of `is_ok`, in no particular order.
        failures: for each stable word, the number of failures and a first example.
        late_ns: int64[n], delay between the scheduled and the actual sending of each request.
        stall_ns: int64[k], how far the client was behind at regular moments of the run.
    """

    timelines: Timelines
    end_ns: Int64s
    is_ok: NDArray[np.bool_]
    num_requested_tokens: Int64s
    num_prompt_tokens: Int64s
    num_cached_tokens: Int64s
    itl_ns: Int64s
    failures: dict[str, tuple[int, str]]
    late_ns: Int64s
    stall_ns: Int64s

    def __len__(self) -> int:
        return len(self.is_ok)

    @property
    def answered(self) -> Timelines:
        """Rows of `is_ok` that have tokens. Scored prompts have no tokens and hence no latencies."""
        whole = self.timelines
        ok = self.is_ok & (whole.num_tokens > 0)
        return Timelines(whole.arrival_ns[ok], whole.first_token_ns[ok], whole.last_token_ns[ok], whole.num_tokens[ok])


class RecordBook:
    """Collects one outcome for each request, in any order. `freeze` needs all of them."""

    def __init__(self, num_requested_tokens: Int64s) -> None:
        count = len(num_requested_tokens)
        self._requested = num_requested_tokens
        self._arrival, self._first, self._last, self._end = (np.zeros(count, np.int64) for _ in range(4))
        self._prompt, self._output, self._cached, self._late = (np.zeros(count, np.int64) for _ in range(4))
        self._ok, self._ended = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self._gaps: list[Int64s] = []
        self._failures: dict[str, tuple[int, str]] = {}

    def sent(self, row: int, arrival_ns: int, late_ns: int) -> None:
        """Record that request `row` arrived at `arrival_ns` and was sent `late_ns` after its scheduled time."""
        self._arrival[row], self._late[row] = arrival_ns, late_ns

    def ended(self, row: int, end_ns: int, outcome: Outcome) -> None:
        """Record the end of request `row`."""
        assert not self._ended[row], f"request {row} ended twice"
        self._ended[row], self._end[row] = True, end_ns
        if outcome.failure is not None:
            count, example = self._failures.get(outcome.failure, (0, outcome.message))
            self._failures[outcome.failure] = (count + 1, example)
            return
        times = np.frombuffer(outcome.delivery_ns, np.int64)
        self._ok[row], self._first[row], self._last[row] = True, times[0], times[-1]
        self._prompt[row], self._output[row] = outcome.num_prompt_tokens, outcome.num_output_tokens
        self._cached[row] = outcome.num_cached_tokens
        self._gaps.append(np.diff(times))

    def freeze(self, stall_ns: Iterable[int] = ()) -> Records:
        """Return the columns; `stall_ns` as in `Records`."""
        assert self._ended.all(), "a request has no outcome"
        return Records(
            timelines=Timelines(self._arrival, self._first, self._last, self._output),
            end_ns=self._end,
            is_ok=self._ok,
            num_requested_tokens=self._requested,
            num_prompt_tokens=self._prompt,
            num_cached_tokens=self._cached,
            itl_ns=np.concatenate([*self._gaps, np.zeros(0, np.int64)]),
            failures=self._failures,
            late_ns=self._late,
            stall_ns=np.fromiter(stall_ns, np.int64),
        )
