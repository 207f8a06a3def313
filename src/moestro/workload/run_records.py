"""Outcomes of a run: records of its requests, their figures, and the search for the highest rate that holds."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S, Timelines
from moestro.errors import ConfigError

# Outcomes of the requests of one run, as columns that fill row by row.

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


# Figures of one run: percentiles, throughput, goodput, failures, and whether the client kept its schedule.

NS_PER_MS = 1_000_000
_FIELDS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "e2el": "e2e_ms"}  # vLLM spells it e2el


@dataclass(frozen=True, slots=True, kw_only=True)
class Slos:
    """Upper bounds in milliseconds, all of which a request must meet. None means no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met(self, timelines: Timelines) -> NDArray[np.bool_]:
        """bool[n]. An answer of one token has no gap and so meets any bound on gaps."""
        good = np.ones(len(timelines), np.bool_)
        for bound_ms, value_ns in (
            (self.ttft_ms, timelines.ttft_ns),
            (self.tpot_ms, timelines.tpot_ns),
            (self.e2e_ms, timelines.e2e_ns),
        ):
            if bound_ms is not None:
                good &= ~(value_ns > bound_ms * NS_PER_MS)
        return good


def parse_slos(pairs: Sequence[str]) -> Slos | None:
    """Parse `("ttft:500", "tpot:50")`; no pairs give None.

    Raises:
        ConfigError: a pair is not NAME:MILLISECONDS.
    """
    bounds: dict[str, float] = {}
    for pair in pairs:
        name, _, number = pair.partition(":")
        if name not in _FIELDS or not _is_positive(number):
            raise ConfigError(
                f"--goodput {pair!r} is not an objective: give ttft:MS, tpot:MS or e2e:MS, milliseconds above 0,"
                " for instance --goodput ttft:500 tpot:50"
            )
        bounds[_FIELDS[name]] = float(number)
    return Slos(**bounds) if bounds else None


def _is_positive(number: str) -> bool:
    try:
        return 0 < float(number) < math.inf
    except ValueError:
        return False


MAX_LATE_MS = 5.0  # p99 lateness of the client; beyond it a run measures the client as much as the server


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A latency over requests (ITL: over gaps) in milliseconds. Percentiles interpolate linearly."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """How far the client was behind its own schedule, in milliseconds."""

    p50: float
    p99: float
    max: float


class Failure(msgspec.Struct, frozen=True):
    """Number of requests that failed in one way, with one example."""

    count: int
    example: str


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met all objectives. A failed request meets none."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    num_met: int
    share: float  # of all requests, failed ones included
    requests_per_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run. Latencies count from the scheduled arrival and cover complete answers only.

    None means that the run has no such latency.
    `duration_s` runs from the first arrival to the end of the last request, so stragglers lower the throughput.
    A scored prompt has an answer of no tokens: it counts as a request and has no latencies.
    `num_wrong_length` counts answers whose length differs from the requested one, and so differ in work.
    """

    num_requests: int
    num_ok: int
    failures: dict[str, Failure]
    num_wrong_length: int
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    cached_share: float  # of the input tokens, as far as the server reports it
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    goodput: Goodput | None
    send_lateness: Lateness
    client_stalls: Lateness
    is_valid: bool


def make_report(records: Records, slos: Slos | None = None) -> Report:
    """Compute the figures of `records`, which hold at least one request."""
    answered = records.answered
    duration_s = float(records.end_ns.max() - records.timelines.arrival_ns.min()) / NS_PER_S
    num_ok, num_input, num_output = (
        int(records.is_ok.sum()),
        int(records.num_prompt_tokens.sum()),
        int(answered.num_tokens.sum()),
    )
    late, stalls = _lateness(records.late_ns), _lateness(records.stall_ns)
    wrong_length = records.is_ok & (records.timelines.num_tokens != records.num_requested_tokens)
    return Report(
        num_requests=len(records),
        num_ok=num_ok,
        failures={word: Failure(count, example) for word, (count, example) in sorted(records.failures.items())},
        num_wrong_length=int(wrong_length.sum()),
        duration_s=duration_s,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        cached_share=int(records.num_cached_tokens.sum()) / num_input if num_input else 0.0,
        requests_per_s=_per_s(num_ok, duration_s),
        input_tokens_per_s=_per_s(num_input, duration_s),
        output_tokens_per_s=_per_s(num_output, duration_s),
        ttft_ms=spread_of(answered.ttft_ns),
        tpot_ms=spread_of(answered.tpot_ns),
        itl_ms=spread_of(records.itl_ns),
        e2e_ms=spread_of(answered.e2e_ns),
        goodput=None if slos is None else _goodput(records, slos, duration_s),
        send_lateness=late,
        client_stalls=stalls,
        is_valid=late.p99 <= MAX_LATE_MS and stalls.p99 <= MAX_LATE_MS,
    )


def _goodput(records: Records, slos: Slos, duration_s: float) -> Goodput:
    answered = records.answered
    num_without_latency = int(records.is_ok.sum()) - len(answered)  # scored prompts cannot be late
    num_met = int(slos.met(answered).sum()) + num_without_latency
    return Goodput(
        ttft_ms=slos.ttft_ms,
        tpot_ms=slos.tpot_ms,
        e2e_ms=slos.e2e_ms,
        num_met=num_met,
        share=num_met / len(records),
        requests_per_s=_per_s(num_met, duration_s),
    )


def spread_of(values_ns: NDArray[np.int64] | NDArray[np.float64]) -> Spread | None:
    """Percentiles of latencies in nanoseconds. NaN is ignored; None means that there are no latencies."""
    known = values_ns[~np.isnan(values_ns)] / NS_PER_MS
    if not len(known):
        return None
    p50, p90, p95, p99 = np.percentile(known, (50, 90, 95, 99)).tolist()
    return Spread(mean=float(known.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


def _lateness(values_ns: NDArray[np.int64]) -> Lateness:
    if not len(values_ns):
        return Lateness(p50=0.0, p99=0.0, max=0.0)
    p50, p99, largest = np.percentile(values_ns / NS_PER_MS, (50, 99, 100)).tolist()
    return Lateness(p50=p50, p99=p99, max=largest)


def _per_s(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


# Search for the highest rate that holds: double or halve until bracketed, then bisect.


class Verdict(StrEnum):
    """Result of a probe at one rate."""

    HOLDS = "holds"
    FAILS = "fails"
    INVALID = "invalid"  # the client could not offer this rate, so the probe says nothing about the server


@dataclass(frozen=True, slots=True)
class Bracket:
    """Result of a search.

    Attributes:
        holds: highest rate that held; None if no tried rate held.
        above: lowest tried rate that did not hold; None if every tried rate held.
        is_client_bound: whether the client was unable to offer the rate `above`.
    """

    holds: float | None
    above: float | None
    is_client_bound: bool


def find_highest(
    probe: Callable[[float], Verdict], start: float, tolerance: float = 0.05, max_probes: int = 12
) -> Bracket:
    """Search upwards and downwards from `start`, with at most `max_probes` probes.

    The search trusts each probe. With a noisy server, whose verdicts do not fall monotonically with the rate, the
    result is a rate that held and, within the tolerance, one that did not.

    Args:
        tolerance: the search ends once `above` <= `holds` * (1 + tolerance).
    """
    low: float | None = None
    high: float | None = None
    last = Verdict.FAILS
    rate = start
    for _ in range(max_probes):
        verdict = probe(rate)
        if verdict is Verdict.HOLDS:
            low = rate
        else:
            high, last = rate, verdict
        if low is not None and high is not None and high <= low * (1 + tolerance):
            break
        rate = _next_rate(rate, low, high)
    return Bracket(low, high, high is not None and last is Verdict.INVALID)


def _next_rate(rate: float, low: float | None, high: float | None) -> float:
    if low is None:
        return rate / 2
    return rate * 2 if high is None else math.sqrt(low * high)
