"""Pool of KV blocks: free blocks, blocks held by sequences, and the prefix cache. Integers only.

A block is in one of three states:

    blank      free, without KV of use
    cached     free, with a full block of KV under its hash; allocated last, least recently used first
    held       referenced by `ref_count` >= 1 sequences; a held block with a hash is shared, and never written

Invariant (`check`): blank + cached + held == num_blocks, and the hash map names exactly the blocks that have one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from enum import Enum, auto
from itertools import islice
from typing import NamedTuple, Protocol

from moestro.errors import InvariantError


class Place(Enum):
    """Tier of the prefix cache that serves a block."""

    DEVICE = auto()
    HOST = auto()  # host memory alone, from which the block is copied back
    GONE = auto()


class CacheEvent(NamedTuple):
    """A full block that enters a tier of the prefix cache or leaves it.

    Attributes:
        step: index of the step among those that were taken at once; 0 for a single step.
        is_stored: whether the block enters.
        block_hash: the block's hash.
        is_on_host: whether the tier is host memory; else it is the device.
        is_alone: whether the other tier does not have the block, so that the cache as a whole gains or loses it.
    """

    step: int
    is_stored: bool
    block_hash: bytes
    is_on_host: bool = False
    is_alone: bool = True

    @property
    def place(self) -> Place | None:
        """The place of the block after the event; None if the event does not change it."""
        if self.is_on_host and not self.is_alone:
            return None  # the device has the block before and after
        if self.is_stored:
            return Place.HOST if self.is_on_host else Place.DEVICE
        return Place.GONE if self.is_alone else Place.HOST


class LowerTier(Protocol):
    """Memory below the pool, which keeps blocks that leave the prefix cache."""

    def evicted(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Take in blocks that have just left the prefix cache, and whose KV is overwritten after the next copies."""

    def forgotten(self, hashes: list[bytes]) -> None:
        """Drop blocks whose KV nothing may read any more."""

    def __contains__(self, block_hash: bytes) -> bool: ...


class BlockPool:
    """Allocates blocks, counts their holders, and finds full blocks by hash.

    Args:
        num_blocks: blocks in the pool.
        enable_prefix_caching: False keeps every block out of the prefix cache.

    Attributes:
        num_free: blocks that can be allocated, blank and cached ones.
        version: a counter that grows whenever a block enters or leaves the prefix cache.
        journal: log of these events in order, for a publisher that empties it. None means no publisher.
        step: index of the current step for the journal, set by a caller that takes many steps at once.
        lower: memory that takes in evicted blocks. None means that they are lost.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._enabled = enable_prefix_caching
        self._blank = list(range(num_blocks - 1, -1, -1))  # pop() returns the lowest id first
        # Cached blocks in the order in which they became free. A block that is hit leaves a stale entry in the middle:
        # the first `_stale[block]` entries of a block do not count. A list of ids takes a tenth of the memory of an
        # OrderedDict, whose nodes are mostly outside of the processor's caches when they are needed. Entries before
        # `_first_freed` are taken: a slice takes many at once, unlike a deque.
        self._freed: list[int] = []
        self._first_freed = 0
        self._end_offered = 0  # entries before it were returned by `next_to_evict`
        self._stale: dict[int, int] = {}
        self.num_free = num_blocks
        self._ref_count = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.version = 0
        self.journal: list[CacheEvent] | None = None
        self.step = 0
        self.lower: LowerTier | None = None

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the prefix cache has the block."""
        return block_hash in self._block_of

    @property
    def is_caching(self) -> bool:
        """Whether blocks may enter the prefix cache."""
        return self._enabled

    @property
    def num_blank(self) -> int:
        """Blocks that can be allocated without an eviction."""
        return len(self._blank)

    def find(self, block_hash: bytes) -> int | None:
        """The cached block with a hash; None if there is none."""
        return self._block_of.get(block_hash)

    def names_of(self, blocks: Iterable[int]) -> list[bytes]:
        """Hashes of those of `blocks` that have one."""
        return [name for block in blocks if (name := self._hash_of[block]) is not None]

    def find_prefix(self, hashes: list[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `hashes`; changes nothing."""
        found, block_of = [], self._block_of
        for block_hash in hashes:
            block = block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def estimate_prefix(self, hashes: list[bytes], at_most: int) -> int:
        """Estimate how many of the first `at_most` of `hashes` are cached, with about log2(at_most) look-ups.

        Blocks of the lower tier count as cached ones.

        The bisection assumes that all blocks before a cached block are cached too. The estimate may be wrong where two
        sequences computed one prefix at the same time, and the sequence whose blocks have the hashes left first.
        """
        known = self._block_of
        if not hashes or (hashes[0] not in known and (self.lower is None or hashes[0] not in self.lower)):
            return 0  # the usual case
        end = min(at_most, len(hashes))
        if (lower := self.lower) is not None:
            return bisect_left(hashes, 1, hi=end, key=lambda name: name not in known and name not in lower)
        return bisect_left(hashes, 1, hi=end, key=lambda name: name not in known)

    def num_free_among(self, blocks: list[int]) -> int:
        """How many of `blocks` (from `find_prefix`) are free now; sharing them takes these from the pool."""
        return sum(1 for block in blocks if self._ref_count[block] == 0)

    def freed_by(self, held: list[list[int]]) -> set[int]:
        """The blocks that would be free if the holders of the lists `held` released them; changes nothing."""
        holders = Counter(block for blocks in held for block in blocks)
        return {block for block, count in holders.items() if count == self._ref_count[block]}

    def share(self, blocks: list[int]) -> None:
        """Add one holder to each of `blocks`, which are cached or held."""
        ref_count = self._ref_count
        for block in blocks:
            if ref_count[block] == 0:
                self._leave_cached(block)
                self.num_free -= 1
            ref_count[block] += 1

    def _leave_cached(self, block: int) -> None:
        """Take a cached block out of the order of the free ones, wherever it stands."""
        self._stale[block] = self._stale.get(block, 0) + 1

    def allocate(self) -> int:
        """Allocate a block: a blank one, or else the least recently used cached one, which leaves the prefix cache.

        The caller checks `num_free` before; an empty pool is a bug of the caller.
        """
        return self.allocate_many(1)[0]

    def allocate_many(self, num_blocks: int) -> list[int]:
        """Allocate the blocks that `num_blocks` calls of `allocate` would return, in their order."""
        blank, ref_count = self._blank, self._ref_count
        if num_blocks > self.num_free:
            raise InvariantError(f"allocation of {num_blocks} blocks from a pool of {self.num_free}")
        self.num_free -= num_blocks
        blocks = blank[-num_blocks:] if num_blocks else []
        if blocks:
            blocks.reverse()
            del blank[-num_blocks:]
        if len(blocks) < num_blocks:
            blocks += self._forget_oldest(num_blocks - len(blocks))
        for block in blocks:
            ref_count[block] = 1
        return blocks

    def _forget_oldest(self, num_blocks: int) -> list[int]:
        """Remove the least recently used blocks from the prefix cache, and return them."""
        freed, first = self._freed, self._first_freed
        hash_of, block_of = self._hash_of, self._block_of
        blocks: list[int] = []
        stale, num_left = self._stale, num_blocks
        while stale and num_left:
            block = freed[first]
            first += 1
            num_stale = stale.get(block)
            if num_stale is None:
                blocks.append(block)
                num_left -= 1
            elif num_stale == 1:
                del stale[block]
            else:
                stale[block] = num_stale - 1
        end = first + num_left
        blocks += freed[first:end]
        self._first_freed = end
        if end > self.num_blocks:
            del freed[:end]
            self._first_freed = 0
            self._end_offered = max(self._end_offered - end, 0)
        hashes: list[bytes] = [hash_of[block] for block in blocks]  # type: ignore[misc]  # cached blocks have one
        for block, block_hash in zip(blocks, hashes, strict=True):
            del block_of[block_hash]
            hash_of[block] = None
        self.version += num_blocks
        if self.lower is not None:
            self.lower.evicted(blocks, hashes)
        if self.journal is not None:  # after the events of the lower tier, which has the blocks from here on
            for block_hash in hashes:
                self._note(block_hash, is_stored=False)
        return blocks

    def _note(self, block_hash: bytes, *, is_stored: bool) -> None:
        """Write to the journal, if there is one, that a block enters the prefix cache or leaves it."""
        if self.journal is not None:
            is_alone = self.lower is None or block_hash not in self.lower
            self.journal.append(CacheEvent(self.step, is_stored, block_hash, is_alone=is_alone))

    def next_to_evict(self, reserve: int) -> list[tuple[int, bytes]]:
        """Cached blocks that have come to be among the next `reserve` blocks to be allocated, coldest first.

        Each is returned once for each time that it became free. A block that was hit since may be among them.
        """
        begin = max(self._end_offered, self._first_freed)
        end = min(self._first_freed + reserve - len(self._blank), len(self._freed))
        if end <= begin:
            return []
        self._end_offered = end
        offered = []
        for block in self._freed[begin:end]:
            block_hash = self._hash_of[block]
            if block_hash is not None and self._ref_count[block] == 0:
                offered.append((block, block_hash))
        return offered

    def release(self, blocks: list[int]) -> None:
        """Remove one holder from each of a sequence's `blocks`, given in the order of its tokens.

        The last block becomes free first, so that the cache loses a long prefix from its end.
        """
        ref_count, hash_of, num_held = self._ref_count, self._hash_of, 0
        become_blank, become_cached = self._blank.append, self._freed.append
        for block in reversed(blocks):
            if ref_count[block] != 1:
                if ref_count[block] == 0:
                    raise InvariantError(f"release of block {block}, which has no holder")
                ref_count[block] -= 1
                num_held += 1
                continue
            ref_count[block] = 0
            if hash_of[block] is None:
                become_blank(block)
            else:
                become_cached(block)
        self.num_free += len(blocks) - num_held
        if len(self._freed) > 3 * self.num_blocks:  # many hits, and few allocations that would take old entries away
            self._freed, self._first_freed, self._end_offered = self.cached(), 0, 0
            self._stale.clear()

    def remember(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Enter `blocks`, which are held and full, into the prefix cache. The first block with a hash keeps it.

        Args:
            hashes: the hash of each block.
        """
        if not self._enabled:
            return
        block_of, hash_of, journal = self._block_of, self._hash_of, self.journal
        num_known = len(block_of)
        for at, block in enumerate(blocks):  # for one block, `zip(..., strict=True)` takes as long as all the rest
            block_hash = hashes[at]
            if hash_of[block] is None and block_hash not in block_of:
                block_of[block_hash] = block
                hash_of[block] = block_hash
                if journal is not None:
                    self._note(block_hash, is_stored=True)
        self.version += len(block_of) - num_known

    def forget(self, hashes: list[bytes]) -> None:
        """Remove the blocks of `hashes` from the prefix cache and the tier below; sequences keep those they hold."""
        self.remove_names(hashes)
        if self.lower is not None:
            self.lower.forgotten(hashes)

    def remove_names(self, hashes: Iterable[bytes]) -> None:
        """Remove the blocks of `hashes` from the prefix cache alone; sequences that hold them keep them."""
        for block_hash in hashes:
            block = self._block_of.pop(block_hash, None)
            if block is None:
                continue
            self._hash_of[block] = None
            if self._ref_count[block] == 0:
                self._leave_cached(block)
                self._blank.append(block)
            self.version += 1
            self._note(block_hash, is_stored=False)

    def forget_all(self) -> None:
        """Remove all blocks from the prefix cache; sequences keep those that they hold."""
        self.forget(list(self._block_of))

    def cached(self) -> list[int]:
        """Free blocks with a hash, the least recently used first."""
        stale, blocks = dict(self._stale), []
        for block in islice(self._freed, self._first_freed, None):
            if stale.get(block, 0):
                stale[block] -= 1
            else:
                blocks.append(block)
        return blocks

    def check(self, held: list[list[int]]) -> None:
        """Recount everything against the block lists that sequences hold.

        Raises:
            InvariantError: a block is lost, held twice, or cached under a wrong hash.
        """
        counts = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        if counts != self._ref_count:
            raise InvariantError("reference counts differ from the blocks that sequences hold")
        cached = self.cached()
        free = sorted([*self._blank, *cached])
        if free != [block for block, count in enumerate(counts) if count == 0] or len(free) != self.num_free:
            raise InvariantError("free blocks and held blocks do not add up to the pool")
        hashed = {block_hash: block for block, block_hash in enumerate(self._hash_of) if block_hash is not None}
        if hashed != self._block_of or not set(cached) <= set(hashed.values()):
            raise InvariantError("hashes and blocks do not name each other")
