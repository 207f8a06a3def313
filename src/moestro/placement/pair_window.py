"""Pairs of experts that a token visits in consecutive layers, counted in a sample of steps and tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import LayerPairs
from moestro.core.experts.source_load import pairs_of_codes

# One step in so many is sampled. A prime, so that it does not fall in with batches that repeat. bench/micro/
# expert_window.py says what a sampled step costs.
PAIR_INTERVAL = 61
PAIRS_PER_EXPERT = 8  # kept for each expert and layer in the mean; the most frequent ones of all
_MAX_CELLS = 1 << 25  # of the table of all pairs, 256 MiB; a network with more has no pairs


class PairWindow:
    """Counts of all pairs in one table, of which only the most frequent ones leave the process.

    Args:
        num_experts: Experts of a layer.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._sums = np.zeros(0)  # [layers - 1, experts, experts], flat; made when the first choices come
        self._weight = 0.0

    def clear(self) -> None:
        """Forget all pairs."""
        self._sums[:] = 0.0
        self._weight = 0.0

    def scale(self, factor: float) -> None:
        """Multiply all weights."""
        self._sums *= factor
        self._weight *= factor

    def add(self, choices: NDArray[np.int32], num_tokens: int, gain: float) -> None:
        """Count the pairs of a step's tokens. Arguments as in `LoadWindow.observe_choices`; `gain`: the step's weight.

        A token of k experts makes k * k pairs between two layers.
        """
        num_layers, num_sampled, _ = choices.shape
        num_cells = (num_layers - 1) * self._num_experts**2
        if num_layers < 2 or num_cells > _MAX_CELLS:
            return
        self._weight += gain
        if not num_sampled:
            return
        if not len(self._sums):
            self._sums = np.zeros(num_cells)
        layers = np.arange(num_layers - 1, dtype=np.int64)[:, None, None]
        first = (layers * self._num_experts + choices[:-1]) * self._num_experts
        codes = first[..., None] + choices[1:, :, None, :]
        np.add.at(self._sums, codes.ravel(), gain * num_tokens / num_sampled)

    def most_frequent(self, busy_share: float) -> LayerPairs | None:
        """Return the most frequent pairs, in tokens per step. None means that no choices came.

        Args:
            busy_share: Share of steps with tokens, by weight; samples are taken of these alone.
        """
        if not self._weight:
            return None
        num_kept = PAIRS_PER_EXPERT * (len(self._sums) // self._num_experts)
        codes = np.flatnonzero(self._sums)
        if len(codes) > num_kept:
            codes = np.argpartition(self._sums, len(self._sums) - num_kept)[-num_kept:]
        return pairs_of_codes(codes, self._sums[codes] * (busy_share / self._weight), self._num_experts)
