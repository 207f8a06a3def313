"""Preemption of sequences: which running sequence frees its KV, for another running one or for a waiting one.

Preempting a sequence frees KV blocks; preempting a batch (`flow`) frees the device and no block. The choice has one
effect on the state: a chosen sequence's unit in flight is recalled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moestro.core.views import BE, EvictView
from moestro.core.work import Slots
from moestro.engine.event_recorder import EventRecorder
from moestro.engine.host_tier import HostTier
from moestro.engine.policy_contract import EvictPolicy
from moestro.engine.policy_views import PolicyViews
from moestro.engine.sequences import Sequence
from moestro.engine.waiting_admission import WaitingAdmission

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
