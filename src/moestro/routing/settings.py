"""Settings of a router and specifications of its engines."""

from __future__ import annotations

import msgspec

from moestro.errors import ConfigError


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a router.

    Attributes:
        block_size: tokens per KV block, equal to the engines' block size.
        max_num_queued: limit of waiting requests per engine; None means no limit. The engines enforce the same limit,
            but only answer between two steps, which delays a refusal.
        seed: seed of the random draws.
        index_bytes: memory limit of the prefix index, bytes.
        predicted_expiry_s: age at which a predicted cache entry is dropped, seconds.
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
    """Properties of an engine that are known before its first report.

    Attributes:
        num_blocks: size of the engine's KV cache in blocks; None means unknown.
        speed: speed relative to the other engines.
    """

    num_blocks: int | None = None
    speed: float = 1.0


DEFAULT_SETTINGS = RouterSettings()
ANY_ENGINE = EngineSpec()
