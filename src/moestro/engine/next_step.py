"""The step that follows the one in flight: it is planned before the host has the tokens that it computes.

An accelerator then finds its next step launched when it ends one, and the host works meanwhile.
"""

from __future__ import annotations

from moestro.core.columns import ONE, all_true
from moestro.core.work import Plan, Slots
from moestro.engine.scheduler import Scheduler
from moestro.engine.units import make_next_units


class NextStep:
    """Plans the decodes that follow the step in flight, where nothing but their tokens is unknown.

    A sequence that ends with the step in flight by a stop token or an abort, which the host learns later, costs one row
    of the next step. `Scheduler.update` drops that row, and releases the sequence's blocks with it.

    Args:
        scheduler: whose plan is in flight. Its executor launches plans in order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._table, self._pool, self._waiting = scheduler.table, scheduler.pool, scheduler.waiting

    def plan(self, now_ns: int) -> Plan | None:
        """Plan one token of each sequence in flight that goes on. None means that the step in flight has to end first.

        It has to where a unit in flight samples no token, a sequence edits its logits or wants log probabilities of its
        prompt, a waiting sequence may find a place, the batch policy leaves a decode out, or blocks are too few.
        """
        slots = self._going_on()
        if slots is None or self._could_admit(slots, now_ns) or not self._takes_all(slots, now_ns):
            return None
        if not self._allocate_blocks(slots):
            return None
        self._scheduler.decode_run.end()
        return self._scheduler.plan_of(make_next_units(self._table, slots))

    def _going_on(self) -> Slots | None:
        """Slots of all running sequences that have a token after the step in flight, as far as the host knows.

        None means that there is none, or that one needs the host before its next token.
        """
        table, running = self._table, self._table.running
        if table.num_editing or table.num_wanting_prompt_logprobs or table.num_hashed or table.num_scoring:
            return None
        if table.num_units_in_flight < len(running):
            return None
        known = table.num_tokens[running]
        if not all_true(table.num_computed[running] + table.num_in_flight[running] == known):
            return None  # a prompt has further chunks
        goes_on = known + ONE < table.last_num_tokens[running]
        if self._scheduler.state.num_leaving:
            goes_on &= ~table.are_leaving(running)
        if all_true(goes_on):
            return running if len(running) else None
        return running[goes_on] if goes_on.any() else None

    def _could_admit(self, slots: Slots, now_ns: int) -> bool:
        """Whether a waiting sequence may be admitted when the step in flight ends.

        Args:
            slots: sequences that go on.
        """
        scheduler = self._scheduler
        if not len(self._waiting):
            return False
        if len(slots) < len(self._table.running):
            return True  # one leaves its slot and its blocks
        if scheduler.preemption.makes_way and self._table.num_be and self._waiting.num_ls:
            return True
        if not self._table.num_free_slots:
            return False
        room = scheduler.batch_policy.room(scheduler.views.decodes(slots, now_ns), scheduler.limits)
        return bool(scheduler.admission.candidates(room, scheduler.limits, now_ns))

    def _takes_all(self, slots: Slots, now_ns: int) -> bool:
        """Whether the batch policy plans a decode of each sequence."""
        scheduler = self._scheduler
        planned = scheduler.batch_policy.plan(scheduler.views.decodes(slots, now_ns), scheduler.limits)
        return all_true(planned == ONE)

    def _allocate_blocks(self, slots: Slots) -> bool:
        """Give a block to each sequence that lacks one. Returns False, and changes nothing, if the pool has too few."""
        table = self._table
        takers: list[int] = slots[table.num_tokens[slots] >= table.capacity[slots]].tolist()
        if len(takers) > self._pool.num_free:
            return False
        if takers:
            table.add_blocks(takers, self._pool.allocate_many(len(takers)))
        return True
