"""Many steps at once: how far nothing is decided, and the effect of all steps up to there.

A *jump* is a run of decode steps. A *leap* begins with a plan in flight that computes prompts, and decodes behind it.

Only the simulator uses this file. A server schedules every step.
"""

from __future__ import annotations

from operator import itemgetter

import msgspec
import numpy as np

from moestro.core.clock import FOREVER_NS
from moestro.core.request import FinishReason
from moestro.core.views import ONE, ZERO, all_nonzero, has_true, int32, true_rows
from moestro.core.work import Int32s, Plan, Slots
from moestro.engine.scheduler import Scheduler
from moestro.engine.sequences import CAPACITY, COMPUTED, LAST_TOKENS, TOKENS, Sequence
from moestro.engine.steps import StepOutput

_NO_OUTPUT = StepOutput()  # of most jumps; callers must not change it
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

    def and_of(self, other: Horizon) -> Horizon:
        """Return the steps in which nothing is decided on either of two ranks that step together."""
        return Horizon(min(self.num_steps, other.num_steps), min(self.until_ns, other.until_ns))


STEPWISE = Horizon(0, FOREVER_NS)


class _Decodes(msgspec.Struct, eq=False, gc=False):
    """The running sequences, all of which decode, as `DecodeJumps` keeps them from jump to jump.

    Steps are counted from `first_step`, so that a jump leaves them as they are.

    Attributes:
        running: slots, the very array of the table.
        first_step: steps of the scheduler when the sequences were gathered.
        num_taken: steps taken since. If the scheduler has more, it has planned one itself, and nothing here holds.
        computed: int32[n], tokens with KV.
        ends_before: for each sequence, one more than the steps after which it has its last token.
        next_end: the least of `ends_before`.
        short_after: for each sequence, steps after which it lacks a block.
        next_full: the least number of steps after which a block is full. It may be that of a sequence that has ended.
    """

    running: Slots
    first_step: int
    num_taken: int
    computed: Int32s
    ends_before: list[int]
    next_end: int
    short_after: list[int]
    next_full: int


class Leap(msgspec.Struct, eq=False, gc=False):
    """Coming steps in which nothing is decided: first those that compute prompts, then those in which all decode.

    Attributes:
        running: slots, all of which are in every step.
        num_known: int32[n], known tokens before the first step.
        chunks: for each step with prompts, int32[n], the tokens that each sequence computes. The first one is planned.
        starts: for each of them, and for the first decode step, int32[n], tokens with KV before it.
        first_tokens: sequences that get their first token, with the step that samples it, in the order of steps.
        num_decode_steps: decode steps behind those, in the last of which sequences may end.
        decodes: the sequences before the first decode step. None means that some do not decode then.
    """

    running: Slots
    num_known: Int32s
    chunks: list[Int32s]
    starts: list[Int32s]
    first_tokens: list[tuple[int, Sequence]]
    num_decode_steps: int = 0
    decodes: _Decodes | None = None


class DecodeJumps:
    """Takes many decode steps of `scheduler` at once, with the same effect as single steps.

    Sequences carry no token ids.

    Attributes:
        computed: int32[n], tokens with KV of the running sequences at the last `horizon`, if that found steps.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._state, self._table, self._pool = scheduler.state, scheduler.table, scheduler.pool
        self._takes_all_of: dict[int, bool] = {}  # by number of sequences: whether the batch policy takes them all
        self._kept: _Decodes | None = None
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
        decodes = self._decodes()
        if decodes is None or not self._all_decode(num, now_ns):
            return STEPWISE
        computed = decodes.computed
        most, until_ns = decodes.next_end - decodes.num_taken - 1, FOREVER_NS
        if table.num_be:
            until_ns = scheduler.views.holds_until_ns(running, now_ns)
        if len(scheduler.waiting) and self._could_admit() and (room := self._room(now_ns)) > 0:
            makes_way = self._makes_way(now_ns) or scheduler.admission.lacks_room_for_claims(scheduler.limits, now_ns)
            if makes_way or scheduler.admission.candidates(room, scheduler.limits, now_ns):
                return STEPWISE
            until_ns = min(until_ns, scheduler.waiting.order_holds_until_ns(now_ns))
            # A block that becomes full may be the prefix that the next waiting request lacks.
            most = min(most, int((block_size - computed % block_size).min()))
            if scheduler.waiting.policy.reads_cache:
                # An allocated block may have been cached, as a prefix on which the order depends.
                most = min(most, min(decodes.short_after) - decodes.num_taken + 1)
        if -(-most // block_size) * num > self._pool.num_free:
            num_blocks = table.capacity[running] // block_size
            most = steps_that_fit(computed, num_blocks, block_size, self._pool.num_free, most)
        if self._state.host.writes_within(-(-most // block_size) * num):
            # A block that is taken may cause a copy to the host, which belongs to the step that takes it.
            most = min(most, min(decodes.short_after) - decodes.num_taken)
        self.computed = computed
        return Horizon(most, until_ns)

    def leap(self, plan: Plan) -> Leap | None:
        """The steps that begin with `plan`, which is in flight, as far as nothing is decided in them.

        Returns:
            None if only the plan itself is certain, as where a waiting sequence could be admitted, or where time alone
            may change a decision.
        """
        scheduler, table, running = self._scheduler, self._table, self._table.running
        if plan.units.slot is not running or not self._is_plain():
            return None
        if len(scheduler.waiting) and self._could_admit():
            return None
        growth = table.growth.take(running, axis=1)
        known, computed, chunk = growth[TOKENS], growth[COMPUTED], plan.units.num_tokens
        found = Leap(running, known, [], [computed], [])
        while True:
            computed = computed + chunk
            left = known - computed
            all_decode = max(left.tolist()) <= 0
            if not all_decode and has_true(computed + ONE >= growth[LAST_TOKENS]):
                break  # a sequence ends
            if all_decode and not self._decode_behind(found, growth, computed):
                break
            found.chunks.append(chunk)
            found.starts.append(computed)
            if all_decode or has_true(computed >= growth[CAPACITY]):
                break
            view = scheduler.views.alone(np.maximum(left, ONE))
            chunk = scheduler.batch_policy.plan(view, scheduler.limits)
            if not all_nonzero(chunk):
                break
        if len(found.chunks) + found.num_decode_steps < 2:
            return None
        self._find_first_tokens(found)
        return found

    def _find_first_tokens(self, leap: Leap) -> None:
        table, running, known = self._table, leap.running, leap.num_known
        for row in true_rows(known == table.num_prompt[running]):
            num_known = known.item(row)
            for step, start in enumerate(leap.starts[1:]):
                if start.item(row) >= num_known:
                    leap.first_tokens.append((step, table.at(running.item(row))))
                    break
        if len(leap.first_tokens) > 1:
            leap.first_tokens.sort(key=itemgetter(0))

    def _is_plain(self) -> bool:
        """Whether time alone changes nothing, and steps have no effect beyond tokens and blocks."""
        state, table, scheduler = self._state, self._table, self._scheduler
        has_extras = table.num_be or table.num_scoring or table.num_wanting_prompt_logprobs or state.num_leaving
        return not (
            has_extras
            or table.num_hashed < len(table.running)
            or scheduler.views.has_shares
            or state.recorder is not None
            or state.host.num_blocks
            or self._pool.journal is not None
        )

    def _decode_behind(self, leap: Leap, growth: Int32s, computed: Int32s) -> bool:
        """Add the decode steps behind the last step with prompts. Returns False where a sequence ends in that step.

        Args:
            growth: the columns of the table before the leap.
            computed: int32[n], tokens with KV after the last step with prompts.
        """
        scheduler, num, block_size = self._scheduler, len(computed), self._table.block_size
        _, _, ends_before, short_after, _ = (growth - computed).tolist()
        next_end = min(ends_before)
        if next_end <= 1:
            return False
        takes_all = self._takes_all_of.get(num)
        if takes_all is None:
            chunk = scheduler.batch_policy.plan(scheduler.views.alone(np.ones(num, np.int32)), scheduler.limits)
            takes_all = self._takes_all_of[num] = all_nonzero(chunk)
        most, num_free = next_end - 1, self._pool.num_free
        if not takes_all:
            most = 0
        elif -(-most // block_size) * num > num_free:
            most = steps_that_fit(computed, growth[CAPACITY] // block_size, block_size, num_free, most)
        leap.num_decode_steps = most
        leap.decodes = _Decodes(
            running=leap.running,
            first_step=scheduler.num_steps + len(leap.chunks),
            num_taken=0,
            computed=computed,
            ends_before=ends_before,
            next_end=next_end,
            short_after=short_after,
            next_full=0,  # known when the prompts' blocks are in the prefix cache
        )
        return True

    def land(self, leap: Leap, num_steps: int, block_hashes: dict[int, bytes] | None = None) -> StepOutput:
        """Apply the first `num_steps` steps of a leap, at least one.

        Args:
            block_hashes: as in `advance`.

        Returns:
            The sequences that ended in the last step, as `advance` does; first tokens are in the leap.
        """
        table, running, decodes = self._table, leap.running, leap.decodes
        if block_hashes:
            for slot, packed in block_hashes.items():
                table.learn_hashes(slot, packed)
        table.num_in_flight[running] = ZERO
        table.num_units_in_flight = 0
        num_prompt_steps = min(num_steps, len(leap.chunks))
        computed = leap.starts[num_prompt_steps]
        for each in leap.starts[1 : num_prompt_steps + 1]:
            self._state.cache_full_blocks(running, each)
        self._scheduler.num_steps += num_prompt_steps - 1
        if decodes is not None and num_steps > num_prompt_steps:
            decodes.next_full = min((table.next_full_at[running] - computed).tolist())
            self._kept = decodes
            return self.advance(num_steps - num_prompt_steps)
        table.num_computed[running] = computed
        table.num_tokens[running] = np.where(computed >= leap.num_known, computed + ONE, leap.num_known)
        return _NO_OUTPUT

    def _all_decode(self, num: int, now_ns: int) -> bool:
        """Whether the batch policy takes all running sequences, which are `num` decodes.

        The answer for latency-sensitive rows alone depends on their number, so the policy answers once for each.
        """
        if self._table.num_be:
            return self._takes_all(now_ns)
        known = self._takes_all_of.get(num)
        if known is None:
            known = self._takes_all_of[num] = self._takes_all(now_ns)
        return known

    def _takes_all(self, now_ns: int) -> bool:
        view = self._scheduler.views.running(self._table.running, now_ns)
        return bool((self._scheduler.batch_policy.plan(view, self._scheduler.limits) == 1).all())

    def _could_admit(self) -> bool:
        """Whether any sequence could be admitted while the running ones decode, so that the order matters."""
        scheduler = self._scheduler
        return self._table.num_free_slots > 0 or scheduler.preemption.makes_way or scheduler.state.shares.are_needed

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
            self._kept = None  # new hashes let blocks become full
        decodes = self._decodes()
        assert decodes is not None, "a running sequence does not decode"
        self._advance_blocks(num_steps, decodes)
        self._scheduler.num_steps += num_steps
        decodes.num_taken += num_steps
        decodes.computed = decodes.computed + int32(num_steps)
        table.num_computed[running] = decodes.computed
        table.num_tokens[running] = decodes.computed + ONE
        return _NO_OUTPUT if decodes.num_taken + 1 < decodes.next_end else self._end(decodes)

    def _end(self, decodes: _Decodes) -> StepOutput:
        """End the sequences that have their last token."""
        rows, ended, next_end = [], [], decodes.next_end
        for row, end in enumerate(decodes.ends_before):
            if end == next_end:
                rows.append(row)
                ended.append(self._table.at(decodes.running.item(row)))
        output = StepOutput(ended, [-1] * len(ended), dict.fromkeys(range(len(ended)), FinishReason.LENGTH))
        self._state.finish_all(ended)
        self._forget(rows, decodes)
        return output

    def _decodes(self) -> _Decodes | None:
        """The running sequences, of which there is one at least. None if one has more to compute than a decode."""
        table, running, num_steps = self._table, self._table.running, self._scheduler.num_steps
        kept = self._kept
        if kept is not None and kept.running is running and kept.first_step + kept.num_taken == num_steps:
            return kept
        growth = table.growth.take(running, axis=1)
        computed = growth[COMPUTED]
        left, _, ends_before, short_after, full_after = (growth - computed).tolist()
        if left.count(1) < len(left) or has_true(growth[TOKENS] == table.num_prompt[running]):
            return None
        self._kept = _Decodes(
            running=running,
            first_step=num_steps,
            num_taken=0,
            computed=computed,
            ends_before=ends_before,
            next_end=min(ends_before),
            short_after=short_after,
            next_full=min(full_after),
        )
        return self._kept

    def _forget(self, rows: list[int], decodes: _Decodes) -> None:
        """Keep the sequences that go on, after those in `rows` have ended."""
        for row in reversed(rows):
            del decodes.ends_before[row], decodes.short_after[row]
        decodes.next_end = min(decodes.ends_before, default=0)
        decodes.running = self._table.running
        decodes.computed = self._table.num_computed[decodes.running]

    def _advance_blocks(self, num_steps: int, decodes: _Decodes) -> None:
        """Allocate and cache the blocks of `num_steps` steps, in the order of single steps."""
        table, pool, running = self._table, self._pool, decodes.running
        block_size, end = table.block_size, decodes.num_taken + num_steps
        if pool.journal is not None or end >= decodes.next_full:
            self._kept = None
            num_blocks = table.capacity[running] // block_size
            for step, kind, row in block_events(decodes.computed, num_blocks, block_size, num_steps):
                pool.step = step
                slot, position = int(running[row]), int(decodes.computed[row]) + step + 1
                if kind == TAKE:
                    table.add_block(slot, pool.allocate())
                elif position >= table.next_full_at[slot]:
                    self._state.cache_blocks(slot, position // block_size)
            pool.step = 0
            return
        # No block enters the cache, so only the order of allocations matters.
        taken, short_after = [], decodes.short_after
        for row, first in enumerate(short_after):
            if first < end:
                step = first
                while step < end:
                    taken.append((step, row))
                    step += block_size
                short_after[row] = step
        if taken:
            taken.sort()
            slots, takers = running.tolist(), []
            for _, row in taken:  # a comprehension takes longer than the loop
                slot = slots[row]
                takers.append(slot)
            table.add_blocks(takers, pool.allocate_many(len(taken)))


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
