"""The content of one publisher's cache, under the publisher's names and under Moestro's.

A publisher names blocks by its own hashes, whose seeds and algorithms need not be known here. Its events carry the
tokens, so `core.hashing` names each block anew, continuing the chain of its parent's name. A block that cannot be named
is left out: an event that is not understood costs a hit and never invents one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import ROOT, block_hash, hash_key
from moestro.wire.kv_events import BlockKey, BlockRemoved, BlockStored, text_of

# Groups of layers whose blocks stay until they are evicted. Blocks of a sliding window leave one by one, and a
# recurrent layer has a state instead; neither tells how much of a prompt is cached.
_WHOLE_PROMPT_KINDS = {None, "full_attention", "mla_attention", "sink_full_attention"}
_FIRST_TIER = "GPU"  # tier of an event that names none
_NUM_LEFT = 1 << 14
_NUM_OUTSIDE = 1 << 18
_MOST_IN_CHUNK = 64  # blocks that the work of one call stays bounded by; LMCache's chunks have 256 tokens
_AMBIGUOUS = "different blocks have the same hash: upgrade the engine (SGLang)"

MAX_BLOCKS = 1 << 20
"""Limit of the blocks of one engine: about 300 MB under both names. 16 million tokens in blocks of 16 are more than
a host with 1 TB keeps of any network in use. The engine's own count of its blocks would be no bound, because a faulty
engine makes it up too.
"""


class NamingRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a publisher's blocks get Moestro's names.

    Attributes:
        model: name by which clients request the model; for an adapter they use the adapter's name.
        block_size: tokens of a block, as in the `hash_blocks` of requests.
        tiers: upper-case names of the media whose blocks count as hits.
        max_num_blocks: most blocks that are followed. A cache that claims more is not followed.
    """

    model: str
    block_size: int
    tiers: tuple[str, ...] = ("GPU", "CPU", "CPU_PINNED")
    max_num_blocks: int = MAX_BLOCKS


@dataclass(slots=True)
class NamingCounts:
    """Numbers of blocks by outcome.

    Attributes:
        stored: named blocks.
        removed: blocks that no tier holds any more.
        orphaned: blocks with an unknown parent.
        unnamed: blocks whose hash covers something that Moestro's names do not, such as a picture, and those behind
            them. The router looks for no prompt that has them.
        malformed: blocks of events without as many tokens or extra keys as blocks, or without an adapter's name.
        other_size: blocks of another size than the router's, but for chunks of whole blocks in other tiers.
        other_tier: blocks in media without hits, or in another machine.
        other_group: blocks of layers that are not followed.
        over_bound: blocks that were not followed because there would be more than `max_num_blocks`.
    """

    stored: int = 0
    removed: int = 0
    orphaned: int = 0
    unnamed: int = 0
    malformed: int = 0
    other_size: int = 0
    other_tier: int = 0
    other_group: int = 0
    over_bound: int = 0


@dataclass(slots=True)
class _Block:
    """The block that a publisher's hash names, or the blocks of a chunk.

    Attributes:
        name: name of the last block.
        key: key of the names.
        tiers: bits of the tiers that hold it.
        before: names of the other blocks of a chunk, in order.
    """

    name: bytes
    key: bytes
    tiers: int
    before: tuple[bytes, ...] = ()

    @property
    def names(self) -> tuple[bytes, ...]:
        """Names of all blocks, in order."""
        return (*self.before, self.name)


class NamingGap(StrEnum):
    """Reasons for which stored blocks that a prompt could hit are missing."""

    ORPHANED = "orphaned"
    MALFORMED = "malformed"
    OTHER_SIZE = "other_size"


# For log lines. A line of its own reports another block size.
GAPS_IN_WORDS: Mapping[NamingGap, str] = {
    NamingGap.ORPHANED: "blocks were stored behind a block that no event has stored",
    NamingGap.MALFORMED: "an event has not as many tokens or extra keys as blocks, or no name of its adapter",
}


class PlacedBlocks(NamedTuple):
    """Blocks by the place where a cache has them now, as packed names.

    Attributes:
        stored: blocks on the device.
        hosted: blocks in other tiers alone, from which the engine copies them back.
        removed: blocks that no tier has any more.
    """

    stored: bytes = b""
    hosted: bytes = b""
    removed: bytes = b""


UNPLACED = PlacedBlocks()


class _Chain(NamedTuple):
    """Name of the previous block, the key, and the extra keys of the next block that the key covers."""

    parent: bytes
    key: bytes
    explained: tuple[str, ...]


class NamedBlocks:
    """Blocks of one publisher's process.

    Attributes:
        block_size_seen: tokens of the publisher's blocks; None until an event tells.
        num_hosted: held blocks that are not on the device.
        fault: why no block counts as held any more; empty means none. Either one hash named two different blocks (as in
            SGLang before its hashes were chained), or the cache claims to hold too many.
        gap: why stored blocks are missing, the first reason since the cache was empty; None means that none are.
    """

    def __init__(self, rules: NamingRules, counts: NamingCounts) -> None:
        self.block_size_seen: int | None = None
        self.num_hosted = 0
        self.fault = ""
        self.gap: NamingGap | None = None
        self._rules = rules
        self._counts = counts
        self._bits = {tier: 1 << at for at, tier in enumerate(rules.tiers)}
        self._device = self._bits.get(_FIRST_TIER, 0)
        self._group: int | None = None
        self._held: dict[BlockKey, _Block] = {}
        # Hashes of `_held` by name, and those whose block is not on the device. EAGLE's and salted blocks may share one
        # name, and so do the engine's blocks and a connector's chunks.
        self._num_keys: dict[bytes, int] = {}
        self._num_off_device: dict[bytes, int] = {}
        self._num_held = 0  # blocks of `_held`
        self._dropped: list[dict[Any, Any]] = []
        # Names of removed blocks: a sequence in flight may have another copy, and store its next block behind it.
        self._left: OrderedDict[BlockKey, _Block] = OrderedDict()
        self._outside: OrderedDict[BlockKey, None] = OrderedDict()  # unnamed blocks, whose children are unnamed too

    @property
    def num_blocks(self) -> int:
        """Blocks held in any tier that serves hits."""
        return len(self._num_keys)

    def placed(self) -> PlacedBlocks:
        """Packed names of all held blocks, parents mostly before their children."""
        hosted = {name for name in self._num_off_device if self._is_hosted(name)}
        on_device = [name for name in self._num_keys if name not in hosted]
        return PlacedBlocks(b"".join(on_device), b"".join([name for name in self._num_keys if name in hosted]))

    def forget(self) -> None:
        """Drop all blocks, because the cache is empty or its content is unknown. Their memory goes with `tidy`."""
        self.num_hosted = self._num_held = 0
        if self._held:
            self._dropped += (self._held, self._num_keys, self._num_off_device)
            self._held, self._num_keys, self._num_off_device = {}, {}, {}
        self._left.clear()
        self._outside.clear()

    def tidy(self, most: int) -> int:
        """Free the memory of up to `most` dropped blocks, and return how many: a million at once take half a second."""
        num = 0
        while num < most and self._dropped:
            dropped = self._dropped[-1]
            for _ in range(min(most - num, len(dropped))):
                dropped.popitem()
                num += 1
            if not dropped:
                self._dropped.pop()
        return num

    def cleared(self) -> None:
        """Drop all blocks, because the cache is empty. A cache that claimed too many is followed again."""
        self.forget()
        self.gap = None
        if self.fault != _AMBIGUOUS:
            self.fault = ""

    def store(self, event: BlockStored) -> PlacedBlocks:
        """Add blocks. Returns the packed names of those that are hits, in the order of the prompt."""
        tier = self._tier(event.medium, event.locality)
        if not tier:
            self._counts.other_tier += len(event.block_hashes)
            return UNPLACED
        is_on_device = tier == self._device
        if self.fault or not self._follows(event, is_on_device=is_on_device):
            return UNPLACED
        stored: list[bytes] = []
        hosted: list[bytes] = []
        named = self._named(event, is_on_device=is_on_device) if event.token_ids else self._known(event.block_hashes)
        for theirs, block in named:
            held = self._held.get(theirs)
            if held is None:
                self._num_held += 1 + len(block.before)
                if self._num_held > self._rules.max_num_blocks:
                    self._counts.over_bound += len(event.block_hashes)
                    return self._give_up(f"it claims to hold more than {self._rules.max_num_blocks:,} blocks")
                self._left.pop(theirs, None)
                held = self._held[theirs] = block
            elif held.name != block.name:
                return self._give_up(_AMBIGUOUS)
            self._put(held, held.tiers | tier)
            if is_on_device:
                stored.append(held.name)
            else:
                for name in held.names:
                    (hosted if self._is_hosted(name) else stored).append(name)
        self._counts.stored += len(stored) + len(hosted)
        return PlacedBlocks(b"".join(stored), b"".join(hosted))

    def remove(self, event: BlockRemoved) -> PlacedBlocks:
        """Remove blocks. Returns the packed names of those that no tier holds any more, or host memory alone."""
        tier = self._tier(event.medium, event.locality)
        if not tier or not (event.group_idx is None or self._group is None or event.group_idx == self._group):
            return UNPLACED
        copies = event.remaining_copy_counts or ()
        removed: list[bytes] = []
        hosted: list[bytes] = []
        for at, theirs in enumerate(event.block_hashes):
            block = self._held.get(theirs)
            if block is None or (at < len(copies) and copies[at] > 0):
                continue
            self._put(block, block.tiers & ~tier)
            if not block.tiers:
                del self._held[theirs]
                self._num_held -= 1 + len(block.before)
                self._left[theirs] = block
            for name in block.names if block.before else (block.name,):
                if name not in self._num_keys:
                    removed.append(name)
                elif self._is_hosted(name):
                    hosted.append(name)
        while len(self._left) > _NUM_LEFT:
            self._left.popitem(last=False)
        self._counts.removed += len(removed)
        return PlacedBlocks(hosted=b"".join(hosted), removed=b"".join(removed))

    def _put(self, block: _Block, tiers: int) -> None:
        """Set the tiers of a block, and count its names by place."""
        before, device = block.tiers, self._device
        num_keys = bool(tiers) - bool(before)
        num_off_device = (tiers != 0 and not tiers & device) - (before != 0 and not before & device)
        block.tiers = tiers
        if not (num_off_device or self._num_off_device or block.before):  # an engine with one tier
            if num := self._num_keys.get(block.name, 0) + num_keys:
                self._num_keys[block.name] = num
            else:
                del self._num_keys[block.name]
            return
        for name in block.names:
            was_hosted = self._is_hosted(name)
            _count(self._num_keys, name, num_keys)
            _count(self._num_off_device, name, num_off_device)
            self.num_hosted += self._is_hosted(name) - was_hosted

    def _is_hosted(self, name: bytes) -> bool:
        """Return whether a block is held and has to be copied to the device: no block of its name is there."""
        num_off_device = self._num_off_device.get(name, 0)
        return num_off_device > 0 and num_off_device == self._num_keys[name]

    def _give_up(self, fault: str) -> PlacedBlocks:
        self.fault = fault
        self.forget()
        return UNPLACED

    def _leave_out(self, gap: NamingGap, num_blocks: int) -> None:
        """Count blocks that are missing from now on."""
        setattr(self._counts, gap, getattr(self._counts, gap) + num_blocks)
        self.gap = self.gap or gap

    def _leave_outside(self, keys: list[BlockKey]) -> None:
        """Count blocks that no prompt of the router can hit."""
        self._counts.unnamed += len(keys)
        self._outside.update(dict.fromkeys(keys))
        while len(self._outside) > _NUM_OUTSIDE:
            self._outside.popitem(last=False)

    def _tier(self, medium: str | None, locality: str | None) -> int:
        """Bit of a medium; 0 if blocks there are no hits."""
        if locality == "REMOTE":
            return 0
        return self._bits.get((medium or _FIRST_TIER).upper(), 0)

    def _follows(self, event: BlockStored, *, is_on_device: bool) -> bool:
        """Whether the event describes a prompt, in blocks of the right size. The first such group is followed.

        A connector that keeps blocks below the device (LMCache) names no group.
        """
        num_blocks, counts = len(event.block_hashes), self._counts
        if event.kv_cache_spec_kind not in _WHOLE_PROMPT_KINDS:
            counts.other_group += num_blocks
            return False
        if self._group is None:
            self._group = event.group_idx
        if event.group_idx != self._group and (is_on_device or event.group_idx is not None):
            counts.other_group += num_blocks
            return False
        return not event.token_ids or self._has_known_size(event, is_on_device=is_on_device)

    def _has_known_size(self, event: BlockStored, *, is_on_device: bool) -> bool:
        """Whether an event with tokens has blocks of the router's size, or below the device chunks of whole blocks.

        A prompt's last chunk may be smaller. It is left out, because no longer prompt hits it.
        """
        num_blocks, size = len(event.block_hashes), self._rules.block_size
        if is_on_device or event.block_size == size:
            self.block_size_seen = event.block_size
        elif event.block_size % size:
            self._counts.other_size += num_blocks
            return False
        if event.block_size != size and (is_on_device or not 0 < event.block_size <= _MOST_IN_CHUNK * size):
            self._leave_out(NamingGap.OTHER_SIZE, num_blocks)
            return False
        if len(event.token_ids) != num_blocks * event.block_size:
            self._leave_out(NamingGap.MALFORMED, num_blocks)  # some have no hash, and the event does not say which
            return False
        return True

    def _named(self, event: BlockStored, *, is_on_device: bool) -> list[tuple[BlockKey, _Block]]:
        """The event's blocks under both names, up to the first that has none.

        Events of other tiers may lack extra keys (vLLM's offloading does), so a block there that is known from the
        device keeps its name.
        """
        num_blocks, size = len(event.block_hashes), self._rules.block_size
        extras = event.extra_keys or [None] * num_blocks
        chain = self._chain(event, [text_of(extra) for extra in extras[0] or ()])
        if chain is None:
            if event.parent_block_hash in self._outside:
                self._leave_outside(event.block_hashes)
            elif not is_on_device:
                return self._known(event.block_hashes)
            else:
                self._leave_out(NamingGap.ORPHANED, num_blocks)
            return []
        name, key, explained = chain
        if len(extras) != num_blocks or (event.lora_id is not None and event.lora_name is None):
            self._leave_out(NamingGap.MALFORMED, num_blocks)
            return []
        tokens, own = np.asarray(event.token_ids, np.int32), _texts(event.lora_name)
        named = []
        for at, theirs in enumerate(event.block_hashes):
            extra_keys = extras[at]
            is_explained = not extra_keys or all(text_of(extra) in explained for extra in extra_keys)
            if not is_explained or theirs in self._outside:
                self._leave_outside(event.block_hashes[at:])
                break
            block = None if is_on_device else self._held.get(theirs) or self._left.get(theirs)
            if block is None and event.block_size == size:
                block = _Block(block_hash(key, name, tokens[at * size : (at + 1) * size]), key, 0)
            elif block is None:
                block = _chunk(key, name, tokens[at * event.block_size : (at + 1) * event.block_size], size)
            named.append((theirs, block))
            name, key, explained = block.name, block.key, own
        return named

    def _chain(self, event: BlockStored, texts: list[str | None]) -> _Chain | None:
        """The chain that the event's first block continues; None if unknown."""
        if event.parent_block_hash is None:
            salt = event.cache_salt or _salt(texts, event.lora_name)
            key = hash_key(event.lora_name or self._rules.model, None, salt)
            return _Chain(ROOT, key, _texts(event.lora_name, salt))
        parent = self._held.get(event.parent_block_hash) or self._left.get(event.parent_block_hash)
        return _Chain(parent.name, parent.key, _texts(event.lora_name)) if parent else None

    def _known(self, block_hashes: list[BlockKey]) -> list[tuple[BlockKey, _Block]]:
        """Name blocks without tokens (vLLM's offloading sends none) that another tier holds, or held."""
        known = [(theirs, self._held.get(theirs) or self._left.get(theirs)) for theirs in block_hashes]
        found = [(theirs, block) for theirs, block in known if block]
        missing = [theirs for theirs, block in known if not block and theirs not in self._outside]
        self._counts.unnamed += len(known) - len(found) - len(missing)
        if missing:
            self._leave_out(NamingGap.ORPHANED, len(missing))
        return found


def _chunk(key: bytes, name: bytes, tokens: NDArray[np.int32], block_size: int) -> _Block:
    """Name the blocks of a chunk behind the block `name`."""
    names = []
    for begin in range(0, len(tokens), block_size):
        name = block_hash(key, name, tokens[begin : begin + block_size])
        names.append(name)
    return _Block(name, key, 0, tuple(names[:-1]))


def _texts(*texts: str | None) -> tuple[str, ...]:
    """Return the texts that there are."""
    return tuple(text for text in texts if text is not None)


def _salt(texts: list[str | None], lora_name: str | None) -> str | None:
    """The cache salt among a first block's extra keys: the text that is not the adapter's name."""
    others = [text for text in texts if text is not None]
    if lora_name in others:
        others.remove(lora_name)
    return others[0] if others else None


def _count(counts: dict[bytes, int], name: bytes, more: int) -> None:
    """Add to a count, which is left out where it is zero."""
    if num := counts.get(name, 0) + more:
        counts[name] = num
    else:
        counts.pop(name, None)
