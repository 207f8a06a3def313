"""KV events on the wire: decodes what vLLM and SGLang publish about their prefix caches. Stateless.

A message has three frames: topic, sequence number (8 bytes, big endian) and a msgpack payload, the batch
`[ts, events, data_parallel_rank]`. An event is either an array that begins with its type's name and continues in the
order of the publisher's fields (vLLM until mid-2026, SGLang until its switch), or a map with the key "type". Sources:
vllm/distributed/kv_events.py and sglang/srt/disaggregation/kv_events.py in their versions to date. Newer additions are
tolerated: unknown keys are ignored, unknown events are counted.

A publisher is another machine's process and may send anything. Every value is therefore decoded straight into its type,
with a bound on its size, and a batch is decoded event by event, so that its reader can pause between two of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from moestro.errors import MoestroError

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)  # replaces the sequence number, with an empty payload
_SEQ_BYTES = 8

MAX_MESSAGE_BYTES = 4 << 20
"""Limit of one message. A publisher sends one batch a step. The largest honest one that we know of stores 131,072
tokens in pages of 16: 0.7 MB of tokens, 8,192 hashes of 34 bytes stored and as many removed, and 0.2 kB for each page
where a publisher sends one event a page: together less than 3 MB.
"""
_MAX_EVENTS = 1 << 16  # of one batch; the batch above has 16,384
_MAX_BLOCKS = 1 << 16  # of one event
_MAX_TOKENS = 1 << 20  # of one event; more than MAX_MESSAGE_BYTES holds of a real vocabulary
_MAX_HASH_BYTES = 64  # SHA-512; vLLM's own are SHA-256
_MAX_NAME_CHARS = 4096  # of adapters, salts and media
_MAX_EXTRA_KEYS = 16  # of one block: an adapter, a salt, and pictures in it

Name = Annotated[str, Meta(max_length=_MAX_NAME_CHARS)]
BlockKey = int | Annotated[bytes, Meta(max_length=_MAX_HASH_BYTES)]  # the publisher's own, opaque name of a block
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_Pair = tuple[TokenId, TokenId]
# What a list of tokens holds: tokens, or with speculative decoding by EAGLE (SGLang) each token and the one behind it.
_Token = TypeVar("_Token")
_Tokens = Annotated[list[_Token], Meta(max_length=_MAX_TOKENS)]
BlockKeys = Annotated[list[BlockKey], Meta(max_length=_MAX_BLOCKS)]
_BlockExtras = Annotated[list[msgspec.Raw], Meta(max_length=_MAX_EXTRA_KEYS)]
ExtraKeys = Annotated[list[_BlockExtras | None], Meta(max_length=_MAX_BLOCKS)]


class KvEventError(MoestroError):
    """A message that is not a KV event batch."""


class _StoredMap(msgspec.Struct, Generic[_Token], frozen=True):
    """The fields of `BlockStored`, with tokens or pairs."""

    block_hashes: BlockKeys
    parent_block_hash: BlockKey | None
    token_ids: _Tokens[_Token]
    block_size: int
    lora_id: int | Name | None = None
    medium: Name | None = None
    lora_name: Name | None = None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: Name | None = None
    cache_salt: Name | None = None
    locality: Name | None = None


class BlockStored(_StoredMap[TokenId], frozen=True):
    """Consecutive full blocks that a cache now holds, after `parent_block_hash`.

    Attributes:
        parent_block_hash: preceding block; None if the first of these blocks begins a prompt.
        token_ids: tokens of all the blocks; empty if the publisher does not know them. `decode_event` replaces pairs of
            EAGLE by the first token of each.
        lora_id: id of an adapter without a published name.
        medium: tier; None if the publisher has only one.
        extra_keys: for each block, what else its hash covers: the adapter's name, `[multimodal id, offset]`, the salt
            of a first block, digests of prompt embeddings. Encoded, because only texts matter (`text_of`).
        group_idx: group of layers, in models whose layers are cached differently.
        kv_cache_spec_kind: kind of attention in that group.
        cache_salt: the salt, in SGLang's messages.
        locality: "REMOTE" if the blocks are not in this engine.
    """


class BlockRemoved(msgspec.Struct, frozen=True):
    """Blocks that a tier of a cache no longer holds.

    Attributes:
        remaining_copy_counts: for each block, copies that the tier still has.
    """

    block_hashes: BlockKeys
    medium: Name | None = None
    group_idx: int | None = None
    locality: Name | None = None
    remaining_copy_counts: Annotated[list[int], Meta(max_length=_MAX_BLOCKS)] | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """The cache is empty."""


class UnknownEvent(msgspec.Struct, frozen=True):
    """An event of a type that this version does not know."""


class UnreadableStore(msgspec.Struct, frozen=True):
    """Stored blocks that cannot be read. Not knowing of a held block costs a hit, and nothing else."""


class UnreadableRemoval(msgspec.Struct, frozen=True):
    """An event that removes blocks, or may do so, and cannot be read."""


Event = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent | UnreadableStore | UnreadableRemoval


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
        events: encoded events, for `decode_event`, in order.
        dp_rank: rank of the cache within a data-parallel server.
    """

    ts_s: float
    events: list[msgspec.Raw]
    dp_rank: int | None


_Events = Annotated[list[msgspec.Raw], Meta(max_length=_MAX_EVENTS)]


class _BatchArray(msgspec.Struct, array_like=True):
    ts: float
    events: _Events
    dp_rank: int | None = None


class _BatchMap(msgspec.Struct):
    ts: float
    events: _Events
    data_parallel_rank: int | None = None
    attn_dp_rank: int | None = None


class _ArrayTag(msgspec.Struct, array_like=True):
    type: str


class _MapTag(msgspec.Struct):
    type: str = ""


class _StoredMetadata(msgspec.Struct):
    """What SGLang's arrays have in the place of `lora_name`: a map of the later fields."""

    lora_name: Name | None = None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: Name | None = None
    cache_salt: Name | None = None
    locality: Name | None = None


class _StoredArray(msgspec.Struct, Generic[_Token], array_like=True, tag="BlockStored"):
    block_hashes: BlockKeys
    parent_block_hash: BlockKey | None
    token_ids: _Tokens[_Token]
    block_size: int
    lora_id: int | Name | None = None
    medium: Name | None = None
    lora_name: Name | _StoredMetadata | None = None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: Name | None = None

    def values(self) -> dict[str, Any]:
        """The fields of `BlockStored`."""
        values = msgspec.structs.asdict(self)
        if isinstance(self.lora_name, _StoredMetadata):
            values |= msgspec.structs.asdict(self.lora_name)
        return values


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: BlockKeys
    medium: Name | None = None
    group_idx: int | None = None

    def event(self) -> BlockRemoved:
        return BlockRemoved(self.block_hashes, self.medium, self.group_idx)


_decode_batch_array = msgspec.msgpack.Decoder(_BatchArray).decode
_decode_batch_map = msgspec.msgpack.Decoder(_BatchMap).decode
_decode_array_tag = msgspec.msgpack.Decoder(_ArrayTag).decode
_decode_map_tag = msgspec.msgpack.Decoder(_MapTag).decode
_decode_stored_array = msgspec.msgpack.Decoder(_StoredArray[TokenId]).decode
_decode_paired_array = msgspec.msgpack.Decoder(_StoredArray[_Pair]).decode
_decode_removed_array = msgspec.msgpack.Decoder(_RemovedArray).decode
_decode_stored_map = msgspec.msgpack.Decoder(BlockStored).decode
_decode_paired_map = msgspec.msgpack.Decoder(_StoredMap[_Pair]).decode
_decode_name = msgspec.msgpack.Decoder(Name).decode
_decode_removed_map = msgspec.msgpack.Decoder(BlockRemoved).decode

_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)  # also of texts that are not UTF-8, and of depth


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
    """Decode one payload, except for its events.

    Raises:
        KvEventError: the payload is no batch, so the cache's state is unknown from here on.
    """
    try:
        if _is_map(payload):
            named = _decode_batch_map(payload)
            rank = named.attn_dp_rank if named.data_parallel_rank is None else named.data_parallel_rank
            return EventBatch(named.ts, named.events, rank)
        batch = _decode_batch_array(payload)
    except _ERRORS as error:
        raise KvEventError(f"expected [ts, events, data_parallel_rank]: {error}") from None
    return EventBatch(batch.ts, batch.events, batch.dp_rank)


def decode_event(encoded: msgspec.Raw) -> Event:
    """Decode one event of a batch."""
    is_map = _is_map(encoded)
    try:
        name = (_decode_map_tag if is_map else _decode_array_tag)(encoded).type
    except _ERRORS:
        # Anything else than a container is no event. A damaged one may be a removal.
        return UnreadableRemoval() if is_map else UnknownEvent()
    if name == "BlockStored":
        try:
            return _decode_stored_map(encoded) if is_map else BlockStored(**_decode_stored_array(encoded).values())
        except _ERRORS:
            return _decode_paired(encoded, is_map=is_map)
    if name == "BlockRemoved":
        try:
            return _decode_removed_map(encoded) if is_map else _decode_removed_array(encoded).event()
        except _ERRORS:
            return UnreadableRemoval()
    return AllBlocksCleared() if name == "AllBlocksCleared" else UnknownEvent()


def _decode_paired(encoded: msgspec.Raw, *, is_map: bool) -> BlockStored | UnreadableStore:
    """Decode stored blocks whose tokens are pairs of a token and the next one, as tokens."""
    try:
        if is_map:
            values = msgspec.structs.asdict(_decode_paired_map(encoded))
        else:
            values = _decode_paired_array(encoded).values()
    except _ERRORS:
        return UnreadableStore()
    pairs: list[tuple[int, int]] = values.pop("token_ids")
    if any(pair[1] != following[0] for pair, following in pairwise(pairs)):
        return UnreadableStore()
    return BlockStored(token_ids=[token for token, _ in pairs], **values)


def stored_parts(event: BlockStored, num_blocks: int) -> Iterator[BlockStored]:
    """Split an event into events of at most `num_blocks` blocks, which together store the same.

    An event whose columns do not fit each other stays whole: its blocks have no names.
    """
    hashes, size, extras = event.block_hashes, event.block_size, event.extra_keys
    is_regular = len(event.token_ids) in (0, len(hashes) * size) and (not extras or len(extras) == len(hashes))
    if len(hashes) <= num_blocks or not is_regular:
        yield event
        return
    for at in range(0, len(hashes), num_blocks):
        end = at + num_blocks
        yield msgspec.structs.replace(
            event,
            block_hashes=hashes[at:end],
            parent_block_hash=hashes[at - 1] if at else event.parent_block_hash,
            token_ids=event.token_ids[at * size : end * size] if event.token_ids else [],
            extra_keys=extras[at:end] if extras else None,
        )


def removed_parts(event: BlockRemoved, num_blocks: int) -> Iterator[BlockRemoved]:
    """Split an event into events of at most `num_blocks` blocks, which together remove the same."""
    copies = event.remaining_copy_counts
    if len(event.block_hashes) <= num_blocks:
        yield event
        return
    for at in range(0, len(event.block_hashes), num_blocks):
        end = at + num_blocks
        yield msgspec.structs.replace(
            event,
            block_hashes=event.block_hashes[at:end],
            remaining_copy_counts=copies[at:end] if copies else None,
        )


def text_of(extra_key: msgspec.Raw) -> str | None:
    """Return an extra key that is a text; None for one of another kind."""
    try:
        return _decode_name(extra_key)
    except _ERRORS:
        return None


def _is_map(encoded: bytes | msgspec.Raw) -> bool:
    """Whether a msgpack value is a map: fixmap, map 16 or map 32."""
    first = memoryview(encoded)[:1]
    return bool(first) and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))
