"""AMoE's defragging scheduler: queues before a dense wave run first, so that rests of a batch catch up with others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import ATTENTION, QueueTable, Run, Wait
from moestro.errors import ConfigError
from moestro.flow.policies.one_queue import OneQueue, can_run, total
from moestro.flow.registry import STEP_POLICIES

PerLayer = NDArray[np.float64]


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
        tokens = total(view.n)
        score = tokens.astype(np.float64)
        if self.lookahead:
            attention, experts = self._ahead(score[:, ATTENTION], view)
            score[:, ATTENTION] += attention
            score[:, ATTENTION + 1 :] += experts[:, None]
        score[~can_run(view)] = -1.0
        return int(score.argmax())

    def _ahead(self, attention: PerLayer, view: QueueTable) -> tuple[PerLayer, PerLayer]:
        """Return what the layers ahead add to each attention and to each expert, both float64[num_layers + 1]."""
        num_layers, num_experts = len(attention) - 1, view.n.shape[2] - 1
        before_attention = _sum_ahead(attention, num_layers + 1, self.lookahead, self.decay, 0.0)
        before_experts = np.zeros(num_layers + 1)
        if num_experts == 0:
            return before_attention, before_experts
        experts = self._expert_tokens(view) / num_experts
        before_experts[:num_layers] = _sum_ahead(experts, num_layers, self.lookahead, self.decay, 0.0)
        if attention.any() and experts.any():
            before_experts += _sum_ahead(attention, num_layers + 1, self.lookahead, self.decay, -0.5)
            own_and_ahead = np.roll(experts, 1)  # the experts of layer l + k - 1 are k - 0.5 layers after attention l
            before_attention += _sum_ahead(own_and_ahead, num_layers + 1, self.lookahead, self.decay, -0.5)
        return before_attention, before_experts

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


def _sum_ahead(tokens: PerLayer, num_layers: int, lookahead: int, decay: float, shift: float) -> PerLayer:
    """Sum decay^(k + shift) * tokens[(l + k) % num_layers] over k = 1 to `lookahead`, for each layer l.

    The order of additions is that of the loop over k, on every machine.
    """
    index, weights = _window(num_layers, lookahead, decay, shift)
    summed: PerLayer = np.add.reduce(tokens[index] * weights, axis=0)
    return summed


@cache
def _window(
    num_layers: int, lookahead: int, decay: float, shift: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Indices int64[lookahead, num_layers] and weights float64[lookahead, 1] of `_sum_ahead`."""
    ahead = np.arange(1, lookahead + 1)[:, None]
    weights = np.array([[decay ** (k + shift)] for k in range(1, lookahead + 1)])
    return (np.arange(num_layers) + ahead) % num_layers, weights
