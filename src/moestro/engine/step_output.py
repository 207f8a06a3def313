"""What one step gained: a scheduler says it, its driver makes messages of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from moestro.core.request import FinishReason, TokenLogprobs
from moestro.engine.sequences import Sequence


class Emitted(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Tokens sampled in one step, one row per sequence that gained one or had to end without.

    Attributes:
        sequences: who.
        token_ids: what (-1 when a hashed trace is replayed, max_tokens is 0 and the prompt is over, or the reason to
            finish is NON_FINITE).
        finish_reasons: None while it goes on.
        logprobs: by row.
        prompt_logprobs: by row, all of the prompt's, with the first token.
    """

    sequences: list[Sequence] = msgspec.field(default_factory=list)
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reasons: list[FinishReason | None] = msgspec.field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = msgspec.field(default_factory=dict)

    def add_failed(self, sequences: list[Sequence]) -> None:
        """Append a row for each of `sequences`, which ended because their logits were not finite."""
        self.sequences.extend(sequences)
        self.token_ids.extend([-1] * len(sequences))
        self.finish_reasons.extend([FinishReason.NON_FINITE] * len(sequences))


@dataclass(slots=True)
class SchedulerCounts:
    """A scheduler's totals since the start."""

    num_preemptions: int = 0
    num_queried_tokens: int = 0  # prompt tokens of admitted sequences
    num_hit_tokens: int = 0  # of these, taken from the prefix cache
    num_kept_tokens: int = 0  # whose KV preempted sequences left in host memory
    num_restored_tokens: int = 0  # whose KV was copied back
