"""One rank's scheduler: which tokens of which sequences are computed next, and what becomes of the results.

There is no prefill phase and no decode phase: a sequence has `num_tokens` known tokens, of which `num_computed` have
their KV in the pool, and a step closes some of the gap. When the gap is closed a token is sampled, and the gap is one
again. Chunked prefill, prefix hits and recomputing after a preemption are all this one rule.

The scheduler decides and keeps books. It neither computes, nor sleeps, nor reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.request import FinishReason, Request
from moestro.core.views import BE, LS, BatchLimits, EvictView
from moestro.core.work import LOGITS_NONE, LOGITS_PROMPT, Int32s, Plan, StepResult, Units
from moestro.engine.block_pool import BlockPool
from moestro.engine.emitted import Emitted
from moestro.engine.entering import Entrance
from moestro.engine.policy_views import PolicyViews
from moestro.engine.rounds import TAKE, Horizon, block_events, blocks_taken, rounds_that_fit
from moestro.engine.sequences import Sequence, SequenceTable
from moestro.engine.settings import SchedulerSettings
from moestro.engine.waiting import WaitingQueue
from moestro.errors import InvariantError
from moestro.policy.admission import AdmitLimits, admit
from moestro.policy.ordering.contract import Admitted, Left


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since the start."""

    num_preemptions: int = 0
    num_queried_tokens: int = 0  # prompt tokens of admitted sequences
    num_hit_tokens: int = 0  # of these, taken from the prefix cache


class Scheduler:
    """Continuous batching with chunked prefill, paged KV, a prefix cache and preemption by recomputing.

    Args:
        settings: bounds and policies.

    Invariants: a sequence with a unit in flight is neither scheduled nor evicted; a shared block is never written;
    blocks are conserved (`check`).
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.num_blocks, enable_prefix_caching=settings.enable_prefix_caching)
        self.table = SequenceTable(settings.max_num_seqs, settings.max_model_len, settings.block_size)
        policies = settings.make_policies()
        self.batch, self._evict, self._order = policies.batch, policies.evict, policies.order
        self.waiting = WaitingQueue(policies.order, self.pool, settings.block_size)
        self._entrance = Entrance(self.pool, self.table, self.waiting, settings.block_size)
        self._views = PolicyViews(self.table, policies.order.promotes_after_ns)
        self.counts = SchedulerCounts()
        self.num_steps = 0
        self.by_id: dict[str, Sequence] = {}
        self.limits = BatchLimits(
            token_budget=settings.max_num_batched_tokens,
            max_chunk=settings.max_chunk or settings.max_num_batched_tokens,
        )
        self._num_added = 0
        self._num_aborted_in_flight = 0

    # --- requests come and go ---------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Put `request` in the waiting queue.

        Returns:
            Its serial: a number of its own in this scheduler, which its units carry.

        Raises:
            RequestError: it can never fit, or the queue is at its bound; nothing has changed.
        """
        settings = self.settings
        limits = AdmitLimits(max_model_len=settings.max_model_len, max_num_queued_reqs=settings.max_num_queued_reqs)
        admit(request, len(self.waiting), limits)
        if request.request_id in self.by_id:
            raise InvariantError(f"request id {request.request_id!r} is in use")
        sequence = Sequence(request, self._num_added)
        self._num_added += 1
        self.by_id[request.request_id] = sequence
        self.waiting.add(sequence)
        return sequence.serial

    def abort(self, request_id: str) -> bool:
        """Drop a request; an unknown id is ignored, for it may just have ended. Returns whether it was known.

        A unit in flight is let finish, since it may write to the sequence's blocks; its result is dropped.
        """
        sequence = self.by_id.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.slot is None:
            self.waiting.remove(sequence)
            self._leave(sequence)
        elif self.table.num_in_flight[sequence.slot]:
            sequence.is_aborted = True
            self._num_aborted_in_flight += 1
        else:
            self._leave(sequence)
        return True

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(len(self.waiting) or len(self.table.running))

    # --- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> Plan | None:
        """The next plan, or None when nothing can be computed now. May be called with units in flight."""
        idle = self.table.idle()
        view = self._views.running(idle, now_ns)
        candidates: list[tuple[Sequence, int]] = []
        if len(self.waiting):
            if self._evict.makes_way and self.batch.room(view, self.limits) > 0 and self._make_way(now_ns):
                idle = self.table.idle()
                view = self._views.running(idle, now_ns)
            candidates = self._entrance.candidates(self.batch.room(view, self.limits), self.limits, now_ns)
            view = self._views.with_candidates(view, candidates, now_ns) if candidates else view
        chunk = self.batch.plan(view, self.limits)
        num_free, num_running = self.pool.num_free, len(self.table.running)
        slots, num_tokens, evicted = self._make_room(idle, chunk[: len(idle)], now_ns)
        if candidates and not evicted:
            kept_back = num_running - (num_free - self.pool.num_free)  # some have just taken theirs
            new_slots, new_tokens = self._admit(candidates, chunk[len(idle) :], kept_back, now_ns)
            slots, num_tokens = np.concatenate((slots, new_slots)), np.concatenate((num_tokens, new_tokens))
        if len(slots) == 0:
            # Who was to be computed gave up its blocks instead: others are not kept waiting for the next call.
            return self.schedule(now_ns) if evicted and not self.table.num_units_in_flight else None
        self.num_steps += 1
        return Plan(self.num_steps, self._units(slots, num_tokens))

    def _make_way(self, now_ns: int) -> bool:
        """Preempt best-effort sequences until the first in order, if it is latency-sensitive, has a place.

        Returns:
            Whether any was preempted.
        """
        head = next(self.waiting.in_order(now_ns))
        if self._views.class_of(head, now_ns) == BE:
            return False
        preempted = False
        while not self._entrance.has_place(head):
            slots = self._yielding(now_ns)
            if len(slots) == 0:
                break
            self._preempt(self._choose(slots, now_ns))
            preempted = True
        return preempted

    def _yielding(self, now_ns: int) -> Int32s:
        """Slots of best-effort sequences without a unit in flight."""
        idle = self.table.idle()
        return idle[np.flatnonzero(self._views.classes(idle, now_ns) == BE)]

    def _admit(
        self, candidates: list[tuple[Sequence, int]], chunk: Int32s, kept_back: int, now_ns: int
    ) -> tuple[Int32s, Int32s]:
        """Give slots, and blocks for all their known tokens, to candidates while `kept_back` blocks stay free.

        Returns:
            Their slots, and their tokens in the plan.
        """
        new_slots: list[int] = []
        new_tokens: list[int] = []
        for (sequence, _), tokens in zip(candidates, chunk.tolist(), strict=True):
            if tokens == 0:
                continue  # the batch policy would rather have others
            # Looked up again: a decode of this very plan may have taken a cached block.
            fit = self._entrance.fit(sequence)
            if fit.num_taken > self.pool.num_free - kept_back:
                break
            self.waiting.remove(sequence)
            self.pool.share(fit.shared)
            sequence.blocks = fit.shared + self.pool.allocate_many(fit.num_own)
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens, sequence.admitted_ns = fit.num_cached, now_ns
                self.counts.num_queried_tokens += sequence.num_tokens
                self.counts.num_hit_tokens += fit.num_cached
                if self._order.observes:
                    self.waiting.observe(Admitted(sequence.user, sequence.request.num_prompt_tokens))
            new_slots.append(self.table.insert(sequence, fit.num_cached, len(fit.shared)))
            new_tokens.append(min(tokens, fit.num_left))
        return np.array(new_slots, np.int32), np.array(new_tokens, np.int32)

    def _make_room(self, idle: Int32s, chunk: Int32s, now_ns: int) -> tuple[Int32s, Int32s, bool]:
        """Blocks for the planned tokens of running sequences, evicting where the pool is empty.

        Only a decode ever lacks one, and one at most: admission gives blocks for all known tokens.

        Returns:
            The slots and tokens that are still to be planned, and whether any was given up.
        """
        table = self.table
        slots, num_tokens = idle, chunk
        if np.count_nonzero(chunk) < len(chunk):
            slots, num_tokens = idle[chunk > 0], chunk[chunk > 0]
        missing = table.num_computed.take(slots) + num_tokens > table.capacity.take(slots)
        if not np.count_nonzero(missing):
            return slots, num_tokens, False
        lost: set[int] = set()
        for slot in slots[missing].tolist():
            while slot not in lost and self.pool.num_free == 0:
                victim = self._choose(self.table.idle(), now_ns)
                lost.add(victim)
                # Rather than give itself up, it waits for the blocks that a unit in flight may soon return.
                if victim != slot or table.num_units_in_flight == 0:
                    self._preempt(victim)
            if slot not in lost:
                table.add_block(slot, self.pool.allocate())
        kept = np.array([slot not in lost for slot in slots.tolist()], np.bool_)
        return slots[kept], num_tokens[kept], bool(lost)

    def _choose(self, slots: Int32s, now_ns: int) -> int:
        """The one of `slots`, none of which has a unit in flight, that the evict policy gives up."""
        ranks = self.waiting.rank([self.table.at(slot) for slot in slots.tolist()], now_ns)
        view = EvictView(ranks, self.table.num_computed[slots], self._views.classes(slots, now_ns))
        return int(slots[self._evict.choose(view)])

    def _preempt(self, slot: int) -> None:
        """Free the sequence's KV and let it wait again; it keeps its tokens, its arrival and its hashes."""
        sequence = self._free(slot)
        self.counts.num_preemptions += 1
        sequence.num_preemptions += 1
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs = []  # they start again with the prompt
        self.waiting.add(sequence)

    def _units(self, slots: Int32s, num_tokens: Int32s) -> Units:
        """The plan's units, and their tokens marked as in flight."""
        table = self.table
        start = table.num_computed.take(slots)
        # LOGITS_LAST is 1: a comparison is the column.
        logits = (start + num_tokens == table.num_tokens.take(slots)).view(np.uint8)
        if table.num_scoring:
            logits[table.last_num_tokens[slots] == table.num_prompt[slots]] = LOGITS_NONE
        following = None
        if table.num_wanting_prompt_logprobs:
            asks = table.wants_prompt_logprobs[slots]
            logits[asks] |= LOGITS_PROMPT
            following = self._token_ids(slots[asks], start[asks] + 1, num_tokens[asks])
        edits = table.logit_edits(slots, logits) if table.num_editing else None
        table.num_in_flight[slots] = num_tokens
        table.num_units_in_flight += len(slots)
        width = int(table.capacity.take(slots).max()) // self.settings.block_size
        return Units(
            slot=slots,
            serial=table.serial.take(slots),
            start=start,
            num_tokens=num_tokens,
            write_start=np.maximum(start, table.write_start.take(slots)),
            logits=logits,
            block_tables=table.block_table[:, :width].take(slots, 0),
            sampling=table.sampling.take(slots),  # a fifth of what [slots] costs on rows of this kind
            token_ids=self._token_ids(slots, start, num_tokens),
            next_token_ids=following,
            edits=edits,
        )

    def _token_ids(self, slots: Int32s, start: Int32s, num_tokens: Int32s) -> Int32s | None:
        """The units' tokens end to end; None where hashed traces are replayed."""
        table = self.table
        if table.num_hashed:
            return None
        total = int(num_tokens.sum())
        if total == len(slots):
            return table.token_ids[slots, start]
        row = np.repeat(slots, num_tokens)
        first = np.repeat(start - (np.cumsum(num_tokens) - num_tokens), num_tokens)
        return table.token_ids[row, first + np.arange(total, dtype=np.int32)]

    # --- update -----------------------------------------------------------------------------------------------------

    def update(self, result: StepResult, now_ns: int) -> Emitted:
        """Take the results of units in flight: tokens appended, full blocks remembered, ended sequences freed."""
        table = self.table
        num_done = table.num_in_flight.take(result.slot)
        if np.count_nonzero(num_done) < len(num_done):
            raise InvariantError("a result for a unit that is not in flight")
        table.num_units_in_flight -= len(num_done)
        if self._num_aborted_in_flight:
            result = self._without_aborted(result)
            num_done = table.num_in_flight[result.slot]
        slots = result.slot
        computed = table.num_computed.take(slots) + num_done
        table.num_computed[slots] = computed
        table.num_in_flight[slots] = 0
        for index, entries in result.prompt_logprobs.items():
            collected = table.at(int(slots[index])).prompt_logprobs
            assert collected is not None
            collected.extend(entries)
        for index, packed in result.block_hashes.items():
            table.learn_hashes(int(slots[index]), packed)
        self._remember_full_blocks(slots, computed)
        return self._emit(result, np.flatnonzero(computed == table.num_tokens.take(slots)))

    def _without_aborted(self, result: StepResult) -> StepResult:
        """The result without sequences that were aborted while their unit was in flight; these leave now."""
        stays = np.array([not self.table.at(slot).is_aborted for slot in result.slot.tolist()], np.bool_)
        for slot in result.slot[~stays].tolist():
            self._num_aborted_in_flight -= 1
            self._leave(self.table.at(slot))
        return result.select(np.flatnonzero(stays))

    def _remember_full_blocks(self, slots: Int32s, computed: Int32s) -> None:
        """Tell the pool of the blocks that are full now that `computed` tokens of each slot have KV."""
        filled = computed >= self.table.next_full_at.take(slots)
        if np.count_nonzero(filled):
            num_full = computed[filled] // self.settings.block_size
            for slot, full in zip(slots[filled].tolist(), num_full.tolist(), strict=True):
                self._remember(slot, full)

    def _remember(self, slot: int, num_full: int) -> None:
        """Tell the pool that the first `num_full` blocks of the sequence in `slot` are full."""
        table, block_size = self.table, self.settings.block_size
        sequence = table.at(slot)
        if sequence.request.token_ids is not None:
            sequence.extend_hashes(num_full, block_size, table.token_ids[slot])
        first, end = int(table.next_full_at[slot]) // block_size - 1, min(num_full, len(sequence.hashes))
        if first < end:
            self.pool.remember(sequence.blocks[first:end], sequence.hashes[first:end])
        table.next_full_at[slot] = (num_full + 1) * block_size

    def _emit(self, result: StepResult, sampled: NDArray[np.int64]) -> Emitted:
        """Append the tokens of the units in rows `sampled` of the result; sequences that ended leave.

        One whose max_tokens is 0 ends as one whose last token has come, with a -1 that nobody is told.
        """
        table = self.table
        is_all = len(sampled) == len(result.slot)
        slots = result.slot if is_all else result.slot[sampled]
        num_tokens = table.num_tokens.take(slots)
        tokens = [-1] * len(slots)
        if result.token_ids is not None:
            new = result.token_ids if is_all else result.token_ids[sampled]
            table.token_ids[slots, num_tokens] = new
            tokens = new.tolist()
        table.num_tokens[slots] = num_tokens + 1
        sequences = [table.at(slot) for slot in slots.tolist()]
        reasons: list[FinishReason | None] = [None] * len(slots)
        for row in np.flatnonzero(num_tokens + 1 >= table.last_num_tokens.take(slots)).tolist():
            reasons[row] = FinishReason.LENGTH
        stopped = [] if result.finished is None else np.flatnonzero(result.finished[sampled]).tolist()
        if result.token_ids is not None:
            stopped += [row for row, sequence in enumerate(sequences) if tokens[row] in sequence.stop_token_ids]
        for row in stopped:
            reasons[row] = FinishReason.STOP
        emitted = Emitted(sequences, tokens, reasons)
        if result.logprobs:
            row_of = {index: row for row, index in enumerate(sampled.tolist())}
            emitted.logprobs.update({row_of[index]: entry for index, entry in result.logprobs.items()})
        if table.num_wanting_prompt_logprobs:
            for row in np.flatnonzero(table.wants_prompt_logprobs[slots]).tolist():
                emitted.prompt_logprobs[row] = table.take_prompt_logprobs(int(slots[row]))
        for sequence, reason in zip(sequences, reasons, strict=True):
            if reason is not None:
                self._end(sequence)
        return emitted

    def _end(self, sequence: Sequence) -> None:
        del self.by_id[sequence.request.request_id]
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence that is over out of its slot, if it has one, and tell the order policy."""
        if sequence.slot is not None:
            self._free(sequence.slot)
        if self._order.observes:
            num_generated = min(len(sequence.generated), sequence.request.sampling.max_tokens)
            self.waiting.observe(Left(sequence.user, num_generated))

    def _free(self, slot: int) -> Sequence:
        """Take the sequence out of its slot and give its blocks back."""
        sequence = self.table.remove(slot)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        return sequence

    # --- many rounds at once ----------------------------------------------------------------------------------------

    def horizon(self, now_ns: int) -> Horizon:
        """An upper bound on the coming rounds in which every running sequence decodes one token and nothing is decided.

        From what the scheduler may know: blocks, max_tokens, the policies, waiting requests that could enter, and the
        time at which another could. No rounds: the next one must be scheduled. Sequences may end in the last of these
        rounds. A stop token or the end of a script ends rounds earlier: the caller asks the device for that.
        """
        table, running = self.table, self.table.running
        if len(running) == 0 or table.num_units_in_flight:
            return Horizon(0, FOREVER_NS)
        view = self._views.running(running, now_ns)
        if not view.is_decode.all() or not (self.batch.plan(view, self.limits) == 1).all():
            return Horizon(0, FOREVER_NS)
        computed, block_size = table.num_computed[running], self.settings.block_size
        num_blocks = table.capacity[running] // block_size
        most = int((table.last_num_tokens[running] - table.num_tokens[running]).min())
        until_ns = self._views.holds_until_ns(running, now_ns)
        if len(self.waiting) and (room := self.batch.room(view, self.limits)) > 0 and self._may_let_in():
            if self._entrance.candidates(room, self.limits, now_ns) or self._would_make_way(now_ns):
                return Horizon(0, FOREVER_NS)
            until_ns = min(until_ns, self.waiting.order_holds_until_ns(now_ns))
            # A block that becomes full may be the prefix for want of which the next request does not fit.
            most = min(most, int((block_size - computed % block_size).min()))
            if self._order.reads_cache:
                # A block that is taken may be a cached one, and a prefix that the order counted on is no more.
                most = min(most, int((num_blocks * block_size - computed).min()) + 1)
        return Horizon(rounds_that_fit(computed, num_blocks, block_size, self.pool.num_free, most), until_ns)

    def _may_let_in(self) -> bool:
        """Whether it matters who is first in order while the running ones decode."""
        return self.table.num_free_slots > 0 or self._evict.makes_way

    def _would_make_way(self, now_ns: int) -> bool:
        """Whether best effort would be preempted now for the first in order, for which there is no place."""
        if not self._evict.makes_way or len(self._yielding(now_ns)) == 0:
            return False
        return self._views.class_of(next(self.waiting.in_order(now_ns)), now_ns) == LS

    def advance(
        self, num_rounds: int, block_hashes: dict[int, bytes] | None = None, finished: list[int] | None = None
    ) -> Emitted:
        """The effect of `num_rounds` <= `horizon` rounds of schedule and update, for sequences without token ids.

        Args:
            block_hashes: by slot, the hashes of the blocks of generated tokens that these rounds complete, packed.
            finished: slots whose script ends in the last of these rounds.

        Returns:
            The sequences that ended in it, and why; of the others' tokens there is nothing to tell.
        """
        table, running = self.table, self.table.running
        for slot, packed in (block_hashes or {}).items():
            table.learn_hashes(slot, packed)
        self._advance_blocks(num_rounds)
        table.num_computed[running] += num_rounds
        table.num_tokens[running] += num_rounds
        self.num_steps += num_rounds
        at_last = running[table.num_tokens.take(running) >= table.last_num_tokens.take(running)].tolist()
        if not at_last and not finished:
            return Emitted()
        reasons = dict.fromkeys(at_last, FinishReason.LENGTH) | dict.fromkeys(finished or (), FinishReason.STOP)
        ended = [slot for slot in running.tolist() if slot in reasons]
        emitted = Emitted([table.at(slot) for slot in ended], [-1] * len(ended), [reasons[slot] for slot in ended])
        for sequence in emitted.sequences:
            self._end(sequence)
        return emitted

    def _advance_blocks(self, num_rounds: int) -> None:
        """Take and remember the blocks of `num_rounds` rounds, in the order in which single rounds do it."""
        table, running, block_size = self.table, self.table.running, self.settings.block_size
        computed, held = table.num_computed.take(running), table.capacity.take(running) // block_size
        next_full = table.next_full_at.take(running)
        num_full = (computed + num_rounds) // block_size
        if np.count_nonzero(np.minimum(num_full, table.num_hashes.take(running)) * block_size >= next_full) == 0:
            # Nothing to remember, so all that counts is who takes a block before whom.
            slots = running.take(blocks_taken(computed, held, block_size, num_rounds)).tolist()
            if slots:
                table.add_blocks(slots, self.pool.allocate_many(len(slots)))
            table.next_full_at[running] = np.maximum(next_full, (num_full + 1) * block_size)
            return
        for rounds, kind, row in block_events(computed, held, block_size, num_rounds):
            slot = int(running[row])
            if kind == TAKE:
                table.add_block(slot, self.pool.allocate())
            else:
                self._remember(slot, (int(computed[row]) + rounds + 1) // block_size)

    def check(self) -> None:
        """Recount blocks and slots from scratch.

        Raises:
            InvariantError: something was lost or counted twice.
        """
        running = [s for s in self.table.sequences if s is not None]
        if sorted(s.slot for s in running if s.slot is not None) != sorted(self.table.running.tolist()):
            raise InvariantError("slots in use and running sequences differ")
        self.pool.check([sequence.blocks for sequence in running])
