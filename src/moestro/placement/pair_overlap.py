"""How far two profiles agree about which experts tokens visit one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class PairOverlap:
    """Agreement of two profiles on the most frequent pairs of each layer.

    Attributes:
        num_compared: Pairs of each layer that are compared: one for each expert.
        shared: float64[layers - 1], share of them that both profiles have.
        by_chance: Share that two random choices of as many pairs would have in common.
    """

    num_compared: int
    shared: Floats
    by_chance: float

    @property
    def mean(self) -> float:
        """Mean of all layers; 1 means the same pairs."""
        return float(self.shared.mean()) if len(self.shared) else 1.0


def pair_overlap(first: LayerPairs, second: LayerPairs, num_layers: int, num_experts: int) -> PairOverlap:
    """Compare the `num_experts` most frequent pairs of each layer.

    A profile with fewer pairs in a layer has its missing ones in common with none.

    Args:
        num_layers: Layers with experts, of both profiles.
        num_experts: Experts of a layer.
    """
    shared = np.empty(max(num_layers - 1, 0))
    for layer in range(len(shared)):
        tops = _top(first, layer, num_experts), _top(second, layer, num_experts)
        shared[layer] = len(np.intersect1d(tops[0], tops[1])) / num_experts
    return PairOverlap(num_compared=num_experts, shared=shared, by_chance=1 / num_experts)


def independent_pairs(load: ExpertLoad) -> LayerPairs:
    """Return the pairs that would be frequent if a token's experts in two layers had nothing to do with each other.

    Popular experts meet often without any affinity, so an overlap counts for as much as it exceeds that of these pairs.
    """
    total = load.total
    _, num_experts = total.shape
    columns = []
    for layer, (here, after) in enumerate(pairwise(total)):
        count = np.outer(here, after / max(float(after.sum()), 1e-300)).ravel()
        best = np.argsort(-count, kind="stable")[:num_experts]
        columns.append((np.full(len(best), layer), best // num_experts, best % num_experts, count[best]))
    if not columns:
        none = np.empty(0, np.int32)
        return LayerPairs(none, none, none, np.empty(0))
    layers, first, second, count = (np.concatenate(column) for column in zip(*columns, strict=True))
    return LayerPairs(layers.astype(np.int32), first.astype(np.int32), second.astype(np.int32), count)


def _top(pairs: LayerPairs, layer: int, num_experts: int) -> NDArray[np.int64]:
    """Return the most frequent pairs of a layer as numbers; among equals, those of lower experts."""
    here = np.flatnonzero(pairs.layer == layer)
    codes = pairs.expert[here].astype(np.int64) * num_experts + pairs.next_expert[here]
    return codes[np.lexsort((codes, -pairs.count[here]))[:num_experts]]
