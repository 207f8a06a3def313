"""Changes to a sequence's logits before sampling: penalties, biases, and stop tokens that are not allowed yet.

The changes are a function of the request and its tokens, gathered anew at each step. There is no state that a
preemption could lose or a batch could mix up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moestro.core.request import Request
from moestro.core.work import Int32s, LogitEdits

_NONE = np.empty(0, np.int32)


class SequenceEdits:
    """Changes that one request asks for.

    Attributes:
        bias_ids, bias: int32[n] and float32[n], the request's `logit_bias`.
    """

    __slots__ = ("_first", "_has_penalties", "_min_tokens", "_num_prompt", "_stop_ids", "bias", "bias_ids")

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self._num_prompt = request.num_prompt_tokens
        self._has_penalties = sampling.has_penalties
        self._first = 0 if sampling.repetition_penalty != 1 else self._num_prompt
        self._min_tokens = sampling.min_tokens
        self._stop_ids = np.array(sampling.stop_token_ids, np.int32)
        self.bias_ids = np.array([token_id for token_id, _ in sampling.logit_bias], np.int32)
        self.bias = np.array([bias for _, bias in sampling.logit_bias], np.float32)

    def said(self, tokens: Int32s) -> Int32s:
        """Those of `tokens`, all known tokens of the sequence, to which penalties apply."""
        return tokens[self._first :] if self._has_penalties else _NONE

    def generated(self, tokens: Int32s) -> NDArray[np.bool_]:
        """bool[n], which of `said` were generated."""
        return np.arange(self._first, self._first + len(self.said(tokens))) >= self._num_prompt

    def banned(self, tokens: Int32s) -> Int32s:
        """Tokens that cannot come after `tokens`."""
        return self._stop_ids if len(tokens) - self._num_prompt < self._min_tokens else _NONE


def join_edits(rows: Sequence[int], sequences: Sequence[SequenceEdits], tokens: Sequence[Int32s]) -> LogitEdits | None:
    """Join the edits of several units of a plan. None means that no logit changes.

    Args:
        rows: indices of the units in the plan.
        sequences: edits of the units' sequences.
        tokens: int32, all known tokens of each sequence.
    """
    pairs = list(zip(sequences, tokens, strict=True))
    said, banned = [own.said(known) for own, known in pairs], [own.banned(known) for own, known in pairs]
    biased = [own.bias_ids for own in sequences]
    if not any(len(ids) for ids in (*said, *banned, *biased)):
        return None
    return LogitEdits(
        said=_pairs(rows, said),
        generated=np.concatenate([own.generated(known) for own, known in pairs]),
        biased=_pairs(rows, biased),
        bias=np.concatenate([own.bias for own in sequences]),
        banned=_pairs(rows, banned),
    )


def _pairs(rows: Sequence[int], token_ids: Sequence[Int32s]) -> Int32s:
    """int32[2, n], (row, token id) pairs."""
    counts = [len(ids) for ids in token_ids]
    return np.stack([np.repeat(np.array(rows, np.int32), counts), np.concatenate(token_ids)])
