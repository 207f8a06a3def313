"""The course of a run: what LMetric's paper draws over time or as a distribution (Fig. 7 to 10, 21 to 24, 26, 27)."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.repro.testbed import counted_prefill
from moestro.sim.figures.results import WINDOW_NS, Results

Floats = NDArray[np.float64]

PERCENTILES = (*range(0, 100, 2), 99, 100)  # of the curves
_DIGITS = 4  # significant digits of stored series


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """One run at half of the capacity, in windows of `window_s` seconds, without its lead-in.

    Attributes:
        ttft_ms, tpot_ms: latency at each of PERCENTILES.
        hit_ratio: share of the prompt tokens that came from the cache, by window of arrival.
        prefill_s: prefill seconds in each window of two engines, those whose prefill seconds vary most between windows
            (section 4.3).
        prefill_spread: standard deviation of prefill seconds over all engines, divided by their mean, the mean over
            windows.
    """

    load: str
    system: str
    window_s: float
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    hit_ratio: tuple[float, ...]
    prefill_s: tuple[tuple[float, ...], tuple[float, ...]]
    prefill_spread: float

    @property
    def mean_prefill_s(self) -> tuple[float, float]:
        """Prefill seconds of a window of the two engines, means over the windows."""
        first, second = self.prefill_s
        return sum(first) / len(first), sum(second) / len(second)


def course_of(load: str, system: str, results: Results, num_lead_in: int) -> Course:
    """The course of a run in which every request was answered.

    Args:
        num_lead_in: first requests left out.
    """
    counted = slice(num_lead_in, None)
    gaps = results.num_tokens[counted].astype(np.int64) - 1
    tpot_ns = (results.last_token_ns - results.first_token_ns)[counted][gaps > 0] / gaps[gaps > 0]
    prefill = counted_prefill(results, num_lead_in)
    unsteady = np.argsort(prefill.std(axis=1))[::-1][:2]
    return Course(
        load=load,
        system=system,
        window_s=WINDOW_NS / NS_PER_S,
        ttft_ms=_curve((results.first_token_ns - results.arrival_ns)[counted]),
        tpot_ms=_curve(tpot_ns),
        hit_ratio=_rounded(_hit_ratios(results, num_lead_in)),
        prefill_s=(_rounded(prefill[unsteady[0]]), _rounded(prefill[unsteady[-1]])),
        prefill_spread=float((prefill.std(axis=0) / np.maximum(prefill.mean(axis=0), 1e-9)).mean()),
    )


def _curve(values_ns: NDArray[np.int64] | Floats) -> tuple[float, ...]:
    return _rounded(np.percentile(values_ns / 1e6, PERCENTILES))


def _hit_ratios(results: Results, num_lead_in: int) -> Floats:
    """The hit ratio of the requests that arrived in each window, float64[windows]; 0 for a window without any."""
    window = results.arrival_ns[num_lead_in:] // WINDOW_NS
    window = window - window[0]
    hits, prompts = (
        np.bincount(window, column[num_lead_in:]) for column in (results.num_hit_tokens, results.num_prompt_tokens)
    )
    ratios: Floats = hits / np.maximum(prompts, 1)
    return ratios


def _rounded(values: Floats) -> tuple[float, ...]:
    return tuple(float(f"{value:.{_DIGITS}g}") for value in values.tolist())
