"""Who gives up KV: for a running sequence that finds no free block, or for a waiting one. Chooses; changes nothing but
that units in flight are recalled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moestro.core.views import BE, EvictView
from moestro.core.work import Slots
from moestro.engine.host_blocks import HostBlocks
from moestro.engine.policy_contract import EvictPolicy
from moestro.engine.policy_views import PolicyViews
from moestro.engine.waiting_admission import Entrance

# (slots, now_ns) -> those whose unit in flight was given up.
Recall = Callable[[Slots, int], Slots]


class Yielding(NamedTuple):
    """A slot to give up, and whether its KV is to be kept in host memory."""

    slot: int
    keeps: bool


class Eviction:
    """Chooses victims among one scheduler's running sequences.

    Args:
        policy: who of those that can go.
        entrance: the scheduler's state, and what a waiting sequence would take of it.
        views: of that state.
        host: memory in which KV may be kept.
        recall: gives up units in flight (see `core.work.Executor.recall`), so that best-effort sequences of which the
            device has nothing can go too; None: a unit in flight protects its sequence.

    Attributes:
        makes_way: whether waiting latency-sensitive sequences take what running best-effort ones hold.
    """

    def __init__(
        self,
        policy: EvictPolicy,
        entrance: Entrance,
        views: PolicyViews,
        host: HostBlocks,
        recall: Recall | None = None,
    ) -> None:
        self.makes_way = policy.makes_way
        self._policy = policy
        self._entrance, self._table, self._waiting = entrance, entrance.table, entrance.waiting
        self._views = views
        self._host = host
        self._recall = recall

    def victim(self, now_ns: int) -> Yielding:
        """Whom to give up for a block, of those that can go; there is one without a unit in flight."""
        slots, room = self._evictable(), self._host.num_free_tokens
        while not self.take_back((victim := self._choose(slots, room, now_ns)).slot, now_ns):
            slots = slots[slots != victim.slot]
        return victim

    def victims_for_first(self, now_ns: int, service_class: int | None = None) -> list[Yielding]:
        """Best-effort sequences to give up, so that the first in order, if it is latency-sensitive, has a place.

        Args:
            service_class: only if it is of this class (then age does not count); None: of any.

        Returns:
            As many as it takes; none if it has a place, or if it would have none though all of them went: nobody is
            preempted for nothing. Units may have been recalled even then, of which the device had done a part.
        """
        first = next(self._waiting.in_order(now_ns))
        if service_class is not None and first.service_class != service_class:
            return []
        if self._entrance.has_place(first) or not self.would_make_way(now_ns):
            return []
        slots, victims, room = self._yielding(now_ns), list[Yielding](), self._host.num_free_tokens
        while not self._entrance.has_place(first, [victim.slot for victim in victims]):
            if len(slots) == 0:
                return []  # the device has something of one that it takes
            victim = self._choose(slots, room, now_ns)
            slots = slots[slots != victim.slot]
            if self.take_back(victim.slot, now_ns):
                victims.append(victim)
                wanted = self._host.room_for(int(self._table.num_computed[victim.slot])) if victim.keeps else 0
                room -= wanted if wanted <= room else 0
        return victims

    def would_make_way(self, now_ns: int) -> bool:
        """Whether the first in order is latency-sensitive and would have a place if all best-effort sequences went that
        might.
        """
        if not self.makes_way:
            return False
        first = next(self._waiting.in_order(now_ns))
        if self._views.class_of(first, now_ns) == BE:
            return False
        slots = self._yielding(now_ns)
        return len(slots) > 0 and self._entrance.has_place(first, slots.tolist())

    def _yielding(self, now_ns: int) -> Slots:
        """Slots of best-effort sequences that might go."""
        slots = self._evictable()
        return slots[np.flatnonzero(self._views.classes(slots, now_ns) == BE)]

    def _evictable(self) -> Slots:
        """Slots without a unit in flight, and those of best-effort sequences whose unit might be recalled."""
        table = self._table
        if self._recall is None or not table.num_units_in_flight:
            return table.idle()
        return np.concatenate((table.idle(), table.in_flight(BE)))

    def take_back(self, slot: int, now_ns: int) -> bool:
        """Recall the unit in flight of the sequence in `slot`, if it has one. Returns whether it has none now."""
        table = self._table
        if not table.num_in_flight[slot]:
            return True
        if self._recall is None or table.at(slot).is_aborted:
            return False
        if len(self._recall(np.array([slot], np.int64), now_ns)) == 0:
            return False  # the device has something of it
        table.num_in_flight[slot] = 0
        table.num_units_in_flight -= 1
        return True

    def _choose(self, slots: Slots, room: int, now_ns: int) -> Yielding:
        """The one of `slots` that the policy gives up.

        Args:
            room: tokens for which host memory has room, once the victims before it are there.
        """
        ranks = self._waiting.rank([self._table.at(slot) for slot in slots.tolist()], now_ns)
        classes = self._views.classes(slots, now_ns)
        view = EvictView(ranks, self._table.num_computed[slots], classes, room)
        row, keeps = self._policy(view)
        return Yielding(int(slots[row]), keeps)
