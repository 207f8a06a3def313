"""Publishes a rank's prefix cache in vLLM's format, for any router that listens.

A message has three frames: topic, number, batch. The last batches are kept for listeners that missed some. Sources:
vllm/distributed/kv_events.py and vllm/config/kv_events.py (field names, frames, replay, ports of data-parallel ranks).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from moestro.config.kv_events_settings import KvEventsSettings
from moestro.engine.cache_events import CacheEvents, RemovedBlocks, StoredBlocks
from moestro.errors import ConfigError
from moestro.worker.kv_events.listeners import BatchLog
from moestro.worker.kv_events.server import KvServer

_DEVICE, _HOST = "GPU", "CPU"  # media as vLLM names them, also where the device is a CPU


class KvPublisher:
    """Publishes one rank's cache events. The rank's loop never waits for a listener.

    Args:
        settings: endpoints are those of rank 0; the ports of rank r are r higher.
        rank: rank of this cache.
        cache: source of the events.
        block_size: tokens of a block.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """

    def __init__(self, settings: KvEventsSettings, rank: int, cache: CacheEvents, block_size: int) -> None:
        self._cache = cache
        self._rank = rank
        self._block_size = block_size
        replay = None if settings.replay_endpoint is None else of_rank(settings.replay_endpoint, rank)
        log = BatchLog(settings.topic.encode(), settings.buffer_steps, settings.hwm)
        try:
            self._server = KvServer(log, of_rank(settings.endpoint, rank), replay)
        except OSError as error:
            raise ConfigError(f"--kv-events-config: {error.filename} cannot be bound: {error.strerror}") from None

    def publish(self) -> None:
        """Send the cache's events since the last call as one batch; without events, send nothing."""
        events = self._cache.take()
        if events:
            self._server.publish(encode_batch(time.time(), events, rank=self._rank, block_size=self._block_size))

    def close(self) -> None:
        """Disconnect all listeners."""
        self._server.close()


def encode_batch(ts_s: float, events: Sequence[StoredBlocks | RemovedBlocks], *, rank: int, block_size: int) -> bytes:
    """Encode one payload, as vLLM's listeners and `wire.kv_events.decode_batch` read it.

    Args:
        ts_s: present time, seconds since 1970.
    """
    return msgspec.msgpack.encode([ts_s, [_on_the_wire(each, block_size) for each in events], rank])


def of_rank(endpoint: str, rank: int) -> str:
    """Endpoint of one rank: `rank` ports above that of the first."""
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


def _on_the_wire(event: StoredBlocks | RemovedBlocks, block_size: int) -> dict[str, Any]:
    medium = _HOST if event.is_on_host else _DEVICE
    if isinstance(event, RemovedBlocks):
        return {"type": "BlockRemoved", "block_hashes": [_number(name) for name in event.names], "medium": medium}
    stored = {
        "type": "BlockStored",
        "block_hashes": [_number(name) for name in event.names],
        "parent_block_hash": None if event.parent is None else _number(event.parent),
        "token_ids": np.frombuffer(event.token_ids, np.int32).tolist(),
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }
    if event.cache_salt is not None:
        stored["extra_keys"] = [[event.cache_salt], *[None] * (len(event.names) - 1)]
    return stored


def _number(name: bytes) -> int:
    """Published name of a block: 64 bits, which every router can read and which suffice for any cache."""
    return int.from_bytes(name[:8], "big")
