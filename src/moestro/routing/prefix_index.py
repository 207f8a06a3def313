"""Which engines hold which KV blocks: engines times blocks, bounded, and quick to ask for a whole prompt at once.

Three books, each with sets of engines as one plain integer, a bit an engine, so that a thousand engines cost little
more than ten:

    history   the prompts that were sent to each engine lately, in a tree of what they share; of limited age, and of
              as many blocks as the engine's cache has
    said      the blocks that an engine says it holds (KV events), one by one, as they are removed one by one
    pending   the prompts in flight on engines of which the events are followed without a loss

An engine that says nothing is known by its history. One whose events are complete is known by what it said, and by what
is pending: between a decision and the end of its request it will hold the prompt, or does, or has said so. One whose
events have a gap is known by history and by what it said.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import HASH_BYTES, split_hashes
from moestro.core.prefix_tree import BlockRun, PrefixTree

# Memory, each with the part of dictionaries that is empty, where these have just grown.
SAID_BYTES = 300  # of one block that one engine said
PROMPT_BYTES = 130  # of one prompt in a history
RUN_BYTES = 700  # of one run of one engine, but for its blocks
_UNLIMITED = 1 << 62
_FEW = 8  # so many bits are found one by one, more by unpacking all

Steps = list[
    tuple[int, int]
]  # (blocks, engines that hold so many of a prompt), from the first; fewer and fewer engines


@dataclass(slots=True)
class _Engine:
    """What is kept of one engine.

    Attributes:
        said: its blocks, those said first first.
        prompts: its history, the oldest first: when each was sent, its last run, and whether by this router.
        capacity: blocks of its cache.
    """

    said: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    prompts: deque[tuple[int, BlockRun, bool]] = field(default_factory=deque)
    capacity: int = _UNLIMITED


class PrefixIndex:
    """Blocks by engine.

    Args:
        max_bytes: of all of it. Each engine may have an equal share. Its oldest prompts go first, then what it said
            first; of one prompt the last blocks.
        expiry_ns: age at which a prompt is dropped from the history.
    """

    def __init__(self, max_bytes: int, expiry_ns: int) -> None:
        self._max_bytes = max_bytes
        self._expiry_ns = expiry_ns
        self._engines: list[_Engine] = []
        self._history = PrefixTree()
        self._pending = PrefixTree()
        self._said: dict[bytes, int] = {}  # who holds each block
        self._complete = 0  # engines that will say all that they hold
        self._exact = 0  # of these, those that have said something
        self._next_to_expire = 0

    def add_engine(self, engine: int) -> None:
        """Make room for `engine`: the next number, or one that was forgotten."""
        if engine == len(self._engines):
            self._engines.append(_Engine())
        row = self._engines[engine]
        assert not row.said
        assert not row.prompts
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
        steps = _steps(self._history, hashes, ~self._exact)
        if not self._exact and not self._said:
            for depth, holders in steps:  # the deeper ones over the others
                _set(found, holders, depth)
            return found
        steps = _either(steps, _steps(self._pending, hashes, self._exact))
        self._walk(hashes, steps, found)
        return found

    def is_exact(self, engine: int) -> bool:
        """Whether all that `engine` holds has been said."""
        return bool(self._exact >> engine & 1)

    @property
    def num_bytes(self) -> int:
        """Memory taken, at most about: what engines share is counted for each."""
        return sum(self._bytes_of(engine) for engine in range(len(self._engines)))

    # --- told of requests

    def sent(self, engine: int, hashes: bytes, now_ns: int, *, is_ours: bool = True) -> BlockRun | None:
        """A prompt was sent to `engine`, which will hold its blocks.

        Args:
            is_ours: by this router, which will tell its end; not by another.

        Returns:
            What `ended` wants back; None: nothing.
        """
        last = self._history.add(engine, hashes)
        if last is not None:
            row = self._engines[engine]
            row.prompts.append((now_ns, last, is_ours))
            while self._history.num_blocks[engine] > row.capacity and len(row.prompts) > 1:
                self._drop_oldest(engine)
            self._keep_share(engine)
        # Another engine's outdated prompts, one engine at a time: no decision waits for them all.
        self._next_to_expire = (self._next_to_expire + 1) % len(self._engines)
        for each in (engine, self._next_to_expire):
            self._expire(each, now_ns)
        return self._pending.add(engine, hashes) if is_ours and self._exact >> engine & 1 else None

    def ended(self, engine: int, pending: BlockRun) -> None:
        """The request of which `sent` returned `pending` is over: what is left of it was said."""
        self._pending.drop(engine, pending)

    # --- told of caches

    def said(self, engine: int, hashes: bytes) -> None:
        """`engine` said that it holds these."""
        row, bit = self._engines[engine], 1 << engine
        self._exact |= self._complete & bit
        mine, all_holders, last, last_with = row.said, self._said, -1, bit
        for block in reversed(split_hashes(hashes)):  # the beginning of a prompt is the last to go
            if block in mine:
                mine.move_to_end(block)
                continue
            mine[block] = None
            holders = all_holders.get(block, 0)
            if holders is not last:  # neighbours that had one set object go on having one
                last, last_with = holders, holders | bit
            all_holders[block] = last_with
        self._keep_share(engine)

    def removed(self, engine: int, hashes: bytes) -> None:
        """`engine` said that it holds these no more; of those that it did not hold, nothing is changed."""
        said, bit = self._engines[engine].said, 1 << engine
        for block in split_hashes(hashes):
            if block in said:
                del said[block]
                self._drop(bit, block)

    def cleared(self, engine: int) -> None:
        """`engine` said that it holds nothing; and from now on it says all that it holds."""
        self.forget(engine)
        self._complete |= 1 << engine

    def lost_track(self, engine: int) -> None:
        """What `engine` said cannot be believed any more."""
        bit = 1 << engine
        self._complete &= ~bit
        self._exact &= ~bit
        said = self._engines[engine].said
        while said:
            self._drop(bit, said.popitem()[0])

    def forget(self, engine: int) -> None:
        """`engine` is another, or gone: it holds nothing. What is in flight there is still to be `ended`."""
        self.lost_track(engine)
        while self._engines[engine].prompts:
            self._drop_oldest(engine)

    # --- handed over

    def prompts(self, engine: int) -> list[BlockRun]:
        """The history of `engine`: the last run of each prompt, the oldest first."""
        return [last for _, last, _ in self._engines[engine].prompts]

    def forget_elsewhere(self, engine: int) -> None:
        """Of the history of `engine`, what other routers sent is forgotten."""
        row = self._engines[engine]
        prompts, row.prompts = row.prompts, deque(each for each in row.prompts if each[2])
        for _, last, is_ours in prompts:
            if not is_ours:
                self._history.drop(engine, last)

    # --- inside

    def _walk(self, hashes: bytes, foretold: Steps, found: NDArray[np.int64]) -> None:
        """Fill `found`: the unbroken run of blocks that an engine said it holds, or is foretold to."""
        blocks, get = split_hashes(hashes), self._said.get
        alive, begin = (1 << len(self._engines)) - 1, 0
        for border, others in (*foretold, (len(blocks), 0)):
            last: int | None = None
            for depth in range(begin, border if alive & ~others else begin):
                held_by = get(blocks[depth], 0)
                if held_by is last:  # neighbours mostly have one set object
                    continue
                last, left = held_by, alive & (held_by | others)
                if left != alive:
                    if depth:
                        _set(found, alive ^ left, depth)
                    alive = left
                    if not alive & ~others:
                        break
            begin = border
        _set(found, alive, begin)

    def _keep_share(self, engine: int) -> None:
        row, share = self._engines[engine], self._max_bytes // len(self._engines)
        while (row.prompts or row.said) and self._bytes_of(engine) > share:
            if row.prompts:
                self._drop_oldest(engine)
            else:
                self._drop(1 << engine, row.said.popitem(last=False)[0])

    def _bytes_of(self, engine: int) -> int:
        """At worst no two blocks share a set, and each is as long as there are engines."""
        row, tree, set_bytes = self._engines[engine], self._history, len(self._engines) // 7
        num_runs = tree.num_runs[engine] + self._pending.num_runs[engine]
        num_blocks = tree.num_blocks[engine] + self._pending.num_blocks[engine]
        return (
            len(row.said) * (SAID_BYTES + set_bytes)
            + len(row.prompts) * PROMPT_BYTES
            + num_runs * (RUN_BYTES + set_bytes)
            + num_blocks * HASH_BYTES
        )

    def _drop_oldest(self, engine: int) -> None:
        self._history.drop(engine, self._engines[engine].prompts.popleft()[1])

    def _expire(self, engine: int, now_ns: int) -> None:
        prompts = self._engines[engine].prompts
        while prompts and now_ns - prompts[0][0] > self._expiry_ns:
            self._drop_oldest(engine)

    def _drop(self, bit: int, block: bytes) -> None:
        left = self._said[block] & ~bit
        if left:
            self._said[block] = left
        else:
            del self._said[block]


def _steps(tree: PrefixTree, hashes: bytes, among: int) -> Steps:
    """Which engines of `among` have how much of a prompt in `tree`."""
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
    """The steps of all engines, each of which is in one of two lists."""
    if not some or not others:
        return some or others
    merged = []
    for depth in sorted({depth for depth, _ in some + others}):
        engines = 0
        for steps in (some, others):
            engines |= next((holders for border, holders in steps if border >= depth), 0)
        merged.append((depth, engines))
    return merged


def _set(found: NDArray[np.int64], engines: int, depth: int) -> None:
    """`found[e] = depth` for each bit of `engines`."""
    if engines.bit_count() <= _FEW:
        while engines:
            lowest = engines & -engines
            found[lowest.bit_length() - 1] = depth
            engines ^= lowest
    else:
        packed = np.frombuffer(engines.to_bytes(-(-len(found) // 8), "little"), np.uint8)
        # A third of what an assignment by mask costs.
        np.putmask(found, np.unpackbits(packed, count=len(found), bitorder="little").view(np.bool_), depth)
