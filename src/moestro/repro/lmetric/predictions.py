"""Errors of a policy that predicts TTFT (LMetric, section 4.6 and Fig. 16)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.rng import Draws
from moestro.repro.lmetric.watching import Watching
from moestro.routing.policy_contract import Choice, FirstToken, Routed, RouteEvent, RoutePolicy, RouteView

Floats = NDArray[np.float64]

_SCORE = "predicted_ttft_ns"


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
