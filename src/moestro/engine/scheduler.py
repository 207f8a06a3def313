"""Scheduler of one rank: chooses the tokens that each step computes, and applies the step's results.

There is no prefill phase and no decode phase. A sequence has `num_tokens` known tokens, of which `num_computed` have
their KV in the pool, and each step computes some of the difference. When the difference reaches zero, the step samples
a token, and the difference is one again. Chunked prefill, prefix cache hits and recomputation after a preemption all
follow this rule.

The scheduler has no effects: it computes no tokens, never sleeps and reads no clock.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moestro.core.request import FinishReason, GrammarBackend, Request
from moestro.core.scheduling_events import SequencePreempted
from moestro.core.views import BE, LS, ONE, BatchLimits, BatchView, all_nonzero, has_true
from moestro.core.work import BlockMoves, Int32s, Plan, Slots, StepResult, Units
from moestro.engine.admission import (
    AdmissionCandidate,
    PolicyViews,
    PreemptionVictim,
    Recall,
    SequencePreemption,
    WaitingAdmission,
)
from moestro.engine.event_recorder import EventRecorder
from moestro.engine.scheduler_state import DecodeRun, SchedulerState
from moestro.engine.sequences import Sequence
from moestro.engine.settings import SchedulerSettings
from moestro.engine.steps import StepOutput, append_sampled_tokens, make_units
from moestro.engine.waiting import check_length
from moestro.errors import InvariantError, QueueFullError, RequestError

# Of the token budget: a prompt waits for others' rows rather than be cut into smaller chunks, each of which reads the
# weights anew. bench/simulator/least_chunk.py sweeps it.
LEAST_CHUNK_SHARE = 0.25


class Scheduler:
    """Continuous batching with chunked prefill, paged KV, a prefix cache and preemption.

    KV of a preempted sequence is computed again, or copied to host memory and back.

    Args:
        settings: bounds and policies.
        recall: withdraws units in flight (`core.work.Executor.recall`), so that a best-effort sequence with a unit that
            the device has not begun can be preempted. None means that a unit in flight protects its sequence.

    Attributes:
        state: sequences, blocks and counters. `pool`, `table`, `waiting`, `by_id` and `counts` are its parts.
        decode_run: makes plans and applies results while the batch stays the same.
        num_steps: plans made so far.
        given_way: sequences that left the full queue for requests of other clients, until `take_given_way`.

    Invariants: a sequence with a unit in flight is not preempted unless the unit is recalled, and `NextStep` alone
    schedules it; a shared block is never written; blocks are conserved (`check`); a sequence whose token mask is late
    delays no other.
    """

    def __init__(self, settings: SchedulerSettings, recall: Recall | None = None) -> None:
        policies = settings.make_policies()
        self.settings = settings
        self.state = SchedulerState(settings, policies.order, policies.share)
        self.pool, self.table, self.waiting = self.state.pool, self.state.table, self.state.waiting
        self.by_id, self.counts = self.state.by_id, self.state.counts
        self.batch_policy = policies.batch
        self.limits = BatchLimits(
            token_budget=settings.max_num_batched_tokens,
            max_chunk=settings.max_chunk or settings.max_num_batched_tokens,
        )
        shares = self.state.shares
        self.views = PolicyViews(self.table, shares, policies.order.promotes_after_ns)
        self.admission = WaitingAdmission(
            self.pool, self.table, self.waiting, self.state.host, settings.max_num_seqs, shares
        )
        self.preemption = SequencePreemption(policies.evict, self.admission, self.views, self.state.host, recall)
        self.decode_run = DecodeRun(self.state)
        self.num_steps = 0
        self._num_added = 0
        self.given_way: list[Sequence] = []

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: Request, num_output_tokens: int | None = None) -> int:
        """Put `request` in the waiting queue.

        Args:
            num_output_tokens: length of the answer, where a replay knows it. No policy reads it. None means that the
                answer ends with a stop token or `max_tokens`.

        Returns:
            The sequence's serial number, unique in this scheduler, which its units carry.

        Raises:
            RequestError: the request can never fit, or the queue is full and no other client gives way; nothing has
                changed.
        """
        check_length(request, self.settings.max_model_len)
        if request.request_id in self.by_id:
            raise InvariantError(f"request id {request.request_id!r} is in use")
        sequence = Sequence(request, self._num_added, self._matcher(request), num_output_tokens)
        if len(self.waiting) >= self.settings.max_num_queued_reqs:
            self._make_room(request.client)
        self._num_added += 1
        self.state.add(sequence)
        return sequence.serial

    def _make_room(self, client: str | None) -> None:
        """Let another client's request leave the full queue; QueueFullError if none does."""
        leaving = self.waiting.giving_way_to(self.state.shares.number_of(client))
        if leaving is None:
            raise QueueFullError(len(self.waiting))
        self.given_way.append(leaving)
        self.waiting.remove(leaving)
        del self.by_id[leaving.request.request_id]
        self.state.leave(leaving)

    def take_given_way(self) -> list[Sequence]:
        """Return the sequences that left the full queue since the last call, for requests of other clients."""
        given_way, self.given_way = self.given_way, []
        return given_way

    def use_grammars(self, grammars: GrammarBackend) -> None:
        """Let answers follow grammars from now on."""
        self.table.grammars = grammars

    def _matcher(self, request: Request) -> Any:
        """Matcher of the request's grammar. None means that it has none."""
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        if self.table.grammars is None:
            text = "This engine cannot follow a grammar: it computes no logits, or its tokenizer has no use for one."
            raise RequestError(text, param="structured_outputs", code="unsupported_parameter")
        return self.table.grammars.matcher(grammar)

    def abort(self, request_id: str, now_ns: int) -> bool:
        """Drop a request, and return whether its id was known; the request may just have ended.

        A unit in flight runs to its end and its result is dropped, unless it is recalled. Only best effort is recalled.
        """
        sequence = self.by_id.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.slot is None:
            self.waiting.remove(sequence)
        elif sequence.service_class == BE:
            self.preemption.recall_unit(sequence.slot, now_ns)
        self.state.leave(sequence)
        return True

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(len(self.table.running) or len(self.waiting))

    @property
    def has_unplanned(self) -> bool:
        """Whether any sequence waits, or runs without a unit in flight."""
        return bool(len(self.waiting) or len(self.table.schedulable()))

    def has_urgent_prompts(self, now_ns: int) -> bool:
        """Whether a latency-sensitive sequence without a token could be computed now.

        Such a sequence either runs without a unit in flight, or waits and could be admitted.
        """
        idle = self.table.schedulable(LS)
        if bool(self.table.has_no_token(idle).any()):
            return True
        if not self.waiting.num_ls:
            return False
        room = self.batch_policy.room(self.views.running(idle, now_ns), self.limits)
        if room <= 0:
            return False
        candidates = self.admission.candidates(room, self.limits, now_ns, LS)
        return bool(candidates) or self.preemption.could_make_way(now_ns)

    # --- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int, service_class: int | None = None, max_tokens: int | None = None) -> Plan | None:
        """Make the next plan, or return None when nothing can be computed now. Units may be in flight.

        Args:
            service_class: schedules only sequences of this class. None means all classes.
            max_tokens: most tokens of the plan. None means no bound but the settings'. A prompt waits rather than get a
                chunk below `LEAST_CHUNK_SHARE` of the budget, while chunks in flight hold rows that come back.
        """
        limits = self.limits if max_tokens is None else self.limits.at_most(max_tokens)
        is_whole = service_class is None and limits is self.limits
        if is_whole and (units := self.decode_run.next_units()) is not None:
            return self.plan_of(units)
        self.decode_run.end()
        if self.state.recorder is not None and len(self.waiting):
            self.state.recorder.look(self.waiting, now_ns)
        self.table.look_for_masks()
        # 1. A waiting latency-sensitive request that finds no place preempts best-effort sequences, and one that its
        #    client may claim a place for preempts sequences of clients that hold more than their part.
        idle = self.table.schedulable(service_class)
        view, num_waiting = self.views.running(idle, now_ns), len(self.waiting)
        if num_waiting and (
            self._preempt_for_first(view, limits, now_ns, service_class)
            or self._preempt_for_claims(view, limits, now_ns, service_class)
        ):
            idle = self.table.schedulable(service_class)
            view = self.views.running(idle, now_ns)

        # 2. The batch policy divides the token budget among running sequences and candidates for admission.
        candidates: list[AdmissionCandidate] = []
        if num_waiting:
            room = self.batch_policy.room(view, limits)
            candidates = self.admission.candidates(room, limits, now_ns, service_class)
            view = self.views.with_candidates(view, candidates, now_ns) if candidates else view
        chunk = self.batch_policy.plan(view, limits)
        if limits.token_budget < self.limits.token_budget:
            chunk = self._without_slivers(view, chunk)

        # 3. Running sequences get the blocks that they lack, if need be by preempting others.
        num_free = self.pool.num_free
        slots, num_tokens, has_preempted = self._allocate_blocks(idle, chunk[: len(idle)], now_ns)

        # 4. Candidates are admitted, unless blocks were so scarce that a sequence was preempted.
        if candidates and not has_preempted:
            slots, num_tokens = self.with_admitted(candidates, slots, num_tokens, chunk, num_free, now_ns)

        # 5. The plan takes its units, and the KV copies that preemptions and admissions have requested.
        if len(slots) == 0:
            # Every sequence of this plan was preempted: the sequences that are left need not wait for the next call.
            retries = has_preempted and not self.table.num_units_in_flight
            return self.schedule(now_ns, service_class, max_tokens) if retries else None
        units = make_units(self.table, slots, num_tokens)
        if is_whole:
            self.decode_run.look_at(units)
        return self.plan_of(units)

    def plan_of(self, units: Units) -> Plan:
        """Number the next plan. It takes the KV copies that preemptions, admissions and evictions have requested."""
        self.num_steps += 1
        self.state.host.write_ahead()
        return Plan(self.num_steps, units, self.state.host.take_moves())

    def _without_slivers(self, view: BatchView, chunk: Int32s) -> Int32s:
        """Let prompts wait that a lack of rows would cut into small chunks. Decodes, and small rests, do not wait."""
        if not np.count_nonzero(self.table.num_in_flight > 1):
            return chunk  # decodes alone hold the missing rows, and take them again
        least = min(round(LEAST_CHUNK_SHARE * self.limits.token_budget), self.limits.max_chunk)
        return np.where((chunk < view.num_left) & (chunk < least), np.int32(0), chunk)

    def _preempt_for_first(self, view: BatchView, limits: BatchLimits, now_ns: int, service_class: int | None) -> bool:
        """Preempt best-effort sequences for the first waiting request, if the policies want it. Returns whether any."""
        if not self.preemption.makes_way or self.batch_policy.room(view, limits) <= 0:
            return False
        victims = self.preemption.victims_for_first(now_ns, service_class)
        if victims and self.state.recorder is not None:
            first = next(self.waiting.in_order(now_ns))
            for victim in victims:
                self._record_preemption(victim, first, now_ns, is_for_class=True)
        for slot, keeps in victims:
            self.state.preempt(slot, keeps=keeps)
        return bool(victims)

    def _preempt_for_claims(self, view: BatchView, limits: BatchLimits, now_ns: int, service_class: int | None) -> bool:
        """Preempt sequences of clients over their part for the claims of others. Returns whether any was preempted."""
        room = self.batch_policy.room(view, limits) if self.state.shares.are_needed else 0
        claimants = self.admission.claimants(limits, now_ns) if room > 0 else []
        num_seqs = num_be = num_blocks = num_preempted = 0
        for claimant in claimants:
            if room <= 0 or (service_class is not None and claimant.service_class != service_class):
                break
            needs = self.admission.needs(claimant)
            num_seqs, num_be = num_seqs + 1, num_be + (claimant.service_class == BE)
            num_blocks += needs.num_taken
            room -= min(needs.num_left, limits.max_chunk)
            while not self.admission.have_room(num_seqs, num_be, num_blocks):
                victim = self.preemption.victim_for(claimant, now_ns)
                if victim is None:
                    return num_preempted > 0
                self._record_preemption(victim, claimant, now_ns, is_for_client=True)
                self.state.preempt(victim.slot, keeps=victim.keeps)
                num_preempted += 1
        return num_preempted > 0

    def _allocate_blocks(self, idle: Slots, chunk: Int32s, now_ns: int) -> tuple[Slots, Int32s, bool]:
        """Give running sequences blocks for their planned tokens, and preempt sequences where the pool is empty.

        Only a decode lacks a block, and one at most: admission gives blocks for all known tokens.

        Returns:
            The slots and tokens that remain in the plan, and whether any sequence was preempted or has to wait.
        """
        table = self.table
        slots, num_tokens = idle, chunk
        if not all_nonzero(chunk):
            slots, num_tokens = idle[chunk > 0], chunk[chunk > 0]
        lacks_block = table.num_tokens[slots] > table.capacity[slots]
        if not has_true(lacks_block):
            return slots, num_tokens, False
        takers: list[int] = slots[lacks_block].tolist()
        if len(takers) <= self.pool.num_free:
            table.add_blocks(takers, self.pool.allocate_many(len(takers)))
            return slots, num_tokens, False
        dropped: set[int] = set()
        for slot in takers:
            while slot not in dropped and self.pool.num_free == 0:
                victim, keeps = self.preemption.victim(now_ns)
                dropped.add(victim)
                # A sequence is not preempted for itself while a unit in flight may soon release blocks: it waits.
                if victim != slot or table.num_units_in_flight == 0:
                    self._record_preemption(PreemptionVictim(victim, keeps), table.at(slot), now_ns)
                    self.state.preempt(victim, keeps=keeps)
            if slot not in dropped:
                table.add_block(slot, self.pool.allocate())
        if not dropped:
            return slots, num_tokens, False
        remains = np.array([slot not in dropped for slot in slots.tolist()], np.bool_)
        return slots[remains], num_tokens[remains], True

    def _record_preemption(self, victim: PreemptionVictim, by: Sequence, now_ns: int, **reason: bool) -> None:
        """Note a preemption that comes now, if there is a recorder.

        Args:
            reason: `is_for_class` or `is_for_client`, as in `SequencePreempted`; without it, KV blocks had run out.
        """
        if self.state.recorder is not None:
            self.state.recorder.preempted(
                SequencePreempted(
                    self.table.at(victim.slot).request.request_id,
                    now_ns,
                    by.request.request_id,
                    num_computed=int(self.table.num_computed[victim.slot]),
                    keeps=bool(victim.keeps),
                    **reason,
                )
            )

    def with_admitted(
        self,
        candidates: list[AdmissionCandidate],
        slots: Slots,
        num_tokens: Int32s,
        chunk: Int32s,
        num_free: int,
        now_ns: int,
    ) -> tuple[Slots, Int32s]:
        """Admit candidates, and return the slots and tokens of the plan with theirs.

        Args:
            slots, num_tokens: of the running sequences in the plan.
            chunk: tokens that the batch policy gives to each row of its view, which ends with the candidates.
            num_free: free blocks at the time when the candidates were found.
        """
        running, wanted = self.table.running, chunk[len(chunk) - len(candidates) :].tolist()
        new_slots, new_tokens = self._admit(candidates, wanted, num_free, now_ns)
        if slots is running and new_tokens == wanted:  # all running sequences and all candidates, as in most steps
            return self.table.running, chunk
        if not new_slots:
            return slots, num_tokens
        return (
            np.concatenate((slots, np.array(new_slots, np.int64))),
            np.concatenate((num_tokens, np.array(new_tokens, np.int32))),
        )

    def _admit(
        self, candidates: list[AdmissionCandidate], chunk: list[int], num_free: int, now_ns: int
    ) -> tuple[list[int], list[int]]:
        """Admit candidates in order while blocks last; one free block is reserved for each running sequence.

        Args:
            chunk: tokens that the batch policy gives to each candidate.
            num_free: free blocks at the time when the candidates were found.

        Returns:
            Slots and planned tokens of the admitted sequences.
        """
        # Running sequences have taken some of the reserved blocks since.
        reserved = len(self.table.running) - (num_free - self.pool.num_free)
        new_slots: list[int] = []
        new_tokens: list[int] = []
        for candidate, tokens in zip(candidates, chunk, strict=True):
            if tokens == 0:
                continue  # the batch policy prefers other sequences
            num_free_now, needs = self.pool.num_free, candidate.needs
            if needs.num_prefix and num_free_now != num_free:
                # An allocation may have taken a cached block that the candidate counted on, in either tier.
                needs = self.admission.needs(candidate.sequence)
            if needs.num_taken > num_free_now - reserved:
                break
            new_slots.append(self.state.admit(candidate.sequence, needs, now_ns))
            new_tokens.append(tokens if tokens < needs.num_left else needs.num_left)
        return new_slots, new_tokens

    # --- update -----------------------------------------------------------------------------------------------------

    def update(self, result: StepResult, now_ns: int) -> StepOutput:
        """Apply the results of units in flight, and return the sampled tokens.

        A sequence whose logits are not finite, or whose request excludes all tokens, ends here without one.
        """
        if not self.state.num_leaving and (output := self.decode_run.take(result)) is not None:
            return output
        self.decode_run.end()
        if result.failed is not None:
            return self._withdraw(result.slot, result.failed)
        return self._apply(result)

    def _apply(self, result: StepResult) -> StepOutput:
        """Apply a result that is not one of a decode run."""
        # 1. The units are no longer in flight, and their tokens have their KV in the pool.
        table = self.table
        num_done = table.end_units(result.slot)
        if not all_nonzero(num_done):
            raise InvariantError("a result for a unit that is not in flight")
        table.num_computed[result.slot] += num_done

        # 2. Sequences that failed, or that had ended or were aborted before, leave.
        failed: list[tuple[Sequence, FinishReason]] = []
        if result.non_finite is not None:
            result, failed = self._remove_failed(result, result.non_finite)
        if self.state.num_leaving:
            result = self._remove_leaving(result)
        slots = result.slot
        computed = table.num_computed[slots]

        # 3. The others compute their last token again if its mask was late. Full blocks enter the prefix cache.
        if result.unmasked is not None:
            computed = self._without_unmasked(result, result.unmasked, computed)
        for index, entries in result.prompt_logprobs.items():
            table.add_prompt_logprobs(int(slots[index]), entries)
        for index, packed in result.block_hashes.items():
            table.learn_hashes(int(slots[index]), packed)
        self.state.cache_full_blocks(slots, computed)

        # 4. A sequence without uncomputed tokens has sampled one, and may have ended with it.
        output = append_sampled_tokens(table, result, computed)
        if output.finish_reasons:
            self.state.finish_all(output.ended)
        if failed:
            output.add_failed(failed)
        return output

    def _withdraw(self, slots: Slots, failed: BlockMoves) -> StepOutput:
        """Take back units that were not computed, because the KV copies of their plan failed.

        All of host memory counts as lost, and so does what should have been copied from there. Sequences that hold such
        blocks are preempted, and compute them again.
        """
        self.table.end_units(slots)
        if self.state.num_leaving:
            for slot in slots[self.table.are_leaving(slots)].tolist():
                self.state.drop_row(self.table.at(slot))
        self.state.drop_copies(set(failed.restored[1].tolist()))
        return StepOutput()

    def _without_unmasked(self, result: StepResult, unmasked: Slots, computed: Int32s) -> Int32s:
        """Give no token to the sequences whose masks were not ready, the rows `unmasked` of the result.

        Their last token counts as not computed, so that a later unit computes its logits again.

        Args:
            computed: int32[n], tokens with KV of each row of the result.

        Returns:
            The same without those tokens.
        """
        computed[unmasked] -= ONE
        self.table.num_computed[result.slot] = computed
        for row in unmasked.tolist():
            result.logprobs.pop(row, None)
        self.table.sit_out(result.slot[unmasked])
        return computed

    def _remove_failed(self, result: StepResult, rows: Slots) -> tuple[StepResult, list[tuple[Sequence, FinishReason]]]:
        """Remove the sequences in `rows` of the result, for which there is no next token.

        If the logits are not finite, the prefix cache forgets all hashes of a sequence's blocks, also of blocks that
        other sequences stored. Chunks without wanted logits enter the cache unchecked, so the next equal prompt is
        computed from its first token.

        Returns:
            The result of the other rows, and the removed sequences that were not leaving before, with the reasons.
        """
        failed = []
        is_excluded = np.isin(rows, () if result.excluded is None else result.excluded)
        for slot, excludes_all in zip(result.slot[rows].tolist(), is_excluded.tolist(), strict=True):
            sequence = self.table.at(slot)
            reason = FinishReason.EXCLUDED if excludes_all else FinishReason.NON_FINITE
            if self.table.has_failed_grammar(sequence):
                reason = FinishReason.GRAMMAR
            if reason is FinishReason.NON_FINITE:
                self.pool.forget(sequence.hashes)
            if sequence.is_leaving:
                self.state.drop_row(sequence)
            else:
                failed.append((sequence, reason))
                self.state.finish(sequence)
        return result.select(np.setdiff1d(np.arange(len(result.slot)), rows)), failed

    def _remove_leaving(self, result: StepResult) -> StepResult:
        """Remove sequences that ended or were aborted while their unit was in flight. Returns the others' result."""
        is_leaving = self.table.are_leaving(result.slot)
        for slot in result.slot[is_leaving].tolist():
            self.state.drop_row(self.table.at(slot))
        return result.select(np.flatnonzero(~is_leaving))

    def record_with(self, recorder: EventRecorder) -> None:
        """Note what happens to requests from now on."""
        self.state.recorder = self.preemption.recorder = recorder

    def check(self) -> None:
        """Recount blocks and slots from scratch.

        Raises:
            InvariantError: a block or a slot is lost or counted twice.
        """
        self.state.check()
