"""Figures of a simulated day, and whether they hold the objectives in each of its windows."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_MS, NS_PER_S
from moestro.planner.settings import ObjectiveSettings
from moestro.sim.figures.results import Results

_LEAST = 20  # requests of a window


class WindowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that arrive in one window.

    Attributes:
        start_s, end_s: seconds after the first arrival.
        num_requests: requests.
        ttft_ms, itl_ms: means.
    """

    start_s: float
    end_s: float
    num_requests: int
    ttft_ms: float
    itl_ms: float

    @property
    def words(self) -> str:
        """When it is, in words."""
        return f"from {_clock(self.start_s)} to {_clock(self.end_s)} ({self.num_requests:,} requests)"


class DayFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One run over the times of the requests.

    Attributes:
        num_requests: requests.
        num_refused: requests that no engine took.
        ttft_ms, ttft_p99_ms: time to first token, mean and 99th percentile.
        itl_ms: mean time between two tokens of an answer.
        tokens_per_s: output tokens a second, from the first arrival to the last token.
        hit_ratio: share of prompt tokens from the prefix cache.
        busiest: window with the highest mean TTFT.
        broken: the objective that the run misses by the largest factor, in a sentence; None: it holds all.
    """

    num_requests: int
    num_refused: int
    ttft_ms: float
    ttft_p99_ms: float
    itl_ms: float
    tokens_per_s: float
    hit_ratio: float
    busiest: WindowFigures
    broken: str | None


def figures_of(results: Results, objectives: ObjectiveSettings) -> DayFigures:
    """Judge a run.

    Args:
        results: requests in order of arrival, of which at least one is answered.
        objectives: what has to hold.
    """
    answered = np.flatnonzero(results.is_answered)
    assert len(answered), "a simulation ends when all requests have ended"
    arrival_ns, first_ns, last_ns = (
        column[answered] for column in (results.arrival_ns, results.first_token_ns, results.last_token_ns)
    )
    ttft_ms, num_gaps = (first_ns - arrival_ns) / NS_PER_MS, np.maximum(results.num_tokens[answered] - 1, 0)
    gaps_ms = (last_ns - first_ns) / NS_PER_MS
    windows = [
        WindowFigures(
            start_s=float(arrival_ns[rows][0] / NS_PER_S),
            end_s=float(arrival_ns[rows][-1] / NS_PER_S),
            num_requests=len(ttft_ms[rows]),
            ttft_ms=float(ttft_ms[rows].mean()),
            itl_ms=float(gaps_ms[rows].sum() / max(int(num_gaps[rows].sum()), 1)),
        )
        for rows in windows_of(arrival_ns, round(objectives.window * NS_PER_S))
    ]
    ttft_p99_ms, num_refused = float(np.percentile(ttft_ms, 99)), len(results) - len(answered)
    return DayFigures(
        num_requests=len(results),
        num_refused=num_refused,
        ttft_ms=float(ttft_ms.mean()),
        ttft_p99_ms=ttft_p99_ms,
        itl_ms=float(gaps_ms.sum() / max(int(num_gaps.sum()), 1)),
        tokens_per_s=float(results.num_tokens[answered].sum() / max(int(last_ns.max() - arrival_ns[0]), 1) * NS_PER_S),
        hit_ratio=float(results.num_hit_tokens[answered].sum() / results.num_prompt_tokens[answered].sum()),
        busiest=max(windows, key=lambda each: each.ttft_ms),
        broken=_broken(windows, ttft_p99_ms, num_refused, objectives),
    )


def windows_of(arrival_ns: NDArray[np.int64], window_ns: int) -> list[slice]:
    """Return the rows of each window; one with few requests joins the next, and the last ones join the one before.

    Args:
        arrival_ns: arrivals, int64[n], ascending.
        window_ns: length of a window.
    """
    begins = np.flatnonzero(np.diff((arrival_ns - arrival_ns[0]) // window_ns, prepend=-1)).tolist()
    found, start = [], 0
    for end in [*begins[1:], len(arrival_ns)]:
        if end - start >= _LEAST:
            found.append(slice(start, end))
            start = end
    if start < len(arrival_ns):
        first = found.pop().start if found else 0
        found.append(slice(first, len(arrival_ns)))
    return found


def _broken(
    windows: list[WindowFigures], ttft_p99_ms: float, num_refused: int, objectives: ObjectiveSettings
) -> str | None:
    """Return the objective that is missed by the largest factor, in a sentence."""
    if num_refused:
        return f"{num_refused:,} requests are refused"
    itl, ttft = max(windows, key=lambda each: each.itl_ms), max(windows, key=lambda each: each.ttft_ms)
    found = [
        (itl.itl_ms, objectives.max_itl,
         f"mean ITL is {itl.itl_ms:,.1f} ms for requests that arrive {itl.words}", "itl"),
        (ttft.ttft_ms, objectives.max_ttft,
         f"mean TTFT is {ttft.ttft_ms:,.0f} ms for requests that arrive {ttft.words}", "ttft"),
        (ttft_p99_ms, objectives.max_ttft_p99, f"P99 of TTFT is {ttft_p99_ms:,.0f} ms", "ttft-p99"),
    ]  # fmt: skip
    missed = [
        (value / most, f"{text}: --max-{flag} is {most:g}")
        for value, most, text, flag in found
        if most is not None and value > most
    ]
    return max(missed)[1] if missed else None


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
