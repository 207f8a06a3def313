"""Expert load that one source of tokens counted, and the sum of several sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SourceLoad:
    """Load of the experts by the tokens of one source (rank), over the window of its steps.

    Layers are those of the network; dense ones have zeros.

    Attributes:
        counts: int64[layers, experts], tokens that visited each expert since the source's process started.
        mean: float64[layers, experts], mean tokens per step.
        variance: float64[layers, experts], variance of the tokens of a step.
        activated: float64[layers, experts], fraction of steps in which the expert got any token.
        weight: Sum of the weights of all steps; the last step weighs 1, earlier ones less where the window decays.
        num_steps: Steps since the window was cleared.
        pairs: Pairs of experts in consecutive layers with experts; None means that none were collected.
    """

    counts: NDArray[np.int64]
    mean: Floats
    variance: Floats
    activated: Floats
    weight: float
    num_steps: int
    pairs: LayerPairs | None = None


def merge_sources(sources: Sequence[SourceLoad | None]) -> tuple[ExpertLoad, NDArray[np.int64]] | None:
    """Combine the loads of all sources of a group into the load of its steps.

    A source that made fewer steps than the busiest one counts as idle in the missing steps. Steps of different sources
    count as independent: variances add up, and an expert is idle when it is idle for each source.

    Args:
        sources: Load of each source; None means a source that counted nothing, or whose window is empty.

    Returns:
        The load, and int64[layers], the network's layer of each of its layers, which leave dense ones out. None means
        that no source counted anything.

    Raises:
        ValueError: The sources have different numbers of layers or experts.
    """
    known = [(at, source) for at, source in enumerate(sources) if source is not None and source.num_steps]
    if not known:
        return None
    shapes = {source.counts.shape for _, source in known}
    if len(shapes) > 1:
        raise ValueError(f"sources of one group counted layers and experts of the shapes {sorted(shapes)}")
    layers = np.flatnonzero(sum(source.counts.sum(axis=1) for _, source in known))
    most = max(source.num_steps for _, source in known)
    num_experts = known[0][1].counts.shape[1]
    tokens = np.zeros((len(sources), len(layers), num_experts))
    variance, idle = np.zeros(tokens.shape[1:]), np.ones(tokens.shape[1:])
    for at, source in known:
        share = source.num_steps / most
        mean = source.mean[layers]
        tokens[at] = share * mean
        variance += share * source.variance[layers] + share * (1 - share) * mean**2
        idle *= 1 - share * source.activated[layers]
    weight = max(source.weight for _, source in known)
    scaled = [(source.pairs, source.num_steps / most) for _, source in known if source.pairs is not None]
    pairs = _join_pairs(scaled, num_experts) if scaled else None
    return ExpertLoad(tokens, variance, np.clip(1 - idle, 0.0, 1.0), weight, pairs), layers


def _join_pairs(parts: Sequence[tuple[LayerPairs, float]], num_experts: int) -> LayerPairs:
    """Add up pairs, each part with a factor on its counts."""
    codes = np.concatenate([pair_codes(pairs, num_experts) for pairs, _ in parts])
    counts = np.concatenate([factor * pairs.count for pairs, factor in parts])
    unique, place = np.unique(codes, return_inverse=True)
    totals: Floats = np.bincount(place, counts, len(unique)).astype(np.float64)
    return pairs_of_codes(unique, totals, num_experts)


def pair_codes(pairs: LayerPairs, num_experts: int) -> NDArray[np.int64]:
    """int64[pairs], a number for each pair: its place in an array [layers, experts, experts]."""
    codes: NDArray[np.int64] = (pairs.layer.astype(np.int64) * num_experts + pairs.expert) * num_experts
    return codes + pairs.next_expert


def pairs_of_codes(codes: NDArray[np.int64], counts: Floats, num_experts: int) -> LayerPairs:
    """Make pairs of the numbers of `pair_codes`, the most frequent ones first. `counts`: float64[pairs]."""
    order = np.lexsort((codes, -counts))
    codes = codes[order]
    rest, next_expert = np.divmod(codes, num_experts)
    layer, expert = np.divmod(rest, num_experts)
    return LayerPairs(layer.astype(np.int32), expert.astype(np.int32), next_expert.astype(np.int32), counts[order])
