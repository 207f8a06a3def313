"""Which engines hold which KV blocks: engines times blocks, bounded, and quick to ask for a whole prompt at once.

A block maps to the set of its holders, one bit an engine in a plain integer. A prompt is looked up by walking its
blocks from the first, and-ing holders: an engine holds as much of it as the unbroken run from the beginning. The cost
is a dictionary look-up a block, and next to nothing an engine: neighbouring blocks mostly share one set object, and
and-ing 4,096 bits takes a tenth of a microsecond.

What an engine says that it holds (KV events) is kept apart from what it is predicted to hold because prompts were sent
there. An engine that says nothing is known by prediction alone: of limited age, and of as many blocks as its cache has.
Of one that does, the prediction covers the time between a decision and the event that follows from it; what the engine
removes is removed from both.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile
from struct import Struct

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import HASH_BYTES

PAIR_BYTES = 300  # of one block of one engine: 140 to 160 on average, twice that where dictionaries have just grown
_UNLIMITED = 1 << 62
_FEW = 8  # so many bits are found one by one, more by unpacking all


@dataclass(slots=True)
class _Engine:
    """One engine's blocks, the least recently used first, each with the time of its last use."""

    said: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    predicted: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    capacity: int = _UNLIMITED


class EngineDump(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's blocks for another router: packed, the least recently used first, and when each was last used."""

    said: bytes
    said_ns: list[int]
    predicted: bytes
    predicted_ns: list[int]


class PrefixIndex:
    """Blocks by engine.

    Args:
        max_bytes: of all of it. Each engine may have an equal share, of what it says and of what is predicted; its
            least recently used blocks go first, and of one prompt the last ones.
        expiry_ns: age at which a prediction is dropped.
    """

    def __init__(self, max_bytes: int, expiry_ns: int) -> None:
        self._max_bytes = max_bytes
        self._expiry_ns = expiry_ns
        self._holders: dict[bytes, int] = {}
        self._engines: list[_Engine] = []
        self._next_to_expire = 0

    def add_engine(self, engine: int) -> None:
        """Make room for `engine`: the next number, or one that was cleared."""
        if engine == len(self._engines):
            self._engines.append(_Engine())
        row = self._engines[engine]
        assert not row.said
        assert not row.predicted
        row.capacity = _UNLIMITED

    def set_capacity(self, engine: int, num_blocks: int | None) -> None:
        """Blocks that `engine` can hold; None: not known."""
        self._engines[engine].capacity = _UNLIMITED if num_blocks is None else num_blocks

    # --- asked

    def match(self, hashes: bytes) -> NDArray[np.int64]:
        """int64[num_engines], how many of the prompt's blocks, from the first, each engine holds without a gap.

        Args:
            hashes: packed, HASH_BYTES each, in the order of the prompt.
        """
        found = np.zeros(len(self._engines), np.int64)
        get, holders, last, depth = self._holders.get, 0, None, 0
        for block in split(hashes):
            held_by = get(block)
            if held_by is not last:
                if held_by is None:
                    break
                left = holders & held_by if depth else held_by
                if left != holders:
                    if depth:
                        _set(found, holders ^ left, depth)
                    holders = left
                    if not holders:
                        return found
                last = held_by
            depth += 1
        _set(found, holders, depth)
        return found

    def is_exact(self, engine: int) -> bool:
        """Whether `engine` has said what it holds."""
        return bool(self._engines[engine].said)

    @property
    def num_blocks(self) -> int:
        """Different blocks."""
        return len(self._holders)

    @property
    def num_bytes(self) -> int:
        """Memory taken, at most about."""
        return sum(len(each.said) + len(each.predicted) for each in self._engines) * self._pair_bytes()

    # --- told

    def said(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """`engine` said that it holds these."""
        row = self._engines[engine]
        self._put(row.said, 1 << engine, hashes, now_ns)
        self._shorten(row.said, row.predicted, engine, self._share())

    def predict(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """A prompt was sent to `engine`, which will hold its blocks."""
        row = self._engines[engine]
        self._put(row.predicted, 1 << engine, hashes, now_ns)
        self._shorten(row.predicted, row.said, engine, min(row.capacity, self._share()))
        self._expire(engine, now_ns)
        # Another engine's outdated predictions, one engine at a time: no decision waits for them all.
        self._next_to_expire = (self._next_to_expire + 1) % len(self._engines)
        self._expire(self._next_to_expire, now_ns)

    def removed(self, engine: int, hashes: bytes) -> None:
        """`engine` said that it holds these no more; of those that it did not hold, nothing is changed."""
        row, bit = self._engines[engine], 1 << engine
        for block in split(hashes):
            was_said = row.said.pop(block, None) is not None
            if row.predicted.pop(block, None) is not None or was_said:
                self._drop(bit, block)

    def cleared(self, engine: int) -> None:
        """`engine` holds nothing."""
        self.lost_track(engine)
        row = self._engines[engine]
        self._shorten(row.predicted, row.said, engine, 0)

    def lost_track(self, engine: int) -> None:
        """What `engine` said cannot be believed any more; prediction takes over."""
        row = self._engines[engine]
        self._shorten(row.said, row.predicted, engine, 0)

    # --- handed over

    def dump(self) -> bytes:
        """All of it, for `load` in a standby."""
        return msgspec.msgpack.encode(
            [
                EngineDump(
                    said=b"".join(each.said),
                    said_ns=list(each.said.values()),
                    predicted=b"".join(each.predicted),
                    predicted_ns=list(each.predicted.values()),
                )
                for each in self._engines
            ]
        )

    def load(self, dump: bytes) -> None:
        """What another index of the same engines held when it was dumped, in place of what this one holds.

        Raises:
            ValueError: it is no dump of as many engines.
        """
        engines = msgspec.msgpack.decode(dump, type=list[EngineDump])
        if len(engines) != len(self._engines):
            raise ValueError(f"the dump has {len(engines)} engines, the index {len(self._engines)}")
        for engine, each in enumerate(engines):
            self.cleared(engine)
            row = self._engines[engine]
            for blocks, packed, used_ns in (
                (row.said, each.said, each.said_ns),
                (row.predicted, each.predicted, each.predicted_ns),
            ):
                for block, at_ns in zip(split(packed), used_ns, strict=True):
                    self._put(blocks, 1 << engine, block, at_ns)

    # --- inside

    def _put(self, blocks: OrderedDict[bytes, int], bit: int, hashes: bytes, now_ns: int) -> None:
        all_holders, last, last_with = self._holders, -1, bit
        for block in reversed(split(hashes)):  # the beginning of a prompt is the last to go
            if block in blocks:
                blocks[block] = now_ns
                blocks.move_to_end(block)
                continue
            blocks[block] = now_ns
            holders = all_holders.get(block, 0)
            if holders is not last:  # neighbours that had one set object go on having one
                last, last_with = holders, holders | bit
            all_holders[block] = last_with

    def _shorten(
        self, blocks: OrderedDict[bytes, int], others: OrderedDict[bytes, int], engine: int, num_left: int
    ) -> None:
        """Drop the least recently used down to `num_left`; what is in `others` too is still held."""
        bit = 1 << engine
        for _ in range(len(blocks) - num_left):
            block, _ = blocks.popitem(last=False)
            if block not in others:
                self._drop(bit, block)

    def _expire(self, engine: int, now_ns: int) -> None:
        row, bit = self._engines[engine], 1 << engine
        outdated = takewhile(lambda used: now_ns - used[1] > self._expiry_ns, row.predicted.items())
        for block, _ in list(outdated):
            del row.predicted[block]
            if block not in row.said:
                self._drop(bit, block)

    def _drop(self, bit: int, block: bytes) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]

    def _pair_bytes(self) -> int:
        """At worst no two blocks share a set, and each is as long as there are engines."""
        return PAIR_BYTES + len(self._engines) // 7

    def _share(self) -> int:
        """Blocks that each engine may have, of either kind."""
        return max(1, self._max_bytes // (2 * self._pair_bytes() * len(self._engines)))


def split(hashes: bytes) -> tuple[bytes, ...]:
    """The packed form, one `bytes` per block; several times as quick as slicing, and a routing decision feels it."""
    return Struct(f"{HASH_BYTES}s" * (len(hashes) // HASH_BYTES)).unpack(hashes)


def _set(found: NDArray[np.int64], engines: int, depth: int) -> None:
    """`found[e] = depth` for each bit of `engines`."""
    if engines.bit_count() <= _FEW:
        while engines:
            lowest = engines & -engines
            found[lowest.bit_length() - 1] = depth
            engines ^= lowest
    else:
        packed = np.frombuffer(engines.to_bytes(-(-len(found) // 8), "little"), np.uint8)
        found[np.unpackbits(packed, count=len(found), bitorder="little").view(np.bool_)] = depth
