"""Gimbal: the first paper's Algorithm 1 line by line, and a reconstruction of the second paper from its abstract."""

from __future__ import annotations

from collections import Counter

import numpy as np

from moestro.core.rng import Draws
from moestro.errors import ConfigError
from moestro.routing.policies.load import StickyMap
from moestro.routing.policy_contract import Choice, EngineLost, Needs, Routed, RoutedElsewhere, RouteEvent, RouteView
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.scoring import (
    ScorePolicy,
    Scores,
    all_fresh,
    expert_pressure,
    kv_usage,
    num_tokens,
    num_waiting,
    queued_prefill_tokens,
)

BRANCHES = ("no metrics", "least KV", "least load", "saturated and even", "user", "no user", "new user")


@ROUTE_POLICIES.register(
    "gimbal-v1",
    "Compares KV use, then tokens in hand, and otherwise returns to the engine of the same user.",
    source="Gimbal v1, section III-B, Algorithm 1",
)
class GimbalV1:
    """Selects DP engines by KV use, then by tokens in hand, then by the user's last engine, otherwise in turn.

    Args:
        kv_threshold: highest KV use from which engines count as saturated (theta_kv), 0 .. 1.
        kv_gap: difference of highest and lowest KV use from which the lowest is chosen (theta_diff), 0 .. 1.
        load_gap: difference of highest and lowest RunningLoad above which the lowest is chosen (theta_load), tokens.
        user_expiry_s: time after which a user's engine is forgotten, seconds. The paper gives no value.

    Attributes:
        counts: number of decisions by each branch in BRANCHES.

    Source: Gimbal v1 (arXiv), section III-B, Algorithm 1. Line numbers in comments are the algorithm's. RunningLoad is
    the figure `num_tokens`: tokens of running and waiting requests. vLLM and SGLang report none; then the router's own
    count takes its place.
    """

    needs = Needs(
        figures=("kv_usage", "num_tokens"),
        required=("kv_usage",),
        otherwise="the router's own count of tokens",
        mark="user",
    )

    def __init__(
        self, *, kv_threshold: float = 0.9, kv_gap: float = 0.1, load_gap: float = 3000.0, user_expiry_s: float = 600.0
    ) -> None:
        if not (0 <= kv_threshold <= 1 and 0 <= kv_gap <= 1 and load_gap >= 0 and user_expiry_s > 0):
            raise ConfigError("kv_threshold and kv_gap must be in 0 .. 1, load_gap and user_expiry_s not negative")
        self._kv_threshold = kv_threshold
        self._kv_gap = kv_gap
        self._load_gap = load_gap
        self._users = StickyMap(int(user_expiry_s * 1e9))
        self.counts: Counter[str] = Counter()

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Run Algorithm 1 over the routable engines."""
        engines = view.engines
        rows = np.flatnonzero(engines.routable)
        in_turn = int(rows[view.decision_id % len(rows)])  # line 1
        if not all_fresh(view, engines.kv_usage):  # line 2
            return _branch(in_turn, 0.0, "no metrics")
        kv, load = engines.kv_usage.values[rows], num_tokens(view)[rows]
        most, least = int(kv.argmax()), int(kv.argmin())  # lines 3, 4
        if kv[most] >= self._kv_threshold:  # line 5
            if kv[most] - kv[least] >= self._kv_gap:  # line 6
                return _branch(int(rows[least]), float(kv[least]), "least KV")  # line 7
            if load.max() - load.min() > self._load_gap:  # lines 9, 10
                at = int(load.argmin())
                return _branch(int(rows[at]), float(load[at]), "least load")  # lines 11, 12
            return _branch(in_turn, 0.0, "saturated and even")
        return self._of_user(view, in_turn)

    def _of_user(self, view: RouteView, in_turn: int) -> Choice:
        user = view.request.user
        if user is None:  # line 15
            return _branch(in_turn, 0.0, "no user")
        last = self._users.get(user, view.now_ns)  # line 16
        if last is None or not view.engines.routable[last]:
            return _branch(in_turn, 0.0, "new user")
        return _branch(last, 0.0, "user")  # line 17

    def observe(self, event: RouteEvent) -> None:
        """Remember the user's engine (line 21), and count the branch."""
        match event:
            case Routed():
                self.counts[BRANCHES[int(event.detail["branch"])]] += 1
                if event.request.user is not None:
                    self._users.put(event.request.user, event.engine, event.now_ns)
            case RoutedElsewhere():
                if event.user is not None:
                    self._users.put(event.user, event.engine, event.now_ns)
            case EngineLost():
                self._users.forget_engine(event.engine)
            case _:
                pass


def _branch(engine: int, score: float, name: str) -> Choice:
    return Choice(engine, score, name, detail={"branch": float(BRANCHES.index(name))})


@ROUTE_POLICIES.register(
    "gimbal-v2",
    "Adds four pressures, each over its greatest: KV use, prefill work, queue length and expert load.",
    source="Gimbal v2, abstract; the combination is a reconstruction",
)
class GimbalV2(ScorePolicy):
    """Adds four pressures, each relative to the highest among the routable engines.

    The pressures are KV use, remaining prefill work, waiting requests, and expert pressure beyond 1. The abstract names
    these signals, but not their combination. Equal weights are Moestro's reconstruction.

    Source: Gimbal v2, abstract.
    """

    needs = Needs(
        figures=("kv_usage", "queued_prefill_tokens", "num_waiting", "expert_pressure"),
        required=("kv_usage",),
        otherwise="the router's own counts; expert pressure 1",
    )
    words = "pressure"

    def score(self, view: RouteView) -> Scores:
        """Add the pressures with equal weights; a pressure that is 0 on all engines is left out."""
        routable = view.engines.routable
        pressures = (kv_usage(view), queued_prefill_tokens(view), num_waiting(view), expert_pressure(view) - 1)
        total = np.zeros(len(routable))
        for pressure in pressures:
            greatest = pressure.max(where=routable, initial=0.0)
            if greatest > 0:
                total += pressure / greatest
        return total
