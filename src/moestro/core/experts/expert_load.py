"""Load of experts: what ranks count for each source of tokens, what policies read, and the pressure on workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class LayerPairs:
    """How often a token that visited one expert visited another one in the next layer; only the most frequent pairs.

    Attributes:
        layer: int32[pairs], the earlier layer.
        expert: int32[pairs], expert of the earlier layer.
        next_expert: int32[pairs], expert of the layer after it.
        count: float64[pairs], tokens per step.
    """

    layer: NDArray[np.int32]
    expert: NDArray[np.int32]
    next_expert: NDArray[np.int32]
    count: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoad:
    """Load of all logical experts over a window of steps.

    A step is one forward pass of a whole group. Layers are those with experts, numbered from 0.

    Attributes:
        tokens: float64[sources, layers, experts], mean tokens per step that each source (attention DP rank) sends to
            each expert.
        variance: float64[layers, experts], variance over steps of the tokens of all sources.
        activated: float64[layers, experts], fraction of steps in which the expert got any token.
        num_steps: Steps that the figures stand for; with decay, their effective number.
        pairs: Pairs of experts in consecutive layers; None means that none were collected.

    Raises:
        ValueError: Shapes differ, or a figure is negative or not finite.
    """

    tokens: NDArray[np.float64]
    variance: NDArray[np.float64]
    activated: NDArray[np.float64]
    num_steps: float
    pairs: LayerPairs | None = None

    def __post_init__(self) -> None:
        shapes = {"variance": self.variance.shape, "activated": self.activated.shape}
        for name, shape in shapes.items():
            if self.tokens.ndim != 3 or shape != self.tokens.shape[1:]:
                raise ValueError(f"tokens has the shape {self.tokens.shape}, and {name} {shape}")
        for name in ("tokens", "variance", "activated"):
            figures = getattr(self, name)
            if not (np.isfinite(figures) & (figures >= 0)).all():
                raise ValueError(f"{name} has a figure that is negative or not finite")

    @property
    def total(self) -> NDArray[np.float64]:
        """float64[layers, experts], mean tokens per step of all sources."""
        total: NDArray[np.float64] = self.tokens.sum(axis=0)
        return total


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


# Visits to a layer that a source is assumed to make as the whole group does, besides its own: an estimate from fewer of
# its own is mostly chance, and a source without any has the group's pressure. Values from 1 to 256 are alike, and 1024
# is worse for a source of 5 tokens a second (`bench/simulator/pressure_constants.py`).
PRIOR_VISITS = 64.0
# An oldest token that waits in a queue for so long counts as much as a mean load. It is a whole token's time, a target
# of chats (DistServe, OSDI 2024, table 1: 0.1 s), and not that of a layer, because the greatest age of all queues of a
# worker is an extreme: in a healthy group it adds little, and where a worker stands still it soon outweighs any load.
# Named, not swept: no simulated group has this figure.
FULL_WAIT_S = 0.1


def expert_pressures(visits: Floats, parts: Floats, oldest_s: Floats | None = None) -> Floats:
    """Estimate for each source how loaded the workers are to which its tokens go, relative to the mean worker.

    The load of a worker in a layer is the number of visits that it gets from all sources. The pressure of source s is
    the mean over layers l of

        sum over workers w of  q[s, l, w] * (load[l, w] / mean load[l] + oldest_s[w] / FULL_WAIT_S)

    where q is the part of the source's visits that goes to the worker; the mean is that of the workers which hold
    experts of the layer. Each source's visits are completed by `PRIOR_VISITS` of the group's.

    Args:
        visits: float64[sources, layers, experts], recent visits of each source's tokens.
        parts: float64[workers, layers, experts], part of each expert's tokens that each worker gets.
        oldest_s: float64[workers], time for which the oldest token waits in a queue of each worker, in seconds. None
            means that no token waits in a queue, because the group computes in step.

    Returns:
        float64[sources], a ratio. 1 means that the source's tokens meet the mean load; without waits, the mean over all
        visits is at least 1. All are 1 while there are no visits.
    """
    total = visits.sum(axis=0)
    layers = np.flatnonzero(total.sum(axis=1) > 0)
    if not len(layers):
        return np.ones(len(visits))
    total, parts = total[layers], parts[:, layers]
    load = np.einsum("le,wle->lw", total, parts)
    holds = (parts > 0).any(axis=2).T
    burden = load / (load.sum(axis=1) / holds.sum(axis=1))[:, None]
    if oldest_s is not None:
        burden = burden + oldest_s / FULL_WAIT_S
    of_expert = np.einsum("lw,wle->le", burden, parts)
    mixed = visits[:, layers] + PRIOR_VISITS * total / total.sum(axis=1, keepdims=True)
    by_layer = np.einsum("sle,le->sl", mixed, of_expert) / mixed.sum(axis=2)
    pressures: Floats = by_layer.mean(axis=1)
    return pressures
