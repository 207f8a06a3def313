"""Policies that consider only load, and policies with affinity of one session, one user or one prompt prefix."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, Literal

import numpy as np

from moestro.core.hashing import HASH_BYTES
from moestro.core.request import Request
from moestro.core.rng import Draws, mix64
from moestro.core.views import UNKNOWN_KV_TOKENS
from moestro.errors import ConfigError
from moestro.routing.policy_contract import Choice, EngineLost, Needs, Routed, RoutedElsewhere, RouteEvent, RouteView
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.scoring import (
    ScorePolicy,
    Scores,
    Stateless,
    all_fresh,
    batch_size,
    choose,
    lowest,
    num_running,
    num_waiting,
)

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
        return Choice(
            int(rows[better]), float(load[better]), f"{load[better]:.0f} in flight, against {load[1 - better]:.0f}"
        )


def least_loaded_score(view: RouteView) -> Scores:
    """Return the requests on each engine, float64[n]: join the shortest queue."""
    return batch_size(view)


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


_KEY_BLOCKS = 16  # leading prompt blocks (256 tokens) that form the key of a request without session and user
_MAX_KEYS = 1 << 18  # limit of remembered keys; the least recently used are dropped first


@ROUTE_POLICIES.register(
    "bounded_hash",
    "Hashes the session, the user or the first 256 tokens to an engine that has at most `max_load` times the mean.",
    source="Mirrokni et al., SODA 2018; SMG, `prefix_hash.rs`",
)
@dataclass(frozen=True, slots=True)
class BoundedHash(Stateless):
    """Consistent hashing with bounded loads: sends a request to its key's engine, or to the key's next if that is full.

    The key is the session, the user or the prompt's first 256 tokens. An engine is full if, with this request, it has
    more than `max_load` times the mean number of requests. Rendezvous hashing ranks the engines of each key; as with a
    ring, adding or removing an engine moves only its own keys.

    Source: Mirrokni et al., "Consistent Hashing with Bounded Loads", SODA 2018; Thaler and Ravishankar, "Using
    Name-Based Mappings to Increase Hit Rates", IEEE/ACM ToN 1998; SMG's `prefix_hash.rs` for key and bound.
    """

    max_load: float = 1.25

    def __post_init__(self) -> None:
        if not self.max_load >= 1:
            raise ConfigError(f"max_load must be at least 1, got {self.max_load}")

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the first of the key's engines with room, or the smallest batch for a request without a key."""
        key = _key(view.request)
        if key is None:
            return choose(view, least_loaded_score(view), draws, "no session, user or full block; smallest batch")
        load, routable = batch_size(view), view.engines.routable
        total = int(load.sum(where=routable)) + 1
        bound = math.ceil(self.max_load * total / int(routable.sum()))
        rank = mix64(np.arange(1, len(load) + 1, dtype=np.uint64) * np.uint64(key | 1) + np.uint64(key >> 1))
        scores = 1 - rank / 2.0**64
        first = lowest(scores, routable, draws)
        engine = first if load[first] < bound else lowest(scores, routable & (load < bound), draws)
        words = "its key's engine" if engine == first else f"its key's engine {first} has {load[first]:.0f} of {bound}"
        return Choice(engine, float(scores[engine]), words, scores)


def _key(request: Request) -> int | None:
    """Return a 64-bit key of the request's session, user or prompt prefix; None without any of them."""
    name = request.session_id or request.user
    if name is None and not request.block_hashes:
        return None
    if name is not None:
        return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    last = min(len(request.block_hashes), _KEY_BLOCKS * HASH_BYTES)
    return int.from_bytes(request.block_hashes[last - 8 : last], "little")


class StickyMap:
    """Remembers the engine of each key for a limited time and in limited memory.

    Args:
        expiry_ns: time since its last use after which a key is forgotten.
    """

    def __init__(self, expiry_ns: int) -> None:
        self._expiry_ns = expiry_ns
        self._engines: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, key: str, now_ns: int) -> int | None:
        """Return the engine of `key`, or None for an unknown or expired key."""
        engine, used_ns = self._engines.get(key, (None, 0))
        return engine if now_ns - used_ns <= self._expiry_ns else None

    def put(self, key: str, engine: int, now_ns: int) -> None:
        """Record that `key` was sent to `engine`."""
        self._engines[key] = (engine, now_ns)
        self._engines.move_to_end(key)
        while self._engines:
            oldest, (_, used_ns) = next(iter(self._engines.items()))
            if len(self._engines) <= _MAX_KEYS and now_ns - used_ns <= self._expiry_ns:
                break
            del self._engines[oldest]

    def forget_engine(self, engine: int) -> None:
        """Forget all keys of `engine`."""
        for key in [key for key, (at, _) in self._engines.items() if at == engine]:
            del self._engines[key]


class Sticky:
    """Sends a request to the engine that last served the same key, and a new key to the smallest batch.

    Attributes:
        key_of: name of the request field that serves as the key.

    Args:
        expiry_s: time without use after which a key is forgotten, seconds.
    """

    needs: ClassVar[Needs]
    key_of: Literal["session_id", "user"]

    def __init__(self, *, expiry_s: float = 600.0) -> None:
        if not expiry_s > 0:
            raise ConfigError(f"expiry_s must be above 0, got {expiry_s}")
        self._map = StickyMap(int(expiry_s * 1e9))

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the key's last engine if it is routable, otherwise the smallest batch."""
        key = getattr(view.request, self.key_of)
        if key is None:
            return choose(view, least_loaded_score(view), draws, f"no {self.key_of}; in flight")
        engine = self._map.get(key, view.now_ns)
        if engine is None:
            return choose(view, least_loaded_score(view), draws, f"first of its {self.key_of}; in flight")
        if not view.engines.routable[engine]:
            return choose(view, least_loaded_score(view), draws, f"engine {engine} is not routable; in flight")
        return Choice(engine, 0.0, f"the engine of its {self.key_of}")

    def observe(self, event: RouteEvent) -> None:
        """Remember the engine of a routed key, and forget the keys of a lost engine."""
        match event:
            case Routed():
                if (key := getattr(event.request, self.key_of)) is not None:
                    self._map.put(key, event.engine, event.now_ns)
            case RoutedElsewhere():
                if (key := getattr(event, self.key_of)) is not None:
                    self._map.put(key, event.engine, event.now_ns)
            case EngineLost():
                self._map.forget_engine(event.engine)
            case _:
                pass


@ROUTE_POLICIES.register(
    "session_affinity",
    "Takes the engine that served the session last, or the smallest batch.",
    source="common practice: sticky sessions of HTTP load balancers",
)
class SessionAffinity(Sticky):
    """Keeps the requests of a session together."""

    key_of = "session_id"
    needs = Needs(mark="session_id")


@ROUTE_POLICIES.register(
    "user_affinity",
    "Takes the engine that served the user last, or the smallest batch.",
    source="common practice: sticky sessions of HTTP load balancers",
)
class UserAffinity(Sticky):
    """Keeps the requests of a user together."""

    key_of = "user"
    needs = Needs(mark="user")
