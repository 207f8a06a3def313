"""State of one rank's scheduler: its sequences, waiting and running, and the KV blocks that they hold.

A sequence waits, runs and leaves; a preempted sequence waits again:

    waiting --admit--> running --finish--> gone
       ^                  |
       +-----preempt------+

Methods carry out these transitions. The scheduler decides when.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import ROOT, block_hash
from moestro.core.views import ONE, ZERO, Admitted, Left, OrderPolicy, all_true, true_rows
from moestro.core.work import Int32s, Slots, StepResult, Units
from moestro.engine.admission import AdmissionNeeds
from moestro.engine.block_pool import BlockPool
from moestro.engine.event_recorder import EventRecorder
from moestro.engine.host_tier import HostTier
from moestro.engine.registry import SharePolicy
from moestro.engine.sequences import (
    CAPACITY,
    COMPUTED,
    FULL_AT,
    LAST_TOKENS,
    NEVER,
    TOKENS,
    BlockContent,
    Sequence,
    SequenceTable,
)
from moestro.engine.settings import SchedulerSettings
from moestro.engine.steps import SchedulerCounts, StepOutput, find_finish_reasons
from moestro.engine.waiting import ClientShares, WaitingQueue
from moestro.errors import InvariantError


class SchedulerState:
    """Sequences, KV blocks and counters, which the steps of one scheduler change.

    Args:
        settings: sizes of the pool, the table and the host memory.
        order: the order policy of the waiting queue.
        share: divides the engine between clients.

    Attributes:
        by_id: every sequence by request id, until it finishes or is aborted.
        block_contents: contents of filled blocks by hash, for a publisher that empties it. None means no publisher.
        recorder: notes what happens to requests. None means that nothing does.
        num_leaving: sequences that leave when their unit in flight returns.
        shares: numbers and parts of the clients.
    """

    def __init__(self, settings: SchedulerSettings, order: OrderPolicy, share: SharePolicy) -> None:
        self.block_size = settings.block_size
        self.pool = BlockPool(settings.num_blocks, enable_prefix_caching=settings.enable_prefix_caching)
        self.table = SequenceTable(settings.num_slots, settings.max_model_len, settings.block_size)
        self.waiting = WaitingQueue(order, self.pool, settings.block_size)
        self.host = HostTier(settings.num_host_blocks, self.pool, settings.block_size)
        self.shares = ClientShares(share, order, self.table, settings.num_blocks)
        self.by_id: dict[str, Sequence] = {}
        self.counts = SchedulerCounts()
        self.block_contents: dict[bytes, BlockContent] | None = None
        self.recorder: EventRecorder | None = None
        self.num_leaving = 0
        self._order = order

    # --- -> waiting -------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the waiting queue."""
        request = sequence.request
        sequence.client = self.shares.join(request.client)
        self.by_id[request.request_id] = sequence
        self.enqueue(sequence)

    def enqueue(self, sequence: Sequence) -> None:
        """Put a sequence, new or preempted, into the waiting queue."""
        self.waiting.add(sequence)
        if self.recorder is not None:
            self.recorder.added(sequence)

    # --- waiting -> running -----------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, needs: AdmissionNeeds, now_ns: int) -> int:
        """Move a waiting sequence into a slot, with blocks for all its known tokens.

        Args:
            needs: blocks that the sequence shares and is given, as the pool is now.

        Returns:
            The slot.
        """
        if self.recorder is not None:
            self.recorder.admitted(sequence, needs.num_cached, now_ns)
        self.waiting.remove(sequence)
        if needs.shared:
            self.pool.share(needs.shared)
        if needs.loaded:
            self.host.pin([sequence.hashes[at] for at in needs.loaded])  # an allocation may evict to the host
        sequence.blocks = needs.shared + self.pool.allocate_many(needs.num_own)
        if sequence.num_kept:
            self.counts.num_restored_tokens += self.host.restore(sequence, len(needs.shared))
        if needs.loaded:
            sequence.blocks = _in_order(sequence.blocks, needs)
        if sequence.num_cached_tokens is None:
            self._note_first_admission(sequence, needs, now_ns)
        slot = self.table.insert(sequence, needs.num_cached, needs.num_prefix)
        if needs.loaded:
            self._load(sequence, slot, needs.loaded)
        if needs.num_prefix:
            self.host.used(sequence.hashes[: needs.num_prefix])
        return slot

    def _load(self, sequence: Sequence, slot: int, positions: tuple[int, ...]) -> None:
        """Copy blocks from host memory into those of a sequence at `positions`, which are cached there from now on.

        The copies come before the units of the next plan, so a sequence that shares the blocks reads what they hold.
        """
        names, blocks = [sequence.hashes[at] for at in positions], [sequence.blocks[at] for at in positions]
        self.host.load(names, blocks)
        if self.block_contents is not None:
            for at in positions:
                self.block_contents |= sequence.contents(at, at + 1, self.table.token_ids[slot], self.block_size)
        self.pool.remember(blocks, names)

    def _note_first_admission(self, sequence: Sequence, needs: AdmissionNeeds, now_ns: int) -> None:
        """Count the prefix cache's hits, and tell the order policy."""
        num_prompt_tokens, num_cached = sequence.request.num_prompt_tokens, needs.num_cached
        sequence.num_host_tokens = min(len(needs.loaded) * self.block_size, num_cached)
        self.counts.num_host_hit_tokens += sequence.num_host_tokens
        sequence.num_cached_tokens, sequence.admitted_ns = num_cached, now_ns
        self.counts.num_queried_tokens += num_prompt_tokens
        self.counts.num_hit_tokens += num_cached - sequence.num_host_tokens
        if self._order.observes:
            self.waiting.observe(Admitted(sequence.user, num_prompt_tokens))

    # --- running -> waiting -----------------------------------------------------------------------------------------

    def preempt(self, slot: int, *, keeps: bool) -> None:
        """Free the KV of a running sequence, which waits again with its tokens, arrival time and hashes.

        Args:
            keeps: whether its KV is copied to host memory, if there is room.
        """
        num_computed = int(self.table.num_computed[slot])
        is_kept = keeps and self.host.keep(self.table.at(slot), num_computed)
        self.counts.num_kept_tokens += num_computed if is_kept else 0
        sequence = self._release_slot(slot)
        self.counts.num_preemptions += 1
        sequence.num_preemptions += 1
        if sequence.prompt_logprobs is not None and not is_kept:
            sequence.prompt_logprobs = []  # the prompt is computed again, from its first token
        self.enqueue(sequence)

    # --- running or waiting -> gone ---------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """Remove a running sequence that has ended."""
        del self.by_id[sequence.request.request_id]
        self.leave(sequence)

    def finish_all(self, sequences: list[Sequence]) -> None:
        """Remove running sequences that have ended."""
        for sequence in sequences:
            self.finish(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Release what a sequence holds whose request id is no longer known, and tell the order policy.

        A unit in flight may write to the sequence's blocks, so they are released with its result (`drop_row`).
        """
        if sequence.slot is not None:
            if self.table.num_in_flight[sequence.slot]:
                sequence.is_leaving = True
                self.num_leaving += 1
                return
            self._release_slot(sequence.slot)
        self.shares.leave(sequence.client)
        if sequence.host_blocks:
            self.host.drop_kept(sequence)
        if self._order.observes or self.recorder is not None:
            num_generated = min(len(sequence.generated), sequence.request.sampling.max_tokens)
            if self.recorder is not None:
                self.recorder.left(sequence, num_generated)
            if self._order.observes:
                self.waiting.observe(Left(sequence.user, num_generated))

    def drop_row(self, sequence: Sequence) -> None:
        """Let a leaving sequence go whose unit has returned. The unit's result has no use."""
        self.num_leaving -= 1
        self.counts.num_dropped_rows += 1
        self.leave(sequence)

    def _release_slot(self, slot: int) -> Sequence:
        """Free the slot and the blocks of a running sequence. Returns the sequence."""
        sequence = self.table.remove(slot)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        return sequence

    # --- full blocks ------------------------------------------------------------------------------------------------

    def cache_full_blocks(self, slots: Slots, computed: Int32s) -> None:
        """Enter newly filled blocks into the prefix cache.

        Args:
            computed: int32[n], tokens of each slot that have KV now.
        """
        rows = true_rows(computed >= self.table.next_full_at[slots])
        if rows:
            blocks, names = list[int](), list[bytes]()
            for row in rows:
                self._name_blocks(slots.item(row), computed.item(row) // self.block_size, blocks, names)
            self.pool.remember(blocks, names)

    def cache_blocks(self, slot: int, num_full: int) -> None:
        """Enter the first `num_full` blocks of the sequence in `slot` into the prefix cache, as far as it has names."""
        blocks, names = list[int](), list[bytes]()
        self._name_blocks(slot, num_full, blocks, names)
        self.pool.remember(blocks, names)

    def _name_blocks(self, slot: int, end: int, blocks: list[int], names: list[bytes]) -> None:
        """Append the full blocks of a sequence that are not in the prefix cache, and their names, to two lists."""
        table, block_size = self.table, self.block_size
        sequence = table.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        request, hashes = sequence.request, sequence.hashes
        has_tokens, first = request.token_ids is not None, table.next_full_at.item(slot) // block_size - 1
        if not has_tokens and len(hashes) < end:
            end = len(hashes)
        while len(hashes) < end:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else ROOT
            hashes.append(block_hash(request.hash_key, parent, table.token_ids[slot, start : start + block_size]))
        table.next_full_at[slot] = (end + 1) * block_size if has_tokens or len(hashes) > end else NEVER
        if not self.host.link(hashes, first, end):
            return  # behind a block that is gone, these could hit nothing
        if self.block_contents is not None:
            self.block_contents.update(sequence.contents(first, end, table.token_ids[slot], block_size))
        if first + 1 == end:  # a decode
            blocks.append(sequence.blocks[first])
            names.append(hashes[first])
        else:
            blocks += sequence.blocks[first:end]
            names += hashes[first:end]

    def forget_cache(self) -> None:
        """Empty the prefix cache. Sequences that have KV now enter no block any more, but those of now on may."""
        for sequence in self.by_id.values():
            if sequence.slot is not None or sequence.host_blocks:
                sequence.may_cache = False
        self.table.next_full_at[self.table.running] = NEVER
        self.pool.forget_all()
        self.host.forget_all()

    def drop_copies(self, device_blocks: set[int]) -> None:
        """Drop all KV in host memory, and that of device blocks which should have come from there."""
        self.counts.num_failed_copies += 1
        self.pool.forget(self.pool.names_of(device_blocks))
        self.host.forget_all()
        for sequence in self.by_id.values():
            if sequence.host_blocks:
                self.waiting.remove(sequence)
                self.host.drop_kept(sequence)
                sequence.prompt_logprobs = None if sequence.prompt_logprobs is None else []
                self.waiting.add(sequence)
        for slot in self.table.running.tolist():
            if not device_blocks.isdisjoint(self.table.at(slot).blocks):
                self.preempt(slot, keeps=False)

    def check(self) -> None:
        """Recount blocks and slots from scratch.

        Raises:
            InvariantError: a block or a slot is lost or counted twice.
        """
        running = [s for s in self.table.sequences if s is not None]
        if sorted(s.slot for s in running if s.slot is not None) != sorted(self.table.running.tolist()):
            raise InvariantError("slots in use and running sequences differ")
        self.pool.check([sequence.blocks for sequence in running])
        self.host.check(sequence for sequence in self.by_id.values() if sequence.slot is None)


def _in_order(blocks: list[int], needs: AdmissionNeeds) -> list[int]:
    """Put the blocks of a sequence, shared ones first, in the order of its tokens."""
    shared, own = iter(blocks[: len(needs.shared)]), iter(blocks[len(needs.shared) :])
    loaded = set(needs.loaded)
    prefix = [next(own if at in loaded else shared) for at in range(needs.num_prefix)]
    return [*prefix, *own]


_ONE_MORE = np.array(1, np.int64)  # as `core.views.ONE`
_NO_SLOTS = np.empty(0, np.int64)
_NOTHING = np.empty(0, np.int32)
_AT_LAST, _AT_CAPACITY, _AT_FULL = range(3)  # rows of `DecodeRun._limits`


class DecodeRun:
    """Makes plans and applies results while the same sequences decode and no request waits.

    A plan then differs from the one before in its positions and tokens alone, because the batch policy sees the same
    view again. Everything else is gathered once. The state is after each call what `Scheduler` would have made of it,
    in a third of the time.

    The run ends by itself when a sequence comes or goes. The scheduler ends it when it makes a plan or applies a result
    without it. Best-effort sequences may be promoted at any time, and hashed traces know their block names late: a
    batch with such a sequence has no run.

    Args:
        state: the scheduler's state.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state, self._table, self._pool, self._waiting = state, state.table, state.pool, state.waiting
        self._token_ids = state.table.token_ids.reshape(-1)
        self._last_planned: Slots = _NO_SLOTS  # by the scheduler itself
        self._running: Slots | None = None  # the table's array, which changes with its sequences; None means no run
        self._is_in_flight = False
        self._sequences: list[Sequence] = []
        self._request_ids: tuple[str, ...] = ()
        self._reported_ids: tuple[str, ...] = ()  # `_request_ids` after the run's first output
        self._computed = self._num_tokens = _NOTHING  # int32[n], tokens with KV, and known tokens, which are one more
        self._limits = _NOTHING  # int32[3, n], values of `_computed` at which something happens
        self._is_at_limit = False  # whether any of them is reached
        self._next_at: Slots = _NO_SLOTS  # int64[n], of each sequence's next token in `_token_ids`
        self._next_token_ids = _NOTHING
        self._ones, self._logits = _NOTHING, _NO_SLOTS.view(np.uint8)
        self._block_tables = _NOTHING
        self._num_known = 0

    @property
    def num_known(self) -> int | None:
        """Known tokens of the running sequences, all of which decode. None means that there is no run."""
        return self._num_known if self._running is self._table.running else None

    def end(self) -> None:
        """Forget the run, because the state changes without it."""
        self._running = None

    # --- schedule

    def look_at(self, units: Units) -> None:
        """Begin a run after the second plan of the scheduler for the same sequences, if all of these decode."""
        table, running = self._table, self._table.running
        if units.slot is not running or len(self._waiting):
            return  # the plan leaves a sequence out, or the next plan may add one
        if self._last_planned is not running:
            self._last_planned = running
            return
        if table.num_be or table.num_hashed or table.num_wanting_prompt_logprobs or table.num_scoring:
            return
        growth = table.growth.take(running, axis=1)
        if all_true(growth[TOKENS] - growth[COMPUTED] == ONE):
            self._begin(running, growth, units)

    def _begin(self, running: Slots, growth: Int32s, units: Units) -> None:
        """Take over from the plan `units`, which is in flight."""
        self._running, self._is_in_flight = running, True
        self._sequences = self._table.at_all(running)
        self._request_ids = tuple(sequence.request.request_id for sequence in self._sequences)
        self._reported_ids = ()  # a prompt's last chunk of one token looks like a decode
        self._computed, self._num_tokens = growth[COMPUTED], growth[TOKENS]
        # The last token is sampled and never computed.
        self._limits = np.stack((growth[LAST_TOKENS] - ONE, growth[CAPACITY], growth[FULL_AT]))
        self._next_at = running * self._table.token_ids.shape[1] + growth[TOKENS]
        self._ones, self._logits = units.num_tokens, units.logits
        self._block_tables = units.block_tables
        self._num_known = int(np.add.reduce(growth[TOKENS]))

    def next_units(self) -> Units | None:
        """Make the units of the next plan, and mark their tokens as in flight. None means that there is no run."""
        table, running = self._table, self._running
        if running is None or table.running is not running or table.num_units_in_flight or len(self._waiting):
            return None
        if self._is_at_limit and not self._allocate_blocks(running):
            return None
        fixed = table.fixed_columns(running)
        edits = table.logit_edits(running, self._logits, self._num_tokens) if table.num_editing else None
        table.num_in_flight[running] = ONE
        table.num_units_in_flight = len(running)
        self._is_in_flight = True
        return Units(
            slot=running,
            serial=fixed.serial,
            service_class=fixed.service_class,
            start=self._computed,
            num_tokens=self._ones,
            write_start=self._computed,  # the first plan went beyond all shared blocks
            logits=self._logits,
            block_tables=self._block_tables,
            sampling=fixed.sampling,
            token_ids=self._next_token_ids,
            edits=edits,
        )

    def _allocate_blocks(self, running: Slots) -> bool:
        """Give a block to each sequence that lacks one. Returns False, and changes nothing, if the pool has too few."""
        table, capacity = self._table, self._limits[_AT_CAPACITY]
        rows = true_rows(self._computed >= capacity)
        if len(rows) > self._pool.num_free:
            return False
        if rows:
            slots = running.take(rows)
            table.add_blocks(slots.tolist(), self._pool.allocate_many(len(rows)))
            capacity[rows] = table.capacity.take(slots)
            width = int(np.maximum.reduce(capacity)) // table.block_size
            self._block_tables = table.block_table[running, :width]  # a new array: devices may hold the old one
        return True

    # --- update

    def take(self, result: StepResult) -> StepOutput | None:
        """Apply the result of the run's plan. None means that it is not for a run, and nothing has changed."""
        table, running, tokens = self._table, self._running, result.token_ids
        if running is None or not self._is_in_flight or not _is_plain(result):
            return None
        if result.slot is not running and result.slot.tobytes() != running.tobytes():
            return None
        assert tokens is not None, "a plain result has tokens"
        self._is_in_flight = False
        self._computed, self._num_tokens = computed, num_tokens = self._num_tokens, self._num_tokens + ONE
        table.num_units_in_flight -= len(running)
        table.num_in_flight[running] = ZERO
        table.num_computed[running] = computed
        reached = computed >= self._limits
        self._is_at_limit = 1 in reached.tobytes()
        if self._is_at_limit:
            self._cache_full_blocks(running, reached[_AT_FULL])
        self._token_ids[self._next_at] = tokens
        self._next_at += _ONE_MORE
        table.num_tokens[running] = num_tokens
        self._next_token_ids = tokens
        self._num_known += len(running)
        return self._output(tokens.tolist(), reached[_AT_LAST], result)

    def _cache_full_blocks(self, running: Slots, is_full: NDArray[np.bool_]) -> None:
        rows = true_rows(is_full)
        if rows:
            slots = running.take(rows)
            self._state.cache_full_blocks(slots, self._computed.take(rows))
            self._limits[_AT_FULL, rows] = self._table.next_full_at.take(slots)

    def _output(self, tokens: list[int], is_last: NDArray[np.bool_], result: StepResult) -> StepOutput:
        """Report the sampled tokens, and remove the sequences that end with them."""
        sequences, at_last = self._sequences, true_rows(is_last) if self._is_at_limit else []
        reasons = find_finish_reasons(self._table, sequences, tokens, at_last)
        output = StepOutput(sequences, tokens, reasons, result.logprobs, request_ids=self._reported_ids)
        self._reported_ids = self._request_ids
        if reasons:
            self._state.finish_all(output.ended)
        return output


def _is_plain(result: StepResult) -> bool:
    """Whether `result` has a token of each row, and else log probabilities of the tokens alone."""
    return not (
        result.token_ids is None or result.non_finite is not None or result.unmasked is not None or result.block_hashes
    )
