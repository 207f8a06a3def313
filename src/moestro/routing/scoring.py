"""What policies are made of: filters, scores and draws, indicators of engines, and predicted times to first token.

Each indicator returns a value for every row. A figure that an engine has not reported within `fresh_ns` is replaced by
the router's own count. A figure older than the last decision is corrected by the requests sent since.

Predictions are learned from answers, or made from the prices of an engine's steps.
"""

from __future__ import annotations

import math
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moestro.core.rng import Draws
from moestro.core.views import Figure, all_true
from moestro.cost.model import Batch
from moestro.cost.tables import MeasuredCost, load_table
from moestro.errors import ConfigError
from moestro.files.text_files import read_text
from moestro.routing.kernel.passes import route_kernel
from moestro.routing.policy_contract import (
    Choice,
    Ended,
    FirstToken,
    Needs,
    PredictTtft,
    Routed,
    RouteEvent,
    RoutePolicy,
    RouteView,
)

Mask = NDArray[np.bool_]
Scores = NDArray[np.float64]
Counts = NDArray[np.int64]


ONE = np.ones(())  # in a sum with a column an array costs half as much as a number of Python

OWN_COUNTS = Needs()


class Stateless:
    """Base of policies without state."""

    needs = OWN_COUNTS

    def observe(self, event: RouteEvent) -> None:
        """Ignore the event: a stateless policy remembers nothing."""


def is_stateless(policy: RoutePolicy) -> bool:
    """Return whether a policy ignores every event, so that none needs to be made for it."""
    return getattr(policy.observe, "__func__", None) is Stateless.observe


class ScorePolicy(Stateless, ABC):
    """Base of policies that choose the routable engine with the lowest score.

    Attributes:
        words: name of the score, shown in the reason of a choice.
    """

    words: str

    @abstractmethod
    def score(self, view: RouteView) -> Scores:
        """Return float64[n], one score per engine; lower is better."""

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the routable engine with the lowest score."""
        return choose(view, self.score(view), draws, self.words)


@dataclass(frozen=True, slots=True)
class Scored(Stateless):
    """A policy made from a score function without a class: expressions and functions of users' files.

    Attributes:
        score: function from a view to float64[n].
        words: name of the score, shown in the reason of a choice.
        needs: inputs that the score reads.
    """

    score: Callable[[RouteView], Scores]
    words: str
    needs: Needs = OWN_COUNTS

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the routable engine with the lowest score."""
        return choose(view, self.score(view), draws, self.words)


def choose(
    view: RouteView,
    scores: Scores | Counts,
    draws: Draws,
    words: str,
    among: Mask | None = None,
    detail: Mapping[str, float] | None = None,
) -> Choice:
    """Choose the routable engine with the lowest score.

    Args:
        scores: [n]; an engine with score NaN is chosen only if all scores are NaN.
        words: name of the score, shown in the reason.
        among: bool[n], rows that passed the filters. Without a routable row among them, the choice is among all
            routable rows, and the reason says so.
        detail: figures for `observe` or for explaining the choice.
    """
    mask = view.engines.routable
    if among is not None:
        left = mask & among
        if np.count_nonzero(left):
            mask = left
        else:
            words += "; the filter leaves no engine, so all are candidates"
    kernel = route_kernel.look()
    engine = -1 if kernel is None else kernel.lowest(view.engines, scores, mask)
    if engine < 0:
        engine = lowest(scores, mask, draws)
    score = float(scores.item(engine))
    return Choice(engine, score, f"{words} {score:.6g}", scores, {} if detail is None else detail)


def lowest(scores: Scores | Counts, among: Mask, draws: Draws) -> int:
    """Return the row with the lowest score in the non-empty set `among`. A draw breaks ties, to spread requests."""
    left = scores if all_true(among) else np.where(among, scores, np.inf)
    best = int(left.argmin())  # argmin returns the first NaN, if any
    least = left.item(best)
    if not math.isfinite(least):
        return _lowest_finite(scores, np.flatnonzero(among), draws)
    (tied,) = (left == least).nonzero()
    return best if len(tied) == 1 else tied.item(draws.below(len(tied)))


def _lowest_finite(scores: Scores | Counts, rows: NDArray[np.int64], draws: Draws) -> int:
    """Handle scores that contain infinity or NaN, as `lowest` does otherwise."""
    values = scores[rows]
    tied = rows[values == np.fmin.reduce(values)]
    tied = tied if len(tied) else rows  # all scores are NaN
    return int(tied[draws.below(len(tied))])


def total(column: Scores) -> float:
    """Return the sum of a column of whole numbers, which no order of the summands changes."""
    return float(np.add.reduce(column))


def range_of(values: Scores | Counts, among: Mask) -> tuple[float, float]:
    """Return the lowest and the highest value in the non-empty set `among`."""
    left = values[among]
    return float(left.min()), float(left.max())


def fresh(view: RouteView, figure: Figure) -> Mask:
    """Return bool[n]: whether the figure is no older than the view's `fresh_ns`."""
    return figure.known(view.now_ns, view.fresh_ns)


def any_fresh(view: RouteView, figure: Figure) -> bool:
    """Return whether any engine has reported the figure within the view's `fresh_ns`."""
    return figure.is_known(view.now_ns, view.fresh_ns)


def all_fresh(view: RouteView, *figures: Figure) -> bool:
    """Return whether every routable engine has reported each of these figures lately, so that they are comparable."""
    unroutable = ~view.engines.routable
    return all(bool((fresh(view, figure) | unroutable).all()) for figure in figures)


def new_tokens(view: RouteView) -> Scores:
    """Tokens of the prompt and of a resumed answer that each engine would have to compute."""
    return float(view.request.num_known_tokens) - view.hit_tokens


def hit_ratio(view: RouteView) -> Scores:
    """Fraction of the prompt in each engine's cache, 0 .. 1."""
    return view.hit_tokens / view.request.num_prompt_tokens


def own_prefill_tokens(view: RouteView) -> Scores:
    """Prompt tokens that this router sent to each engine and that are not yet computed.

    The router's own count includes whole prompts until their first token. The engine's report counts partly computed
    prompts, but may include other routers' requests. Both are upper bounds at any age, so the minimum holds.
    """
    return np.minimum(view.engines.prefill_tokens, view.engines.reported_prefill_tokens)


def foreign_prefill_tokens(view: RouteView) -> Scores:
    """Prompt tokens that other routers sent to each engine and that were not computed at its last report."""
    engines = view.engines
    known = fresh(view, engines.queued_prefill_tokens) & (engines.num_foreign > 0)
    return np.where(known, np.maximum(engines.reported_prefill_tokens - engines.prefill_tokens, 0.0), 0.0)


def queued_prefill_tokens(view: RouteView) -> Scores:
    """Prompt tokens that all routers sent to each engine and that are not yet computed."""
    own = own_prefill_tokens(view)
    return own + foreign_prefill_tokens(view) if np.count_nonzero(view.engines.num_foreign) else own


def p_tokens(view: RouteView) -> Scores:
    """LMetric's P-token: tokens that each engine would compute before this request's first token."""
    tokens = new_tokens(view)
    tokens += queued_prefill_tokens(view)
    return tokens


def batch_size(view: RouteView) -> Scores:
    """Requests on each engine, waiting or running: exact for this router, as last reported for others."""
    engines = view.engines
    if not np.count_nonzero(engines.num_foreign):
        return engines.num_in_flight
    return engines.num_in_flight + np.where(fresh(view, engines.num_waiting), engines.num_foreign, 0)


def num_waiting(view: RouteView) -> Scores:
    """Requests without KV blocks; without a fresh report, those without a first token."""
    engines = view.engines
    reported = engines.num_waiting.values + engines.num_unseen
    return np.where(fresh(view, engines.num_waiting), reported, engines.num_prefilling)


def num_running(view: RouteView) -> Scores:
    """Requests with KV blocks; without a fresh report, those with a first token."""
    engines = view.engines
    own = engines.num_in_flight - engines.num_prefilling
    return np.where(fresh(view, engines.num_running), engines.num_running.values, own)


def num_tokens(view: RouteView) -> Scores:
    """Context tokens of the requests on each engine; without a fresh report, tokens of their prompts."""
    engines = view.engines
    return np.where(fresh(view, engines.num_tokens), engines.num_tokens.values, engines.context_tokens)


def kv_usage(view: RouteView) -> Scores:
    """Fraction of KV blocks held; without a fresh report, the share that prompts in flight would hold, or 0."""
    engines = view.engines
    own = np.minimum(engines.context_tokens / engines.num_kv_tokens, 1.0)
    return np.where(fresh(view, engines.kv_usage), engines.kv_usage.values, own)


def expert_pressure(view: RouteView) -> Scores:
    """Load of the workers of each engine's experts over the mean worker's, at least 1; without a fresh report, 1."""
    figure = view.engines.expert_pressure
    return np.where(fresh(view, figure), np.maximum(figure.values, 1.0), 1.0)


def expert_local_share(view: RouteView) -> Scores:
    """Fraction of each engine's visits to experts that stay on its device, 0 .. 1; without a fresh report, 0."""
    figure = view.engines.expert_local_share
    return np.where(fresh(view, figure), figure.values, 0.0)


def host_tokens(view: RouteView) -> Scores:
    """Tokens of the prompt that each engine's cache holds in host memory alone, and copies back."""
    return np.zeros(len(view.engines)) if view.host_tokens is None else view.host_tokens


def copy_price(view: RouteView) -> Scores:
    """Time to copy a prompt token from host memory over the time to compute it, on each engine."""
    return view.engines.copy_price


def speed(view: RouteView) -> Scores:
    """Prompt tokens a second of each engine relative to the others."""
    return view.engines.speed


def decode_speed(view: RouteView) -> Scores:
    """Tokens of answers a second of each engine relative to the others."""
    return view.engines.decode_speed


def prompt_tokens(view: RouteView) -> Counts:
    """Length of the prompt in tokens, the same for all engines."""
    return np.full(len(view.engines), view.request.num_prompt_tokens, np.int64)


# Indicators by their names in `--route-score`.
INDICATORS: Mapping[str, Callable[[RouteView], Scores | Counts]] = {
    each.__name__: each
    for each in (
        p_tokens, new_tokens, queued_prefill_tokens, hit_ratio, prompt_tokens, batch_size,
        num_waiting, num_running, num_tokens, kv_usage, expert_pressure, expert_local_share, speed, decode_speed,
        host_tokens, copy_price,
    )
}  # fmt: skip

# Inputs of each indicator, from which the needs of a score expression follow.
HIT_INDICATORS = frozenset({"p_tokens", "new_tokens", "hit_ratio", "host_tokens"})
TRAIT_INDICATORS = frozenset({"speed", "decode_speed", "copy_price"})
FIGURES_OF: Mapping[str, tuple[str, ...]] = {
    "p_tokens": ("queued_prefill_tokens",),
    "queued_prefill_tokens": ("queued_prefill_tokens",),
    "num_waiting": ("num_waiting",),
    "num_running": ("num_running",),
    "num_tokens": ("num_tokens",),
    "kv_usage": ("kv_usage",),
    "expert_pressure": ("expert_pressure",),
    "expert_local_share": ("expert_local_share",),
}
# Figures that no count of the router replaces.
REQUIRED_FIGURES = frozenset({"kv_usage", "expert_pressure", "expert_local_share"})


Floats = NDArray[np.float64]

DEFAULT_TOKENS_PER_S = 15_928  # llm-d's own default
_FEWEST = 16  # samples of a first fit; four for each weight and one term of noise
_HORIZON = 1024  # older samples fade; the error of three weights over so many is 5 % of one sample's
_RIDGE = 1e-3  # against a batch or a length that never varies
_PER_THOUSAND = 1e-3  # unit of the P-tokens in a fit, so that all terms have similar sizes
_TYPICAL_CONTEXT = 1024  # tokens; a router knows the batch of an engine, but not its contexts
NO_PRICES = "none"
_BUDGET = 2048  # tokens of a step, where a description has none
_ROUNDING = 64  # tokens; prices of partial steps are rounded so that their table stays small


class LearnedTtft:
    """Predicts TTFT as a constant, a time for each P-token and a time for each request in the batch.

    The three weights are a least-squares fit over recent first tokens, none of them negative. Before the first fit,
    llm-d's default rate is used. llm-d's predictor too is trained on the traffic that it routes.

    Source: llm-d router, latency predictor; the linear form is ours.
    """

    def __init__(self) -> None:
        self._gram = np.eye(3) * _RIDGE
        self._moment = np.zeros(3)
        self._weights = np.array([0.0, 1e12 / DEFAULT_TOKENS_PER_S, 0.0])
        self._num_samples = 0

    def __call__(self, p_tokens: Floats, queued_tokens: Floats, batch: Floats) -> Floats:
        """Implement `PredictTtft`."""
        constant, per_thousand, per_request = self._weights
        predicted: Floats = constant + per_thousand * _PER_THOUSAND * p_tokens + per_request * batch
        return predicted

    def learn(self, p_tokens: float, batch: float, ttft_ns: int) -> None:
        """Take in the TTFT of one request and what was known when it was sent."""
        terms = np.array([1.0, p_tokens * _PER_THOUSAND, batch])
        kept = 1 - 1 / _HORIZON
        self._gram = self._gram * kept + np.outer(terms, terms)
        self._moment = self._moment * kept + terms * ttft_ns
        self._num_samples += 1
        if self._num_samples >= _FEWEST:
            # A negative weight is noise: it would prefer longer queues.
            self._weights = np.maximum(np.linalg.solve(self._gram + np.eye(3) * _RIDGE, self._moment), 0.0)


class PredictsTtft:
    """Base of policies that compare predicted times to first token.

    Args:
        predict_ttft_ns: predictor. None means one that learns from the answers.
        prices: file of an engine that `moestro calibrate --server` described, whose prices then predict.

    Raises:
        ConfigError: the file cannot be read, or describes no engine with a cost table.
    """

    def __init__(self, predict_ttft_ns: PredictTtft | None, prices: str = NO_PRICES) -> None:
        if prices != NO_PRICES:
            predict_ttft_ns = described_ttft(Path(prices))
        learned = LearnedTtft()
        self._learned = learned if predict_ttft_ns is None else None
        self._predict: PredictTtft = predict_ttft_ns or learned
        self._sent: dict[str, tuple[float, float, int]] = {}  # request -> P-tokens, batch, time of its sending

    def predicted_ttft_ns(self, view: RouteView) -> Floats:
        """Return the predicted TTFT on each engine, float64[n], ns."""
        return self._predict(p_tokens(view), queued_prefill_tokens(view), batch_size(view))

    def prefill_ns(self, num_tokens: Floats) -> Floats:
        """Return the predicted time to compute prompts of these lengths alone, float64[n], ns."""
        nothing = np.zeros(len(num_tokens))
        times = self._predict(num_tokens, nothing, nothing)
        return times - self._learned(nothing, nothing, nothing) if self._learned else times

    def with_terms(self, view: RouteView, choice: Choice) -> Choice:
        """Add to a choice what a predictor can learn from it."""
        if self._learned is None:
            return choice
        engine = choice.engine
        terms = {"p_tokens": float(p_tokens(view)[engine]), "batch": float(batch_size(view)[engine])}
        return Choice(choice.engine, choice.score, choice.reason, choice.scores, {**choice.detail, **terms})

    def observe(self, event: RouteEvent) -> None:
        """Learn from first tokens."""
        if self._learned is None:
            return
        match event:
            case Routed():
                detail = event.detail
                self._sent[event.request.request_id] = (detail["p_tokens"], detail["batch"], event.now_ns)
            case FirstToken():
                if (sent := self._sent.pop(event.request_id, None)) is not None:
                    self._learned.learn(sent[0], sent[1], event.now_ns - sent[2])
            case Ended():
                self._sent.pop(event.request_id, None)
            case _:
                pass


def described_ttft(path: Path) -> PredictTtft:
    """Make a predictor from the description of an engine, a TOML file with a table [engines].

    Raises:
        ConfigError: the file cannot be read, or describes no engine with a cost table.
    """
    try:
        engines = tomllib.loads(read_text(path)).get("engines")
    except OSError as error:
        raise ConfigError(f"prices={path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeError) as error:
        raise ConfigError(f"prices={path}: {error}") from error
    if not isinstance(engines, dict) or not isinstance(engines.get("table"), str):
        raise ConfigError(
            f"prices={path} has no table [engines] with a cost table: moestro calibrate --server writes it"
        )
    cost = MeasuredCost(load_table(path.parent / engines["table"]))
    return priced_ttft(cost.step_ns, int(engines.get("max_num_batched_tokens", _BUDGET)))


def priced_ttft(step_ns: Callable[[Batch], int], max_num_batched_tokens: int) -> PredictTtft:
    """Make a predictor from prices. Prefill is priced in full steps of the token budget, each beside the batch.

    Args:
        step_ns: price of a step, ns; of the served network for a tuned predictor, of another for a mistuned one.
    """
    table: dict[tuple[int, int], int] = {}

    def price_ns(num_tokens: int, batch: int) -> int:
        key = (num_tokens, batch)
        if key not in table:
            decodes = np.full(batch, _TYPICAL_CONTEXT, np.int64)
            start = np.concatenate([decodes, [0]])
            table[key] = step_ns(Batch(start, np.concatenate([np.ones(batch, np.int64), [num_tokens]])))
        return table[key]

    def predict(p_tokens: Floats, queued_tokens: Floats, batch: Floats) -> Floats:
        del queued_tokens  # `p_tokens` includes them
        ttft_ns = np.empty(len(p_tokens))
        for engine, (tokens, others) in enumerate(zip(p_tokens.tolist(), map(int, batch.tolist()), strict=True)):
            full, rest = divmod(max(int(tokens), 1), max_num_batched_tokens)
            rest -= rest % _ROUNDING if rest > _ROUNDING else 0
            ttft_ns[engine] = full * price_ns(max_num_batched_tokens, others) + (price_ns(rest, others) if rest else 0)
        return ttft_ns

    return predict
