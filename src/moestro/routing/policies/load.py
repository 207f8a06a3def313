"""Policies that consider only load."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moestro.core.rng import Draws
from moestro.core.views import UNKNOWN_KV_TOKENS
from moestro.errors import ConfigError
from moestro.routing.indicators import all_fresh, batch_size, num_running, num_waiting
from moestro.routing.policy_contract import Choice, Needs, RouteView
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.scoring import ScorePolicy, Scores, Stateless, choose

_LOAD_ALONE = Needs(prompts=False)


@ROUTE_POLICIES.register(
    "round_robin",
    "Takes the engines in turn.",
    source="nginx, default method of `upstream`",
)
class RoundRobin(Stateless):
    """Takes the routable engines in turn."""

    needs = _LOAD_ALONE

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the next engine."""
        (routable,) = view.engines.routable.nonzero()
        turn = view.decision_id % len(routable)
        return Choice(int(routable[turn]), float(turn), f"turn {turn} of {len(routable)}")


@ROUTE_POLICIES.register(
    "power_of_two",
    "Draws two engines and takes the smaller batch.",
    source="Mitzenmacher, IEEE TPDS 12(10), 2001",
)
class PowerOfTwo(Stateless):
    """Draws two engines and takes the one with fewer requests in flight.

    Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10), 2001.
    """

    needs = _LOAD_ALONE

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the smaller batch of two drawn engines."""
        routable = np.flatnonzero(view.engines.routable)
        first = draws.below(len(routable))
        second = (first + 1 + draws.below(len(routable) - 1)) % len(routable) if len(routable) > 1 else first
        rows = routable[[first, second]]
        load = batch_size(view)[rows]
        better = int(load[1] < load[0])
        return Choice(int(rows[better]), float(load[better]), f"{load[better]} in flight, against {load[1 - better]}")


def least_loaded_score(view: RouteView) -> Scores:
    """Return the requests on each engine, float64[n]: join the shortest queue."""
    return batch_size(view).astype(np.float64)


@ROUTE_POLICIES.register(
    "least_loaded",
    "Joins the shortest queue: the smallest batch.",
    source="Winston, Journal of Applied Probability 14, 1977",
)
class LeastLoaded(ScorePolicy):
    """Takes the engine with the fewest requests."""

    needs = _LOAD_ALONE
    words = "in flight"

    def score(self, view: RouteView) -> Scores:
        """Return the requests on each engine."""
        return least_loaded_score(view)


@ROUTE_POLICIES.register(
    "vllm-0.26",
    "Adds waiting requests, weighted by 4, and running requests.",
    source="vLLM up to 0.26, `vllm/v1/engine/core_client.py`",
)
class Vllm026(ScorePolicy):
    """The load balancer of vLLM's data-parallel engines up to 0.26.

    Requests sent since the engine's last report count as waiting.
    """

    needs = Needs(figures=("num_waiting", "num_running"), otherwise="waiting: without a first token; running: the rest")
    words = "4 * waiting + running"

    def score(self, view: RouteView) -> Scores:
        """Return 4 * waiting + running."""
        return 4 * num_waiting(view) + num_running(view)


@ROUTE_POLICIES.register(
    "vllm-0.27",
    "Adds waiting and running requests, and KV pressure if requests wait.",
    source="vLLM from 0.27, pull request 49204",
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm027(Stateless):
    """Adds `max(clients * mine, waiting + running)` and, with waiting requests, `waiting * 6 * max(0, kv_usage - 0.5)`.

    Attributes:
        num_clients: number of API servers that share the engines.

    Source: vLLM from 0.27, pull request 49204, the same file.
    """

    num_clients: int = 1
    needs = Needs(figures=("num_waiting", "num_running", "kv_usage"), required=("kv_usage",), otherwise="as vllm-0.26")

    def __post_init__(self) -> None:
        if self.num_clients < 1:
            raise ConfigError(f"num_clients must be at least 1, got {self.num_clients}")

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the lowest sum."""
        engines, waiting = view.engines, num_waiting(view)
        scores = np.maximum(self.num_clients * engines.num_in_flight, waiting + num_running(view))
        if all_fresh(view, engines.kv_usage):
            scores = scores + waiting * 6 * np.maximum(0.0, engines.kv_usage.values - 0.5)
        return choose(view, scores, draws, "requests and KV pressure")


@ROUTE_POLICIES.register(
    "most_free_kv",
    "Takes the most free KV memory.",
    source="AMoE, section 3.1",
)
class MostFreeKv(Stateless):
    """Takes the engine with the most free KV memory.

    Source: AMoE, section 3.1 ("assigns each new request to the rank with the most available memory").
    """

    needs = Needs(figures=("kv_usage",), required=("kv_usage",))

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the most free tokens where every engine's capacity is known, otherwise the lowest KV use."""
        engines = view.engines
        if not all_fresh(view, engines.kv_usage):
            return choose(view, least_loaded_score(view), draws, "KV use is not known for all engines; in flight")
        if (engines.num_kv_tokens < UNKNOWN_KV_TOKENS).all(where=engines.routable):
            free = (1 - engines.kv_usage.values) * engines.num_kv_tokens
            return choose(view, -free, draws, "free KV tokens, negative:")
        return choose(view, engines.kv_usage.values, draws, "KV use")
