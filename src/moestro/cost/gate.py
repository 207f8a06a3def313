"""A gate without a network: it draws the experts of each token by popularity."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.rng import uniform
from moestro.core.unit_sets import token_spans
from moestro.core.work import Int32s, Units

Floats = NDArray[np.float64]
Keys = NDArray[np.uint64]

_MOST_DRAWS = 1 << 18  # draws at once; more of them, as a long prompt needs for all layers, would not fit the CPU cache


class PopularityGate:
    """Chooses experts. A token's choice in a layer depends only on its sequence and its position.

    The choice is therefore the same in any batch, with or without preemption.

    Args:
        popularity: float64[num_experts], sums to 1: nearly a token's chances, since it chooses no expert twice.
        num_chosen: experts that a token visits in a layer.
    """

    def __init__(self, popularity: Floats, num_chosen: int) -> None:
        self._popularity = popularity
        self._num_chosen = num_chosen

    def choose(self, tokens: Keys, layer: int) -> Int32s:
        """int32[tokens, num_chosen], experts of each token, ascending."""
        chosen: Int32s = np.sort(self._draw(tokens, np.array([layer]))[:, 0], axis=-1).astype(np.int32)
        return chosen

    def count(self, tokens: Keys, layers: range) -> NDArray[np.int64]:
        """int64[len(layers), num_experts], how many of the tokens visit each expert."""
        num_experts = len(self._popularity)
        counts = np.empty((len(layers), num_experts), np.int64)
        at_once = max(_MOST_DRAWS // (len(tokens) * num_experts), 1)
        for first in range(0, len(layers), at_once):
            some = np.array(layers[first : first + at_once])
            cells = self._draw(tokens, some) + (np.arange(len(some)) * num_experts)[None, :, None]
            counted = np.bincount(cells.ravel(), minlength=len(some) * num_experts)
            counts[first : first + len(some)] = counted.reshape(len(some), num_experts)
        return counts

    def _draw(self, tokens: Keys, layers: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[tokens, layers, num_chosen], the first of exponential clocks whose rates are the popularities."""
        num_experts = len(self._popularity)
        cells = (layers[:, None] * num_experts + np.arange(num_experts)).astype(np.uint64)
        rings = -np.log1p(-uniform(tokens[:, None, None], cells[None])) / self._popularity
        first: NDArray[np.int64] = np.argpartition(rings, self._num_chosen - 1, axis=-1)[..., : self._num_chosen]
        return first


def token_keys(units: Units) -> Keys:
    """uint64[tokens], one key for each token of `units` in order, made from its sequence and its position."""
    keys = (np.repeat(units.serial, units.num_tokens) << 32) + token_spans(units.start, units.num_tokens)
    return keys.astype(np.uint64)
