"""Admission of waiting sequences, and preemption of running ones: who finds a slot and KV blocks, and who frees them.

Preempting a sequence frees KV blocks; preempting a batch (`flow`) frees the device and no block. Admission only reads
the scheduler's state. Preemption changes it in one way: the unit in flight of the chosen sequence is recalled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.views import BE, LS, BatchLimits, BatchView, EvictView
from moestro.core.work import Int32s, Slots
from moestro.engine.block_pool import BlockPool
from moestro.engine.event_recorder import EventRecorder
from moestro.engine.host_tier import HostTier
from moestro.engine.registry import EvictPolicy
from moestro.engine.sequences import Sequence, SequenceTable
from moestro.engine.waiting import ClientShares, WaitingQueue


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


class PolicyViews:
    """Makes views of `table`, and never changes it.

    Args:
        shares: parts of the clients.
        promotes_after_ns: waiting time after which a best-effort sequence counts as latency-sensitive
            (`OrderPolicy.promotes_after_ns`).
    """

    def __init__(self, table: SequenceTable, shares: ClientShares, promotes_after_ns: int) -> None:
        self._table, self._shares = table, shares
        self._promotes_after_ns = promotes_after_ns
        # Constant columns of the usual step, cut to length: running rows, then candidates.
        self._num_slots = len(table.sequences)
        self._is_waiting = np.arange(2 * self._num_slots) >= self._num_slots
        self._all_ls = np.full(self._num_slots, LS, np.uint8)

    def running(self, slots: Slots, now_ns: int) -> BatchView:
        """View of the running sequences in `slots`, as they will be when their units in flight are done."""
        table = self._table
        computed, known = table.progress(slots)
        num_left = known - computed
        classes, none_waits = self.classes(slots, now_ns), self._is_waiting[: len(slots)]
        if self._shares.are_needed:
            clients, part = table.client[slots], self._shares.part
            return BatchView(num_left, none_waits, classes, table.num_units_in_flight, clients, part)
        return BatchView(num_left, none_waits, classes, table.num_units_in_flight)

    @property
    def has_shares(self) -> bool:
        """Whether plans depend on parts of several clients."""
        return self._shares.are_needed

    def alone(self, num_left: Int32s) -> BatchView:
        """View of latency-sensitive running sequences of one client, with `num_left` tokens each, and of no others."""
        num = len(num_left)
        return BatchView(num_left, self._is_waiting[:num], self._all_ls[:num])

    def with_candidates(self, view: BatchView, candidates: list[AdmissionCandidate], now_ns: int) -> BatchView:
        """Append a row for each candidate to `view`. There are at most as many as free slots."""
        old, num = len(view.num_left), len(candidates)
        num_left = np.empty(old + num, np.int32)
        num_left[:old] = view.num_left
        has_be = self._table.num_be > 0
        for row, candidate in enumerate(candidates, old):  # they are few, and a list of them would become an array
            num_left[row] = candidate.needs.num_left
            has_be = has_be or candidate.sequence.service_class == BE
        if has_be:
            classes = np.concatenate((view.service_class, self._classes_of(candidates, now_ns)))
        else:
            classes = self._all_ls[: old + num]
        return BatchView(
            num_left,
            self._is_waiting[self._num_slots - old : self._num_slots + num],
            classes,
            view.num_in_flight,
            None if view.client is None else np.append(view.client, [each.sequence.client for each in candidates]),
            view.part,
        )

    def _classes_of(self, candidates: list[AdmissionCandidate], now_ns: int) -> NDArray[np.uint8]:
        return np.array([self.class_of(candidate.sequence, now_ns) for candidate in candidates], np.uint8)

    def class_of(self, sequence: Sequence, now_ns: int) -> int:
        """LS or BE. A best-effort sequence counts as LS once the order policy has promoted it."""
        is_promoted = now_ns - sequence.request.arrival_ns >= self._promotes_after_ns
        return LS if is_promoted else sequence.service_class

    def classes(self, slots: Slots, now_ns: int) -> NDArray[np.uint8]:
        """uint8[n], `class_of` of the sequences in `slots`."""
        table = self._table
        if table.num_be == 0:
            return self._all_ls[: len(slots)]
        promoted = now_ns - table.arrival_ns[slots] >= self._promotes_after_ns
        return np.where(promoted, np.uint8(LS), table.service_class[slots])

    def holds_until_ns(self, slots: Slots, now_ns: int) -> int:
        """Time at which the next sequence in `slots` is promoted. FOREVER_NS means never."""
        if self._table.num_be == 0:
            return FOREVER_NS
        promoted_ns = self._table.arrival_ns[slots] + self._promotes_after_ns
        return int(promoted_ns.min(initial=FOREVER_NS, where=self.classes(slots, now_ns) == BE))


# (slots, now_ns) -> those slots whose unit in flight was withdrawn.
Recall = Callable[[Slots, int], Slots]


class PreemptionVictim(NamedTuple):
    """A slot to be preempted, and whether its KV is to be kept in host memory."""

    slot: int
    keeps: bool


class SequencePreemption:
    """Chooses victims among the running sequences of one scheduler.

    Args:
        policy: chooses one victim of several sequences.
        admission: the scheduler's state, and the needs of waiting sequences.
        views: makes the policies' views of that state.
        host: memory for the KV of preempted sequences.
        recall: withdraws units in flight (`core.work.Executor.recall`), so that a best-effort sequence with a unit that
            the device has not begun can be a victim. None means that a unit in flight protects its sequence.

    Attributes:
        makes_way: whether a waiting latency-sensitive sequence may preempt running best-effort ones.
        recorder: as in `SchedulerState`.
    """

    def __init__(
        self,
        policy: EvictPolicy,
        admission: WaitingAdmission,
        views: PolicyViews,
        host: HostTier,
        recall: Recall | None = None,
    ) -> None:
        self.makes_way = policy.makes_way
        self._policy = policy
        self._admission, self._table, self._waiting = admission, admission.table, admission.waiting
        self._views = views
        self._host = host
        self._recall = recall
        self.recorder: EventRecorder | None = None

    def victim(self, now_ns: int) -> PreemptionVictim:
        """The sequence to preempt for a free block. At least one running sequence has no unit in flight.

        With several clients, it belongs to the client that holds most over its part, if one does.
        """
        slots, shares = self._preemptible(), self._admission.shares
        over = self._recalled(shares.over_share(slots), now_ns) if shares.are_needed else None
        victim = over or self._recalled(slots, now_ns)
        assert victim is not None, "every running sequence has a unit in flight that the device has begun"
        return victim

    def victim_for(self, claimant: Sequence, now_ns: int) -> PreemptionVictim | None:
        """The sequence to preempt for a waiting one that its client may claim a place for. None means that none may be.

        It belongs to the client that holds most over its part. Best effort preempts nothing of a client that runs a
        latency-sensitive sequence, because the last in order of that client may be such a one.
        """
        slots = self._admission.shares.over_share(self._preemptible())
        if claimant.service_class == BE and bool((self._views.classes(slots, now_ns) != BE).any()):
            return None
        return self._recalled(slots, now_ns)

    def _recalled(self, slots: Slots, now_ns: int) -> PreemptionVictim | None:
        """The policy's choice among those of `slots` that have no unit in flight, or whose unit can be recalled."""
        while len(slots):
            victim = self._choose(slots, self._host.num_free_tokens, now_ns)
            if self.recall_unit(victim.slot, now_ns):
                return victim
            slots = slots[slots != victim.slot]
        return None

    def victims_for_first(self, now_ns: int, service_class: int | None = None) -> list[PreemptionVictim]:
        """Best-effort sequences to preempt for the first waiting sequence, if that one is latency-sensitive.

        Args:
            service_class: considers the first sequence only if the client gave it this class. Promotion by age then
                does not count. None means any class.

        Returns:
            Victims until the first sequence has a place. The list is empty if it has a place already, or if preempting
            all of them would not suffice. Even then units may have been recalled that the device had begun in part.
        """
        first = next(self._waiting.in_order(now_ns))
        if service_class is not None and first.service_class != service_class:
            return []
        if self._admission.has_place(first) or not self.could_make_way(now_ns):
            return []
        slots, victims, room = self._best_effort(now_ns), list[PreemptionVictim](), self._host.num_free_tokens
        while not self._admission.has_place(first, [victim.slot for victim in victims]):
            if len(slots) == 0:
                return []  # a needed victim's unit has begun on the device
            victim = self._choose(slots, room, now_ns)
            slots = slots[slots != victim.slot]
            if self.recall_unit(victim.slot, now_ns):
                victims.append(victim)
                wanted = self._host.room_for(int(self._table.num_computed[victim.slot])) if victim.keeps else 0
                room -= wanted if wanted <= room else 0
        return victims

    def could_make_way(self, now_ns: int) -> bool:
        """Whether preempting all best-effort sequences would give the first waiting sequence a place.

        The answer is False where that sequence is best effort itself.
        """
        if not self.makes_way:
            return False
        first = next(self._waiting.in_order(now_ns))
        if self._views.class_of(first, now_ns) == BE:
            return False
        slots = self._best_effort(now_ns)
        return len(slots) > 0 and self._admission.has_place(first, slots.tolist())

    def _best_effort(self, now_ns: int) -> Slots:
        """Slots of best-effort sequences that might be preempted."""
        slots = self._preemptible()
        return slots[np.flatnonzero(self._views.classes(slots, now_ns) == BE)]

    def _preemptible(self) -> Slots:
        """Slots without a unit in flight, and slots of best-effort sequences whose unit might be recalled."""
        table = self._table
        if self._recall is None or not table.num_units_in_flight:
            return table.idle()
        return np.concatenate((table.idle(), table.in_flight(BE)))

    def recall_unit(self, slot: int, now_ns: int) -> bool:
        """Withdraw the unit in flight of the sequence in `slot`, if any. Returns whether none is in flight now."""
        table = self._table
        if not table.num_in_flight[slot]:
            return True
        if self._recall is None or table.at(slot).is_leaving:
            return False
        if len(self._recall(np.array([slot], np.int64), now_ns)) == 0:
            return False  # the device has begun it
        table.num_in_flight[slot] = 0
        table.num_units_in_flight -= 1
        return True

    def _choose(self, slots: Slots, room: int, now_ns: int) -> PreemptionVictim:
        """Ask the policy for a victim among `slots`.

        Args:
            room: tokens for which host memory has room after the victims chosen before.
        """
        ranks = self._waiting.rank([self._table.at(slot) for slot in slots.tolist()], now_ns)
        classes = self._views.classes(slots, now_ns)
        view = EvictView(ranks, self._table.num_computed[slots], classes, room)
        row, keeps = choice = self._policy(view)
        if self.recorder is not None:
            self.recorder.chose(self._table.at(int(slots[row])), view, choice, now_ns)
        return PreemptionVictim(int(slots[row]), keeps)
