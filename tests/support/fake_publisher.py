"""A prefix cache that publishes as vLLM does, and remembers after each batch what it held: the slow oracle."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from moestro.core.hashing import hash_blocks, hash_key, split_hashes

BLOCK_SIZE = 4
MODEL = "m"
STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind",
)  # fmt: skip
REMOVED = ("block_hashes", "medium", "group_idx")


def as_array(event: dict[str, Any]) -> list[Any]:
    """The older encoding of an event: values in the order of the fields, trailing ones that are None left out."""
    fields = {"BlockStored": STORED, "BlockRemoved": REMOVED}.get(event["type"], ())
    values = [event.get(name) for name in fields]
    while values and values[-1] is None:
        values.pop()
    return [event["type"], *values]


def stored(hashes: list, parent: Any, tokens: list[int], **more: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": BLOCK_SIZE, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    return event | more


def removed(hashes: list, medium: str = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium} | more


def payload(*events: dict[str, Any], rank: int = 0, ts: float = 1.0, arrays: bool = False) -> bytes:
    return msgspec.msgpack.encode([ts, [as_array(e) if arrays else e for e in events], rank])


def frames(seq: int, body: bytes) -> list[bytes]:
    return [b"kv@e1@m", seq.to_bytes(8, "big"), body]


END = [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]


def replay_frames(seq: int, body: bytes, *, has_topic: bool = True) -> list[bytes]:
    return [b"", *([b"kv@e1@m"] if has_topic else []), seq.to_bytes(8, "big"), body]


class Sink:
    """What a router would believe of the engines."""

    def __init__(self) -> None:
        self.held: dict[int, set[bytes]] = {}
        self.hosted: dict[int, set[bytes]] = {}
        self.calls: list[str] = []

    def kv_hosted(self, engine: int, hashes: bytes, now_ns: int) -> None:
        self.held.setdefault(engine, set()).update(split_hashes(hashes))
        self.hosted.setdefault(engine, set()).update(split_hashes(hashes))
        self.calls.append("hosted")

    def kv_stored(self, engine: int, hashes: bytes, now_ns: int) -> None:
        self.held.setdefault(engine, set()).update(split_hashes(hashes))
        self.hosted.setdefault(engine, set()).difference_update(split_hashes(hashes))
        self.calls.append("stored")

    def kv_removed(self, engine: int, hashes: bytes, now_ns: int) -> None:
        for known in (self.held, self.hosted):
            known.setdefault(engine, set()).difference_update(split_hashes(hashes))
        self.calls.append("removed")

    def kv_cleared(self, engine: int, now_ns: int) -> None:
        self.held[engine], self.hosted[engine] = set(), set()
        self.calls.append("cleared")

    def kv_incomplete(self, engine: int, now_ns: int) -> None:
        self.calls.append("incomplete")

    def reports_all_blocks(self, engine: int) -> bool:
        return True

    def kv_lost(self, engine: int, now_ns: int) -> None:
        self.held[engine], self.hosted[engine] = set(), set()
        self.calls.append("lost")


@dataclass(frozen=True)
class Prompt:
    """Tokens and all else that names their blocks; `picture` is the block that holds one, if any."""

    tokens: tuple[int, ...]
    adapter: str | None = None
    salt: str | None = None
    picture: int | None = None

    def names(self) -> list[bytes | None]:
        """Ours, made from the whole prompt at once; None from a picture on."""
        key = hash_key(self.adapter or MODEL, None, self.salt)
        names: list[bytes | None] = list(split_hashes(hash_blocks(key, np.array(self.tokens, np.int32), BLOCK_SIZE)))
        if self.picture is not None:
            names[self.picture :] = [None] * len(names[self.picture :])
        return names

    def extra_keys(self, block: int) -> list[Any] | None:
        keys: list[Any] = [self.adapter] if self.adapter else []
        if block == self.picture:
            keys.append(["picture", 1])
        if block == 0 and self.salt:
            keys.append(self.salt)
        return keys or None


class FakePublisher:
    """One process: a cache of two tiers, its batches, and the last of them for replay.

    Attributes:
        published: (number, payload) of all batches.
        names_after: what was held after each batch, in our names.
        hosted_after: those of them that the second tier alone held.
    """

    def __init__(self, rng: np.random.Generator, *, arrays: bool, int_hashes: bool, num_kept: int) -> None:
        self.rng, self.arrays, self.int_hashes = rng, arrays, int_hashes
        self.seed = rng.bytes(8)
        self.published: list[tuple[int, bytes]] = []
        self.names_after: list[set[bytes]] = []
        self.hosted_after: list[set[bytes]] = []
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=num_kept)
        self._pending: list[dict[str, Any]] = []
        self._held: dict[str, dict[Any, tuple[Prompt, int, bytes | None]]] = {"GPU": {}, "CPU": {}}

    def compute(self, prompt: Prompt) -> None:
        """Store what of a prompt is not held yet, from the first block on that is not."""
        hashes, names = self._hashes(prompt), prompt.names()
        cached = 0
        while cached < len(hashes) and hashes[cached] in self._held["GPU"]:
            cached += 1
        if cached == len(hashes):
            return
        for at in range(cached, len(hashes)):
            self._held["GPU"][hashes[at]] = (prompt, at, names[at])
        self._pending.append(self._stored(prompt, hashes, cached, len(hashes), "GPU"))

    def offload(self, *, tells_tokens: bool) -> None:
        """Copy a random block to the second tier."""
        if not self._held["GPU"]:
            return
        theirs = list(self._held["GPU"])[self.rng.integers(len(self._held["GPU"]))]
        prompt, at, _ = self._held["CPU"][theirs] = self._held["GPU"][theirs]
        if tells_tokens:
            self._pending.append(self._stored(prompt, self._hashes(prompt), at, at + 1, "CPU"))
        else:
            event = stored([theirs], None, [], medium="CPU", block_size=0, group_idx=0)
            self._pending.append(event)

    def evict(self, tier: str) -> None:
        """Drop a random block of a tier."""
        held = self._held[tier]
        if held:
            theirs = list(held)[self.rng.integers(len(held))]
            del held[theirs]
            self._pending.append(removed([theirs], tier, group_idx=0))

    def clear(self) -> None:
        for held in self._held.values():
            held.clear()
        self._pending.append({"type": "AllBlocksCleared"})

    def publish(self) -> None:
        """What happened since the last time, as one batch."""
        if not self._pending:
            return
        if self.rng.random() < 0.2:
            self._pending.append({"type": "BlockBlessed", "block_hashes": [1]})
        seq = len(self.published)
        batch = (seq, payload(*self._pending, ts=float(self.rng.random()), arrays=self.arrays))
        self._pending = []
        self.published.append(batch)
        self.buffer.append(batch)
        on_device, on_host = ({name for _, _, name in held.values() if name} for held in self._held.values())
        self.names_after.append(on_device | on_host)
        self.hosted_after.append(on_host - on_device)

    def _hashes(self, prompt: Prompt) -> list[Any]:
        """Of the process's own making: seeded, chained, over tokens and all else."""
        hashes, parent = [], self.seed
        for at in range(len(prompt.tokens) // BLOCK_SIZE):
            tokens = prompt.tokens[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]
            parent = sha256(parent + repr((tokens, prompt.adapter, prompt.extra_keys(at))).encode()).digest()
            hashes.append(int.from_bytes(parent[-8:], "big") if self.int_hashes else parent)
        return hashes

    def _stored(self, prompt: Prompt, hashes: list[Any], first: int, end: int, medium: str) -> dict[str, Any]:
        return stored(
            hashes[first:end],
            hashes[first - 1] if first else None,
            list(prompt.tokens[first * BLOCK_SIZE : end * BLOCK_SIZE]),
            medium=medium,
            lora_id=7 if prompt.adapter else None,
            lora_name=prompt.adapter,
            extra_keys=[prompt.extra_keys(at) for at in range(first, end)],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
