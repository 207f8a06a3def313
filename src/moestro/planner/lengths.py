"""Lengths of requests, and loads with a constant number of them in a steady state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.sim.load.closed_loop import TimedRows
from moestro.workload.rows import Rows

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LengthSample:
    """Lengths that occur equally often.

    Attributes:
        prompt, output: tokens of each request, int64[n], at least 1.
    """

    prompt: Int64s
    output: Int64s

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt."""
        return float(self.prompt.mean())

    @property
    def mean_output(self) -> float:
        """Mean tokens of an answer."""
        return float(self.output.mean())

    @property
    def mean_context(self) -> float:
        """Mean tokens in the cache of a decoding request; long answers last longer."""
        return float((self.output * (self.prompt + self.output / 2)).sum() / self.output.sum())

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return int((self.prompt + self.output).max())

    @property
    def longest_requested(self) -> int:
        """Most tokens that a simulated request may ask for: those in progress ask for the longest answer too."""
        return self.longest + int(self.output.max())

    def steady_load(self, num_first: int, num_more: int, spread_s: float, seed: int) -> TimedRows:
        """Make requests in progress, and the requests that replace them.

        Those in progress are drawn in proportion to the time that they take, and their progress evenly. Both are
        spread over equal strata, so that about equally many end in equal times.

        Args:
            num_first: requests in progress.
            num_more: further requests.
            spread_s: seconds over which the requests in progress enter, less than a request takes.
            seed: seed of the draws.
        """
        rng = np.random.default_rng([seed, num_first])
        share = self.output.cumsum() / self.output.sum()
        which = np.minimum(share.searchsorted(_strata(num_first, rng)), len(share) - 1)
        rng.shuffle(which)
        done = (_strata(num_first, rng) * self.output[which]).astype(np.int64)
        new = rng.integers(len(self.prompt), size=num_more)
        rows = Rows(
            num_prompt_tokens=np.concatenate([self.prompt[which] + done, self.prompt[new]]),
            num_output_tokens=np.concatenate([self.output[which] - done, self.output[new]]),
            is_generated=True,
        )
        return TimedRows(rows, (np.arange(num_first) * (spread_s * NS_PER_S / num_first)).astype(np.int64), num_first)


def _strata(number: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """float64[number] in 0 .. 1, one in each of equal strata, ascending."""
    found: NDArray[np.float64] = (np.arange(number) + rng.random(number)) / number
    return found
