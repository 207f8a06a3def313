"""The settings of a router and of each engine behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
from cyclopts import Parameter

from moestro.core.setting_checks import CheckedSettings, above, at_least, check_settings
from moestro.routing.registry import ROUTE_POLICIES

_HELP = f"Which engine gets a request (bailian:hit_weight=0.5); or FILE.py:NAME.\n\n{ROUTE_POLICIES.help_text()}"


@dataclass(frozen=True, kw_only=True)
class RoutePolicySettings(CheckedSettings):
    """The routing policy that an operator chooses."""

    route_policy: Annotated[str, Parameter(help=_HELP)] = "moestro"
    route_score: str | None = None
    "In place of a policy: an expression over indicators, the lowest wins: 'p_tokens * (batch_size + 1)'."


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A router's own settings.

    Attributes:
        block_size: tokens of one KV block, the engines' own.
        max_num_queued: requests that may wait in one engine; None: no bound here. The engines keep the same bound, but
            refuse only between two steps.
        seed: random seed of draws between equals.
        index_bytes: memory of the index of the engines' caches.
        predicted_expiry_s: age at which a prediction of what a cache holds is dropped.
    """

    PLACE: ClassVar[str] = ""

    block_size: Annotated[int, at_least(1)] = 16
    max_num_queued: int | None = None
    seed: int = 0
    index_bytes: Annotated[int, at_least(1)] = 1 << 30
    predicted_expiry_s: Annotated[float, above(0)] = 180.0

    def __post_init__(self) -> None:
        check_settings(self)


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, as the router knows it before the first message.

    Attributes:
        num_blocks: blocks of the KV cache; None: unknown.
        speed: relative to the other engines.
    """

    num_blocks: int | None = None
    speed: float = 1.0


DEFAULT_SETTINGS = RouterSettings()
ANY_ENGINE = EngineSpec()
