"""What a router is told: once, and of each engine."""

from __future__ import annotations

import msgspec

from moestro.errors import ConfigError


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

    block_size: int = 16
    max_num_queued: int | None = None
    seed: int = 0
    index_bytes: int = 1 << 30
    predicted_expiry_s: float = 180.0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}")
        if self.index_bytes < 1 or not self.predicted_expiry_s > 0:
            raise ConfigError("index_bytes and predicted_expiry_s must be above 0")


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
