"""Host memory for the KV of preempted sequences: which of its blocks are whose, what is to be copied. Integers only.

A preempted sequence whose KV is kept goes on where it was; one whose KV is not computes it again. Copies are collected
until a plan is made and go with it: those out of the device before those into it, and all of them before its units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from moestro.core.work import BlockMoves
from moestro.engine.sequences import Sequence
from moestro.errors import InvariantError


class HostBlocks:
    """Keeps and restores.

    Args:
        num_blocks: blocks of host memory; 0: there is none, and nothing is ever kept.
        block_size: tokens of one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: list[tuple[int, int]] = []  # (device block, host block), not in a plan yet
        self._restored: list[tuple[int, int]] = []  # (host block, device block)

    @property
    def num_free_tokens(self) -> int:
        """Tokens whose KV would still find room."""
        return len(self._free) * self._block_size

    def room_for(self, num_tokens: int) -> int:
        """What keeping the KV of so many tokens takes, in tokens: whole blocks."""
        return -(-num_tokens // self._block_size) * self._block_size

    def keep(self, sequence: Sequence, num_computed: int) -> bool:
        """Copy the KV of a sequence that is about to give its blocks up.

        Args:
            num_computed: its tokens with KV.

        Returns:
            False: it has none, or there is no room for all of it; nothing has changed.
        """
        num_blocks = self.room_for(num_computed) // self._block_size
        if not 0 < num_blocks <= len(self._free):
            return False
        sequence.host_blocks = [self._free.pop() for _ in range(num_blocks)]
        sequence.num_kept = num_computed
        self._kept += zip(sequence.blocks[:num_blocks], sequence.host_blocks, strict=True)
        return True

    def restore(self, sequence: Sequence, num_shared: int) -> int:
        """Copy what was kept into the blocks that the sequence has just been given; its host blocks are free again.

        Args:
            num_shared: its first blocks, which it found in the prefix cache: these need no copy.

        Returns:
            Tokens whose KV is copied.
        """
        num_blocks = len(sequence.host_blocks)
        self._restored += zip(sequence.host_blocks[num_shared:], sequence.blocks[num_shared:num_blocks], strict=True)
        num_tokens = max(sequence.num_kept - num_shared * self._block_size, 0)
        self._release(sequence)
        return num_tokens

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that leaves."""
        if sequence.host_blocks:
            gone = set(sequence.host_blocks)
            self._kept = [move for move in self._kept if move[1] not in gone]  # nobody is to read them
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._free += sequence.host_blocks
        sequence.host_blocks, sequence.num_kept = [], 0

    def take_moves(self) -> BlockMoves | None:
        """The copies since the last call, for the next plan; None: there are none."""
        if not self._kept and not self._restored:
            return None
        moves = BlockMoves(_columns(self._kept), _columns(self._restored))
        self._kept, self._restored = [], []
        return moves

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Recount everything against what waiting sequences have here.

        Raises:
            InvariantError: a block is lost or held twice.
        """
        held = Counter(self._free)
        for sequence in waiting:
            held.update(sequence.host_blocks)
            if len(sequence.host_blocks) != -(-sequence.num_kept // self._block_size):
                raise InvariantError(f"{sequence.request.request_id}: blocks in host memory and tokens there differ")
        if held != Counter(range(self.num_blocks)):
            raise InvariantError("free and held blocks of host memory do not add up")


def _columns(moves: list[tuple[int, int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(moves, np.int64).reshape(-1, 2).T
