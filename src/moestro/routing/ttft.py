"""Predictions of the time to first token: learned from answers, or from the prices of an engine's steps."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moestro.cost.model import Batch
from moestro.cost.tables import MeasuredCost, load_table
from moestro.errors import ConfigError
from moestro.files.text_files import read_text
from moestro.routing.indicators import batch_size, p_tokens, queued_prefill_tokens
from moestro.routing.policy_contract import Choice, Ended, FirstToken, PredictTtft, Routed, RouteEvent, RouteView

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

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

    def __call__(self, p_tokens: Floats, queued_tokens: Floats, batch: Counts) -> Floats:
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
        times = self._predict(num_tokens, nothing, nothing.astype(np.int64))
        return times - self._learned(nothing, nothing, nothing.astype(np.int64)) if self._learned else times

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

    def predict(p_tokens: Floats, queued_tokens: Floats, batch: Counts) -> Floats:
        del queued_tokens  # `p_tokens` includes them
        ttft_ns = np.empty(len(p_tokens))
        for engine, (tokens, others) in enumerate(zip(p_tokens.tolist(), batch.tolist(), strict=True)):
            full, rest = divmod(max(int(tokens), 1), max_num_batched_tokens)
            rest -= rest % _ROUNDING if rest > _ROUNDING else 0
            ttft_ns[engine] = full * price_ns(max_num_batched_tokens, others) + (price_ns(rest, others) if rest else 0)
        return ttft_ns

    return predict
