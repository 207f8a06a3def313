"""KV events on the wire: decodes what vLLM and SGLang publish about their prefix caches. Stateless.

A message has three frames: topic, sequence number (8 bytes, big endian) and a msgpack payload, the batch
`[ts, events, data_parallel_rank]`. An event is either an array that begins with its type's name and continues in the
order of the publisher's fields (vLLM until mid-2026, SGLang until its switch), or a map with the key "type". Sources:
vllm/distributed/kv_events.py and sglang/srt/disaggregation/kv_events.py in their versions to date. Newer additions are
tolerated: unknown keys are ignored, unknown events are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from moestro.errors import MoestroError

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)  # replaces the sequence number, with an empty payload
_SEQ_BYTES = 8

BlockKey = int | bytes  # the publisher's own, opaque name of a block
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class KvEventError(MoestroError):
    """A message that is not a KV event batch."""


class BlockStored(msgspec.Struct, frozen=True):
    """Consecutive full blocks that a cache now holds, after `parent_block_hash`.

    Attributes:
        parent_block_hash: preceding block; None if the first of these blocks begins a prompt.
        token_ids: tokens of all the blocks; empty if the publisher does not know them.
        lora_id: id of an adapter without a published name.
        medium: tier; None if the publisher has only one.
        extra_keys: for each block, what else its hash covers: the adapter's name, `[multimodal id, offset]`, the salt
            of a first block, digests of prompt embeddings.
        group_idx: group of layers, in models whose layers are cached differently.
        kv_cache_spec_kind: kind of attention in that group.
        cache_salt: the salt, in SGLang's messages.
        locality: "REMOTE" if the blocks are not in this engine.
    """

    block_hashes: list[BlockKey]
    parent_block_hash: BlockKey | None
    token_ids: list[TokenId]
    block_size: int
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True):
    """Blocks that a tier of a cache no longer holds.

    Attributes:
        remaining_copy_counts: for each block, copies that the tier still has.
    """

    block_hashes: list[BlockKey]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    remaining_copy_counts: list[int] | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """The cache is empty."""


class UnreadableRemoval(msgspec.Struct, frozen=True):
    """A removal whose blocks cannot be read."""


Known = TypeVar("Known", BlockStored, BlockRemoved)
Event = BlockStored | BlockRemoved | AllBlocksCleared | UnreadableRemoval


class KvMessage(NamedTuple):
    """One message of a publisher.

    Attributes:
        seq: its sequence number; None at the end of a replay.
    """

    seq: int | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One payload.

    Attributes:
        ts_s: time of publication, seconds since 1970 on the publisher's clock.
        dp_rank: rank of the cache within a data-parallel server.
        num_unknown: events of unknown types.
        num_illegible: stored blocks that cannot be read and so do not count as held.
    """

    ts_s: float
    events: list[Event]
    dp_rank: int | None
    num_unknown: int
    num_illegible: int


# Order of an array's values behind the name of the type.
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_METADATA_AT = _STORED_FIELDS.index("lora_name")  # SGLang has a map at this place


def decode_frames(frames: list[bytes]) -> KvMessage:
    """Decode a published message (topic, number, payload) or a replayed one.

    A replayed message has an empty frame (the topic in newer vLLM), the number and the payload.

    Raises:
        KvEventError: the frames are not those of a KV event publisher.
    """
    if len(frames) < 2 or len(frames[-2]) != _SEQ_BYTES:
        sizes = [len(frame) for frame in frames]
        raise KvEventError(f"expected frames of topic, 8 bytes of sequence number, payload; got {sizes} bytes")
    if frames[-2] == END_OF_REPLAY:
        return KvMessage(None, b"")
    return KvMessage(int.from_bytes(frames[-2], "big"), frames[-1])


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one payload's events, in order.

    Raises:
        KvEventError: the payload is no batch, so the cache's state is unknown from here on.
    """
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:  # also of texts, map keys and depth
        raise KvEventError(f"not msgpack: {error}") from None
    if isinstance(raw, dict):
        raw = [raw.get("ts"), raw.get("events"), raw.get("data_parallel_rank", raw.get("attn_dp_rank"))]
    if not isinstance(raw, list) or len(raw) < 2 or not isinstance(raw[1], list):
        raise KvEventError("expected [ts, events, data_parallel_rank]")
    if not isinstance(raw[0], int | float):
        raise KvEventError(f"expected a time stamp first, got {type(raw[0]).__name__}")
    dp_rank = raw[2] if len(raw) > 2 and isinstance(raw[2], int) else None
    events: list[Event] = []
    num_unknown = num_illegible = 0
    for raw_event in raw[1]:
        name, fields = _named_fields(raw_event)
        if name == "BlockStored":
            event = _convert(fields, BlockStored)
            if event is None:
                num_illegible += 1  # not knowing of a held block costs a hit, and nothing else
            else:
                events.append(event)
        elif name == "BlockRemoved":
            events.append(_convert(fields, BlockRemoved) or UnreadableRemoval())
        elif name == "AllBlocksCleared":
            events.append(AllBlocksCleared())
        else:
            num_unknown += 1
    return EventBatch(float(raw[0]), events, dp_rank, num_unknown, num_illegible)


def _named_fields(raw: Any) -> tuple[str | None, dict[str, Any]]:
    """Type and fields of an event in either encoding."""
    if isinstance(raw, dict):
        return raw.get("type"), raw
    if not isinstance(raw, list) or not raw or not isinstance(raw[0], str):
        return None, {}
    name, values = raw[0], raw[1:]
    if name == "BlockRemoved":
        return name, dict(zip(_REMOVED_FIELDS, values, strict=False))
    metadata = {}
    if len(values) > _METADATA_AT and isinstance(values[_METADATA_AT], dict):
        metadata, values = values[_METADATA_AT], values[:_METADATA_AT]
    return name, dict(zip(_STORED_FIELDS, values, strict=False)) | metadata


def _convert(fields: dict[str, Any], to: type[Known]) -> Known | None:
    try:
        return msgspec.convert(fields, to)
    except msgspec.ValidationError:
        return None
