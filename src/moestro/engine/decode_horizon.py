"""Many decode steps at once: how far nothing is decided, and the effect of all steps up to there.

Only the simulator uses this file. A server schedules every step.
"""

from __future__ import annotations

import msgspec
import numpy as np

from moestro.core.clock import FOREVER_NS
from moestro.core.columns import ONE, SHORT, true_rows
from moestro.core.request import FinishReason
from moestro.core.work import Int32s, Slots
from moestro.engine.scheduler import Scheduler
from moestro.engine.sequences import CAPACITY, COMPUTED, FULL_AT, LAST_TOKENS, PROMPT, TOKENS
from moestro.engine.step_output import StepOutput

TAKE, FILL = 0, 1  # within a step: `schedule` takes blocks, then `update` caches the full ones


class Horizon(msgspec.Struct, frozen=True, gc=False):
    """Coming decode steps in which nothing is decided: the first `num_steps` of those that begin before `until_ns`.

    A step begins when the step before it ends. The first begins now, so it is always among them.

    Attributes:
        num_steps: an upper bound. 0 means that the next step has to be scheduled.
        until_ns: time at which the order or the batch may change with time alone. FOREVER_NS means never.
    """

    num_steps: int
    until_ns: int


STEPWISE = Horizon(0, FOREVER_NS)


class _Growth(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The running sequences as `DecodeJumps` gathered them.

    Attributes:
        running: slots, the very array of the table.
        num_steps: steps of the scheduler by then. Another number means that the columns have changed.
        columns: int32[NUM_GROWTH_COLUMNS, n], the table's `growth` of these slots.
        until_last, until_full, until_short: for the nearest sequence, tokens with KV to come until `last_num_tokens`,
            until a block is full, and those that its blocks still hold.
    """

    running: Slots
    num_steps: int
    columns: Int32s
    until_last: int
    until_full: int
    until_short: int


class DecodeJumps:
    """Takes many decode steps of `scheduler` at once, with the same effect as single steps.

    Sequences carry no token ids.

    Attributes:
        computed: int32[n], tokens with KV of the running sequences at the last `horizon`, if that found steps.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._state, self._table, self._pool = scheduler.state, scheduler.table, scheduler.pool
        self._decodes: dict[int, bool] = {}  # by number of sequences: whether the batch policy takes them all
        self._growth: _Growth | None = None
        self.computed: Int32s = np.empty(0, np.int32)

    def horizon(self, now_ns: int) -> Horizon:
        """The coming steps in which every running sequence decodes one token and nothing is decided.

        The bound follows from blocks, max_tokens, the policies, and waiting requests that could be admitted now or at a
        later time. Sequences may end in the last of these steps, but none samples its first token in them.
        """
        scheduler, table, running = self._scheduler, self._table, self._table.running
        num, block_size = len(running), table.block_size
        if num == 0 or table.num_units_in_flight:
            return STEPWISE
        columns = table.growth.take(running, axis=1)
        computed = columns[COMPUTED]
        most_behind, most_prompt, until_last, until_short, until_full = _extremes(columns - computed)
        if most_behind > 1 or most_prompt > 0 or not self._all_decode(num, now_ns):
            return STEPWISE
        most, until_ns = until_last - 1, FOREVER_NS
        if table.num_be:
            until_ns = scheduler.views.holds_until_ns(running, now_ns)
        if len(scheduler.waiting) and self._could_admit() and (room := self._room(now_ns)) > 0:
            if scheduler.admission.candidates(room, scheduler.limits, now_ns) or self._makes_way(now_ns):
                return STEPWISE
            until_ns = min(until_ns, scheduler.waiting.order_holds_until_ns(now_ns))
            # A block that becomes full may be the prefix that the next waiting request lacks.
            most = min(most, int((block_size - computed % block_size).min()))
            if scheduler.waiting.policy.reads_cache:
                # An allocated block may have been cached, as a prefix on which the order depends.
                most = min(most, until_short + 1)
        if -(-most // block_size) * num > self._pool.num_free:
            num_blocks = columns[CAPACITY] // block_size
            most = steps_that_fit(computed, num_blocks, block_size, self._pool.num_free, most)
        self.computed = computed
        self._growth = _Growth(running, scheduler.num_steps, columns, until_last, until_full, until_short)
        return Horizon(most, until_ns)

    def _all_decode(self, num: int, now_ns: int) -> bool:
        """Whether the batch policy takes all running sequences, which are `num` decodes.

        The answer for latency-sensitive rows alone depends on their number, so the policy is asked once for each.
        """
        if self._table.num_be:
            return self._takes_all(now_ns)
        known = self._decodes.get(num)
        if known is None:
            known = self._decodes[num] = self._takes_all(now_ns)
        return known

    def _takes_all(self, now_ns: int) -> bool:
        view = self._scheduler.views.running(self._table.running, now_ns)
        return bool((self._scheduler.batch_policy.plan(view, self._scheduler.limits) == 1).all())

    def _could_admit(self) -> bool:
        """Whether any sequence could be admitted while the running ones decode, so that the order matters."""
        return self._table.num_free_slots > 0 or self._scheduler.preemption.makes_way

    def _room(self, now_ns: int) -> int:
        """Tokens that the batch policy would give to admitted sequences."""
        view = self._scheduler.views.running(self._table.running, now_ns)
        return self._scheduler.batch_policy.room(view, self._scheduler.limits)

    def _makes_way(self, now_ns: int) -> bool:
        return self._scheduler.preemption.could_make_way(now_ns)

    def advance(self, num_steps: int, block_hashes: dict[int, bytes] | None = None) -> StepOutput:
        """Apply `num_steps` decode steps, at most `horizon`.

        Args:
            block_hashes: by slot, packed hashes of the blocks of generated tokens that these steps complete.

        Returns:
            The sequences that ended in the last step; the tokens of the others are not listed.
        """
        table, running = self._table, self._table.running
        if block_hashes:
            for slot, packed in block_hashes.items():
                table.learn_hashes(slot, packed)
        growth = None if block_hashes else self._growth  # new hashes let blocks become full
        if growth is None or growth.running is not running or growth.num_steps != self._scheduler.num_steps:
            growth = self._gathered()
        computed = growth.columns[COMPUTED] + num_steps
        num_tokens = computed + ONE
        self._advance_blocks(num_steps, growth, computed)
        self._scheduler.num_steps += num_steps
        table.num_computed[running] = computed
        table.num_tokens[running] = num_tokens
        at_last: list[int] = []
        if num_steps + 1 >= growth.until_last:
            at_last = true_rows(num_tokens >= growth.columns[LAST_TOKENS])
        if not at_last:
            return StepOutput()
        slots = running.tolist()
        ended = [table.at(slots[row]) for row in at_last]
        output = StepOutput(ended, [-1] * len(ended), [FinishReason.LENGTH] * len(ended), ended=ended)
        self._state.finish_all(output)
        return output

    def _gathered(self) -> _Growth:
        """Gather the running sequences, of which there is one at least."""
        running = self._table.running
        columns = self._table.growth.take(running, axis=1)
        _, _, until_last, until_short, until_full = _extremes(columns - columns[COMPUTED])
        return _Growth(running, self._scheduler.num_steps, columns, until_last, until_full, until_short)

    def _advance_blocks(self, num_steps: int, growth: _Growth, computed_then: Int32s) -> None:
        """Allocate and cache the blocks of `num_steps` steps, in the order of single steps."""
        table, pool, running = self._table, self._pool, growth.running
        computed, capacity, block_size = growth.columns[COMPUTED], growth.columns[CAPACITY], table.block_size
        if pool.journal is not None or num_steps >= growth.until_full:
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
        if num_steps > growth.until_short:
            short = true_rows(capacity < computed_then)
            slots, starts, ends = running.tolist(), computed.tolist(), capacity.tolist()
            slots, starts = [slots[row] for row in short], [starts[row] for row in short]
            taken = blocks_taken(starts, [ends[row] for row in short], block_size, num_steps)
            table.add_blocks([slots[row] for row in taken], pool.allocate_many(len(taken)))


def _extremes(left: Int32s) -> tuple[int, int, int, int, int]:
    """The largest of the rows TOKENS and PROMPT, and the least of the rows LAST_TOKENS, CAPACITY and FULL_AT.

    Args:
        left: int32[NUM_GROWTH_COLUMNS, n], n > 0, columns of `SequenceTable.growth` less the computed tokens.
    """
    if left.shape[1] <= SHORT:
        rows = left.tolist()
        return max(rows[TOKENS]), max(rows[PROMPT]), min(rows[LAST_TOKENS]), min(rows[CAPACITY]), min(rows[FULL_AT])
    until_last, until_short, until_full = np.minimum.reduce(left[LAST_TOKENS:], axis=1).tolist()
    return int(left[TOKENS].max()), int(left[PROMPT].max()), until_last, until_short, until_full


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
        for row, computed in enumerate(num_computed)
        for position in range(capacity[row], computed + num_steps, block_size)
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
