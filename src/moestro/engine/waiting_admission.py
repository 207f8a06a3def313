"""Who could enter: whether a waiting sequence finds a slot and blocks beside the running ones. Decides nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moestro.core.views import BE, BatchLimits
from moestro.engine.block_pool import BlockPool
from moestro.engine.sequences import Sequence, SequenceTable
from moestro.engine.waiting import WaitingQueue


class Fit(NamedTuple):
    """What admitting a waiting sequence would take.

    Attributes:
        shared: cached blocks that it would share.
        num_own: blocks that it would be given besides.
        num_taken: free blocks that would be fewer: its own, and the shared ones that nobody holds now.
        num_cached: tokens that it need not compute: found in the prefix cache, or kept in host memory.
        num_left: those that it must.
    """

    shared: list[int]
    num_own: int
    num_taken: int
    num_cached: int
    num_left: int


class Candidate(NamedTuple):
    """A waiting sequence that could enter, and what it would take if nothing changed before."""

    sequence: Sequence
    fit: Fit


@dataclass(frozen=True, slots=True)
class Entrance:
    """Looks at one scheduler's state, which it never changes.

    Attributes:
        max_num_be: best-effort sequences that may run at once.
    """

    pool: BlockPool
    table: SequenceTable
    waiting: WaitingQueue
    block_size: int
    max_num_be: int

    def fit(self, sequence: Sequence) -> Fit:
        """What admitting a waiting sequence now would take."""
        block_size, num_tokens = self.block_size, sequence.num_tokens
        shared = self.pool.find_prefix(sequence.readable_hashes()[: num_tokens // block_size])
        num_own = -(-num_tokens // block_size) - len(shared)
        # The last token is computed even on a full hit: its logits are wanted.
        num_cached = min(max(len(shared) * block_size, sequence.num_kept), num_tokens - 1)
        return Fit(shared, num_own, num_own + self.pool.num_free_among(shared), num_cached, num_tokens - num_cached)

    def has_place(self, sequence: Sequence, gone: Collection[int] = ()) -> bool:
        """Whether a waiting sequence would find a slot and its blocks, had those in the slots `gone` left."""
        table, slots = self.table, list(gone)
        num_be = table.num_be - int(np.count_nonzero(table.service_class[slots] == BE))
        if table.num_free_slots + len(slots) == 0 or num_be + (sequence.service_class == BE) > self.max_num_be:
            return False
        fit, num_blocks = self.fit(sequence), self._num_blocks() + len(slots)
        if not slots or fit.num_taken > num_blocks + int(table.capacity[slots].sum()) // self.block_size:
            return fit.num_taken <= num_blocks
        # Blocks that others hold too stay held; of the prefix that it would share, those set free are taken again.
        freed = self.pool.freed_by([table.at(slot).blocks for slot in slots])
        return fit.num_taken + len(freed.intersection(fit.shared)) <= num_blocks + len(freed)

    def candidates(
        self, room: int, limits: BatchLimits, now_ns: int, service_class: int | None = None
    ) -> list[Candidate]:
        """Waiting sequences that could enter beside the running ones, in order.

        The first that does not fit stops the search: nobody overtakes it for being smaller. But where best effort's
        places are taken, those who need none of them go on.

        Args:
            room: tokens that newcomers might be given; 0 or less: nobody is looked at.
            service_class: only sequences of this class; None: all.
        """
        found: list[Candidate] = []
        if room <= 0 or self.table.num_free_slots == 0:
            return found
        num_free, num_be, num_ls_left = self._num_blocks(), self.table.num_be, self.waiting.num_ls
        for sequence in self.waiting.in_order(now_ns):
            is_be = sequence.service_class == BE
            num_ls_left -= not is_be
            if is_be and num_be >= self.max_num_be:
                if num_ls_left == 0:
                    break
                continue
            if service_class is not None and sequence.service_class != service_class:
                continue
            fit = self.fit(sequence)
            num_free -= fit.num_taken
            if num_free < 0:
                break
            num_be += is_be
            found.append(Candidate(sequence, fit))
            room -= min(fit.num_left, limits.max_chunk)
            if room <= 0 or len(found) == self.table.num_free_slots:
                break
        return found

    def _num_blocks(self) -> int:
        """Free blocks for newcomers: one is kept back for each that runs, or a newcomer would soon be evicted again."""
        return self.pool.num_free - len(self.table.running)
