"""Wrappers of a policy that note its decisions, its predictions, and the figures of tracked classes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.rng import Draws
from moestro.routing.policy_contract import Choice, FirstToken, Needs, Routed, RouteEvent, RoutePolicy, RouteView


class Watching:
    """Forwards to a policy. A subclass notes decisions in `decide` or events in `observe`.

    Args:
        policy: the policy that decides.
    """

    def __init__(self, policy: RoutePolicy) -> None:
        self._policy = policy

    @property
    def needs(self) -> Needs:
        """The needs of the policy."""
        return self._policy.needs

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """The choice of the policy."""
        return self._policy.decide(view, draws)

    def observe(self, event: RouteEvent) -> None:
        """Forward an event to the policy."""
        self._policy.observe(event)


class WatchedClasses(Watching):
    """Notes the figures of LMetric's detector for each request whose class it tracks.

    Args:
        policy: LMetric with its detector.
    """

    def __init__(self, policy: RoutePolicy) -> None:
        super().__init__(policy)
        self._shares: list[tuple[float, float]] = []

    def observe(self, event: RouteEvent) -> None:
        """Note the class's share of requests and of engines, unless no engine has its blocks."""
        super().observe(event)
        if isinstance(event, Routed) and event.detail.get("holder_share"):
            self._shares.append((event.detail["class_share"], event.detail["holder_share"]))

    def sample(self, num_points: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Class shares and holder shares, sampled evenly from the whole run, at most `num_points`."""
        at = np.linspace(0, len(self._shares) - 1, min(num_points, len(self._shares))).astype(int)
        chosen = [self._shares[i] for i in at]
        return tuple(x for x, _ in chosen), tuple(m for _, m in chosen)


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
