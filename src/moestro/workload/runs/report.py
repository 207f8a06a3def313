"""Figures of one run: percentiles, throughput, goodput, failures, and whether the client kept its schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.core.timeline import Timelines
from moestro.errors import ConfigError
from moestro.workload.runs.records import Records

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
