"""Prefix tree of prompts: runs of blocks that prompts share, and the number of prompts of each holder in each run.

A prompt is the list of its blocks' names. A name covers all blocks before its own (`core.hashing`), so the name of its
first block finds a run, in any prompt. Runs are cut only where prompts differ: a prompt of a thousand blocks is a few
runs. To add, drop or find it costs a few dictionary look-ups and memory comparisons, not a thousand.
"""

from __future__ import annotations

from collections import defaultdict

from moestro.core.hashing import HASH_BYTES


class BlockRun:
    """Consecutive blocks of prompts: a prompt with one of them has all of them.

    Attributes:
        parent: the run before this one. None means that prompts begin with this run.
        blocks: packed names of the blocks.
        depth: number of blocks of a prompt up to the end of this run.
        counts: prompts that contain this run, by holder.
        holders: bit mask of the same holders.
    """

    __slots__ = ("blocks", "counts", "depth", "holders", "parent")

    def __init__(self, parent: BlockRun | None, blocks: bytes, counts: dict[int, int], holders: int) -> None:
        self.parent = parent
        self.blocks = blocks
        self.depth: int = (parent.depth if parent else 0) + len(blocks) // HASH_BYTES
        self.counts = counts
        self.holders = holders

    def hashes(self) -> bytes:
        """Packed names of all blocks of a prompt that ends with this run."""
        runs, run = [], self.parent
        while run is not None:
            runs.append(run.blocks)
            run = run.parent
        return b"".join(reversed(runs)) + self.blocks


class PrefixTree:
    """Prompts of several holders, which are small integers.

    The last run identifies an added prompt, and continues to do so when runs are cut.

    Attributes:
        num_blocks, num_runs: distinct blocks and runs in the prompts of each holder.
    """

    def __init__(self) -> None:
        self.num_blocks: defaultdict[int, int] = defaultdict(int)
        self.num_runs: defaultdict[int, int] = defaultdict(int)
        self._runs: dict[bytes, BlockRun] = {}
        self._sought: bytes | None = None  # prompt of the last `find` since the tree changed
        self._found: tuple[BlockRun | None, int] = (None, 0)

    def __len__(self) -> int:
        """Runs."""
        return len(self._runs)

    def find(self, hashes: bytes) -> tuple[BlockRun | None, int]:
        """Find the longest prefix that a prompt shares with any prompt of the tree.

        Returns:
            The last run of the prefix, and the number of its blocks, which may end within that run. (None, 0) means
            that no prefix is shared.
        """
        if hashes is not self._sought:  # a prompt is sought before it is routed, and again when it is added
            self._found = self._find(hashes)
            self._sought = hashes
        return self._found

    def _find(self, hashes: bytes) -> tuple[BlockRun | None, int]:
        get, last, at, end = self._runs.get, None, 0, len(hashes)
        while at < end:
            run = get(hashes[at : at + HASH_BYTES])
            # A name with another parent than before is no hash of `core.hashing`, and is treated as unknown.
            if run is None or run.parent is not last:
                break
            last = run
            if not hashes.startswith(run.blocks, at):
                return run, at // HASH_BYTES + _num_common(run.blocks, hashes, at)
            at += len(run.blocks)
        return last, at // HASH_BYTES

    def add(self, holder: int, hashes: bytes) -> BlockRun | None:
        """Add a prompt of `holder`. Returns the last run; None means that the prompt has no block."""
        last, num_blocks = self.find(hashes)
        self._sought = None
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
        """Remove one prompt of `holder`, whose last run is `last`."""
        self._sought = None
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
        """Cut a run in two at `depth`, and return the first part, which is a new object.

        The second part stays the same object, so that prompts and later runs keep their references.
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
    """Number of leading blocks of `blocks` that `hashes` has at byte `at`; not all of them match."""
    same, more = 0, min(len(blocks), len(hashes) - at) // HASH_BYTES
    while same < more:  # `same` blocks match, and more than `more` do not
        middle = (same + more + 1) // 2
        if hashes.startswith(blocks[: middle * HASH_BYTES], at):
            same = middle
        else:
            more = middle - 1
    return same
