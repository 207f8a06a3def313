"""Host memory for the KV of preempted sequences: its free blocks, and the copies to be done. Integers only.

A preempted sequence whose KV is kept continues where it was; without kept KV it computes its tokens again. Copies are
collected until the next plan and go with it: first those out of the device, then those into it, then the plan's units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from moestro.core.work import BlockMoves
from moestro.engine.sequences import Sequence
from moestro.errors import InvariantError


class HostBlocks:
    """Allocates blocks of host memory, and collects the copies to and from the device.

    Args:
        num_blocks: blocks of host memory. With 0 no KV is ever kept.
        block_size: tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: list[tuple[int, int]] = []  # (device block, host block), not yet in a plan
        self._restored: list[tuple[int, int]] = []  # (host block, device block)

    @property
    def num_free_tokens(self) -> int:
        """Tokens whose KV still has room."""
        return len(self._free) * self._block_size

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
        if not 0 < num_blocks <= len(self._free):
            return False
        sequence.host_blocks = [self._free.pop() for _ in range(num_blocks)]
        sequence.num_kept = num_computed
        self._kept += zip(sequence.blocks[:num_blocks], sequence.host_blocks, strict=True)
        return True

    def restore(self, sequence: Sequence, num_shared: int) -> int:
        """Copy kept KV into the blocks that the sequence has just been given, and free its host blocks.

        Args:
            num_shared: its first blocks, which come from the prefix cache and need no copy.

        Returns:
            Tokens whose KV is copied.
        """
        num_blocks = len(sequence.host_blocks)
        self._restored += zip(sequence.host_blocks[num_shared:], sequence.blocks[num_shared:num_blocks], strict=True)
        num_tokens = max(sequence.num_kept - num_shared * self._block_size, 0)
        self._release(sequence)
        return num_tokens

    def forget(self, sequence: Sequence) -> None:
        """Drop the kept KV of a sequence that leaves."""
        if sequence.host_blocks:
            gone = set(sequence.host_blocks)
            self._kept = [move for move in self._kept if move[1] not in gone]  # they would never be read
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._free += sequence.host_blocks
        sequence.host_blocks, sequence.num_kept = [], 0

    def take_moves(self) -> BlockMoves | None:
        """Take the copies since the last call, for the next plan. None means that there are none."""
        if not self._kept and not self._restored:
            return None
        moves = BlockMoves(_columns(self._kept), _columns(self._restored))
        self._kept, self._restored = [], []
        return moves

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Recount all host blocks against those of the waiting sequences.

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
