"""Host memory of one rank: the KV of preempted sequences, and blocks below the prefix cache. Names and integers only.

A preempted sequence whose KV is kept continues where it was; without kept KV it computes its tokens again. The rest of
the memory holds full blocks under their hashes, as the prefix cache does:

1. The blocks that the pool would evict next are copied to the host before they are evicted (`write_ahead`). A block
   that is evicted before its turn is copied with the plan that takes its place.
2. A prompt's prefix is looked up in both tiers. What the host has is copied or computed again, whichever is cheaper:
   copied blocks are in the device before the plan that reads them, and are then cached there.
3. Kept KV takes the place of cached blocks, and a cached block that of an older one. Blocks that the device holds too,
   and does not evict soon, go first; then the least recently used ones.
4. A block whose parent is in neither tier can hit nothing, so it leaves both (`forgotten`).

Copies are collected until the next plan and go with it: first those out of the device, then those into it, then the
plan's units. A host block that is read by the next plan is therefore not written before that plan.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from moestro.core.work import BlockMoves, Plan
from moestro.engine.block_pool import BlockPool, CacheEvent
from moestro.engine.sequences import Sequence
from moestro.errors import InvariantError


class HostBlocks:
    """Allocates blocks of host memory, and collects the copies to and from the device.

    Args:
        num_blocks: blocks of host memory.

    Attributes:
        read: host blocks that the next plan reads.
        num_out, num_in: copies out of the device, and into it, that plans have taken.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._freed_when_read: list[int] = []
        self._kept: dict[int, int] = {}  # device block by host block
        self._restored: list[tuple[int, int]] = []  # (host block, device block)
        self.read: set[int] = set()
        self.num_out = self.num_in = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a free block; the caller has checked `num_free`."""
        return self._free.pop()

    def release(self, host_block: int) -> None:
        """Free a block; one that the next plan reads is free after that plan."""
        if host_block in self.read:
            self._freed_when_read.append(host_block)
        else:
            self._kept.pop(host_block, None)  # the copy would never be read
            self._free.append(host_block)

    def copy_out(self, device_block: int, host_block: int) -> None:
        """Copy a block out of the device with the next plan."""
        self._kept[host_block] = device_block

    def copy_in(self, host_block: int, device_block: int) -> None:
        """Copy a block into the device with the next plan, after all copies out of it."""
        self._restored.append((host_block, device_block))
        self.read.add(host_block)

    def take_moves(self) -> BlockMoves | None:
        """Take the copies since the last call, for the next plan. None means that there are none."""
        if not self._kept and not self._restored:
            return None
        kept = [(device_block, host_block) for host_block, device_block in self._kept.items()]
        moves = BlockMoves(_columns(kept), _columns(self._restored))
        self.num_out += len(self._kept)
        self.num_in += len(self._restored)
        self._kept, self._restored = {}, []
        self._free += self._freed_when_read
        self._freed_when_read.clear()
        self.read.clear()
        return moves

    def unused(self) -> Iterable[int]:
        """Blocks that are free, now or after the next plan."""
        return [*self._free, *self._freed_when_read]


def _columns(moves: list[tuple[int, int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(moves, np.int64).reshape(-1, 2).T


_LEAST_TOKENS = 32  # of a step whose duration tells what the computation of a prompt takes
_NEW_SHARE = 0.2  # weight of the newest step


class LoadPrices(Protocol):
    """Costs that decide whether a prefix is copied from host memory or computed again."""

    def copying_ns(self, num_blocks: int) -> int:
        """Time of a copy of blocks to the device."""
        ...

    def computing_ns(self, start: int, num_tokens: int) -> int:
        """Time that the computation of a prompt's tokens from position `start` on takes."""
        ...


class LinearPrices(NamedTuple):
    """Prices in proportion to the blocks copied and to the tokens computed.

    Attributes:
        block_ns: time of the copy of a block.
        token_ns: time of the computation of a token.
    """

    block_ns: float
    token_ns: float

    def copying_ns(self, num_blocks: int) -> int:
        """Implement `LoadPrices.copying_ns`."""
        return round(num_blocks * self.block_ns)

    def computing_ns(self, start: int, num_tokens: int) -> int:
        """Implement `LoadPrices.computing_ns`."""
        return round(num_tokens * self.token_ns)


FREE_COPIES = LinearPrices(0.0, 1.0)  # where nothing is measured: a copy always pays


class MeasuredPrices:
    """Prices of a running engine: the copy as measured at the start, the computation as its own steps take.

    Before the first prompt a copy always pays.

    Args:
        block_ns: time of the copy of a block to the device.

    Attributes:
        token_ns: time of a token in steps of prompts. None means that no such step has ended.
    """

    def __init__(self, block_ns: float) -> None:
        self.block_ns = block_ns
        self.token_ns: float | None = None
        self._begun: deque[tuple[int, int]] = deque()  # time and tokens of steps in flight; 0 tokens tell nothing
        self._last_end_ns = 0

    def copying_ns(self, num_blocks: int) -> int:
        """Implement `LoadPrices.copying_ns`."""
        return round(num_blocks * self.block_ns)

    def computing_ns(self, start: int, num_tokens: int) -> int:
        """Implement `LoadPrices.computing_ns`."""
        token_ns = self.block_ns + 1 if self.token_ns is None else self.token_ns
        return round(num_tokens * token_ns)

    def began(self, plan: Plan, now_ns: int) -> None:
        """Note the submission of a plan."""
        num_tokens = plan.num_tokens
        tells = num_tokens >= max(_LEAST_TOKENS, 4 * len(plan.units)) and plan.moves is None
        self._begun.append((now_ns, num_tokens if tells else 0))

    def ended(self, now_ns: int) -> None:
        """Note the result of the oldest plan in flight."""
        begun_ns, num_tokens = self._begun.popleft()
        if num_tokens:
            token_ns = (now_ns - max(begun_ns, self._last_end_ns)) / num_tokens
            last = token_ns if self.token_ns is None else self.token_ns
            self.token_ns = last + _NEW_SHARE * (token_ns - last)
        self._last_end_ns = now_ns


_RESERVE_SHARE = 8  # of the smaller tier's blocks: one of so many is written ahead, and is then in both tiers


class HostTier:
    """Owns the host memory of one rank; implements `block_pool.LowerTier`.

    Args:
        num_blocks: blocks of host memory. With 0 no KV is ever kept, and evicted blocks are lost.
        pool: the device's blocks and the prefix cache, which reports evictions here.
        block_size: tokens of a block.

    Attributes:
        prices: costs of a copy from the host and of the computation that it saves.
    """

    def __init__(self, num_blocks: int, pool: BlockPool, block_size: int) -> None:
        self._blocks = HostBlocks(num_blocks)
        self._pool = pool
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._spare: OrderedDict[bytes, None] = OrderedDict()  # also on the device, and not among its coldest blocks
        self._lru: OrderedDict[bytes, None] = OrderedDict()
        self._parent_of: dict[bytes, bytes] = {}  # of blocks in either tier
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._pinned: set[bytes] = set()  # blocks that the next plan reads
        self._leaving: set[bytes] = set()  # blocks that have left the device and are not on the host yet
        self._reserve = min(num_blocks, pool.num_blocks) // _RESERVE_SHARE
        self.prices: LoadPrices = FREE_COPIES
        if num_blocks and pool.is_caching:
            pool.lower = self

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the host tier has a cached block."""
        return block_hash in self._block_of

    @property
    def num_blocks(self) -> int:
        """Blocks of host memory."""
        return self._blocks.num_blocks

    @property
    def num_stored_blocks(self) -> int:
        """Blocks that went to the host with plans so far, cached ones and those of preempted sequences."""
        return self._blocks.num_out

    @property
    def num_loaded_blocks(self) -> int:
        """Blocks that came from the host with plans so far."""
        return self._blocks.num_in

    @property
    def num_used_blocks(self) -> int:
        """Blocks of host memory that hold KV."""
        return self._blocks.num_blocks - self._blocks.num_free

    @property
    def num_free_tokens(self) -> int:
        """Tokens whose KV still has room beside the KV of preempted sequences."""
        return self._num_available() * self._block_size

    def _num_available(self) -> int:
        """Blocks that a preempted sequence could take: free ones, and cached ones that the next plan does not read."""
        num_pinned = sum(1 for name in self._pinned if name in self._block_of)
        return self._blocks.num_free + len(self._block_of) - num_pinned

    # --- preempted sequences ----------------------------------------------------------------------------------------

    def room_for(self, num_tokens: int) -> int:
        """Tokens of the whole blocks that keeping the KV of `num_tokens` takes."""
        return -(-num_tokens // self._block_size) * self._block_size

    def keep(self, sequence: Sequence, num_computed: int) -> bool:
        """Copy the KV of a sequence that is about to release its blocks.

        Args:
            num_computed: tokens of the sequence that have KV.

        Returns:
            Whether the KV is kept. False means that there is none, or no room for all of it; nothing has changed.
        """
        num_blocks = self.room_for(num_computed) // self._block_size
        if not 0 < num_blocks <= self._num_available():
            return False
        for device_block in sequence.blocks[:num_blocks]:
            host_block = self._allocate()
            assert host_block is not None, "too few blocks are available"
            self._blocks.copy_out(device_block, host_block)
            sequence.host_blocks.append(host_block)
        sequence.num_kept = num_computed
        return True

    def restore(self, sequence: Sequence, num_shared: int) -> int:
        """Copy kept KV into the blocks that the sequence has just been given, and free its host blocks.

        Args:
            num_shared: its first blocks, which come from the prefix cache and need no copy.

        Returns:
            Tokens whose KV is copied.
        """
        for at in range(num_shared, len(sequence.host_blocks)):
            self._blocks.copy_in(sequence.host_blocks[at], sequence.blocks[at])
        num_tokens = max(sequence.num_kept - num_shared * self._block_size, 0)
        self.drop_kept(sequence)
        return num_tokens

    def drop_kept(self, sequence: Sequence) -> None:
        """Free the kept KV of a sequence."""
        for host_block in sequence.host_blocks:
            self._blocks.release(host_block)
        sequence.host_blocks, sequence.num_kept = [], 0

    # --- cached blocks ----------------------------------------------------------------------------------------------

    def link(self, hashes: list[bytes], first: int, end: int) -> bool:
        """Note the parents of blocks `first` .. `end` - 1 of a prompt, which are about to enter the prefix cache.

        Returns:
            Whether they may enter. False means that the block before them is in neither tier.
        """
        if self._pool.lower is None:
            return True
        if first and hashes[first - 1] not in self._pool and hashes[first - 1] not in self:
            return False
        for at in range(max(first, 1), end):
            self._parent_of[hashes[at]] = hashes[at - 1]
            self._children.setdefault(hashes[at - 1], {})[hashes[at]] = None
        return True

    def used(self, hashes: Iterable[bytes]) -> None:
        """Note that the device now holds blocks and reads them, given in the order of their prompt."""
        if self._block_of:
            for block_hash in reversed(list(hashes)):  # so that a prompt's first blocks leave last
                if block_hash in self._block_of:
                    self._lru.pop(block_hash, None)
                    self._spare[block_hash] = None
                    self._spare.move_to_end(block_hash)

    def find_prefix(self, hashes: list[bytes], first: list[int]) -> tuple[list[int], tuple[int, ...]]:
        """Find the cached prefix of a prompt in both tiers, as far as copying costs less than computing.

        Args:
            first: leading blocks on the device, as `BlockPool.find_prefix` returns them.

        Returns:
            Blocks on the device, and the positions of blocks in host memory, which together are a prefix.
        """
        shared, loaded, at = list(first), list[int](), len(first)
        saved_ns = best_ns = 0
        best = len(shared), 0
        while at < len(hashes):
            begin = at
            while at < len(hashes) and hashes[at] in self._block_of and hashes[at] not in self._pool:
                at += 1
            loaded += range(begin, at)
            middle = at
            while at < len(hashes) and (block := self._pool.find(hashes[at])) is not None:
                shared.append(block)
                at += 1
            if at == begin:
                break
            saved_ns += self.prices.computing_ns(begin * self._block_size, (at - begin) * self._block_size)
            saved_ns -= self.prices.copying_ns(middle - begin)
            if saved_ns > best_ns:
                best_ns, best = saved_ns, (len(shared), len(loaded))
        return shared[: best[0]], tuple(loaded[: best[1]])

    def load(self, hashes: list[bytes], device_blocks: list[int]) -> None:
        """Copy cached blocks into blocks of the device, with the next plan."""
        for block_hash, device_block in zip(hashes, device_blocks, strict=True):
            self._blocks.copy_in(self._block_of[block_hash], device_block)

    def pin(self, hashes: list[bytes]) -> None:
        """Keep blocks, which `load` copies, from being evicted before the next plan."""
        self._pinned.update(hashes)

    def write_ahead(self) -> None:
        """Copy the blocks that the pool would evict next to the host, with the next plan."""
        if self._reserve and self._pool.num_blank < self._reserve:
            for block, block_hash in self._pool.next_to_evict(self._reserve):
                self._store(block, block_hash)

    def writes_within(self, num_allocated: int) -> bool:
        """Whether the allocation of so many blocks may cause a copy to the host."""
        return self._pool.lower is not None and self._pool.num_blank - num_allocated < self._reserve

    def evicted(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Implement `LowerTier.evicted`."""
        lost, self._leaving = [], set(hashes)
        for block, name in zip(blocks, hashes, strict=True):
            # A block may be dropped with its parent, whose place an earlier one of these has taken.
            if name in self._leaving and not self._store(block, name):
                lost.append(name)
        self._leaving.clear()
        self.forgotten(lost)

    def forget_all(self) -> None:
        """Drop all cached blocks, and those of the device behind blocks that the host alone has."""
        for name in list(self._block_of):
            if name in self._pool:
                self._remove(name)
            else:
                self.forgotten([name])

    def forgotten(self, hashes: list[bytes]) -> None:
        """Drop blocks and all blocks behind them from both tiers; those of `hashes` have left the device already."""
        names = list(hashes)
        while names:
            name = names.pop()
            self._remove(name)
            self._leaving.discard(name)
            parent = self._parent_of.pop(name, None)
            if parent is not None and parent in self._children:
                self._children[parent].pop(name, None)
                if not self._children[parent]:
                    del self._children[parent]
            children = self._children.pop(name, None)
            if children:
                self._pool.remove_names(children)
                names += children

    def _store(self, block: int, block_hash: bytes) -> bool:
        """Put a block at the end of the LRU, and copy it unless the host has it. Returns False without room."""
        if block_hash in self._block_of:
            self._spare.pop(block_hash, None)
            self._lru[block_hash] = None
            self._lru.move_to_end(block_hash)
            return True
        host_block = self._allocate()
        if host_block is None:
            return False
        if block_hash not in self._pool and block_hash not in self._leaving:
            self._blocks.release(host_block)  # of its parent, with which it was dropped
            return True
        self._blocks.copy_out(block, host_block)
        self._block_of[block_hash] = host_block
        self._lru[block_hash] = None
        self._pool.version += 1
        self._note(block_hash, is_stored=True)
        return True

    def _note(self, block_hash: bytes, *, is_stored: bool) -> None:
        """Write to the pool's journal, if there is one, that a block enters host memory or leaves it."""
        if self._pool.journal is not None:
            is_alone = block_hash not in self._pool and block_hash not in self._leaving
            event = CacheEvent(self._pool.step, is_stored, block_hash, is_on_host=True, is_alone=is_alone)
            self._pool.journal.append(event)

    def _allocate(self) -> int | None:
        """Take a free block, or that of the cached block that is worth least. None means that there is none."""
        while not self._blocks.num_free:
            victim = next(self._victims(), None)
            if victim is None:
                return None
            if victim in self._pool:
                self._remove(victim)
            else:
                self.forgotten([victim])
        return self._blocks.allocate()

    def _victims(self) -> Iterator[bytes]:
        """Yield cached blocks that the next plan does not read, those worth least first."""
        for names in (self._spare, self._lru):
            for name in names:
                if name not in self._pinned:
                    yield name

    def _remove(self, block_hash: bytes) -> None:
        """Remove a block from the host tier, if it is there."""
        host_block = self._block_of.pop(block_hash, None)
        if host_block is not None:
            self._spare.pop(block_hash, None)
            self._lru.pop(block_hash, None)
            self._blocks.release(host_block)
            self._pool.version += 1
            self._note(block_hash, is_stored=False)

    # --- plans ------------------------------------------------------------------------------------------------------

    def take_moves(self) -> BlockMoves | None:
        """Take the copies since the last call, for the next plan. None means that there are none."""
        self._pinned.clear()
        return self._blocks.take_moves()

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Recount all host blocks against those of waiting sequences and cached blocks.

        Raises:
            InvariantError: a block is lost or has two owners, or a cached block has lost its parent.
        """
        held = Counter(self._blocks.unused())
        for sequence in waiting:
            held.update(sequence.host_blocks)
            if len(sequence.host_blocks) != -(-sequence.num_kept // self._block_size):
                raise InvariantError(f"{sequence.request.request_id}: blocks in host memory and tokens there differ")
        held.update(self._block_of.values())
        if held != Counter(range(self.num_blocks)):
            raise InvariantError("free, kept and cached blocks of host memory do not add up")
        if Counter(list(self._block_of)) != Counter([*self._spare, *self._lru]):
            raise InvariantError("cached blocks of host memory have no place in the order of eviction, or two")
        if any(name not in self._pool for name in self._spare):
            raise InvariantError("a spare block of host memory is not on the device")
        for name, parent in self._parent_of.items():
            if name not in self._pool and name not in self:
                raise InvariantError("the parent of a block is noted that is in neither tier")
            if parent not in self._pool and parent not in self:
                raise InvariantError("a block outlives its parent")
