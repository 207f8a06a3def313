"""Prefix index: tells which engines hold the KV blocks of a prompt, in bounded memory.

The index keeps three sources of knowledge. Each represents a set of engines as one integer, one bit per engine, so that
a thousand engines cost little more than ten:

    history   prompts sent to each engine, in a tree of shared prefixes; bounded by the blocks of the engine's cache
    reported  blocks that an engine reports by KV events, stored and removed one by one
    pending   prompts in flight on engines with complete KV events

An engine without KV events is represented by its history. An engine with complete events is represented by the blocks
that it reported and by pending prompts: from the decision to the request's end the engine holds the prompt or will hold
it. Its history would not count, so its prompts are only kept, until its events fail and they become its history. An
engine with a gap in its events is represented by its history and by the blocks that it reported.

Reported blocks that neighbour each other in a prompt and have the same holders share one object, which has their names
packed. So a look-up compares a whole run of blocks at once. A run is cut where its blocks get different holders, and
joined again when a prompt passes many runs with the same holders.

An engine may keep blocks in host memory alone. Of reported blocks these are marked. Of a history they are those that
its device has no room for, because newer prompts came since.

The size of an engine's cache may be unknown. Then it follows from the engine's answers: for each block that was wrongly
predicted to be cached it shrinks by one block, for each that was wrongly dropped it grows by one. In the long run as
many blocks are predicted too many as too few.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import HASH_BYTES, BlockRun, PrefixTree, num_common, split_hashes
from moestro.core.views import SHORT
from moestro.routing.kernel.passes import route_kernel

# Bytes per entry, including the unused part of dictionaries that have just grown.
REPORTED_BYTES = 300  # one block reported by one engine
HOSTED_BYTES = 120  # more for one in host memory alone
PROMPT_BYTES = 130  # one prompt in a history
RUN_BYTES = 700  # one run of one engine, without its blocks
_UNLIMITED = 1 << 62
_MOST_UNREPORTED = 3  # prompts in a row; a cache that is full may have lost one of them before its request ended
_LEAVE_AT_ONCE = 4096  # blocks dropped at once, in a few milliseconds; a stranger may have reported a million
_LEAVE_A_CALL = 256
_KEPT_SIZES = 4  # sizes of a cache whose blocks kept prompts have together; prompts share blocks
_MANY = 1 << 40
_MOST_ALIKE = 4  # neighbouring runs with the same holders that a look-up passes without joining them
_FEW = 8  # up to this number bits are extracted one by one, above it by unpacking all bits

Tokens = NDArray[np.float64]  # whole numbers, in the type in which scores need them
Steps = list[tuple[int, int]]  # (depth in blocks, engines that hold that many leading blocks), by ascending depth


class _HeldRun:
    """Reported blocks that the same engines hold.

    Attributes:
        holders: set of the engines.
        blocks: packed names of consecutive blocks, each of which has this object in `PrefixIndex._reported`. Blocks
            that were cut off from them may have it too.
    """

    __slots__ = ("blocks", "holders")

    def __init__(self, holders: int, blocks: bytes = b"") -> None:
        self.holders = holders
        self.blocks = blocks

    def leave(self, blocks: bytes) -> None:
        """Forget consecutive blocks that have another object from now on."""
        mine = self.blocks
        if mine.endswith(blocks):
            self.blocks = mine[: -len(blocks)]
        elif mine.startswith(blocks):
            self.blocks = mine[len(blocks) :]
        else:  # blocks behind them are cut off; and of blocks that are not consecutive here, none may stay
            self.blocks = mine[: max(_place(mine, blocks), 0)]

    def num_common(self, hashes: bytes, at: int) -> int:
        """Return how many blocks of a prompt from byte `at` are known to have this object, as the first one has."""
        blocks = self.blocks
        if blocks and hashes.startswith(blocks, at):
            return len(blocks) // HASH_BYTES
        begin = _place(blocks, hashes[at : at + HASH_BYTES])
        if begin < 0:
            return 1
        if begin:
            blocks = blocks[begin:]
            if hashes.startswith(blocks, at):
                return len(blocks) // HASH_BYTES
        return num_common(blocks, hashes, at)


@dataclass(slots=True)
class _Engine:
    """State of one engine.

    Attributes:
        reported: blocks that the engine reported, in order of their reports.
        prompts: history, oldest first, each prompt as its last run.
        kept: prompts sent since its events are exact, oldest first, packed.
        num_kept_blocks: blocks of `kept`, each counted for each prompt.
        capacity: size of the engine's cache in blocks, all tiers together.
        recent: the newest of `prompts`, as many as fit on the device; empty for an engine without host memory.
        num_device_blocks: size of the part of the cache that is on the device. None means all of it.
        is_capacity_known: whether the engine reported it; else it is learned.
        num_hosted: reported blocks that host memory alone holds.
        num_unreported: computed prompts in a row of which no event reported the first block.
        num_free_bytes: memory below its share at the last look, without what its prompts may have taken since.
        looked_at: value of `PrefixIndex._num_sent` at the last look.
    """

    reported: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    prompts: deque[BlockRun] = field(default_factory=deque)
    kept: deque[bytes] = field(default_factory=deque)
    num_kept_blocks: int = 0
    capacity: int = _UNLIMITED
    recent: deque[BlockRun] = field(default_factory=deque)
    num_device_blocks: int | None = None
    num_hosted: int = 0
    is_capacity_known: bool = False
    num_unreported: int = 0
    num_free_bytes: int = 0
    looked_at: int = 0


class PrefixIndex:
    """Index from KV blocks to the engines that hold them.

    Args:
        max_bytes: memory limit. Each engine gets an equal share. Over its share, an engine loses its oldest prompts,
            last blocks first, then its oldest reported blocks.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._engines: list[_Engine] = []
        self._history = PrefixTree()
        self._pending = PrefixTree()
        self._recent = PrefixTree()  # of engines with host memory, the part of the history that is on the device
        self._has_host = 0  # engines with host memory of known size
        self._hosted: dict[bytes, int] = {}  # block -> set of engines that reported it in host memory alone
        self._reported: dict[bytes, _HeldRun] = {}  # block -> engines that hold it
        self._leaving: deque[tuple[int, OrderedDict[bytes, None]]] = deque()  # dropped blocks still in `_reported`
        self._stale = 0  # engines with such blocks, whose bits in `_reported` are not believed
        self._complete = 0  # engines whose events report all their blocks
        self._num_sent = 0  # prompts sent, and much more with each new engine
        self._exact = 0  # those of `_complete` that have reported a block

    def add_engine(self, engine: int) -> None:
        """Add `engine`, whose number is the next one or that of a forgotten engine."""
        if engine == len(self._engines):
            self._engines.append(_Engine())
        row = self._engines[engine]
        assert not row.reported
        assert not row.prompts
        assert not row.kept
        self.set_capacity(engine, None)
        self._num_sent += _MANY  # the shares are smaller, so that each engine has to be looked at

    def set_capacity(self, engine: int, num_blocks: int | None, num_host_blocks: int = 0) -> None:
        """Set the cache size of `engine` in blocks.

        Args:
            num_blocks: blocks on the device; None means unknown.
            num_host_blocks: blocks of host memory below it.
        """
        row = self._engines[engine]
        row.is_capacity_known = num_blocks is not None
        row.capacity = _UNLIMITED if num_blocks is None else num_blocks + num_host_blocks
        had_blocks, row.num_device_blocks = row.num_device_blocks, num_blocks if num_host_blocks else None
        self._has_host &= ~(1 << engine)
        if row.num_device_blocks is not None:
            self._has_host |= 1 << engine
        if row.num_device_blocks != had_blocks:
            self._fill_recent(engine)

    def surprised(self, engine: int, num_blocks: int) -> None:
        """Learn from an answer of `engine` how large its cache is, unless that is known or events report its blocks.

        Args:
            num_blocks: how many more blocks of the prompt the engine had than were predicted; below 0 means fewer.
        """
        row = self._engines[engine]
        if row.is_capacity_known or self._exact >> engine & 1:
            return
        if num_blocks < 0:
            row.capacity = max(min(row.capacity, self._history.num_blocks[engine]) + num_blocks, 1)
            self._keep_capacity(engine)
        elif row.capacity != _UNLIMITED:
            row.capacity += num_blocks

    # --- queries

    def match(self, hashes: bytes, block_tokens: int = 1) -> Tokens:
        """Return how many leading tokens of a prompt each engine holds without a gap, float64[num_engines].

        Args:
            hashes: packed block hashes, HASH_BYTES each, in prompt order.
            block_tokens: tokens per block; 1 counts blocks.
        """
        if self._leaving:
            self._leave(_LEAVE_A_CALL)
        num_engines, exact = len(self._engines), self._exact
        # Histories of exact engines do not count, so where all engines are exact none is looked at.
        steps = [] if exact == (1 << num_engines) - 1 else _steps(self._history, hashes, ~exact)
        if not exact and not self._reported:
            found = np.zeros(num_engines)
            if num_engines > SHORT and (kernel := route_kernel.look()) is not None:
                kernel.fill(found, steps, block_tokens)
                return found
            for depth, holders in steps:  # ascending, so that deeper matches overwrite shallower ones
                _set(found, holders, depth * block_tokens)
            return found
        steps = _either(steps, _steps(self._pending, hashes, exact))
        return _filled(num_engines, self._walk(hashes, steps), block_tokens)

    @property
    def has_hosted(self) -> bool:
        """Whether any engine may hold blocks in host memory alone."""
        return bool(self._hosted or self._has_host)

    def hosted_of(self, hashes: bytes, hits: Tokens) -> Tokens:
        """Return how many leading blocks of a prompt are in each engine's host memory alone, float64[num_engines].

        Args:
            hashes: packed block hashes, in prompt order.
            hits: the value of `match` for them.
        """
        found = np.zeros(len(hits))
        foretold = self._has_host & ~self._exact
        if foretold:
            on_device = np.zeros(len(hits))
            for depth, holders in _steps(self._recent, hashes, foretold):
                _set(on_device, holders, depth)
            rows = np.array([engine for engine in range(len(hits)) if foretold >> engine & 1])
            found[rows] = np.maximum(hits[rows] - on_device[rows], 0)
        if self._hosted:
            self._count_hosted(hashes, hits, found)
        return found

    def _count_hosted(self, hashes: bytes, hits: Tokens, found: Tokens) -> None:
        """Write to `found` the marked blocks of each engine with KV events, run by run of neighbours alike."""
        believed, get = ~self._stale & ~(self._has_host & ~self._exact), self._hosted.get
        holders = [get(block, 0) & believed for block in split_hashes(hashes)[: int(hits.max(initial=0))]]
        begin = 0
        for end in range(1, len(holders) + 1):
            if end == len(holders) or holders[end] != holders[begin]:
                if holders[begin]:
                    span = np.zeros(len(hits))
                    _set(span, holders[begin], end - begin)
                    found += np.minimum(span, np.maximum(hits - begin, 0))
                begin = end

    def is_complete(self, engine: int) -> bool:
        """Return whether the index has every block that `engine` reported since it was empty."""
        return bool(self._complete >> engine & 1)

    def is_exact(self, engine: int) -> bool:
        """Return whether KV events report all blocks of `engine`."""
        return bool(self._exact >> engine & 1)

    @property
    def num_bytes(self) -> int:
        """Estimated memory, an upper bound: entries that engines share count once per engine."""
        num_leaving = sum(len(blocks) for _, blocks in self._leaving)
        return num_leaving * REPORTED_BYTES + sum(self._bytes_of(engine) for engine in range(len(self._engines)))

    # --- requests

    def sent(self, engine: int, hashes: bytes, *, is_in_flight: bool = True) -> BlockRun | None:
        """Record that a prompt was sent to `engine`, which will hold its blocks.

        Args:
            is_in_flight: whether the request runs and the caller will call `ended`; False means that it has ended.

        Returns:
            The handle to pass to `ended`; None means no call is needed.
        """
        self._num_sent += 1
        if self._exact >> engine & 1:
            self._keep(engine, hashes)
            return self._pending.add(engine, hashes) if is_in_flight else None
        self._remember(engine, hashes)
        return None

    def ended(self, engine: int, pending: BlockRun, *, is_computed: bool = False) -> None:
        """Drop a pending prompt after its request ended: KV events report the blocks that remain.

        If the events stop, the history represents the engine until it reports a block again.

        Args:
            is_computed: whether the engine has computed the prompt, so that its events must have reported it.
        """
        row, first = self._engines[engine], pending
        while first.parent is not None:
            first = first.parent
        self._pending.drop(engine, pending)
        if is_computed and row.reported:  # an engine without any block may have caching turned off
            row.num_unreported = 0 if first.blocks[:HASH_BYTES] in row.reported else row.num_unreported + 1
            if row.num_unreported >= _MOST_UNREPORTED:
                self._distrust(engine)

    def lacks_events(self, engine: int) -> bool:
        """Return whether prompts were sent to `engine` and no complete events tell what it holds of them."""
        return bool(self._engines[engine].prompts) and not self.is_exact(engine)

    # --- KV events

    def reported(self, engine: int, hashes: bytes) -> None:
        """Record blocks that `engine` reported as stored on its device."""
        if self._hosted:
            for block in split_hashes(hashes):
                self._unmark(1 << engine, block)
        self._note(engine, hashes)

    def hosted(self, engine: int, hashes: bytes) -> None:
        """Record blocks that `engine` reported to be in host memory alone."""
        self._note(engine, hashes)
        row, bit = self._engines[engine], 1 << engine
        for block in split_hashes(hashes):
            marked = self._hosted.get(block, 0)
            if block in row.reported and not marked & bit:  # a block that is not reported was dropped for memory
                self._hosted[block] = marked | bit
                row.num_hosted += 1
        self._keep_share(engine)

    def _note(self, engine: int, hashes: bytes) -> None:
        """Record blocks that `engine` reported, in any tier."""
        if self._leaving:
            self._leave(_LEAVE_A_CALL)
        row, bit = self._engines[engine], 1 << engine
        row.num_unreported = 0
        self._exact |= self._complete & bit
        mine, held = row.reported, self._reported
        new: list[bytes] = []
        for block in reversed(split_hashes(hashes)):  # so that a prompt's first blocks are evicted last
            if block in mine:
                mine.move_to_end(block)
            else:
                mine[block] = None
                new.append(block)
        new.reverse()
        for begin, end, old in _by_run(held, new):
            part = new[begin:end]
            run = _HeldRun(bit if old is None else old.holders | bit, b"".join(part))
            for block in part:
                held[block] = run
            if old is not None:
                old.leave(run.blocks)
        self._keep_share(engine)

    def removed(self, engine: int, hashes: bytes) -> None:
        """Record blocks that `engine` reported as removed. Blocks that it did not hold are ignored."""
        reported = self._engines[engine].reported
        gone: list[bytes] = []
        for block in split_hashes(hashes):
            if block in reported:
                del reported[block]
                gone.append(block)
        self._drop(1 << engine, gone)

    def cleared(self, engine: int) -> None:
        """Record that `engine` holds no block, and that its events are complete from now on."""
        self.forget(engine)
        self._complete |= 1 << engine

    def incomplete(self, engine: int) -> None:
        """Record that `engine` holds blocks that its events do not report. Its history counts again beside them."""
        self._complete &= ~(1 << engine)
        self._distrust(engine)

    def lost_track(self, engine: int) -> None:
        """Discard the blocks that `engine` reported, because its events are no longer complete."""
        bit = 1 << engine
        self.incomplete(engine)
        row = self._engines[engine]
        if row.reported:
            self._leaving.append((engine, row.reported))
            self._stale |= bit
            row.reported = OrderedDict()
        self._leave(_LEAVE_AT_ONCE)

    def forget(self, engine: int) -> None:
        """Discard all blocks of `engine`, after a restart or removal. Its requests in flight still need `ended`."""
        row = self._engines[engine]
        row.kept.clear()
        row.num_kept_blocks = 0
        self.lost_track(engine)
        while row.prompts:
            self._drop_oldest(engine)
        self._forget_recent(engine)

    # --- history

    def prompts(self, engine: int) -> list[BlockRun]:
        """Return the history of `engine`: the last run of each prompt, oldest first. Kept prompts become history."""
        self._remember_kept(engine)
        return list(self._engines[engine].prompts)

    # --- inside

    def _walk(self, hashes: bytes, foretold: Steps) -> Steps:
        """Return how many leading blocks each engine reported, or holds according to `foretold`.

        Each engine is in one of the sets.
        """
        num_blocks, get = len(hashes) // HASH_BYTES, self._reported.get
        alive, believed = (1 << len(self._engines)) - 1, ~self._stale
        found: Steps = []
        begin = end = held_by = num_alike = 0  # blocks before `end` are known to be held by `held_by`
        for border, others in (*foretold, (num_blocks, 0)):
            depth = begin
            while depth < border and alive & ~others:
                if depth >= end:
                    at = depth * HASH_BYTES
                    held, last = get(hashes[at : at + HASH_BYTES]), held_by
                    held_by = 0 if held is None else held.holders
                    end = depth + (1 if held is None else held.num_common(hashes, at))
                    num_alike += held_by == last
                left = alive & (held_by & believed | others)
                if left != alive:
                    found.append((depth, alive ^ left))
                    alive = left
                depth = end
            begin = border
        found.append((begin, alive))
        if num_alike > _MOST_ALIKE:
            self._join(hashes[: end * HASH_BYTES])
        return found

    def _join(self, hashes: bytes) -> None:
        """Join the neighbouring runs of a prompt's blocks that have the same holders."""
        blocks, held = split_hashes(hashes), self._reported
        runs = [held.get(block) for block in blocks]
        if len(set(blocks)) < len(blocks):  # no prompt has a block twice, unless its names are made up
            return
        for begin, end in _alike([None if run is None else run.holders for run in runs]):
            first = runs[begin]
            if first is None or runs[begin:end].count(first) == end - begin == len(first.blocks) // HASH_BYTES:
                continue
            joined = _HeldRun(first.holders, hashes[begin * HASH_BYTES : end * HASH_BYTES])
            for at, until in _alike(runs[begin:end]):
                old = runs[begin + at]
                assert old is not None
                old.leave(hashes[(begin + at) * HASH_BYTES : (begin + until) * HASH_BYTES])
            for block in blocks[begin:end]:
                held[block] = joined

    def _keep(self, engine: int, hashes: bytes) -> None:
        """Keep a prompt of an engine with exact events, up to a few sizes of its cache."""
        row = self._engines[engine]
        row.kept.append(hashes)
        row.num_kept_blocks += len(hashes) // HASH_BYTES
        while row.num_kept_blocks > _KEPT_SIZES * row.capacity and len(row.kept) > 1:
            self._drop_kept(row)
        # A prompt takes at most its blocks twice, kept and pending, and cuts at most one run of each tree in two.
        row.num_free_bytes -= PROMPT_BYTES + 2 * len(hashes)
        most_runs = 6 * (self._num_sent - row.looked_at)
        if row.num_free_bytes <= most_runs * (RUN_BYTES + len(self._engines) // 7):
            self._keep_share(engine)

    def _drop_kept(self, row: _Engine) -> None:
        row.num_kept_blocks -= len(row.kept.popleft()) // HASH_BYTES

    def _distrust(self, engine: int) -> None:
        """Represent `engine` by its history from now on, because its events do not report all its blocks."""
        self._exact &= ~(1 << engine)
        self._remember_kept(engine)

    def _remember_kept(self, engine: int) -> None:
        row = self._engines[engine]
        kept, row.kept, row.num_kept_blocks = row.kept, deque(), 0
        for hashes in kept:
            self._remember(engine, hashes)

    def _remember(self, engine: int, hashes: bytes) -> None:
        """Add a prompt to the history of `engine`."""
        last = self._history.add(engine, hashes)
        if last is not None:
            self._engines[engine].prompts.append(last)
            self._keep_recent(engine, hashes)
            self._keep_capacity(engine)
            self._keep_share(engine)

    def _keep_recent(self, engine: int, hashes: bytes) -> None:
        """Note that the newest prompt is on the device of `engine`, and that the oldest ones may be no more."""
        row = self._engines[engine]
        if row.num_device_blocks is None:
            return
        last = self._recent.add(engine, hashes)
        if last is not None:
            row.recent.append(last)
        while self._recent.num_blocks[engine] > row.num_device_blocks and len(row.recent) > 1:
            self._recent.drop(engine, row.recent.popleft())

    def _fill_recent(self, engine: int) -> None:
        """Take the newest prompts of the history for those on the device, whose size has just become known.

        A router that joins others has their history before it has read how large the engines' tiers are.
        """
        self._forget_recent(engine)
        row = self._engines[engine]
        if row.num_device_blocks is None:
            return
        for prompt in reversed(row.prompts):
            last = self._recent.add(engine, prompt.hashes())
            if last is None:
                continue
            if row.recent and self._recent.num_blocks[engine] > row.num_device_blocks:
                self._recent.drop(engine, last)
                break
            row.recent.appendleft(last)

    def _forget_recent(self, engine: int) -> None:
        recent = self._engines[engine].recent
        while recent:
            self._recent.drop(engine, recent.popleft())

    def _keep_capacity(self, engine: int) -> None:
        row = self._engines[engine]
        while self._history.num_blocks[engine] > row.capacity and len(row.prompts) > 1:
            self._drop_oldest(engine)

    def _keep_share(self, engine: int) -> None:
        row, share = self._engines[engine], self._max_bytes // len(self._engines)
        while (num_bytes := self._bytes_of(engine)) > share and (row.prompts or row.kept or row.reported):
            if row.prompts:
                self._drop_oldest(engine)
            elif row.kept:
                self._drop_kept(row)
            else:
                self._drop(1 << engine, [row.reported.popitem(last=False)[0]])
                self.incomplete(engine)
        row.num_free_bytes, row.looked_at = share - num_bytes, self._num_sent

    def _bytes_of(self, engine: int) -> int:
        """Bytes of one engine, assuming that no two blocks share a set and each set has a bit per engine."""
        row, set_bytes = self._engines[engine], len(self._engines) // 7
        num_runs, num_blocks = self._pending.num_runs[engine], self._pending.num_blocks[engine]
        if row.prompts:
            num_runs += self._history.num_runs[engine]
            num_blocks += self._history.num_blocks[engine]
        if row.recent:
            num_runs += self._recent.num_runs[engine]
            num_blocks += self._recent.num_blocks[engine]
        return (
            len(row.reported) * (REPORTED_BYTES + set_bytes)
            + row.num_hosted * (HOSTED_BYTES + set_bytes)
            + (len(row.prompts) + len(row.recent) + len(row.kept)) * PROMPT_BYTES
            + num_runs * (RUN_BYTES + set_bytes)
            + (num_blocks + row.num_kept_blocks) * HASH_BYTES
        )

    def _drop_oldest(self, engine: int) -> None:
        row = self._engines[engine]
        self._history.drop(engine, row.prompts.popleft())
        while len(row.recent) > len(row.prompts):  # the device has no prompt that the cache as a whole lacks
            self._recent.drop(engine, row.recent.popleft())

    def _drop(self, bit: int, gone: list[bytes]) -> None:
        """Record that an engine holds blocks no more, which are mostly consecutive, first or last one first."""
        held = self._reported
        for begin, end, old in _by_run(held, gone):
            if old is None:
                continue
            part, left = gone[begin:end], old.holders & ~bit
            blocks = b"".join(part)
            if len(part) > 1 and old.blocks.find(part[-1]) < old.blocks.find(part[0]):
                blocks = b"".join(reversed(part))
            if left:
                run = _HeldRun(left, blocks)
                for block in part:
                    held[block] = run
            else:
                for block in part:
                    del held[block]
            old.leave(blocks)
        if self._hosted:
            for block in gone:
                self._unmark(bit, block)

    def _unmark(self, bit: int, block: bytes) -> None:
        """Forget that an engine holds a block in host memory alone."""
        marked = self._hosted.get(block, 0)
        if marked & bit:
            self._engines[bit.bit_length() - 1].num_hosted -= 1
            if marked ^ bit:
                self._hosted[block] = marked ^ bit
            else:
                del self._hosted[block]

    def _leave(self, most: int) -> None:
        """Drop up to `most` blocks of engines that lost track. Until the last one, no reported block counts there."""
        while most > 0 and self._leaving:
            engine, blocks = self._leaving[0]
            now_reported, bit = self._engines[engine].reported, 1 << engine
            leaving = [blocks.popitem()[0] for _ in range(min(most, len(blocks)))]
            most -= len(leaving)
            self._drop(bit, [block for block in leaving if block not in now_reported])
            if not blocks:
                self._leaving.popleft()
                if all(engine != other for other, _ in self._leaving):
                    self._stale &= ~bit


def _steps(tree: PrefixTree, hashes: bytes, among: int) -> Steps:
    """Return the leading blocks of a prompt that the engines in `among` have in `tree`, as steps."""
    run, num_blocks = tree.find(hashes)
    steps: Steps = []
    while run is not None:
        holders = run.holders & among
        if holders:
            steps.append((min(run.depth, num_blocks), holders))
        run = run.parent
    steps.reverse()
    return steps


def _either(some: Steps, others: Steps) -> Steps:
    """Merge the steps of two disjoint sets of engines."""
    if not some or not others:
        return some or others
    merged = []
    for depth in sorted({depth for depth, _ in some + others}):
        engines = 0
        for steps in (some, others):
            engines |= next((holders for border, holders in steps if border >= depth), 0)
        merged.append((depth, engines))
    return merged


def _by_run(held: Mapping[bytes, _HeldRun], blocks: list[bytes]) -> Iterator[tuple[int, int, _HeldRun | None]]:
    """Yield begin, end and run of neighbouring blocks that have the same one; None means no holder."""
    runs = [*map(held.get, blocks)]
    begin, num = 0, len(runs)
    while begin < num:
        run = runs[begin]
        end = num if run is None else min(num, begin + len(run.blocks) // HASH_BYTES)
        if end <= begin or runs[begin:end].count(run) != end - begin:  # mostly a whole run, or no other has a holder
            end = begin + 1
            while end < num and runs[end] is run:
                end += 1
        yield begin, end, run
        begin = end


def _place(blocks: bytes, part: bytes) -> int:
    """Return the byte at which consecutive blocks stand among others; -1 without them."""
    at = blocks.find(part)
    while at > 0 and at % HASH_BYTES:  # across two names
        at = blocks.find(part, at + 1)
    return at


_Kind = TypeVar("_Kind")


def _alike(values: Sequence[_Kind]) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each run of equal values."""
    begin = 0
    for end in range(1, len(values) + 1):
        if end == len(values) or values[end] != values[begin]:
            yield begin, end
            begin = end


def _filled(num_engines: int, found: Steps, block_tokens: int) -> Tokens:
    """Return the tokens of each engine, which is in one of the sets of `found`, float64[num_engines]."""
    if num_engines > SHORT and (kernel := route_kernel.look()) is not None:
        tokens = np.empty(num_engines)
        kernel.fill(tokens, found, block_tokens)
        return tokens
    most = found[0]
    for step in found:
        if step[1].bit_count() > most[1].bit_count():
            most = step
    if num_engines <= SHORT:
        of_engine = [most[0] * block_tokens] * num_engines
        for step in found:
            if step is not most:
                for engine in _rows(step[1]):
                    of_engine[engine] = step[0] * block_tokens
        return np.array(of_engine, np.float64)
    of_all = np.full(num_engines, most[0] * block_tokens, np.float64)
    for step in found:
        if step is not most:
            _set(of_all, step[1], step[0] * block_tokens)
    return of_all


@lru_cache(maxsize=4096)  # few engines have few sets, which come again and again
def _rows(engines: int) -> tuple[int, ...]:
    """Return the bits of a set of few engines."""
    return tuple(engine for engine in range(engines.bit_length()) if engines >> engine & 1)


def _set(found: Tokens, engines: int, depth: int) -> None:
    """Set `found[e] = depth` for each bit `e` of `engines`."""
    if engines.bit_count() <= _FEW:
        while engines:
            lowest = engines & -engines
            found[lowest.bit_length() - 1] = depth
            engines ^= lowest
    elif engines == (1 << len(found)) - 1:  # a system prompt that every engine holds
        found.fill(depth)
    else:
        packed = np.frombuffer(engines.to_bytes(-(-len(found) // 8), "little"), np.uint8)
        # putmask takes a third of the time of an assignment by mask.
        np.putmask(found, np.unpackbits(packed, count=len(found), bitorder="little").view(np.bool_), depth)
