"""AMoE's defragging scheduler: queues before a dense wave run first, so that rests of a batch catch up with others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import ATTENTION, QueueTable, Run, Wait
from moestro.errors import ConfigError
from moestro.flow.policies.one_queue import OneQueue, can_run, total
from moestro.flow.registry import STEP_POLICIES

PerLayer = NDArray[np.float64]
Counts = NDArray[np.int32]


@STEP_POLICIES.register(
    "defrag",
    "Runs the queue with the most tokens in it and, decayed, in the `lookahead` layers after it.",
    source="AMoE, Algorithm 1; constants and lookback of its code",
)
@dataclass(kw_only=True)
class Defrag(OneQueue):
    """Runs the queue with the highest score: its tokens, and those that wait in the following layers.

    The score of an expert's queue in layer l adds, for k = 1 to `lookahead`, `decay`^k times the mean tokens per expert
    of layer l + k, modulo the number of layers. The score of an attention queue adds those of attention l + k, modulo
    the number of layers plus one, because the sampler is a layer of its own.
    On a device with both kinds, stages have one order: attention l, experts l, attention l + 1. The score counts both
    kinds, each at its distance in layers; an attention and its experts are half a layer apart.

    Bound: none in time, since the score does not look at ages; `urgent` adds one. Without arrivals every token runs.

    Attributes:
        lookahead: layers that the score looks ahead (K). 0 makes the policy equal to `mtfs`.
        decay: weight of the next layer in the score of a layer (delta).
        lookback: choices of which the mean number of tokens is added to the present one among the layers ahead, for
            experts alone. 0 is Algorithm 1; AMoE's code has 10.

    Raises:
        ConfigError: a number is negative, or `decay` is above 1.

    Source: Wang et al., "Toward Cost-Efficient Serving of Mixture-of-Experts with Asynchrony", section 3.4, which
        prints no constants; K = 7, delta = 0.8 and the lookback are those of its source (USC-NSL/DisagMoE).
    """

    lookahead: int = 7
    decay: float = 0.8
    lookback: int = 0
    _history: deque[NDArray[np.int64]] = field(default_factory=deque, init=False, repr=False, compare=False)
    _summed: NDArray[np.int64] | int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        OneQueue.__post_init__(self)
        if self.lookahead < 0 or self.lookback < 0 or not 0 <= self.decay <= 1:
            raise ConfigError("lookahead and lookback must be at least 0, and decay between 0 and 1")

    def __call__(self, view: QueueTable, now_ns: int) -> Run | Wait:
        """Run the best queue; then add the table to the history that later choices look back on."""
        answer = super().__call__(view, now_ns)
        if self.lookback:
            self._observe(view)
        return answer

    def choose(self, view: QueueTable) -> int:
        """Return the queue with the highest score. This changes nothing."""
        ready = total(view.n) * can_run(view)
        num_groups = int(ready.shape[1])
        queues = ready.reshape(-1).nonzero()[0]
        if len(queues) == 1:
            return int(queues[0])
        if self.lookahead == 0:
            return int(ready.argmax())
        attention, experts = total(view.n[:, :, ATTENTION]), None
        before_experts = (-1.0, 0)
        if num_groups > 1:
            experts = self._expert_tokens(view) / (num_groups - 1)
            # All experts of a layer have the same layers ahead, so the fullest of them has the highest score.
            fullest = np.maximum.reduce(ready[:, ATTENTION + 1 :], axis=1)
            before_experts = _best(fullest, lambda: self._ahead_of_experts(attention, experts))
        score, layer = before_experts
        own, own_layer = _best(ready[:, ATTENTION], lambda: self._ahead_of_attention(attention, experts))
        if own > score or (own == score and own_layer <= layer):
            return own_layer * num_groups
        return layer * num_groups + 1 + int(ready[layer, ATTENTION + 1 :].argmax())

    def _ahead_of_attention(self, attention: Counts, experts: PerLayer | None) -> PerLayer:
        """Return what the stages after each attention add to its score, float64[num_layers + 1]."""
        ahead = self._sum(attention, 1, 1.0)
        if experts is not None and np.count_nonzero(experts):
            ahead += self._sum(experts, 0, 0.5)
        return ahead

    def _ahead_of_experts(self, attention: Counts, experts: PerLayer) -> PerLayer:
        """Return what the stages after each layer's experts add to their scores, float64[num_layers + 1]."""
        ahead = np.zeros(len(experts))
        ahead[:-1] = self._sum(experts[:-1], 1, 1.0)
        if np.count_nonzero(attention):
            ahead += self._sum(attention, 1, 0.5)
        return ahead

    def _sum(self, tokens: Counts | PerLayer, first: int, distance: float) -> PerLayer:
        """Sum decay^(distance + i) * tokens[(l + first + i) % len(tokens)] over `lookahead` values of i from 0 on.

        The order of additions is that of the loop over i, on every machine.
        """
        index, weights = _window(len(tokens), self.lookahead, self.decay, first, distance)
        summed: PerLayer = np.add.reduce(tokens.take(index) * weights, axis=0)
        return summed

    def _expert_tokens(self, view: QueueTable) -> PerLayer:
        """Sum the tokens of each layer's experts, and add their mean over the history."""
        tokens: PerLayer = total(view.num_expert_tokens).astype(np.float64)
        if self._history:
            tokens += self._summed / len(self._history)
        return tokens

    def _observe(self, view: QueueTable) -> None:
        if len(self._history) == self.lookback:
            self._summed = self._summed - self._history.popleft()
        self._history.append(total(view.num_expert_tokens).astype(np.int64))
        self._summed = self._summed + self._history[-1]


def _best(ready: Counts, ahead: Callable[[], PerLayer]) -> tuple[float, int]:
    """Return the highest score of one kind of queue, and the first layer that has it; -1 if none of them can run."""
    can_run = ready > 0
    if not np.count_nonzero(can_run):
        return -1.0, 0
    score = np.where(can_run, ready + ahead(), -1.0)
    layer = int(score.argmax())
    return float(score[layer]), layer


@cache
def _window(
    num_layers: int, lookahead: int, decay: float, first: int, distance: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Indices int64[lookahead, num_layers] and weights float64[lookahead, 1] of `Defrag._sum`."""
    ahead = np.arange(first, first + lookahead)[:, None]
    weights = np.array([[decay ** (distance + i)] for i in range(lookahead)])
    return (np.arange(num_layers) + ahead) % num_layers, weights
