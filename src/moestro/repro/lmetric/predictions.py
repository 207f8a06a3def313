"""Errors of a policy that predicts TTFT (LMetric, section 4.6 and Fig. 16)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.rng import Draws
from moestro.cost.model import Batch, CostModel
from moestro.repro.lmetric.watching import Watching
from moestro.routing.policies.filtered import PredictTtft
from moestro.routing.policy_contract import Choice, FirstToken, Routed, RouteEvent, RoutePolicy, RouteView

Floats = NDArray[np.float64]

_SCORE = "predicted_ttft_ns"


def predictor(cost: CostModel, max_num_batched_tokens: int) -> PredictTtft:
    """A predictor of TTFT that prices prefill in full steps of the token budget, each beside the decoding batch.

    Args:
        cost: cost model of the served network (tuned) or of another (mistuned).
    """
    table: dict[tuple[int, int], int] = {}

    def step_ns(num_tokens: int, batch: int) -> int:
        key = (num_tokens, batch)
        if key not in table:
            decodes = np.full(batch, 1024, np.int64)  # a router knows the batch, but not its contexts
            start = np.concatenate([decodes, [0]])
            table[key] = cost.step_ns(Batch(start, np.concatenate([np.ones(batch, np.int64), [num_tokens]])))
        return table[key]

    def predict(p_tokens: Floats, queued_tokens: Floats, batch: NDArray[np.int64]) -> Floats:
        del queued_tokens  # they are in p_tokens
        ttft_ns = np.empty(len(p_tokens))
        for engine, (tokens, others) in enumerate(zip(p_tokens.tolist(), batch.tolist(), strict=True)):
            full, rest = divmod(max(int(tokens), 1), max_num_batched_tokens)
            rest -= rest % 64 if rest > 64 else 0  # so that a table of prices stays small
            ttft_ns[engine] = full * step_ns(max_num_batched_tokens, others) + (step_ns(rest, others) if rest else 0)
        return ttft_ns

    return predict


class Watched(Watching):
    """Notes the predictions of a policy whose score is a predicted TTFT, and the actual values.

    Args:
        policy: the policy that decides.

    Attributes:
        predicted_ns: predictions of the requests that have a first token, in the order of the first tokens.
        actual_ns: actual TTFT of the same requests.
    """

    def __init__(self, policy: RoutePolicy) -> None:
        super().__init__(policy)
        self._pending: dict[str, tuple[float, int]] = {}
        self.predicted_ns: list[float] = []
        self.actual_ns: list[int] = []

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """The choice of the policy, with its score in the detail."""
        choice = super().decide(view, draws)
        return Choice(choice.engine, choice.score, choice.reason, choice.scores, {_SCORE: choice.score})

    def observe(self, event: RouteEvent) -> None:
        """Note a prediction when a request is routed, and its actual TTFT at the first token."""
        super().observe(event)
        match event:
            case Routed():
                self._pending[event.request.request_id] = (event.detail[_SCORE], event.now_ns)
            case FirstToken():
                predicted_ns, routed_ns = self._pending.pop(event.request_id)
                self.predicted_ns.append(predicted_ns)
                self.actual_ns.append(event.now_ns - routed_ns)

    def relative_errors(self) -> Floats:
        """The relative errors |predicted / actual - 1|, float64[n]."""
        ratio: Floats = np.asarray(self.predicted_ns) / np.maximum(np.asarray(self.actual_ns), 1)
        return np.abs(ratio - 1)
