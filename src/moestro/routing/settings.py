"""What a router is told: once, and of each engine."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from moestro.core.setting_checks import above, at_least, check_settings


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a router is told once.

    Attributes:
        block_size: tokens of one KV block, the engines' own.
        max_num_queued: requests that may wait in one engine; None: no bound here. The engines keep the same bound, but
            answer between two steps, which is late for a refusal.
        seed: of the draws.
        index_bytes: memory for what the engines' caches hold.
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
    """What is known of an engine before it says anything.

    Attributes:
        num_blocks: that its KV cache holds; None: not known.
        speed: relative to the others'.
    """

    num_blocks: int | None = None
    speed: float = 1.0


DEFAULT_SETTINGS = RouterSettings()
ANY_ENGINE = EngineSpec()
