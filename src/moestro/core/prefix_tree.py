"""Which prompts share which beginnings: a tree of runs of blocks, and who holds how many prompts through each.

A prompt is its blocks' names. A block's name covers all that is before it (`core.hashing`), so a run of blocks is found
by the name of its first one, whatever prompt it is in. Runs are cut only where prompts part: a prompt of a thousand
blocks is a handful of runs, and adding, dropping or looking for it costs a handful of dictionary look-ups and
comparisons of memory, not a thousand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from moestro.core.hashing import HASH_BYTES


class BlockRun:
    """Blocks that whoever has one of them has all of, in the order of the prompt.

    Attributes:
        parent: the run before it; None: prompts begin here.
        blocks: packed.
        depth: blocks of a prompt up to this run's end.
        counts: prompts that go through it, or end with it, by holder.
        holders: the same holders, a bit each.
    """

    __slots__ = ("blocks", "counts", "depth", "holders", "parent")

    def __init__(self, parent: BlockRun | None, blocks: bytes, counts: dict[int, int], holders: int) -> None:
        self.parent = parent
        self.blocks = blocks
        self.depth: int = (parent.depth if parent else 0) + len(blocks) // HASH_BYTES
        self.counts = counts
        self.holders = holders

    def hashes(self) -> bytes:
        """The blocks of a prompt that ends with this run, packed."""
        runs, run = [], self.parent
        while run is not None:
            runs.append(run.blocks)
            run = run.parent
        return b"".join(reversed(runs)) + self.blocks


class PrefixTree:
    """Prompts by holder, a small number each.

    A prompt that was added is known by its last run. That stays so however runs are cut.

    Attributes:
        num_blocks, num_runs: different ones of each holder's prompts.
    """

    def __init__(self) -> None:
        self.num_blocks: defaultdict[int, int] = defaultdict(int)
        self.num_runs: defaultdict[int, int] = defaultdict(int)
        self._runs: dict[bytes, BlockRun] = {}

    def __len__(self) -> int:
        """Runs."""
        return len(self._runs)

    def find(self, hashes: bytes) -> tuple[BlockRun | None, int]:
        """The longest beginning of a prompt that any prompt here has.

        Returns:
            Its last run, and how many blocks it has, which may end within that run. None, 0: there is none.
        """
        get, last, at, end = self._runs.get, None, 0, len(hashes)
        while at < end:
            run = get(hashes[at : at + HASH_BYTES])
            # A name that follows another block than it did before is no name of `core.hashing`: nothing is known of it.
            if run is None or run.parent is not last:
                break
            last = run
            if not hashes.startswith(run.blocks, at):
                return run, at // HASH_BYTES + _num_common(run.blocks, hashes, at)
            at += len(run.blocks)
        return last, at // HASH_BYTES

    def add(self, holder: int, hashes: bytes) -> BlockRun | None:
        """`holder` has one prompt more. Returns its last run; None: it has no block."""
        last, num_blocks = self.find(hashes)
        if last is not None and num_blocks < last.depth:
            last = self._cut(last, num_blocks)
        rest = hashes[num_blocks * HASH_BYTES :]
        if rest and rest[:HASH_BYTES] not in self._runs:
            last = self._runs[rest[:HASH_BYTES]] = BlockRun(last, rest, {}, 0)
        run, bit = last, 1 << holder
        while run is not None:
            counts = run.counts
            if holder in counts:
                counts[holder] += 1
            else:
                counts[holder] = 1
                run.holders |= bit
                self.num_blocks[holder] += len(run.blocks) // HASH_BYTES
                self.num_runs[holder] += 1
            run = run.parent
        return last

    def drop(self, holder: int, last: BlockRun) -> None:
        """`holder` has a prompt less, whose last run is `last`."""
        run: BlockRun | None = last
        while run is not None:
            counts = run.counts
            if counts[holder] > 1:
                counts[holder] -= 1
            else:
                del counts[holder]
                self.num_blocks[holder] -= len(run.blocks) // HASH_BYTES
                self.num_runs[holder] -= 1
                if counts:
                    run.holders ^= 1 << holder
                else:
                    del self._runs[run.blocks[:HASH_BYTES]]
            run = run.parent

    def _cut(self, run: BlockRun, depth: int) -> BlockRun:
        """Make two runs of one, the first of which ends at `depth`. Returns that one, which is new.

        The end stays the same object: prompts, and runs behind it, go on knowing it.
        """
        at = len(run.blocks) - (run.depth - depth) * HASH_BYTES
        head = BlockRun(run.parent, run.blocks[:at], run.counts.copy(), run.holders)
        run.parent, run.blocks = head, run.blocks[at:]
        self._runs[head.blocks[:HASH_BYTES]] = head
        self._runs[run.blocks[:HASH_BYTES]] = run
        for holder in run.counts:
            self.num_runs[holder] += 1
        return head


def _num_common(blocks: bytes, hashes: bytes, at: int) -> int:
    """How many blocks of `blocks`, from the first, stand at byte `at` of `hashes`; not all of them do."""
    most = min(len(blocks), len(hashes) - at) // HASH_BYTES
    sizes = range(HASH_BYTES, (most + 1) * HASH_BYTES, HASH_BYTES)
    return bisect_left(sizes, 1, key=lambda size: not hashes.startswith(blocks[:size], at))
