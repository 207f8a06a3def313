"""The step that follows the one in flight: it is planned before the host has the tokens that it computes.

An accelerator then finds its next step launched when it ends one, and the host works meanwhile.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.columns import ONE, all_nonzero, all_true, has_true, true_rows
from moestro.core.work import FROM_STEP_BEFORE, Int32s, Plan, Slots
from moestro.engine.scheduler import Scheduler
from moestro.engine.units import make_units
from moestro.engine.waiting_admission import AdmissionCandidate

# Of the sequences of a step that goes ahead without those that follow a grammar: each of these then takes every other
# step, which costs more tokens than the host's time is worth if they are many.
_MOST_WAITING_SHARE = 1 / 8


class NextStep:
    """Plans the step that follows the one in flight, where nothing but sampled tokens is unknown.

    The policies see the sequences as they will be when the step in flight is done, without those that reach their last
    token in it. A sequence that ends with it by a stop token or an abort, which the host learns later, costs one row of
    the next step. `Scheduler.update` drops that row, and releases the sequence's blocks with it.

    Args:
        scheduler: whose plan is in flight. Its executor launches plans in order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._table, self._pool, self._waiting = scheduler.table, scheduler.pool, scheduler.waiting

    def plan(self, now_ns: int) -> Plan | None:
        """Plan the next step, or return None where the step in flight has to end first.

        It has to where many sequences need their tokens on the host, where a waiting sequence may preempt others or
        gets its prefix from the step in flight, and where blocks are too few.
        """
        scheduler = self._scheduler
        if self._table.num_hashed or self._may_preempt(now_ns):
            return None
        slots = self._without_waiting(self._going_on())
        if slots is None:
            return None
        view, num_free = scheduler.views.running(slots, now_ns), self._pool.num_free
        candidates: list[AdmissionCandidate] = []
        if len(self._waiting):
            if scheduler.state.recorder is not None:
                scheduler.state.recorder.look(self._waiting, now_ns)
            room = scheduler.batch_policy.room(view, scheduler.limits)
            candidates = scheduler.admission.candidates(room, scheduler.limits, now_ns)
            if candidates and self._fills_prefix(candidates):
                return None
            view = scheduler.views.with_candidates(view, candidates, now_ns) if candidates else view
        chunk = scheduler.batch_policy.plan(view, scheduler.limits)
        num_tokens = chunk[: len(slots)]
        if not all_nonzero(num_tokens):
            slots, num_tokens = slots[num_tokens > 0], num_tokens[num_tokens > 0]
        if not self._allocate_blocks(slots):
            return None
        if candidates:
            slots, num_tokens = scheduler.with_admitted(candidates, slots, num_tokens, chunk, num_free, now_ns)
        return self._plan_of(slots, num_tokens) if len(slots) else None

    def _without_waiting(self, slots: Slots) -> Slots | None:
        """Leave out sequences whose grammar reads the token that they sample now. Returns None where these are many.

        Sequences that sit out until their masks are ready are left out too, as in any step.
        """
        table = self._table
        if table.num_sitting_out:
            table.look_for_masks()
            slots = slots[~table.sits_out[slots]]
        if not table.num_editing:
            return slots
        waits = self._samples(slots) & table.has_grammar[slots]
        if not has_true(waits):
            return slots
        return None if np.count_nonzero(waits) > _MOST_WAITING_SHARE * len(slots) else slots[~waits]

    def _samples(self, slots: Slots) -> NDArray[np.bool_]:
        """bool[n], which of `slots` have all their known tokens computed by the step in flight."""
        samples: NDArray[np.bool_] = self._table.progress(slots)[0] == self._table.num_tokens[slots]
        return samples

    def _may_preempt(self, now_ns: int) -> bool:
        """Whether a waiting sequence may preempt another, which has to be idle for that."""
        scheduler = self._scheduler
        if not len(self._waiting):
            return False
        may_make_way = scheduler.preemption.makes_way and self._table.num_be > 0
        return may_make_way or scheduler.admission.lacks_room_for_claims(scheduler.limits, now_ns)

    def _fills_prefix(self, candidates: list[AdmissionCandidate]) -> bool:
        """Whether the step in flight fills a prompt's block that a candidate lacks, and would find afterwards."""
        table, running, size = self._table, self._table.running, self._table.block_size
        computed, after = table.num_computed[running], table.progress(running)[0]
        filled = set[bytes]()
        if self._scheduler.settings.enable_prefix_caching:
            for row in true_rows((after - computed > ONE) & (after // size > computed // size)):
                first, end = computed.item(row) // size, after.item(row) // size
                filled.update(table.at(running.item(row)).hashes[first:end])
        for candidate in candidates if filled else ():
            hashes, num_prefix = candidate.sequence.readable_hashes(), candidate.needs.num_prefix
            if num_prefix < len(hashes) and hashes[num_prefix] in filled:
                return True
        return False

    def _going_on(self) -> Slots:
        """Slots of the running sequences that have more to compute after the step in flight, as far as is known."""
        table, running = self._table, self._table.running
        goes_on = ~self._samples(running) | (table.num_tokens[running] + ONE < table.last_num_tokens[running])
        if self._scheduler.state.num_leaving:
            goes_on &= ~table.are_leaving(running)
        return running if all_true(goes_on) else running[goes_on]

    def _allocate_blocks(self, slots: Slots) -> bool:
        """Give a block to each sequence that lacks one. Returns False, and changes nothing, if the pool has too few."""
        table = self._table
        takers: list[int] = slots[table.progress(slots)[1] > table.capacity[slots]].tolist()
        if len(takers) > self._pool.num_free:
            return False
        if takers:
            table.add_blocks(takers, self._pool.allocate_many(len(takers)))
        return True

    def _plan_of(self, slots: Slots, num_tokens: Int32s) -> Plan:
        """Make the plan. `Scheduler.update` replaces FROM_STEP_BEFORE in the table by the tokens."""
        table = self._table
        following = slots[self._samples(slots)]
        table.token_ids[following, table.num_tokens[following]] = FROM_STEP_BEFORE
        self._scheduler.decode_run.end()
        self._scheduler.counts.num_steps_ahead += 1
        return self._scheduler.plan_of(make_units(table, slots, num_tokens))
