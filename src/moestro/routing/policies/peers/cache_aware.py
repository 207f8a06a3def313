"""Policies that follow the cache: by filters of overloaded engines, or by weights of savings and of load."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moestro.core.rng import Draws
from moestro.errors import ConfigError
from moestro.routing.policy_contract import Choice, Needs, PredictTtft, RouteView
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.scoring import (
    NO_PRICES,
    PredictsTtft,
    ScorePolicy,
    Scores,
    Stateless,
    batch_size,
    choose,
    hit_ratio,
    host_tokens,
    new_tokens,
    queued_prefill_tokens,
    range_of,
)

_PREDICTED = Needs(
    hits=True,
    figures=("queued_prefill_tokens",),
    otherwise="the router's own count of prompt tokens",
    ttft=True,
)


@ROUTE_POLICIES.register(
    "aibrix",
    "Takes the best hit among usual loads, or the smallest batch where batches differ by over `max_range`.",
    source="AIBrix, `pkg/plugins/gateway/algorithms/prefix_cache.go`; LMetric, Fig. 13",
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Aibrix(Stateless):
    """Chooses the best hit, or the smallest batch if batches differ by more than `max_range`.

    Only engines with a hit and a batch of at most the mean plus `num_deviations` standard deviations are eligible.
    Without an eligible engine the smallest batch wins.

    Attributes:
        max_range: largest tolerated difference of batches, requests. The paper finds 4 to 16 best, by workload.
        num_deviations: tolerated excess of a batch over the mean, standard deviations.

    Source: AIBrix `pkg/plugins/gateway/algorithms/prefix_cache.go`; LMetric, Fig. 13.
    """

    max_range: int = 8
    num_deviations: float = 1.0
    needs = Needs(hits=True)

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the best hit among engines of usual load."""
        load, routable = batch_size(view), view.engines.routable
        least, most = range_of(load, routable)
        if most - least > self.max_range:
            return choose(view, load, draws, f"batches differ by {most - least:.0f}; smallest batch")
        loads = load[routable]
        bound = loads.mean() + self.num_deviations * loads.std()
        good = routable & (view.hit_tokens > 0) & (load <= bound)
        if not good.any():
            return choose(view, load, draws, "no hit on an engine of usual load; smallest batch")
        # More hits first, then fewer requests, in one number; correct while every batch is below the factor.
        order = -view.hit_tokens * (1 << 20) + load
        choice = choose(view, order, draws, "", good)
        hit = int(view.hit_tokens[choice.engine])
        return Choice(
            choice.engine, float(-hit), f"most hits, {hit} tokens, with {load[choice.engine]:.0f} in the batch"
        )


@ROUTE_POLICIES.register(
    "cache_aware",
    "Takes the longest match if it covers over `cache_threshold` and loads are balanced, otherwise the smallest load.",
    source="SGLang router and SMG, `policies/cache_aware.rs`",
)
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAware(Stateless):
    """Chooses the best match if it is long enough, otherwise or with unbalanced loads the smallest load.

    Loads are unbalanced if `max - min > abs_threshold` and `max > rel_threshold * min`.

    Attributes:
        cache_threshold: fraction of the prompt that a match must exceed.
        abs_threshold: difference of loads, requests.
        rel_threshold: ratio of loads.

    Source: SGLang router and SMG, `policies/cache_aware.rs`. Older versions sent a miss to the smallest tree, which was
    found to send everything to one worker (sglang issues 14305, 14532).
    """

    cache_threshold: float = 0.5
    abs_threshold: int = 32
    rel_threshold: float = 1.1
    needs = Needs(hits=True)

    def __post_init__(self) -> None:
        if not 0 <= self.cache_threshold <= 1:
            raise ConfigError(f"cache_threshold must be in 0 .. 1, got {self.cache_threshold}")

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the best match or the smallest load."""
        load, routable = batch_size(view), view.engines.routable
        least, most = range_of(load, routable)
        if most - least > self.abs_threshold and most > self.rel_threshold * least:
            return choose(view, load, draws, "unbalanced; smallest load")
        best = int(view.hit_tokens.max(where=routable, initial=0))
        if best <= self.cache_threshold * view.request.num_prompt_tokens:
            return choose(view, load, draws, "no good match; smallest load")
        return choose(view, load, draws, f"match of {best} tokens; load", view.hit_tokens == best)


@ROUTE_POLICIES.register(
    "llm-d-affinity",
    "Takes the fewest tokens among engines with a good hit, unless they would wait `max_penalty_s` longer.",
    source="llm-d router, filter `prefix-cache-affinity` and scorer `token-load`, August 2026",
)
class LlmdAffinity(PredictsTtft):
    """Chooses the fewest tokens among engines with a good hit, unless their first token would come much later.

    Args:
        min_hit: fraction of the prompt that makes a hit good.
        max_penalty_s: tolerated excess of the best TTFT with a good hit over the best other TTFT, seconds.
        prices: file of an engine that `moestro calibrate --server` described, whose prices predict.
        predict_ttft_ns: predictor of the TTFT; None means one that learns from the answers.

    Source: llm-d router, filter `prefix-cache-affinity` and scorer `token-load`, August 2026.
    """

    needs = _PREDICTED

    def __init__(
        self,
        *,
        min_hit: float = 0.8,
        max_penalty_s: float = 18.0,
        prices: str = NO_PRICES,
        predict_ttft_ns: PredictTtft | None = None,
    ) -> None:
        super().__init__(predict_ttft_ns, prices)
        self._min_hit = min_hit
        self._max_penalty_ns = max_penalty_s * 1e9

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the fewest tokens, in flight and new, among engines with a good hit."""
        return self.with_terms(view, self._decide(view, draws))

    def _decide(self, view: RouteView, draws: Draws) -> Choice:
        routable, tokens = view.engines.routable, view.engines.context_tokens + new_tokens(view)
        sticky = routable & (view.hit_tokens >= self._min_hit * view.request.num_prompt_tokens)
        if not sticky.any():
            return choose(view, tokens, draws, "no good hit; tokens")
        others = routable & ~sticky
        if others.any():
            ttft_ns = self.predicted_ttft_ns(view)
            if ttft_ns[sticky].min() - ttft_ns[others].min() > self._max_penalty_ns:
                return choose(view, tokens, draws, "engines with good hits have too long a queue; tokens")
        return choose(view, tokens, draws, "good hit; tokens", sticky)


@ROUTE_POLICIES.register(
    "llm-d",
    "Takes the lowest predicted TTFT.",
    source="llm-d as in LMetric, Fig. 14",
)
class LowestTtft(PredictsTtft):
    """Chooses the engine with the lowest predicted time to first token.

    Args:
        prices: file of an engine that `moestro calibrate --server` described, whose prices predict.
        predict_ttft_ns: predictor of the TTFT. A tuned predictor uses the cost model of the served network, a mistuned
            one that of another (LMetric, section 4.6). None means one that learns from the answers.
    """

    needs = _PREDICTED

    def __init__(self, *, prices: str = NO_PRICES, predict_ttft_ns: PredictTtft | None = None) -> None:
        super().__init__(predict_ttft_ns, prices)

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the lowest predicted TTFT."""
        return self.with_terms(view, choose(view, self.predicted_ttft_ns(view), draws, "predicted TTFT in ns"))


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
