"""Settings of a router and specifications of its engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec

from moestro.core.setting_checks import CheckedSettings, at_least, check_settings, flag_help
from moestro.routing.policy_contract import FRESH_NS
from moestro.routing.registry import ROUTE_POLICIES

_HELP = "Policy that chooses engines (bailian:hit_weight=0.5), or FILE.py:NAME."


@dataclass(frozen=True, kw_only=True)
class RoutePolicySettings(CheckedSettings):
    """The routing policy that an operator chooses."""

    route_policy: Annotated[str, flag_help(_HELP, ROUTE_POLICIES)] = "moestro"
    route_score: str | None = None
    "Expression over indicators that replaces the policy; the lowest value wins: 'p_tokens * (batch_size + 1)'."


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a router.

    Attributes:
        block_size: tokens per KV block, equal to the engines' block size.
        max_num_queued: limit of waiting requests per engine; None means no limit. The engines enforce the same limit,
            but refuse only between two steps.
        seed: random seed of draws between equal engines.
        index_bytes: memory limit of the prefix index, bytes.
        fresh_ns: age up to which a reported figure counts, ns; longer than the interval between two reports.
        compares_known: whether a figure counts only while every routable engine has reported it lately. False where
            engines report changes alone: there a missing report means an idle engine.
        engine_block_size: tokens per KV block of an engine that does not say it. An engine caches whole blocks only.
    """

    PLACE: ClassVar[str] = ""

    block_size: Annotated[int, at_least(1)] = 16
    max_num_queued: int | None = None
    seed: int = 0
    index_bytes: Annotated[int, at_least(1)] = 1 << 30
    fresh_ns: Annotated[int, at_least(1)] = FRESH_NS
    compares_known: bool = False
    engine_block_size: Annotated[int, at_least(1)] = 1

    def __post_init__(self) -> None:
        check_settings(self)


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an engine that are known before its first report.

    Attributes:
        num_blocks: size of the engine's KV cache in blocks of the router; None means unknown.
        num_host_blocks: blocks of host memory below it, to which evicted blocks go.
        speed: speed relative to the other engines, of prompts and answers. None means that the router learns it.
        block_size: tokens per KV block of the engine; None means unknown.
        copy_price: time to copy a prompt token from host memory over the time to compute it. None means that the router
            learns it.
        group: number of the group of engines that begin every step together. None means that this one steps alone.
    """

    num_blocks: int | None = None
    num_host_blocks: int = 0
    speed: float | None = None
    block_size: Annotated[int, at_least(1)] | None = None
    copy_price: float | None = None
    group: int | None = None


DEFAULT_SETTINGS = RouterSettings()
ANY_ENGINE = EngineSpec()
