"""Admission of waiting sequences: which of them would find a slot and KV blocks beside the running ones.

Everything here only reads the scheduler's state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from moestro.core.views import BE, BatchLimits
from moestro.engine.block_pool import BlockPool
from moestro.engine.client_shares import ClientShares
from moestro.engine.host_tier import HostTier
from moestro.engine.sequences import Sequence, SequenceTable
from moestro.engine.waiting import WaitingQueue


class AdmissionNeeds(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Blocks and computation that the admission of a waiting sequence would take.

    Attributes:
        shared: cached blocks that the sequence would share.
        num_own: further blocks that it would be given.
        loaded: positions in the prompt of those further blocks into which cached KV is copied from host memory.
        num_taken: free blocks that the pool would lose: the own ones, and shared ones without a holder now.
        num_cached: tokens that need no computation, from the prefix cache or from host memory.
        num_left: tokens that the sequence would compute.
    """

    shared: list[int]
    num_own: int
    num_taken: int
    num_cached: int
    num_left: int
    loaded: tuple[int, ...] = ()

    @property
    def num_prefix(self) -> int:
        """Leading blocks of the prompt whose KV is cached on the device or in host memory."""
        return len(self.shared) + len(self.loaded)


class AdmissionCandidate(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A waiting sequence that could be admitted, and its needs as long as the pool does not change."""

    sequence: Sequence
    needs: AdmissionNeeds


@dataclass(frozen=True, slots=True)
class WaitingAdmission:
    """Finds the waiting sequences of one scheduler that could be admitted.

    Attributes:
        host: host memory, where the prefix cache's evicted blocks may be.
        max_num_be: best-effort sequences that may run at once.
        shares: parts of the clients.
    """

    pool: BlockPool
    table: SequenceTable
    waiting: WaitingQueue
    host: HostTier
    max_num_be: int
    shares: ClientShares

    def needs(self, sequence: Sequence) -> AdmissionNeeds:
        """Blocks and computation that a waiting sequence would take now."""
        block_size, num_tokens = self.table.block_size, sequence.num_tokens
        hashes = sequence.readable_hashes()[: num_tokens // block_size]
        shared = self.pool.find_prefix(hashes)
        loaded: tuple[int, ...] = ()
        if not sequence.num_kept and len(shared) < len(hashes) and hashes[len(shared)] in self.host:
            shared, loaded = self.host.find_prefix(hashes, shared)
        num_own = -(-num_tokens // block_size) - len(shared)
        if not shared and not loaded and not sequence.num_kept:
            return AdmissionNeeds(shared, num_own, num_own, 0, num_tokens)
        # The last token is computed even when the cache holds the whole prompt, because its logits are wanted.
        num_cached = min(max((len(shared) + len(loaded)) * block_size, sequence.num_kept), num_tokens - 1)
        num_taken = num_own + self.pool.num_free_among(shared)
        return AdmissionNeeds(shared, num_own, num_taken, num_cached, num_tokens - num_cached, loaded)

    def has_place(self, sequence: Sequence, preempted: Collection[int] = ()) -> bool:
        """Whether a waiting sequence would find a slot and blocks if the sequences in slots `preempted` were gone."""
        table, slots = self.table, list(preempted)
        num_be = table.num_be - int(np.count_nonzero(table.service_class[slots] == BE))
        if table.num_free_slots + len(slots) == 0 or num_be + (sequence.service_class == BE) > self.max_num_be:
            return False
        needs, num_blocks = self.needs(sequence), self._num_blocks() + len(slots)
        if not slots or needs.num_taken > num_blocks + int(table.capacity[slots].sum()) // table.block_size:
            return needs.num_taken <= num_blocks
        # A block with another holder stays held. A freed block of the sequence's own prefix would be taken again.
        freed = self.pool.freed_by([table.at(slot).blocks for slot in slots])
        return needs.num_taken + len(freed.intersection(needs.shared)) <= num_blocks + len(freed)

    def candidates(
        self, room: int, limits: BatchLimits, now_ns: int, service_class: int | None = None
    ) -> list[AdmissionCandidate]:
        """Waiting sequences that could be admitted beside the running ones, in the order policy's order.

        With several clients, those that their client may claim a place for come first. The first sequence that does not
        fit ends the search, so that a smaller one behind it cannot overtake it. Where all places for best effort are
        taken, latency-sensitive sequences may overtake best-effort ones.

        Args:
            room: tokens that admitted sequences may be given. With 0 or less there are no candidates.
            service_class: considers only sequences of this class. None means all classes.
        """
        found: list[AdmissionCandidate] = []
        num_slots = self.table.num_free_slots
        if room <= 0 or num_slots == 0:
            return found
        num_free, num_be, num_ls_left = self._num_blocks(), self.table.num_be, self.waiting.num_ls
        for sequence in self._in_order(limits, now_ns):
            is_be = sequence.service_class == BE
            num_ls_left -= not is_be
            if is_be and num_be >= self.max_num_be:
                if num_ls_left == 0:
                    break
                continue
            if service_class is not None and sequence.service_class != service_class:
                continue
            needs = self.needs(sequence)
            num_free -= needs.num_taken
            if num_free < 0:
                break
            num_be += is_be
            found.append(AdmissionCandidate(sequence, needs))
            room -= needs.num_left if needs.num_left < limits.max_chunk else limits.max_chunk
            if room <= 0 or len(found) == num_slots:
                break
        return found

    def claimants(self, limits: BatchLimits, now_ns: int) -> list[Sequence]:
        """Waiting sequences that their clients may claim a place for, in order; none while there is one client."""
        if not self.shares.are_needed or not len(self.waiting):
            return []
        return self.waiting.claimants(self.shares.claims(limits), now_ns)

    def lacks_room_for_claims(self, limits: BatchLimits, now_ns: int) -> bool:
        """Whether sequences with a claim find no place while a client holds more than its part."""
        # The shares first: mostly none is over its part, and claims look at the queue.
        if not self.shares.are_needed or not len(self.shares.over_share(self.table.running)):
            return False
        claimants = self.claimants(limits, now_ns)
        if not claimants:
            return False
        num_be = sum(sequence.service_class == BE for sequence in claimants)
        num_blocks = sum(self.needs(sequence).num_taken for sequence in claimants)
        return not self.have_room(len(claimants), num_be, num_blocks)

    def _in_order(self, limits: BatchLimits, now_ns: int) -> Iterator[Sequence]:
        """Iterate over the waiting sequences: those with a claim, then the others."""
        claimants = self.claimants(limits, now_ns)
        if not claimants:
            yield from self.waiting.in_order(now_ns)
            return
        yield from claimants
        first = {sequence.serial for sequence in claimants}
        for sequence in self.waiting.in_order(now_ns):
            if sequence.serial not in first:
                yield sequence

    def have_room(self, num_seqs: int, num_be: int, num_blocks: int) -> bool:
        """Whether sequences that take so many slots, of which some are best effort, and blocks find a place now."""
        table = self.table
        has_slots = num_seqs <= table.num_free_slots and table.num_be + num_be <= self.max_num_be
        return has_slots and num_blocks <= self._num_blocks()

    def _num_blocks(self) -> int:
        """Free blocks for admission.

        One block is reserved for each running sequence, or an admitted sequence would soon be preempted again.
        """
        return self.pool.num_free - len(self.table.running)
