"""One rank's scheduler: which tokens of which sequences are computed next, and what becomes of the results.

There is no prefill phase and no decode phase: a sequence has `num_tokens` known tokens, of which `num_computed` have
their KV in the pool, and a step closes some of the gap. When the gap is closed a token is sampled, and the gap is one
again. Chunked prefill, prefix hits and recomputing after a preemption are all this one rule.

The scheduler decides and keeps books. It neither computes, nor sleeps, nor reads a clock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.columns import true_rows
from moestro.core.request import FinishReason, Request
from moestro.core.views import BE, LS, BatchLimits, BatchView
from moestro.core.work import Int32s, Plan, Slots, StepResult
from moestro.engine.block_pool import BlockPool
from moestro.engine.decode_horizon import TAKE, Horizon, block_events, blocks_taken, rounds_that_fit
from moestro.engine.host_blocks import HostBlocks
from moestro.engine.policies.admission import AdmitLimits, admit
from moestro.engine.policy_contract import Admitted, Left
from moestro.engine.policy_views import PolicyViews
from moestro.engine.sequence_preemption import Eviction, Recall
from moestro.engine.sequences import BlockContent, Sequence, SequenceTable
from moestro.engine.settings import SchedulerSettings
from moestro.engine.step_output import Emitted, SchedulerCounts
from moestro.engine.units import make_units
from moestro.engine.waiting import WaitingQueue
from moestro.engine.waiting_admission import Candidate, Entrance
from moestro.errors import InvariantError


class Scheduler:
    """Continuous batching with chunked prefill, paged KV, a prefix cache and preemption, by recomputing or with KV that
    was kept in host memory.

    Args:
        settings: bounds and policies.
        recall: gives up units in flight (see `core.work.Executor.recall`), so that best-effort sequences of which the
            device has nothing may be evicted too; None: a unit in flight protects its sequence.

    Invariants: a sequence with a unit in flight is neither scheduled nor, unless that is recalled, evicted; a shared
    block is never written; blocks are conserved (`check`).
    """

    def __init__(self, settings: SchedulerSettings, recall: Recall | None = None) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.num_blocks, enable_prefix_caching=settings.enable_prefix_caching)
        self.contents: dict[bytes, BlockContent] | None = None  # of blocks that were filled, for whoever empties it
        self.table = SequenceTable(settings.num_slots, settings.max_model_len, settings.block_size)
        policies = settings.make_policies()
        self.batch, self._order = policies.batch, policies.order
        self.waiting = WaitingQueue(policies.order, self.pool, settings.block_size)
        self._entrance = Entrance(self.pool, self.table, self.waiting, settings.block_size, settings.max_num_seqs)
        self._views = PolicyViews(self.table, policies.order.promotes_after_ns)
        self._host = HostBlocks(settings.num_host_blocks, settings.block_size)
        self._eviction = Eviction(policies.evict, self._entrance, self._views, self._host, recall)
        self.counts = SchedulerCounts()
        self.num_steps = 0
        self.by_id: dict[str, Sequence] = {}
        self.limits = BatchLimits(
            token_budget=settings.max_num_batched_tokens,
            max_chunk=settings.max_chunk or settings.max_num_batched_tokens,
        )
        self._decodes: dict[int, bool] = {}  # by number of sequences, whether all decode in one step
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

    def abort(self, request_id: str, now_ns: int) -> bool:
        """Drop a request; an unknown id is ignored, for it may just have ended. Returns whether it was known.

        A unit in flight that is not recalled is let finish, since it may write to the sequence's blocks; its result is
        dropped.
        """
        sequence = self.by_id.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.slot is None:
            self.waiting.remove(sequence)
            self._leave(sequence)
        elif not self._takes_back(sequence, sequence.slot, now_ns):
            sequence.is_aborted = True
            self._num_aborted_in_flight += 1
        else:
            self._leave(sequence)
        return True

    def _takes_back(self, sequence: Sequence, slot: int, now_ns: int) -> bool:
        """Whether it has no unit in flight, or had one that only waited: best effort's, which others have passed."""
        if not self.table.num_in_flight[slot]:
            return True
        return sequence.service_class == BE and self._eviction.take_back(slot, now_ns)

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(len(self.waiting) or len(self.table.running))

    def has_urgent_prompts(self, now_ns: int) -> bool:
        """Whether a latency-sensitive sequence without a token could be computed now: it has no unit in flight, or it
        waits and could enter.
        """
        idle = self.table.idle(LS)
        if bool(self.table.has_no_token(idle).any()):
            return True
        if not self.waiting.num_ls or (room := self.batch.room(self._views.running(idle, now_ns), self.limits)) <= 0:
            return False
        could_enter = self._entrance.candidates(room, self.limits, now_ns, LS)
        return bool(could_enter) or self._eviction.would_make_way(now_ns)

    # --- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int, service_class: int | None = None) -> Plan | None:
        """The next plan, or None when nothing can be computed now. May be called with units in flight.

        Args:
            service_class: only sequences of this class; None: all.
        """
        idle = self.table.idle(service_class)
        view = self._views.running(idle, now_ns)
        candidates: list[Candidate] = []
        if len(self.waiting):
            if self._eviction.makes_way and self.batch.room(view, self.limits) > 0:
                for slot, keeps in (victims := self._eviction.victims_for_first(now_ns, service_class)):
                    self._preempt(slot, keeps=keeps)
                if victims:
                    idle = self.table.idle(service_class)
                    view = self._views.running(idle, now_ns)
            room = self.batch.room(view, self.limits)
            candidates = self._entrance.candidates(room, self.limits, now_ns, service_class)
            view = self._views.with_candidates(view, candidates, now_ns) if candidates else view
        chunk = self.batch.plan(view, self.limits)
        num_free = self.pool.num_free
        slots, num_tokens, evicted = self._make_room(idle, chunk[: len(idle)], now_ns)
        if candidates and not evicted:
            new_slots, new_tokens = self._admit(candidates, chunk[len(idle) :], num_free, now_ns)
            slots, num_tokens = np.concatenate((slots, new_slots)), np.concatenate((num_tokens, new_tokens))
        if len(slots) == 0:
            # Who was to be computed gave up its blocks instead: others are not kept waiting for the next call.
            return self.schedule(now_ns, service_class) if evicted and not self.table.num_units_in_flight else None
        self.num_steps += 1
        return Plan(self.num_steps, make_units(self.table, slots, num_tokens), self._host.take_moves())

    def _admit(self, candidates: list[Candidate], chunk: Int32s, num_free: int, now_ns: int) -> tuple[Slots, Int32s]:
        """Give slots, and blocks for all their known tokens, to candidates; one block stays free for each that runs.

        Args:
            num_free: blocks that were free when they were looked for; running ones have taken the difference.

        Returns:
            Their slots, and their tokens in the plan.
        """
        kept_back = len(self.table.running) - (num_free - self.pool.num_free)  # some have just taken theirs
        new_slots: list[int] = []
        new_tokens: list[int] = []
        for (sequence, looked_up), tokens in zip(candidates, chunk.tolist(), strict=True):
            if tokens == 0:
                continue  # the batch policy would rather have others
            # Looked up again if blocks were given out: one of them may be a cached one.
            fit = looked_up if self.pool.num_free == num_free else self._entrance.fit(sequence)
            if fit.num_taken > self.pool.num_free - kept_back:
                break
            self.waiting.remove(sequence)
            self.pool.share(fit.shared)
            sequence.blocks = fit.shared + self.pool.allocate_many(fit.num_own)
            if sequence.num_kept:
                self.counts.num_restored_tokens += self._host.restore(sequence, len(fit.shared))
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens, sequence.admitted_ns = fit.num_cached, now_ns
                self.counts.num_queried_tokens += sequence.request.num_prompt_tokens
                self.counts.num_hit_tokens += fit.num_cached
                if self._order.observes:
                    self.waiting.observe(Admitted(sequence.user, sequence.request.num_prompt_tokens))
            new_slots.append(self.table.insert(sequence, fit.num_cached, len(fit.shared)))
            new_tokens.append(min(tokens, fit.num_left))
        return np.array(new_slots, np.int64), np.array(new_tokens, np.int32)

    def _make_room(self, idle: Slots, chunk: Int32s, now_ns: int) -> tuple[Slots, Int32s, bool]:
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
                victim, keeps = self._eviction.victim(now_ns)
                lost.add(victim)
                # Rather than give itself up, it waits for the blocks that a unit in flight may soon return.
                if victim != slot or table.num_units_in_flight == 0:
                    self._preempt(victim, keeps=keeps)
            if slot not in lost:
                table.add_block(slot, self.pool.allocate())
        kept = np.array([slot not in lost for slot in slots.tolist()], np.bool_)
        return slots[kept], num_tokens[kept], bool(lost)

    def _preempt(self, slot: int, *, keeps: bool) -> None:
        """Free the sequence's KV and let it wait again; it keeps its tokens, its arrival and its hashes.

        Args:
            keeps: whether its KV goes to host memory, if there is room.
        """
        num_computed = int(self.table.num_computed[slot])
        is_kept = keeps and self._host.keep(self.table.at(slot), num_computed)
        self.counts.num_kept_tokens += num_computed if is_kept else 0
        sequence = self._free(slot)
        self.counts.num_preemptions += 1
        sequence.num_preemptions += 1
        if sequence.prompt_logprobs is not None and not is_kept:
            sequence.prompt_logprobs = []  # they start again with the prompt
        self.waiting.add(sequence)

    # --- update -----------------------------------------------------------------------------------------------------

    def update(self, result: StepResult, now_ns: int) -> Emitted:
        """Take the results of units in flight: tokens appended, full blocks remembered, ended sequences freed.

        Sequences whose logits are not finite end here, without a token.
        """
        table = self.table
        num_done = table.num_in_flight.take(result.slot)
        if np.count_nonzero(num_done) < len(num_done):
            raise InvariantError("a result for a unit that is not in flight")
        table.num_units_in_flight -= len(num_done)
        failed: list[Sequence] = []
        if result.non_finite is not None:
            result, failed = self._without_non_finite(result, result.non_finite)
        if self._num_aborted_in_flight:
            result = self._without_aborted(result)
        slots = result.slot
        if len(slots) < len(num_done):
            num_done = table.num_in_flight.take(slots)
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
        emitted = self._emit(result, computed == table.num_tokens.take(slots))
        emitted.add_failed(failed)
        return emitted

    def _without_non_finite(self, result: StepResult, rows: Slots) -> tuple[StepResult, list[Sequence]]:
        """The result without its non-finite `rows`, whose sequences leave now; and those that were not aborted.

        The prefix cache forgets all names of their blocks, also of blocks that other sequences stored: chunks whose
        logits were not wanted enter the cache unchecked. So the next equal prompt is computed from its first token.
        """
        failed = []
        for slot in result.slot[rows].tolist():
            sequence = self.table.at(slot)
            self.pool.forget(sequence.hashes)
            if sequence.is_aborted:
                self._num_aborted_in_flight -= 1
            else:
                del self.by_id[sequence.request.request_id]
                failed.append(sequence)
            self._leave(sequence)
        return result.select(np.setdiff1d(np.arange(len(result.slot)), rows)), failed

    def _without_aborted(self, result: StepResult) -> StepResult:
        """The result without sequences that were aborted while their unit was in flight; these leave now."""
        stays = np.array([not self.table.at(slot).is_aborted for slot in result.slot.tolist()], np.bool_)
        for slot in result.slot[~stays].tolist():
            self._num_aborted_in_flight -= 1
            self._leave(self.table.at(slot))
        return result.select(np.flatnonzero(stays))

    def _remember_full_blocks(self, slots: Slots, computed: Int32s) -> None:
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
        if self.contents is not None:
            self.contents.update(sequence.contents(first, end, table.token_ids[slot], block_size))
        self.pool.remember(sequence.blocks[first:end], sequence.hashes[first:end])
        table.remembered(slot, end)

    def _emit(self, result: StepResult, sampled: NDArray[np.bool_]) -> Emitted:
        """Append the tokens of the units in rows `sampled` of the result; sequences that ended leave.

        One whose max_tokens is 0 ends as one whose last token has come, with a -1 that nobody is told.
        """
        table, slots, tokens, finished = self.table, result.slot, result.token_ids, result.finished
        rows = None
        if np.count_nonzero(sampled) < len(sampled):
            (rows,) = sampled.nonzero()
            slots = slots.take(rows)
            tokens = None if tokens is None else tokens.take(rows)
            finished = None if finished is None else finished.take(rows)
        num_tokens = table.num_tokens.take(slots)
        if tokens is not None:
            table.token_ids[slots, num_tokens] = tokens
        num_tokens += 1
        table.num_tokens[slots] = num_tokens
        emitted = Emitted(table.at_all(slots), [-1] * len(slots) if tokens is None else tokens.tolist())
        emitted.finish_reasons.extend([None] * len(slots))
        reasons = emitted.finish_reasons
        for row in true_rows(num_tokens >= table.last_num_tokens.take(slots)):
            reasons[row] = FinishReason.LENGTH
        stopped = [] if finished is None else true_rows(finished)
        if tokens is not None:
            told = zip(emitted.sequences, emitted.token_ids, strict=True)
            stopped += [row for row, (sequence, token) in enumerate(told) if token in sequence.stop_token_ids]
        for row in stopped:
            reasons[row] = FinishReason.STOP
        if result.logprobs:
            row_of = {index: row for row, index in enumerate(range(len(slots)) if rows is None else rows.tolist())}
            emitted.logprobs.update({row_of[index]: entry for index, entry in result.logprobs.items()})
        if table.num_wanting_prompt_logprobs:
            for row in true_rows(table.wants_prompt_logprobs.take(slots)):
                emitted.prompt_logprobs[row] = table.take_prompt_logprobs(int(slots[row]))
        self._end_all(emitted)
        return emitted

    def _end_all(self, emitted: Emitted) -> None:
        """Let the sequences leave that have a reason to."""
        for sequence, reason in zip(emitted.sequences, emitted.finish_reasons, strict=True):
            if reason is not None:
                del self.by_id[sequence.request.request_id]
                self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence that is over out of its slot, if it has one, and tell the order policy."""
        if sequence.slot is not None:
            self._free(sequence.slot)
        self._host.forget(sequence)
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
        if np.count_nonzero(view.is_decode) < len(running) or not self._decodes_all(view):
            return Horizon(0, FOREVER_NS)
        computed, block_size = table.num_computed.take(running), self.settings.block_size
        most = int((table.last_num_tokens.take(running) - computed).min()) - 1
        until_ns = self._views.holds_until_ns(running, now_ns)
        if len(self.waiting) and (room := self.batch.room(view, self.limits)) > 0 and self._may_let_in():
            if self._entrance.candidates(room, self.limits, now_ns) or self._eviction.would_make_way(now_ns):
                return Horizon(0, FOREVER_NS)
            until_ns = min(until_ns, self.waiting.order_holds_until_ns(now_ns))
            # A block that becomes full may be the prefix for want of which the next request does not fit.
            most = min(most, int((block_size - computed % block_size).min()))
            if self._order.reads_cache:
                # A block that is taken may be a cached one, and a prefix that the order counted on is no more.
                most = min(most, int((table.capacity.take(running) - computed).min()) + 1)
        if -(-most // block_size) * len(running) > self.pool.num_free:
            num_blocks = table.capacity.take(running) // block_size
            most = rounds_that_fit(computed, num_blocks, block_size, self.pool.num_free, most)
        return Horizon(most, until_ns)

    def _decodes_all(self, view: BatchView) -> bool:
        """Whether the batch policy takes every row of `view`, which are decodes.

        Where all are latency-sensitive it is asked once for each number of rows: its answer depends on nothing else.
        """
        if self.table.num_be:
            return bool((self.batch.plan(view, self.limits) == 1).all())
        known = self._decodes.get(len(view.num_left))
        if known is None:
            known = self._decodes[len(view.num_left)] = bool((self.batch.plan(view, self.limits) == 1).all())
        return known

    def _may_let_in(self) -> bool:
        """Whether it matters who is first in order while the running ones decode."""
        return self.table.num_free_slots > 0 or self._eviction.makes_way

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
        self.num_steps += num_rounds
        num_tokens = table.num_computed.take(running) + num_rounds
        table.num_computed[running] = num_tokens
        num_tokens += 1
        table.num_tokens[running] = num_tokens
        at_last = true_rows(num_tokens >= table.last_num_tokens.take(running))
        if not at_last and not finished:
            return Emitted()
        reasons = dict.fromkeys(running.take(at_last).tolist(), FinishReason.LENGTH)
        reasons |= dict.fromkeys(finished or (), FinishReason.STOP)
        ended = [slot for slot in running.tolist() if slot in reasons]
        emitted = Emitted([table.at(slot) for slot in ended], [-1] * len(ended), [reasons[slot] for slot in ended])
        self._end_all(emitted)
        return emitted

    def _advance_blocks(self, num_rounds: int) -> None:
        """Take and remember the blocks of `num_rounds` rounds, in the order in which single rounds do it."""
        table, running, block_size = self.table, self.table.running, self.settings.block_size
        computed, capacity = table.num_computed.take(running), table.capacity.take(running)
        end = computed + num_rounds
        if self.pool.journal is not None or np.count_nonzero(end >= table.next_full_at.take(running)):
            for rounds, kind, row in block_events(computed, capacity // block_size, block_size, num_rounds):
                self.pool.round = rounds
                slot, position = int(running[row]), int(computed[row]) + rounds + 1
                if kind == TAKE:
                    table.add_block(slot, self.pool.allocate())
                elif position >= table.next_full_at[slot]:
                    self._remember(slot, position // block_size)
            self.pool.round = 0
            return
        # Nothing to remember, so all that counts is who takes a block before whom.
        short = true_rows(end > capacity)
        if short:
            taken = blocks_taken(computed.take(short).tolist(), capacity.take(short).tolist(), block_size, num_rounds)
            short_slots = running.take(short).tolist()
            table.add_blocks([short_slots[row] for row in taken], self.pool.allocate_many(len(taken)))

    def check(self) -> None:
        """Recount blocks and slots from scratch.

        Raises:
            InvariantError: something was lost or counted twice.
        """
        running = [s for s in self.table.sequences if s is not None]
        if sorted(s.slot for s in running if s.slot is not None) != sorted(self.table.running.tolist()):
            raise InvariantError("slots in use and running sequences differ")
        self.pool.check([sequence.blocks for sequence in running])
        self._host.check(sequence for sequence in self.by_id.values() if sequence.slot is None)
