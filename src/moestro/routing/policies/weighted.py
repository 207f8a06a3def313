"""Policies that add cache savings and load costs with weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moestro.core.rng import Draws
from moestro.errors import ConfigError
from moestro.routing.indicators import batch_size, hit_ratio, host_tokens, queued_prefill_tokens
from moestro.routing.policy_contract import Choice, Needs, RouteView
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.scoring import ScorePolicy, Scores, Stateless, choose


@ROUTE_POLICIES.register(
    "bailian",
    "Adds `hit_weight * (1 - hit ratio)` and `(1 - hit_weight) * B / largest B`.",
    source="LMetric, Fig. 6 (b) and section 4.4",
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Bailian(Stateless):
    """Adds `hit_weight * (1 - hit ratio)` and `(1 - hit_weight) * batch / largest batch`.

    Attributes:
        hit_weight: lambda of the paper, which finds 0.7 best for chats and 0.55 for API calls.

    Source: LMetric, Fig. 6 (b) and section 4.4.
    """

    hit_weight: float = 0.7
    needs = Needs(hits=True)

    def __post_init__(self) -> None:
        if not 0 <= self.hit_weight <= 1:
            raise ConfigError(f"hit_weight must be in 0 .. 1, got {self.hit_weight}")

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the lowest sum."""
        load = batch_size(view)
        largest = max(1, int(load.max(where=view.engines.routable, initial=1)))
        scores = self.hit_weight * (1 - hit_ratio(view)) + (1 - self.hit_weight) * load / largest
        return choose(view, scores, draws, "miss ratio and relative batch")


@ROUTE_POLICIES.register(
    "dynamo",
    "Adds the blocks to prefill, less a credit for cached ones, and the blocks in decode.",
    source="NVIDIA Dynamo, `lib/kv-router/src/scheduling/selector.rs`",
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamo(Stateless):
    """Adds blocks to prefill, less a credit for cached blocks, and blocks in decode.

    `prefill_scale * max(0, (queued + prompt) / block - credit) + decode blocks + request_weight * requests`, where
    `credit = overlap_weight * decay * blocks on the device + host_weight * blocks in host memory` and `decay = 1 / (1 +
    overlap_decay * (queued - least queued) / prompt)`. With a temperature, an engine is drawn by softmax over the
    negative scores, divided by their range.

    Limit: Dynamo counts a block that several requests share once; this policy counts it for each request.

    Source: NVIDIA Dynamo, `lib/kv-router/src/scheduling/selector.rs`.
    """

    prefill_scale: float = 1.0
    overlap_weight: float = 1.0
    overlap_decay: float = 0.0
    host_weight: float = 0.75
    request_weight: float = 0.0
    temperature: float = 0.0
    needs = Needs(hits=True, figures=("queued_prefill_tokens",), otherwise="the router's own count of prompt tokens")

    def __post_init__(self) -> None:
        weights = (self.prefill_scale, self.overlap_weight, self.overlap_decay, self.host_weight, self.request_weight)
        if min(*weights, self.temperature) < 0:
            raise ConfigError(f"a weight of dynamo is negative: {self}; give 0 or more")

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the lowest score, or draw an engine if a temperature is set."""
        scores = self._scores(view)
        if self.temperature > 0:
            return self._draw(view, scores, draws)
        return choose(view, scores, draws, "blocks to compute and to hold")

    def _scores(self, view: RouteView) -> Scores:
        routable, prompt = view.engines.routable, view.request.num_known_tokens
        queued = queued_prefill_tokens(view)
        hosted = host_tokens(view)
        credit = self.overlap_weight * (view.hit_tokens - hosted)
        if self.overlap_decay:
            least = queued.min(where=routable, initial=math.inf)
            credit = credit / (1 + self.overlap_decay * (queued - least) / prompt)
        credit = credit + self.host_weight * hosted
        prefill = np.maximum(0, queued + prompt - credit)
        decode = view.engines.context_tokens + prompt
        scores = (self.prefill_scale * prefill + decode) / view.block_size
        return scores + self.request_weight * view.engines.num_in_flight if self.request_weight else scores

    def _draw(self, view: RouteView, scores: Scores, draws: Draws) -> Choice:
        rows = np.flatnonzero(view.engines.routable)
        values = scores[rows]
        span = float(values.max() - values.min()) or 1.0
        weights = np.cumsum(np.exp((values.min() - values) / (span * self.temperature)))
        at = int(np.searchsorted(weights, draws.below(1 << 53) / (1 << 53) * weights[-1], side="right"))
        engine = int(rows[min(at, len(rows) - 1)])
        return Choice(engine, float(scores[engine]), f"drawn by softmax, blocks {scores[engine]:.6g}", scores)


@ROUTE_POLICIES.register(
    "miss_ratio",
    "Multiplies the miss ratio and the batch, `(1 - hit ratio) * (B + 1)`.",
    source="LMetric, section 5.1, on the indicator of AIGW and Preble",
)
class MissRatio(ScorePolicy):
    """Multiplies the miss ratio and the batch, where LMetric multiplies the P-token and the batch.

    This is LMetric's product with the indicator that it attributes to Preble and AIGW; `preble` is Preble's own rule.
    """

    needs = Needs(hits=True)
    words = "miss ratio * batch"

    def score(self, view: RouteView) -> Scores:
        """Return (1 - hit ratio) * (batch + 1)."""
        return (1 - hit_ratio(view)) * (batch_size(view) + 1)
