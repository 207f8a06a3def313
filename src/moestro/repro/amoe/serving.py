"""One run of a system, observed from outside and stopped at a time or after a number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.repro.amoe.systems import Built
from moestro.sim.load.arrivals import AtTimes
from moestro.sim.load.closed_loop import Observation, Replacing, TimedRows, run_observed

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Figures of one run, after its beginning.

    Attributes:
        tokens_per_s: output tokens a second.
        itl_ms, itl_p99_ms: time between consecutive tokens of a request, mean and 99th percentile.
        requests_per_s: requests that end a second.
        stall_shares: share of the time for which each worker computes nothing.
        ended_per_s: requests that end in each second since the start.
    """

    tokens_per_s: float
    itl_ms: float
    itl_p99_ms: float
    requests_per_s: float
    stall_shares: tuple[float, ...]
    ended_per_s: tuple[float, ...]


def serve_open(built: Built, load: TimedRows, begin_s: float, stop_s: float) -> Seen:
    """Serve requests that arrive at fixed times; figures are those between two times."""
    begin_ns, stop_ns = round(begin_s * NS_PER_S), round(stop_s * NS_PER_S)
    busy_ns: list[Int64s] = []

    def begin() -> None:
        busy_ns.append(built.busy_ns())
        for tally in built.tallies or ():
            tally.is_counting = True

    observation = Observation(begin_ns, stop_ns, on_begin=begin)
    run_observed(built.groups, observation, load, AtTimes(load.offsets_ns), computes_prompts=False)
    assert busy_ns, "nothing happened after the beginning"
    return _seen(observation, (built.busy_ns() - busy_ns[0]) / (stop_ns - begin_ns))


_LONGEST_S = 60.0  # of a run with a constant number of requests


class ClosedRates(NamedTuple):
    """Output tokens a second, and those of latency-sensitive requests if the load has both classes."""

    tokens_per_s: float
    sensitive_tokens_per_s: float


def closed_throughput(
    built: Built, load: TimedRows, passes: tuple[int, int], *, computes_prompts: bool = False
) -> ClosedRates:
    """Serve a constant number of requests.

    Args:
        passes: tokens of each request, in the mean, before the observation and in it.
        computes_prompts: whether requests that replace others have their prompts computed.
    """
    first, last = passes[0] * load.num_first, sum(passes) * load.num_first
    observation = Observation(
        round(_LONGEST_S * NS_PER_S), round(_LONGEST_S * NS_PER_S), most_tokens=last,
        is_by_class=load.rows.is_ls is not None,
    )  # fmt: skip
    run_observed(built.groups, observation, load, Replacing(load), computes_prompts=computes_prompts)
    begin = int(np.searchsorted(observation.tokens, first))
    assert begin + 1 < len(observation.tokens), "the run ended before it was observed"
    return ClosedRates(observation.tokens_per_s(begin), observation.sensitive_tokens_per_s(begin))


def _seen(observation: Observation, busy_shares: NDArray[np.float64]) -> Seen:
    begin_ns, stop_ns = observation.begin_ns, observation.stop_ns
    seconds = (stop_ns - begin_ns) / NS_PER_S
    ended_ns, gaps_ms = np.array(observation.ended_ns), np.array(observation.gaps_ns) / 1e6
    first = int(np.searchsorted(observation.at_ns, begin_ns))
    assert len(gaps_ms), "no request gained two tokens"
    per_s = np.bincount(ended_ns // NS_PER_S, minlength=int(stop_ns // NS_PER_S)) if len(ended_ns) else np.zeros(0)
    return Seen(
        tokens_per_s=observation.tokens_per_s(first),
        itl_ms=float(gaps_ms.mean()),
        itl_p99_ms=float(np.percentile(gaps_ms, 99)),
        requests_per_s=float((ended_ns >= begin_ns).sum() / seconds),
        stall_shares=tuple((1 - busy_shares).clip(0, 1).tolist()),
        ended_per_s=tuple(per_s.astype(float).tolist()),
    )
