"""Blocks of host memory: which are free, and the copies between them and the device. Integers only.

Copies are collected until the next plan and go with it: first those out of the device, then those into it, then the
plan's units. A host block that is read by the next plan is therefore not written before that plan.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from moestro.core.work import BlockMoves


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
