"""Publishes a rank's prefix cache in vLLM's format, for any router that listens.

A message has three frames: topic, number, batch. The last batches are kept for listeners that missed some. Sources:
vllm/distributed/kv_events.py and vllm/config/kv_events.py (field names, frames, replay, ports of data-parallel ranks).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from moestro.config.kv_events_settings import KvEventsSettings
from moestro.engine.cache_events import CacheEvents, RemovedBlocks, StoredBlocks
from moestro.errors import ConfigError
from moestro.wire.kv_events import END_OF_REPLAY
from moestro.worker.wake_pipe import WakePipe

_MEDIUM = "GPU"  # vLLM's name of a cache's first tier
_LINGER_MS = 500  # for the last batches, if a listener does not keep up
_SEQ_BYTES = 8
_MAX_FRAME_BYTES = 4096  # of what a listener sends: a subscription, or a request for a replay
_HANDSHAKE_MS = 5000  # for a peer's handshake
_MAX_REQUESTS = 8  # held for each peer


class KvPublisher:
    """Publishes one rank's cache events. A thread owns the sockets, so that the rank's loop never waits for them.

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
        self._topic = settings.topic.encode()
        self._num_published = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._outbox: deque[bytes] = deque()
        self._to_send = WakePipe()
        self._is_closing = False
        self._context = zmq.Context()
        self._context.sndhwm = settings.hwm
        self._events = self._bound(zmq.PUB, settings.endpoint)
        self._replay = None if settings.replay_endpoint is None else self._bound(zmq.ROUTER, settings.replay_endpoint)
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Send the cache's events since the last call as one batch; without events, send nothing."""
        events = self._cache.take()
        if events:
            self._outbox.append(encode_batch(time.time(), events, rank=self._rank, block_size=self._block_size))
            self._to_send.wake()

    def close(self) -> None:
        """Send queued batches and disconnect."""
        self._is_closing = True
        self._to_send.wake()
        self._thread.join()

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.RCVHWM, _MAX_REQUESTS)
        address = of_rank(endpoint, self._rank)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"--kv-events-config: {address} cannot be bound: {error}") from None
        return socket

    # --- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._to_send.fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not (self._is_closing and not self._outbox):
            ready = {each for each, _ in poller.poll()}
            if self._to_send.fd in ready:
                self._to_send.clear()
            while self._outbox:
                number = self._num_published.to_bytes(_SEQ_BYTES, "big")
                payload = self._outbox.popleft()
                self._num_published += 1
                self._kept.append((number, payload))
                self._events.send_multipart([self._topic, number, payload])
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
        self._context.destroy(linger=_LINGER_MS)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Repeat the requested batches, as far as they are kept. Malformed requests are ignored."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != _SEQ_BYTES:
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        first = self._num_published - len(self._kept)
        for at in range(max(0, start - first), len(self._kept)):
            replay.send_multipart([client, b"", *self._kept[at]])
        replay.send_multipart([client, b"", END_OF_REPLAY, b""])


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
    if isinstance(event, RemovedBlocks):
        return {"type": "BlockRemoved", "block_hashes": [_number(name) for name in event.names], "medium": _MEDIUM}
    stored = {
        "type": "BlockStored",
        "block_hashes": [_number(name) for name in event.names],
        "parent_block_hash": None if event.parent is None else _number(event.parent),
        "token_ids": np.frombuffer(event.token_ids, np.int32).tolist(),
        "block_size": block_size,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": None,
    }
    if event.cache_salt is not None:
        stored["extra_keys"] = [[event.cache_salt], *[None] * (len(event.names) - 1)]
    return stored


def _number(name: bytes) -> int:
    """Published name of a block: 64 bits, which every router can read and which suffice for any cache."""
    return int.from_bytes(name[:8], "big")
