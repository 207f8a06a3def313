"""Many decode steps at once: how far nothing is decided, and the effect of all steps up to there.

Only the simulator uses this file. A server schedules every step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moestro.core.clock import FOREVER_NS
from moestro.core.columns import true_rows
from moestro.core.request import FinishReason
from moestro.core.views import BatchView
from moestro.core.work import Int32s
from moestro.engine.scheduler import Scheduler
from moestro.engine.step_output import StepOutput

TAKE, FILL = 0, 1  # within a step: `schedule` takes blocks, then `update` caches the full ones


class Horizon(NamedTuple):
    """Coming decode steps in which nothing is decided: the first `num_steps` of those that begin before `until_ns`.

    A step begins when the step before it ends. The first begins now, so it is always among them.

    Attributes:
        num_steps: an upper bound. 0 means that the next step has to be scheduled.
        until_ns: time at which the order or the batch may change with time alone. FOREVER_NS means never.
    """

    num_steps: int
    until_ns: int


class DecodeJumps:
    """Takes many decode steps of `scheduler` at once, with the same effect as single steps.

    Sequences carry no token ids.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._state, self._table, self._pool = scheduler.state, scheduler.table, scheduler.pool
        self._decodes: dict[int, bool] = {}  # by number of sequences: whether the batch policy takes them all

    def horizon(self, now_ns: int) -> Horizon:
        """The coming steps in which every running sequence decodes one token and nothing is decided.

        The bound follows from blocks, max_tokens, the policies, and waiting requests that could be admitted now or at a
        later time. Sequences may end in the last of these steps. The device knows of earlier ends, by a stop token or
        the end of a script: the caller asks it.
        """
        scheduler, table, running = self._scheduler, self._table, self._table.running
        if len(running) == 0 or table.num_units_in_flight:
            return Horizon(0, FOREVER_NS)
        view = scheduler.views.running(running, now_ns)
        if np.count_nonzero(view.is_decode) < len(running) or not self._all_decode(view):
            return Horizon(0, FOREVER_NS)
        computed, block_size = table.num_computed.take(running), table.block_size
        most = int((table.last_num_tokens.take(running) - computed).min()) - 1
        until_ns = scheduler.views.holds_until_ns(running, now_ns)
        if len(scheduler.waiting) and self._could_admit() and (room := self._room(view)) > 0:
            if scheduler.admission.candidates(room, scheduler.limits, now_ns) or self._makes_way(now_ns):
                return Horizon(0, FOREVER_NS)
            until_ns = min(until_ns, scheduler.waiting.order_holds_until_ns(now_ns))
            # A block that becomes full may be the prefix that the next waiting request lacks.
            most = min(most, int((block_size - computed % block_size).min()))
            if scheduler.waiting.policy.reads_cache:
                # An allocated block may have been cached, as a prefix on which the order depends.
                most = min(most, int((table.capacity.take(running) - computed).min()) + 1)
        if -(-most // block_size) * len(running) > self._pool.num_free:
            num_blocks = table.capacity.take(running) // block_size
            most = steps_that_fit(computed, num_blocks, block_size, self._pool.num_free, most)
        return Horizon(most, until_ns)

    def _all_decode(self, view: BatchView) -> bool:
        """Whether the batch policy takes every row of `view`, which are decodes.

        The answer for latency-sensitive rows alone depends on their number, so the policy is asked once for each.
        """
        if self._table.num_be:
            return self._takes_all(view)
        num_rows = len(view.num_left)
        if num_rows not in self._decodes:
            self._decodes[num_rows] = self._takes_all(view)
        return self._decodes[num_rows]

    def _takes_all(self, view: BatchView) -> bool:
        return bool((self._scheduler.batch_policy.plan(view, self._scheduler.limits) == 1).all())

    def _could_admit(self) -> bool:
        """Whether any sequence could be admitted while the running ones decode, so that the order matters."""
        return self._table.num_free_slots > 0 or self._scheduler.preemption.makes_way

    def _room(self, view: BatchView) -> int:
        """Tokens that the batch policy would give to admitted sequences."""
        return self._scheduler.batch_policy.room(view, self._scheduler.limits)

    def _makes_way(self, now_ns: int) -> bool:
        return self._scheduler.preemption.could_make_way(now_ns)

    def advance(
        self, num_steps: int, block_hashes: dict[int, bytes] | None = None, finished: list[int] | None = None
    ) -> StepOutput:
        """Apply `num_steps` decode steps, at most `horizon`.

        Args:
            block_hashes: by slot, packed hashes of the blocks of generated tokens that these steps complete.
            finished: slots whose script ends in the last of these steps.

        Returns:
            The sequences that ended in the last step; the tokens of the others are not listed.
        """
        table, running = self._table, self._table.running
        for slot, packed in (block_hashes or {}).items():
            table.learn_hashes(slot, packed)
        self._advance_blocks(num_steps)
        self._scheduler.num_steps += num_steps
        num_tokens = table.num_computed.take(running) + num_steps
        table.num_computed[running] = num_tokens
        num_tokens += 1
        table.num_tokens[running] = num_tokens
        at_last = true_rows(num_tokens >= table.last_num_tokens.take(running))
        if not at_last and not finished:
            return StepOutput()
        reasons = dict.fromkeys(running.take(at_last).tolist(), FinishReason.LENGTH)
        reasons |= dict.fromkeys(finished or (), FinishReason.STOP)
        ended = [slot for slot in running.tolist() if slot in reasons]
        output = StepOutput([table.at(slot) for slot in ended], [-1] * len(ended), [reasons[slot] for slot in ended])
        self._state.finish_all(output)
        return output

    def _advance_blocks(self, num_steps: int) -> None:
        """Allocate and cache the blocks of `num_steps` steps, in the order of single steps."""
        table, pool, running = self._table, self._pool, self._table.running
        block_size = table.block_size
        computed, capacity = table.num_computed.take(running), table.capacity.take(running)
        end = computed + num_steps
        if pool.journal is not None or np.count_nonzero(end >= table.next_full_at.take(running)):
            for step, kind, row in block_events(computed, capacity // block_size, block_size, num_steps):
                pool.step = step
                slot, position = int(running[row]), int(computed[row]) + step + 1
                if kind == TAKE:
                    table.add_block(slot, pool.allocate())
                elif position >= table.next_full_at[slot]:
                    self._state.cache_blocks(slot, position // block_size)
            pool.step = 0
            return
        # No block enters the cache, so only the order of allocations matters.
        short = true_rows(end > capacity)
        if short:
            taken = blocks_taken(computed.take(short).tolist(), capacity.take(short).tolist(), block_size, num_steps)
            short_slots = running.take(short).tolist()
            table.add_blocks([short_slots[row] for row in taken], pool.allocate_many(len(taken)))


# --- arithmetic: when blocks are taken and filled while each sequence grows by one token a step -----------------------


def steps_without_blocks(num_computed: Int32s, capacity: Int32s, block_size: int) -> int:
    """Number of coming steps, at least 0, in which no block is taken and none becomes full.

    Args:
        num_computed, capacity: int32[n], n > 0, tokens with KV and tokens with blocks of each sequence.
    """
    until_full = -(num_computed + 1) % block_size
    return int(np.minimum(until_full, capacity - num_computed).min())


def steps_that_fit(num_computed: Int32s, num_blocks: Int32s, block_size: int, num_free: int, at_most: int) -> int:
    """The largest number of steps, up to `at_most`, whose new blocks fit into `num_free`.

    Args:
        num_computed, num_blocks: int32[n], tokens with KV and blocks held, of each running sequence.
    """

    def num_needed(steps: int) -> int:
        return int(np.maximum(-(-(num_computed + steps) // block_size) - num_blocks, 0).sum())

    if num_needed(at_most) <= num_free:
        return at_most
    low, high = 0, at_most  # `low` steps fit, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if num_needed(middle) <= num_free else (low, middle)
    return low


def blocks_taken(num_computed: list[int], capacity: list[int], block_size: int, num_steps: int) -> list[int]:
    """The row of each block taken in `num_steps` steps, in the order of single steps.

    Args:
        num_computed, capacity: tokens with KV and tokens with blocks of each sequence. Sequence i computes position
            `num_computed[i] + s` in step s = 0, 1, ...
    """
    taken = [
        (position - computed, row)
        for row, (computed, first) in enumerate(zip(num_computed, capacity, strict=True))
        for position in range(first, computed + num_steps, block_size)
    ]
    taken.sort()
    return [row for _, row in taken]


def block_events(
    num_computed: Int32s, num_blocks: Int32s, block_size: int, num_steps: int
) -> list[tuple[int, int, int]]:
    """(step, TAKE or FILL, row) of each block taken or filled in `num_steps` steps, in the order of single steps.

    Sequence i computes position `num_computed[i] + s` in step s = 0, 1, ...
    """
    events = []
    for row, (computed, held) in enumerate(zip(num_computed.tolist(), num_blocks.tolist(), strict=True)):
        end = computed + num_steps
        events += [(position - computed, TAKE, row) for position in range(held * block_size, end, block_size)]
        first_filled = -(-(computed + 1) // block_size) * block_size
        events += [(border - 1 - computed, FILL, row) for border in range(first_filled, end + 1, block_size)]
    return sorted(events)
