"""Output of one scheduler step: the sampled tokens, and the sequences that ended."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from moestro.core.columns import ONE, all_true, true_rows
from moestro.core.request import FinishReason, TokenLogprobs
from moestro.core.work import Int32s, StepResult
from moestro.engine.sequences import Sequence, SequenceTable


class StepOutput(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Tokens sampled in one step: one row for each sequence that gained a token or had to end without one.

    Attributes:
        sequences: the sequence of each row.
        token_ids: the sampled token of each row. The value is -1 where there is no token: in a hashed trace, after a
            prompt with max_tokens 0, and with the finish reasons NON_FINITE and GRAMMAR.
        finish_reasons: why the sequence of each row ended. None means that it continues.
        logprobs: by row, of the sampled token.
        prompt_logprobs: by row, of the whole prompt, once.
        ended: the sequences with a finish reason, in the order of their rows.
        further: ids of the requests of all rows, where each row is one further token and nothing else; else empty.
    """

    sequences: list[Sequence] = msgspec.field(default_factory=list)
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reasons: list[FinishReason | None] = msgspec.field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = msgspec.field(default_factory=dict)
    ended: list[Sequence] = msgspec.field(default_factory=list)
    further: tuple[str, ...] = ()

    def add_failed(self, sequences: list[Sequence], has_failed_grammar: list[bool]) -> None:
        """Append a row for each of `sequences`, which ended without a token.

        Args:
            has_failed_grammar: whether that is because of the sequence's grammar, or because of non-finite logits.
        """
        self.sequences.extend(sequences)
        self.ended.extend(sequences)
        self.token_ids.extend([-1] * len(sequences))
        self.finish_reasons.extend(
            FinishReason.GRAMMAR if failed else FinishReason.NON_FINITE for failed in has_failed_grammar
        )


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
    reasons: list[FinishReason | None] = [None] * len(slots)
    output = StepOutput(table.at_all(slots), [-1] * len(slots) if tokens is None else tokens.tolist(), reasons)
    at_last = true_rows(num_tokens >= table.last_num_tokens[slots])
    for row in at_last:
        reasons[row] = FinishReason.LENGTH
    stopped: list[int] = []
    if tokens is not None:
        pairs = zip(output.sequences, output.token_ids, strict=True)
        stopped = [row for row, (sequence, token) in enumerate(pairs) if token in sequence.stop_token_ids]
    for row in stopped:
        reasons[row] = FinishReason.STOP
    if at_last or stopped:
        output.ended.extend(output.sequences[row] for row, reason in enumerate(reasons) if reason is not None)
    if result.logprobs:
        row_of = {index: row for row, index in enumerate(range(len(slots)) if rows is None else rows.tolist())}
        output.logprobs.update({row_of[index]: entry for index, entry in result.logprobs.items()})
    if table.num_wanting_prompt_logprobs:
        for row in true_rows(table.wants_prompt_logprobs[slots]):
            output.prompt_logprobs[row] = table.take_prompt_logprobs(int(slots[row]))
    return output


@dataclass(slots=True)
class SchedulerCounts:
    """Totals of one scheduler since its start.

    Attributes:
        num_preemptions: preemptions of sequences.
        num_queried_tokens: prompt tokens of admitted sequences.
        num_hit_tokens: those of them that the prefix cache held.
        num_kept_tokens: tokens of preempted sequences whose KV was copied to host memory.
        num_restored_tokens: tokens whose KV was copied back.
    """

    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_kept_tokens: int = 0
    num_restored_tokens: int = 0
