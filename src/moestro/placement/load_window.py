"""The load of experts over a rank's last steps, with exponential decay, and the pairs that tokens visit in turn.

The load is updated in place, once a step. Pairs of experts in consecutive layers are counted in a sample of steps and
tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs, SourceLoad, pairs_of_codes

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


# Steps whose counts enter the sums together: as many as make arrays of 64 KiB, within these bounds.
_FEWEST_BUFFERED, _MOST_BUFFERED, _BUFFERED_CELLS = 16, 128, 1 << 13
_MAX_GAIN = 1e100  # then all sums are divided by the gain; the squares of counts stay far below the largest float64


class LoadWindow:
    """Decayed mean, variance and activity of each expert.

    New steps gain weight instead of old ones losing it, so that a step touches each sum once. Steps without tokens cost
    nothing but two numbers. The counts of some steps are kept, and enter the sums together: the calls, and not the
    additions, cost the time of a step. The sums are the same bits as if each step were added by itself.

    Args:
        num_layers, num_experts: Shape of the counts.
        half_life: Steps after which a step counts half, at least 1; 0 means that all steps count alike.

    Attributes:
        num_steps: Steps since the window was cleared.
        pairs: Pairs of experts in consecutive layers.
    """

    def __init__(self, num_layers: int, num_experts: int, half_life: float) -> None:
        self._shape = shape = (num_layers, num_experts)
        self._growth = 2 ** (1 / half_life) if half_life else 1.0
        self._counts = np.zeros(shape, np.int64)
        self._sum, self._square_sum, self._active_sum = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        num_cells = max(1, num_layers * num_experts)
        self._num_kept = min(max(_BUFFERED_CELLS // num_cells, _FEWEST_BUFFERED), _MOST_BUFFERED)
        self._steps: list[NDArray[np.int64]] = []
        self._gains: list[float] = []
        # Each sum before some steps, and what these add to it.
        self._addends = np.empty((self._num_kept + 1, *shape))
        self.pairs = PairWindow(num_experts)
        self.clear()

    def clear(self) -> None:
        """Forget all steps; the counts since the start remain."""
        self._add_kept()
        self._sum[:] = self._square_sum[:] = self._active_sum[:] = 0.0
        self._gain = 1.0  # weight of the last step; the sums of all weights are in the same unit
        self._weight = self._busy_weight = 0.0
        self.num_steps = 0
        self.pairs.clear()

    def observe(self, counts: NDArray[np.int64]) -> None:
        """Take in a step.

        Args:
            counts: int64[layers, experts], tokens that visited each expert. The array is kept and must not change.

        Raises:
            ValueError: `counts` has another shape.
        """
        if counts.shape != self._shape:
            raise ValueError(f"counts of the shape {counts.shape} came after {self._shape}")
        # As `skip(1)`, without its call: in a step of a millisecond, each call of this method counts.
        self.num_steps += 1
        self._gain = gain = self._gain * self._growth
        self._weight += gain
        self._busy_weight += gain
        self._steps.append(counts)
        self._gains.append(gain)
        if len(self._steps) == self._num_kept:
            self._add_kept()
        if gain > _MAX_GAIN:
            self._rescale()

    def _add_kept(self) -> None:
        """Add the kept steps to the sums, in their order."""
        if not self._steps:
            return
        counts, gains = np.stack(self._steps), np.array(self._gains)[:, None, None]
        addends = self._addends[: len(counts) + 1]
        self._steps.clear()
        self._gains.clear()
        self._counts += np.add.reduce(counts)
        np.multiply(counts, gains, out=addends[1:])
        self._add(self._sum, addends)
        addends[1:] *= counts
        self._add(self._square_sum, addends)
        np.multiply(counts > 0, gains, out=addends[1:])
        self._add(self._active_sum, addends)

    def _add(self, total: NDArray[np.float64], addends: NDArray[np.float64]) -> None:
        addends[0] = total
        np.add.reduce(addends, out=total)  # along the first axis, row by row

    def observe_choices(self, choices: NDArray[np.int32], num_tokens: int) -> None:
        """Take in the experts of some tokens of the step that was observed last.

        Args:
            choices: int32[layers with experts, sampled tokens, chosen].
            num_tokens: Tokens of the step, for which the sampled ones stand.
        """
        self.pairs.add(choices, num_tokens, self._gain)

    def skip(self, num_steps: int) -> None:
        """Take in steps of the rank's group in which the rank had no tokens."""
        self.num_steps += num_steps
        for _ in range(num_steps):
            self._gain *= self._growth
            self._weight += self._gain
            if self._gain > _MAX_GAIN:
                self._rescale()

    def _rescale(self) -> None:
        """Divide all sums by the gain, which changes no mean."""
        self._add_kept()
        scale = 1 / self._gain
        self._sum *= scale
        self._square_sum *= scale
        self._active_sum *= scale
        self.pairs.scale(scale)
        self._weight *= scale
        self._busy_weight *= scale
        self._gain = 1.0

    def load(self, *, with_pairs: bool = False) -> SourceLoad:
        """Return the load of the window; figures of an empty one are zero.

        Args:
            with_pairs: Whether to look for the most frequent pairs too, which takes time in a large network.
        """
        self._add_kept()
        weight = self._weight or math.inf
        mean = self._sum / weight
        return SourceLoad(
            counts=self._counts.copy(),
            mean=mean,
            variance=np.maximum(self._square_sum / weight - mean**2, 0.0),
            activated=np.minimum(self._active_sum / weight, 1.0),
            weight=self._weight / self._gain,
            num_steps=self.num_steps,
            pairs=self.pairs.most_frequent(self._busy_weight / weight) if with_pairs else None,
        )


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
