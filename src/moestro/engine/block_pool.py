"""KV block bookkeeping: which block is whose, and which still holds a prefix worth keeping. Integers only.

A block is in one of three states:

    blank      free, holds nothing of use
    cached     free, but holds a full block of KV under its hash: given out last, oldest first
    held       referenced by `ref_count` >= 1 sequences; may carry a hash too, and is then shared, never written

Invariant (`check`): blank + cached + held == num_blocks, and the hash map names exactly the blocks that carry one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from typing import NamedTuple

from moestro.errors import InvariantError


class CacheEvent(NamedTuple):
    """A full block that can be found from now on, or no more.

    Attributes:
        step: index of the step among those that were taken at once; 0 where there is only one.
        is_stored: it can be found.
        block_hash: its name.
    """

    step: int
    is_stored: bool
    block_hash: bytes


class BlockPool:
    """Hands out blocks, counts their holders, remembers full ones by hash.

    Args:
        num_blocks: blocks in the pool.
        enable_prefix_caching: False: no hash is ever remembered.

    Attributes:
        version: goes up whenever a hash is remembered or forgotten.
        journal: where each of these is written down, in order, for whoever tells others of it and empties it; None:
            nobody wants to know.
        step: index of the current step for the journal, set by a caller that takes many steps at once.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._enabled = enable_prefix_caching
        self._blank = list(range(num_blocks - 1, -1, -1))  # pop() gives the lowest id first
        # An OrderedDict as the LRU list, since a hit takes a block out of its middle: O(1) for all three operations.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref_count = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.version = 0
        self.journal: list[CacheEvent] | None = None
        self.step = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be given out: blank and cached."""
        return len(self._blank) + len(self._cached)

    def find_prefix(self, hashes: list[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `hashes`; changes nothing."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def estimate_prefix(self, hashes: list[bytes], at_most: int) -> int:
        """How many of the first `at_most` of `hashes` are cached, by bisection: some log2(at_most) look-ups.

        It takes for granted that before a cached block all others are cached too. That fails only where two sequences
        computed one prefix at the same time and the one whose blocks carry its hashes left first: then it may be wrong.
        """
        known = self._block_of
        if not hashes or hashes[0] not in known:
            return 0  # the usual case, at once
        return bisect_left(hashes, 1, hi=min(at_most, len(hashes)), key=lambda name: name not in known)

    def num_free_among(self, blocks: list[int]) -> int:
        """How many of `blocks` (from `find_prefix`) are free: sharing them takes these from the pool."""
        return sum(1 for block in blocks if self._ref_count[block] == 0)

    def freed_by(self, held: list[list[int]]) -> set[int]:
        """The blocks that would be free if the holders of the lists `held` let go of them; changes nothing."""
        holders = Counter(block for blocks in held for block in blocks)
        return {block for block, count in holders.items() if count == self._ref_count[block]}

    def share(self, blocks: list[int]) -> None:
        """Add one holder to each of `blocks`, which are cached or held."""
        ref_count = self._ref_count
        for block in blocks:
            if ref_count[block] == 0:
                del self._cached[block]
            ref_count[block] += 1

    def allocate(self) -> int:
        """A block of one's own: a blank one, else the cached one unused the longest, whose prefix is forgotten.

        The caller looks at `num_free` first: an empty pool is a bug here.
        """
        return self.allocate_many(1)[0]

    def allocate_many(self, num_blocks: int) -> list[int]:
        """The blocks that `num_blocks` calls of `allocate` would give, in their order."""
        if num_blocks > self.num_free:
            raise InvariantError(f"allocation of {num_blocks} blocks from a pool of {self.num_free}")
        blank, ref_count = self._blank, self._ref_count
        kept = max(len(blank) - num_blocks, 0)
        blocks = blank[kept:]
        blocks.reverse()
        del blank[kept:]
        num_forgotten = num_blocks - len(blocks)
        self.version += num_forgotten
        for _ in range(num_forgotten):
            block, _ = self._cached.popitem(last=False)
            forgotten = self._hash_of.pop(block)
            del self._block_of[forgotten]
            blocks.append(block)
            if self.journal is not None:
                self.journal.append(CacheEvent(self.step, is_stored=False, block_hash=forgotten))
        for block in blocks:
            ref_count[block] = 1
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Take one holder from each of a sequence's `blocks`, given in the order of its tokens.

        The last ones become free first, so that a long prefix is forgotten from its end.
        """
        ref_count, hash_of, cached, blank = self._ref_count, self._hash_of, self._cached, self._blank
        for block in reversed(blocks):
            count = ref_count[block] - 1
            if count > 0:
                ref_count[block] = count
                continue
            if count < 0:
                raise InvariantError(f"release of block {block}, which nobody holds")
            ref_count[block] = 0
            if block in hash_of:
                cached[block] = None
            else:
                blank.append(block)

    def remember(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Each of `blocks`, held and now full, holds the KV that its hash names. The first block of a hash keeps it."""
        if not self._enabled:
            return
        block_of, hash_of = self._block_of, self._hash_of
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_hash not in block_of and block not in hash_of:
                block_of[block_hash] = block
                hash_of[block] = block_hash
                self.version += 1
                if self.journal is not None:
                    self.journal.append(CacheEvent(self.step, is_stored=True, block_hash=block_hash))

    def forget(self, hashes: list[bytes]) -> None:
        """Make the blocks of `hashes` impossible to find; sequences that hold them keep them."""
        for block_hash in hashes:
            block = self._block_of.pop(block_hash, None)
            if block is None:
                continue
            del self._hash_of[block]
            if self._ref_count[block] == 0:
                del self._cached[block]
                self._blank.append(block)
            self.version += 1
            if self.journal is not None:
                self.journal.append(CacheEvent(self.step, is_stored=False, block_hash=block_hash))

    def check(self, held: list[list[int]]) -> None:
        """Recount everything against the block lists that sequences hold.

        Raises:
            InvariantError: a block is lost, held twice, or remembered wrongly.
        """
        counts = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        if counts != self._ref_count:
            raise InvariantError("reference counts differ from the blocks that sequences hold")
        free = sorted([*self._blank, *self._cached])
        if free != [block for block, count in enumerate(counts) if count == 0]:
            raise InvariantError("free blocks and held blocks do not add up to the pool")
        if {h: b for b, h in self._hash_of.items()} != self._block_of or not set(self._cached) <= set(self._hash_of):
            raise InvariantError("hashes and blocks do not name each other")
