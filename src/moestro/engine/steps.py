"""A step of the scheduler: the columns of its plan, the sampled tokens, the sequences that end, and the outputs."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from moestro.core.request import WITHOUT_TOKEN, FinishReason, NewOutputs, Output, PackedLogprobs, TokenLogprobs
from moestro.core.views import ONE, all_true, true_rows
from moestro.core.work import LOGITS_NONE, LOGITS_PROMPT, Int32s, Slots, StepResult, Units
from moestro.engine.sequences import Sequence, SequenceTable

_BYTES = np.dtype(np.uint8)  # a view as a type object takes three times as long
_NO_TABLES = np.empty((1 << 20, 0), np.int32)  # takes no memory


def make_units(table: SequenceTable, slots: Slots, num_tokens: Int32s) -> Units:
    """Make the units of a plan, and mark their tokens as in flight, behind units that are in flight already."""
    start, known = table.progress(slots)
    # LOGITS_LAST is 1, so the comparison itself is the column.
    logits = (start + num_tokens == known).view(_BYTES)
    if table.num_scoring:
        logits[table.last_num_tokens[slots] == table.num_prompt[slots]] = LOGITS_NONE
    following = None
    if table.num_wanting_prompt_logprobs:
        asks = table.wants_prompt_logprobs[slots] & (start < table.num_tokens[slots])  # not behind the first token
        logits[asks] |= LOGITS_PROMPT
        if not table.num_hashed:
            following = _token_ids(table, slots[asks], start[asks] + 1, num_tokens[asks])
    edits = table.logit_edits(slots, logits, known) if table.num_editing else None
    table.begin_units(slots, num_tokens)
    fixed, is_hashed = table.fixed_columns(slots), table.num_hashed > 0
    return Units(
        slot=slots,
        serial=fixed.serial,
        service_class=fixed.service_class,
        start=start,
        num_tokens=num_tokens,
        write_start=start if is_hashed else np.maximum(start, fixed.write_start),
        logits=logits,
        block_tables=_NO_TABLES[: len(slots)] if is_hashed else _block_tables(table, slots),
        sampling=fixed.sampling,
        token_ids=None if is_hashed else _token_ids(table, slots, start, num_tokens),
        next_token_ids=following,
        edits=edits,
    )


def _block_tables(table: SequenceTable, slots: Slots) -> Int32s:
    """The units' blocks, and whatever follows them in the rows of the table."""
    width = max(table.capacity[slots].tolist()) // table.block_size
    return table.block_table[slots, :width]  # `take` would copy the whole table first


def _token_ids(table: SequenceTable, slots: Slots, start: Int32s, num_tokens: Int32s) -> Int32s:
    """The units' tokens end to end, where no hashed trace is replayed."""
    if not np.count_nonzero(num_tokens > 1):
        return table.token_ids[slots, start]
    total = int(num_tokens.sum())
    row = np.repeat(slots, num_tokens)
    first = np.repeat(start - (np.cumsum(num_tokens) - num_tokens), num_tokens)
    return table.token_ids[row, first + np.arange(total, dtype=np.int32)]


class StepOutput(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Tokens sampled in one step: one row for each sequence that gained a token or had to end without one.

    Attributes:
        sequences: the sequence of each row.
        token_ids: the sampled token of each row. The value is -1 where there is no token: in a hashed trace, after a
            prompt with max_tokens 0, and with the finish reasons in WITHOUT_TOKEN.
        finish_reasons: by row in ascending order, why its sequence ended. The others continue.
        logprobs: by row, of the sampled token.
        prompt_logprobs: by row, of the whole prompt, once.
        request_ids: ids of the requests of all rows, where an earlier output had a row of each; else empty.
    """

    sequences: list[Sequence] = msgspec.field(default_factory=list)
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reasons: dict[int, FinishReason] = msgspec.field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = msgspec.field(default_factory=dict)
    request_ids: tuple[str, ...] = ()

    @property
    def ended(self) -> list[Sequence]:
        """The sequences with a finish reason, in the order of their rows."""
        return list(map(self.sequences.__getitem__, self.finish_reasons))

    def add_failed(self, failed: list[tuple[Sequence, FinishReason]]) -> None:
        """Append a row for each sequence that ended without a token, for the reason beside it."""
        for row, (sequence, reason) in enumerate(failed, start=len(self.sequences)):
            self.finish_reasons[row] = reason
            self.sequences.append(sequence)
            self.token_ids.append(-1)


def append_sampled_tokens(table: SequenceTable, result: StepResult, computed: Int32s) -> StepOutput:
    """Append the sampled tokens of `result` to their sequences, and give a finish reason to those that ended.

    A sequence with max_tokens 0 takes a placeholder of -1 that is never sent, and ends with it.

    Args:
        computed: int32[n], tokens with KV of each row of the result. A row without uncomputed tokens has sampled one.
    """
    slots, tokens = result.slot, result.token_ids
    num_tokens, rows = table.num_tokens[slots], None
    sampled = computed == num_tokens
    if not all_true(sampled):
        (rows,) = sampled.nonzero()
        slots, num_tokens = slots[rows], num_tokens[rows]
        tokens = None if tokens is None else tokens[rows]
    if tokens is not None:
        table.token_ids[slots, num_tokens] = tokens
    num_tokens += ONE
    table.num_tokens[slots] = num_tokens
    sequences, token_ids = table.at_all(slots), None if tokens is None else tokens.tolist()
    at_last = true_rows(num_tokens >= table.last_num_tokens[slots])
    reasons = find_finish_reasons(table, sequences, token_ids, at_last)
    output = StepOutput(sequences, token_ids or [-1] * len(slots), reasons)
    if result.logprobs:
        row_of = {index: row for row, index in enumerate(range(len(slots)) if rows is None else rows.tolist())}
        output.logprobs.update({row_of[index]: entry for index, entry in result.logprobs.items()})
    if table.num_wanting_prompt_logprobs:
        for row in true_rows(table.wants_prompt_logprobs[slots]):
            output.prompt_logprobs[row] = table.take_prompt_logprobs(int(slots[row]))
    return output


def find_finish_reasons(
    table: SequenceTable, sequences: list[Sequence], token_ids: list[int] | None, at_last: list[int]
) -> dict[int, FinishReason]:
    """Return the finish reasons of rows that gained a token, by row in ascending order.

    Args:
        token_ids: the token of each row. None means those of a hashed trace, which are unknown.
        at_last: rows with the last token that their sequence may have.
    """
    reasons = dict.fromkeys(at_last, FinishReason.LENGTH)
    if token_ids is None or not table.may_stop(token_ids):
        return reasons
    pairs = zip(sequences, token_ids, strict=True)
    stopped = [row for row, (sequence, token) in enumerate(pairs) if token in sequence.stop_token_ids]
    reasons.update(dict.fromkeys(stopped, FinishReason.STOP))
    return dict(sorted(reasons.items()))


def outputs_of(output: StepOutput) -> NewOutputs:
    """Return the API server's share of a step's output: a row of each sequence that gained a token or ended."""
    sequences, request_ids, token_ids = output.sequences, output.request_ids, output.token_ids
    rows = {*output.finish_reasons, *output.logprobs, *output.prompt_logprobs}
    if request_ids and not rows:
        return NewOutputs((), request_ids, token_ids)
    if not request_ids:
        rows.update([row for row, sequence in enumerate(sequences) if not sequence.is_reported])
        request_ids = tuple([sequence.request.request_id for sequence in sequences])
    if not rows:
        return NewOutputs((), request_ids, token_ids)
    in_order = sorted(rows)
    others = tuple([_output_of(output, row) for row in in_order])
    further_ids, further_tokens = list(request_ids), token_ids.copy()
    for row in reversed(in_order):
        del further_ids[row], further_tokens[row]
    return NewOutputs(others, tuple(further_ids), further_tokens)


def _output_of(output: StepOutput, row: int) -> Output:
    sequence, reason = output.sequences[row], output.finish_reasons.get(row)
    sequence.is_reported = True
    prompt = output.prompt_logprobs.get(row)
    return Output(
        request_id=sequence.request.request_id,
        token_ids=(output.token_ids[row],) if reason is None or _has_token(sequence, reason) else (),
        finish_reason=reason,
        logprobs=(output.logprobs[row],) if row in output.logprobs else (),
        prompt_logprobs=None if prompt is None else PackedLogprobs.pack(prompt),
        num_cached_tokens=sequence.num_cached_tokens or 0,
        num_host_tokens=sequence.num_host_tokens,
        admitted_ns=sequence.admitted_ns,
        num_preemptions=sequence.num_preemptions,
    )


def _has_token(sequence: Sequence, reason: FinishReason) -> bool:
    """Whether a sequence ended with a token. One of max_tokens 0 ends at once, without any."""
    return sequence.request.sampling.max_tokens > 0 and reason not in WITHOUT_TOKEN


@dataclass(slots=True)
class SchedulerCounts:
    """Totals of one scheduler since its start.

    Attributes:
        num_preemptions: preemptions of sequences.
        num_queried_tokens: prompt tokens of admitted sequences.
        num_hit_tokens: those of them that the prefix cache held on the device.
        num_host_hit_tokens: those of the others that were copied from host memory.
        num_failed_copies: plans whose copies to or from host memory failed.
        num_kept_tokens: tokens of preempted sequences whose KV was copied to host memory.
        num_restored_tokens: tokens whose KV was copied back.
        num_dropped_rows: computed units without use, because their sequences had ended or were aborted meanwhile.
        num_steps_ahead: steps launched behind the one in flight, before its tokens were on the host.
    """

    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_failed_copies: int = 0
    num_kept_tokens: int = 0
    num_restored_tokens: int = 0
    num_dropped_rows: int = 0
    num_steps_ahead: int = 0
