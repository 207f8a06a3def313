"""A run of decode steps: the same sequences decode one token each, from step to step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.columns import ONE, ZERO, all_true, true_rows
from moestro.core.work import Int32s, Slots, StepResult, Units
from moestro.engine.scheduler_state import SchedulerState
from moestro.engine.sequences import CAPACITY, COMPUTED, FULL_AT, LAST_TOKENS, TOKENS, Sequence
from moestro.engine.step_output import StepOutput, find_finish_reasons

_ONE_MORE = np.array(1, np.int64)  # as `core.columns.ONE`
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
