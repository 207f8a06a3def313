"""AMoE's loads: requests with dummy KV that arrive by a Poisson process, in a system that is already at work.

A request lasts for up to a minute, so an empty system would take minutes to reach its steady state. A run therefore
begins with requests in progress: their lengths are drawn in proportion to the time that they take, and their progress
evenly. Their number comes from runs with a constant number of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.sim.load.closed_loop import SPREAD_S, TimedRows
from moestro.workload.generated.draws import poisson
from moestro.workload.rows import Rows

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRanges:
    """Lengths that are drawn evenly from ranges (section 5, "Workloads").

    Attributes:
        prompt, output: least and most tokens.
    """

    prompt: tuple[int, int]
    output: tuple[int, int]

    @property
    def mean_output(self) -> float:
        """Mean output tokens of a request."""
        return sum(self.output) / 2

    @property
    def mean_context(self) -> float:
        """Mean tokens in the cache of a request in progress: longer answers last longer."""
        outputs = np.arange(self.output[0], self.output[1] + 1)
        return sum(self.prompt) / 2 + float((outputs**2).mean() / outputs.mean()) / 2

    @property
    def longest(self) -> int:
        """Most tokens that a request may ask for: those in progress ask for whole answers, as every client does."""
        return self.prompt[1] + 2 * self.output[1]


LENGTHS = {
    "short": LengthRanges(prompt=(30, 70), output=(70, 130)),
    "medium": LengthRanges(prompt=(50, 150), output=(50, 250)),
    "reasonable": LengthRanges(prompt=(100, 300), output=(100, 500)),
}


def fresh(lengths: LengthRanges, num_requests: int, rng: np.random.Generator) -> tuple[Int64s, Int64s]:
    """Draw prompt and output tokens of new requests, int64[n] each."""
    prompt = rng.integers(lengths.prompt[0], lengths.prompt[1] + 1, num_requests)
    return prompt, rng.integers(lengths.output[0], lengths.output[1] + 1, num_requests)


def in_progress(lengths: LengthRanges, num_requests: int, rng: np.random.Generator) -> tuple[Int64s, Int64s]:
    """Draw the tokens in the cache and the output tokens left of requests in a steady state, int64[n] each."""
    outputs = np.arange(lengths.output[0], lengths.output[1] + 1)
    prompt = rng.integers(lengths.prompt[0], lengths.prompt[1] + 1, num_requests)
    output = rng.choice(outputs, num_requests, p=outputs / outputs.sum())
    done = (rng.random(num_requests) * output).astype(np.int64)
    return prompt + done, output - done


def open_load(lengths: LengthRanges, rate: float, seconds: float, num_first: int, seed: int) -> TimedRows:
    """Make requests that arrive at a rate for some seconds, beside `num_first` in progress."""
    rng = np.random.default_rng([seed, 0])
    num_new = max(round(rate * seconds), 1)
    prompt, output = fresh(lengths, num_new, rng)
    arrival_ns = poisson(num_new, rate, np.random.default_rng([seed, 1]))
    kept, left = in_progress(lengths, num_first, rng)
    entry_ns = (np.arange(num_first) * (SPREAD_S * NS_PER_S / max(num_first, 1))).astype(np.int64)
    times = np.concatenate([entry_ns, arrival_ns])
    order = times.argsort(kind="stable")
    rows = Rows(
        num_prompt_tokens=np.concatenate([kept, prompt])[order],
        num_output_tokens=np.concatenate([left, output])[order],
        is_generated=True,
    )
    return TimedRows(rows, times[order], num_first)


def closed_load(
    lengths: LengthRanges, num_first: int, num_more: int, seed: int, num_sensitive: int | None = None
) -> TimedRows:
    """Make `num_first` requests in progress, and those that replace them; times are those of the former.

    Args:
        num_more: requests that may replace others, of each class.
        num_sensitive: latency-sensitive requests of the first, which stand evenly among the best-effort ones. None
            means that all are.
    """
    rng = np.random.default_rng([seed, 2])
    kept, left = in_progress(lengths, num_first, rng)
    prompt, output = fresh(lengths, num_more if num_sensitive is None else 2 * num_more, rng)
    is_ls = None
    if num_sensitive is not None:
        turns = np.arange(num_first) * num_sensitive // num_first
        is_ls = np.concatenate([np.diff(turns, prepend=-1) > 0, np.arange(2 * num_more) < num_more])
    rows = Rows(
        num_prompt_tokens=np.concatenate([kept, prompt]),
        num_output_tokens=np.concatenate([left, output]),
        is_ls=is_ls,
        is_generated=True,
    )
    return TimedRows(rows, (np.arange(num_first) * (SPREAD_S * NS_PER_S / num_first)).astype(np.int64), num_first)
