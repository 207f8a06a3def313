"""Every routing policy by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moestro.core.policy_registry import PolicyEntry, parse_policy
from moestro.core.policy_registry import make_policy as make_registered
from moestro.errors import ConfigError
from moestro.routing.policies.affinity import STICKY_EXPIRY_S, BoundedHash, Sticky
from moestro.routing.policies.contract import RoutePolicy
from moestro.routing.policies.expression import expression_policy
from moestro.routing.policies.filtered import Aibrix, CacheAware, LlmdAffinity, LowestTtft
from moestro.routing.policies.gimbal import GIMBAL_V2_NEEDS, GimbalV1, gimbal_v2_score
from moestro.routing.policies.lmetric import LMetric
from moestro.routing.policies.load import (
    VLLM_NEEDS,
    MostFreeKv,
    PowerOfTwo,
    RoundRobin,
    Vllm027,
    least_loaded_score,
    vllm_026_score,
)
from moestro.routing.policies.moestro import Moestro
from moestro.routing.policies.scoring import Scored
from moestro.routing.policies.trial import try_once
from moestro.routing.policies.user_file import user_policy
from moestro.routing.policies.weighted import PREBLE_NEEDS, Bailian, Dynamo, preble_score

NO_SETTINGS: Mapping[str, object] = {}


def _least_loaded() -> RoutePolicy:
    return Scored(least_loaded_score, "in flight")


def _vllm_026() -> RoutePolicy:
    return Scored(vllm_026_score, "4 * waiting + running", VLLM_NEEDS)


def _preble() -> RoutePolicy:
    return Scored(preble_score, "miss ratio * batch", PREBLE_NEEDS)


def _gimbal_v2() -> RoutePolicy:
    return Scored(gimbal_v2_score, "pressure", GIMBAL_V2_NEEDS)


def _session_affinity(*, expiry_s: float = STICKY_EXPIRY_S) -> RoutePolicy:
    return Sticky(by="session_id", expiry_s=expiry_s)


def _user_affinity(*, expiry_s: float = STICKY_EXPIRY_S) -> RoutePolicy:
    return Sticky(by="user", expiry_s=expiry_s)


ROUTING: dict[str, PolicyEntry[RoutePolicy]] = {
    "round_robin": PolicyEntry(RoundRobin, "the engines in turn"),
    "power_of_two": PolicyEntry(PowerOfTwo, "of two engines drawn, the one with fewer requests in flight"),
    "least_loaded": PolicyEntry(_least_loaded, "join the shortest queue: the fewest requests in flight"),
    "most_free_kv": PolicyEntry(MostFreeKv, "the most free KV memory (AMoE)"),
    "vllm-0.26": PolicyEntry(_vllm_026, "4 * waiting + running (vLLM up to 0.26)"),
    "vllm-0.27": PolicyEntry(Vllm027, "waiting + running, and KV pressure where any wait (vLLM from 0.27)"),
    "bounded_hash": PolicyEntry(BoundedHash, "consistent hash of session, user or prefix, with bounded load"),
    "session_affinity": PolicyEntry(_session_affinity, "the engine that served the session last"),
    "user_affinity": PolicyEntry(_user_affinity, "the engine that served the user last"),
    "bailian": PolicyEntry(Bailian, "miss ratio and relative batch, added with a weight (Bailian)"),
    "dynamo": PolicyEntry(Dynamo, "blocks to prefill, less those cached, and blocks in decode (Dynamo)"),
    "preble": PolicyEntry(_preble, "miss ratio * batch (Preble, AIGW)"),
    "aibrix": PolicyEntry(Aibrix, "the best hit, unless batches differ too much (AIBrix)"),
    "cache_aware": PolicyEntry(CacheAware, "the best match if good, else the smallest load (SGLang, SMG)"),
    "llm-d": PolicyEntry(LowestTtft, "the lowest predicted TTFT (llm-d as in LMetric)"),
    "llm-d-affinity": PolicyEntry(LlmdAffinity, "good hits first, unless they wait too long; fewest tokens (llm-d)"),
    "gimbal-v1": PolicyEntry(GimbalV1, "KV use, then tokens in hand, then the user's last engine (Gimbal, Alg. 1)"),
    "gimbal-v2": PolicyEntry(_gimbal_v2, "KV, prefill, queue and expert pressure (Gimbal v2, our reconstruction)"),
    "lmetric": PolicyEntry(LMetric, "P-token * batch, with the hotspot detector (LMetric)"),
    "moestro": PolicyEntry(Moestro, "the least delay caused, in prompt tokens: LMetric's product corrected (ours)"),
}


def policy_from(text: str, score: str | None = None) -> RoutePolicy:
    """The policy that an operator named.

    Args:
        text: a name in ROUTING, with settings if any (`bailian:hit_weight=0.55`), or `FILE.py:NAME`.
        score: an expression over indicators, in place of `text`.

    Raises:
        ConfigError: there is no such policy, or it does not take these settings.
    """
    if score is not None:
        return expression_policy(score)
    name, _, rest = text.partition(":")
    if name.endswith(".py"):
        return user_policy(Path(name), rest)
    return make_policy(*parse_policy("route policy", text))


def make_policy(name: str, settings: Mapping[str, object] = NO_SETTINGS) -> RoutePolicy:
    """The policy `name` with `settings` over its defaults, tried once.

    Raises:
        ConfigError: no policy, or no setting of it, has that name; or a value is not allowed.
    """
    policy = make_registered("route policy", ROUTING, name, settings)
    try:
        try_once(policy)
    except Exception as error:
        raise ConfigError(f"route policy {name!r} cannot decide with {dict(settings)}: {error}") from error
    return policy
