"""Preble's E2: exploit a long cached prefix, or explore the engine on which the request costs the least GPU time.

A request whose cached prefix is longer than the rest of its prompt goes to an engine that holds the prefix. Any other
request goes to the engine with the lowest cost L + M + P, in GPU time:

    L   the prefills that the engine computed and the answers that it decoded for the requests of the last `window_s`
    M   the prefills that later requests repeat, because this request evicts their blocks
    P   the prefill of the request's own uncached tokens

A block that is evicted counts with the share of the window's requests that have it. Blocks that no request of the
window has count nothing. If the engine of an exploited prefix has more than `balance_ratio` times the load of the
least loaded one, the request goes there instead, and its prefix with it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np

from moestro.core.hashing import HASH_BYTES, BlockRun, PrefixTree
from moestro.core.rng import Draws
from moestro.errors import ConfigError
from moestro.routing.policy_contract import (
    Choice,
    Ended,
    EngineLost,
    FirstToken,
    Needs,
    PredictTtft,
    Routed,
    RouteEvent,
    RouteView,
)
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.scoring import NO_PRICES, PredictsTtft, Scores, choose, new_tokens

_NUM_GAPS = 200  # measured times per token that an engine's median covers, as in the published code
_FIRST_GAP_NS = 150e6  # time per token before the first measurement, as in the published code


class _Sent(NamedTuple):
    """A request of the window: its sending, its predicted prefill and its last run in the tree of prompts."""

    now_ns: int
    prefill_ns: float
    last: BlockRun | None


class _Underway(NamedTuple):
    """A request under way: its engine, and the time of its first token; None before it."""

    engine: int
    first_ns: int | None = None


@ROUTE_POLICIES.register(
    "preble",
    "Takes the engine of a prefix that covers over half of the prompt, otherwise the least GPU time (E2).",
    source="Preble, arXiv:2407.00023, section 3.2, Algorithms 1 and 2; constants of its published code",
)
class Preble(PredictsTtft):
    """Chooses by E2, the scheduling rule of Preble, with its rebalancing.

    Args:
        window_s: window of the load, seconds; 3 minutes in the paper.
        balance_ratio: load of the chosen engine over the least load above which a request moves there; 15 as in the
            published code.
        min_requests: requests in the window below which no request moves, because their loads say little.
        prices: file of an engine that `moestro calibrate --server` described, whose prices count.
        predict_ttft_ns: predictor whose prefill times count. The paper profiles each GPU. None means one that learns
            from the answers.

    Limits: the policy replicates a prefix only by moving requests, whereas Preble also replicates one whose queueing
    time has doubled. Preble's priorities within an engine are an order, not a route.

    Source: Preble, arXiv:2407.00023, section 3.2.
    """

    needs = Needs(hits=True, ttft=True)

    def __init__(
        self,
        *,
        window_s: float = 180.0,
        balance_ratio: float = 15.0,
        min_requests: int = 50,
        prices: str = NO_PRICES,
        predict_ttft_ns: PredictTtft | None = None,
    ) -> None:
        if not (window_s > 0 and balance_ratio >= 1 and min_requests >= 0):
            raise ConfigError("window_s must be above 0, balance_ratio at least 1, and min_requests not negative")
        super().__init__(predict_ttft_ns, prices)
        self._window_ns = int(window_s * 1e9)
        self._balance_ratio = balance_ratio
        self._min_requests = min_requests
        self._tree = PrefixTree()  # prompts of the window, by engine
        self._sent_to: defaultdict[int, deque[_Sent]] = defaultdict(deque)
        self._prefill_sum_ns: defaultdict[int, float] = defaultdict(float)
        self._num_sent = 0
        self._lengths: deque[tuple[int, int]] = deque()  # (end, tokens) of the window's answers
        self._length_sum = 0
        self._gaps: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_GAPS))
        self._gap_ns: dict[int, float] = {}  # medians of `_gaps`
        self._answers: dict[str, _Underway] = {}

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Exploit the longest cached prefix if it is longer than the rest, otherwise take the lowest cost."""
        routable, hits = view.engines.routable, view.hit_tokens
        prefill_ns = self.prefill_ns(new_tokens(view))
        load_ns = self._load_ns(view)
        cost_ns = load_ns + self._eviction_ns(view) + prefill_ns
        best = int(hits.max(where=routable, initial=0))
        if best <= view.request.num_known_tokens - best:
            choice = choose(view, cost_ns, draws, "short hits; GPU time in ns")
        else:
            choice = choose(view, cost_ns, draws, f"hit of {best} tokens; GPU time in ns", hits == best)
            least = float(load_ns[routable].min())
            is_hot = float(load_ns[choice.engine]) > self._balance_ratio * least
            if is_hot and self._num_sent >= self._min_requests:
                words = "the hit's engine is overloaded; GPU time in ns"
                choice = choose(view, cost_ns, draws, words, load_ns == least)
        choice = self.with_terms(view, choice)
        detail = {**choice.detail, "prefill_ns": float(prefill_ns[choice.engine])}
        return Choice(choice.engine, choice.score, choice.reason, choice.scores, detail)

    def observe(self, event: RouteEvent) -> None:
        """Keep the window, and measure answers."""
        super().observe(event)
        match event:
            case Routed():
                self._slide(event.now_ns)
                last = self._tree.add(event.engine, event.request.block_hashes)
                self._sent_to[event.engine].append(_Sent(event.now_ns, event.detail["prefill_ns"], last))
                self._prefill_sum_ns[event.engine] += event.detail["prefill_ns"]
                self._num_sent += 1
                self._answers[event.request.request_id] = _Underway(event.engine)
            case FirstToken():
                self._answers[event.request_id] = _Underway(event.engine, event.now_ns)
            case Ended():
                self._measure(event)
            case EngineLost():
                while self._sent_to[event.engine]:
                    self._drop_oldest(event.engine)
                self._gaps.pop(event.engine, None)
                self._gap_ns.pop(event.engine, None)

    def _measure(self, event: Ended) -> None:
        """Take in the length of an answer and its time per token."""
        answer = self._answers.pop(event.request_id, None)
        if answer is None or not event.num_output_tokens:
            return
        self._lengths.append((event.now_ns, event.num_output_tokens))
        self._length_sum += event.num_output_tokens
        if answer.first_ns is not None and event.num_output_tokens > 1:
            gaps = self._gaps[event.engine]
            gaps.append((event.now_ns - answer.first_ns) / (event.num_output_tokens - 1))
            self._gap_ns[event.engine] = float(np.median(gaps))

    def _load_ns(self, view: RouteView) -> Scores:
        """Return L, float64[n], ns."""
        load = np.zeros(len(view.engines))
        length = self._length_sum / len(self._lengths) if self._lengths else 0.0
        for engine, sent in self._sent_to.items():
            num, prefill_ns = len(sent), self._prefill_sum_ns[engine]
            for each in sent:  # requests that have left the window since the last event
                if each.now_ns >= view.now_ns - self._window_ns:
                    break
                num, prefill_ns = num - 1, prefill_ns - each.prefill_ns
            if num:
                load[engine] = max(prefill_ns, 0.0) + num * length * self._gap_ns.get(engine, _FIRST_GAP_NS)
        return load

    def _eviction_ns(self, view: RouteView) -> Scores:
        """Return M, float64[n], ns; 0 where the size of the cache is not known."""
        engines, cost = view.engines, np.zeros(len(view.engines))
        for engine in self._sent_to:
            missed = view.request.num_known_tokens - int(view.hit_tokens[engine])
            excess = self._tree.num_blocks[engine] * view.block_size + missed - engines.num_kv_tokens[engine]
            victims: list[tuple[float, float]] = []  # tokens, share of requests
            for each in self._sent_to[engine]:
                if excess <= 0:
                    break
                if each.last is not None:
                    tokens = len(each.last.blocks) // HASH_BYTES * view.block_size
                    victims.append((tokens, sum(each.last.counts.values()) / self._num_sent))
                    excess -= tokens
            if victims:
                tokens, shares = np.array(victims).T
                cost[engine] = float(self.prefill_ns(tokens) @ shares)
        return cost

    def _slide(self, now_ns: int) -> None:
        """Drop what has left the window."""
        for engine, sent in self._sent_to.items():
            while sent and sent[0].now_ns < now_ns - self._window_ns:
                self._drop_oldest(engine)
        while self._lengths and self._lengths[0][0] < now_ns - self._window_ns:
            self._length_sum -= self._lengths.popleft()[1]

    def _drop_oldest(self, engine: int) -> None:
        oldest = self._sent_to[engine].popleft()
        self._prefill_sum_ns[engine] -= oldest.prefill_ns
        self._num_sent -= 1
        if oldest.last is not None:
            self._tree.drop(engine, oldest.last)
