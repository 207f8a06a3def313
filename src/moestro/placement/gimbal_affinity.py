"""Affinity between experts of consecutive layers, as the two readings of Gimbal v1 rank it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs

Scope = Literal["layer", "model"]
Cut = Literal["literal", "symmetric"]
SCOPES: tuple[Scope, ...] = ("layer", "model")
CUTS: tuple[Cut, ...] = ("literal", "symmetric")


@dataclass(frozen=True, slots=True, eq=False)
class Affinity:
    """Pairs of experts that tokens visit one after another; the strongest pair comes first.

    Attributes:
        layer: int64[pairs], the earlier layer; 0 throughout where one map serves all layers.
        expert, partner: int64[pairs], experts of the earlier and of the later layer.
        weight: float64[pairs], tokens per step, above 0.
    """

    layer: NDArray[np.int64]
    expert: NDArray[np.int64]
    partner: NDArray[np.int64]
    weight: NDArray[np.float64]


def pairs_of(load: ExpertLoad, policy: str) -> LayerPairs:
    """Return the load's pairs.

    Raises:
        ValueError: The load has none.
    """
    if load.pairs is None:
        raise ValueError(
            f"{policy} needs pairs of experts that tokens visit in neighbouring layers, and this load has none; "
            "collect the load from the experts of each token (ExpertLoad.pairs)"
        )
    return load.pairs


def rank_pairs(pairs: LayerPairs, num_experts: int, scope: Scope, cut: Cut) -> Affinity:
    """Rank pairs by weight; equal weights in the order of layer, expert and partner.

    Args:
        scope: "layer" keeps the weights E[i, j, k] of each two layers; "model" sums them to W[j, k] (equation 2).
        cut: "literal" counts pairs with j < k only, as equation 11 does. "symmetric" counts all of them: with scope
            "model" it adds W[k, j] to W[j, k] and drops W[j, j], which no placement can cut.
    """
    layer = pairs.layer.astype(np.int64)
    first, second = pairs.expert.astype(np.int64), pairs.next_expert.astype(np.int64)
    if scope == "model":
        layer = np.zeros_like(layer)
        if cut == "symmetric":
            first, second = np.minimum(first, second), np.maximum(first, second)
    counts = first < second if cut == "literal" or scope == "model" else np.ones(len(first), np.bool_)
    counts &= pairs.count > 0
    key = ((layer * num_experts + first) * num_experts + second)[counts]
    key, which = np.unique(key, return_inverse=True)
    weight = np.zeros(len(key))
    np.add.at(weight, which, pairs.count[counts])
    order = np.lexsort((key, -weight))
    key, weight = key[order], weight[order]
    return Affinity(key // num_experts**2, key // num_experts % num_experts, key % num_experts, weight)
