"""Changes to a sequence's logits before sampling: penalties, biases, bans and masks of the allowed tokens.

The changes are a function of the request and its tokens, gathered anew at each step. There is no state that a
preemption could lose or a batch could mix up: a grammar's matcher only remembers how far it has read the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.grammar import GrammarBackend, MaskRequest, TokenMask
from moestro.core.request import Request
from moestro.core.work import Int32s, LogitEdits

_NONE = np.empty(0, np.int32)
_NO_PAIRS = np.empty((2, 0), np.int32)
_WORD_BITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class ListedTokens:
    """Mask of the tokens that a request lists, perhaps narrowed by another mask; implements `core.grammar.TokenMask`.

    Attributes:
        listed: int32[words], as in `TokenMask.words`.
        other: the other mask. None means that there is none.
    """

    listed: NDArray[np.int32]
    other: TokenMask | None = None

    def words(self) -> NDArray[np.int32] | None:
        """Implement `TokenMask.words`."""
        if self.other is None:
            return self.listed
        words = self.other.words()
        if words is None:
            return None
        common = min(len(words), len(self.listed))
        return words[:common] & self.listed[:common]


class SequenceEdits:
    """Changes that one request asks for.

    Args:
        request: the request.
        matcher: `GrammarBackend.matcher` of its grammar. None means that the answer may be any text.

    Attributes:
        bias_ids, bias: int32[n] and float32[n], the request's `logit_bias`.
        matcher: as above.
        listed: int32[words], mask of the request's `allowed_token_ids`. None means all tokens.
    """

    __slots__ = (
        "_bad_words", "_first", "_has_penalties", "_min_tokens", "_num_prompt", "_stop_ids", "bias", "bias_ids",
        "listed", "matcher",
    )  # fmt: skip

    def __init__(self, request: Request, matcher: Any = None) -> None:
        sampling = request.sampling
        self._num_prompt = request.num_prompt_tokens
        self._has_penalties = sampling.has_penalties
        self._first = 0 if sampling.repetition_penalty != 1 else self._num_prompt
        self._min_tokens = sampling.min_tokens
        self._stop_ids = np.array(sampling.stop_token_ids, np.int32)
        self._bad_words = [np.array(word, np.int32) for word in sampling.bad_words]
        self.bias_ids = np.array([token_id for token_id, _ in sampling.logit_bias], np.int32)
        self.bias = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self.matcher = matcher
        self.listed = _packed(sampling.allowed_token_ids) if sampling.allowed_token_ids else None

    def said(self, tokens: Int32s) -> Int32s:
        """Those of `tokens`, all known tokens of the sequence, to which penalties apply."""
        return tokens[self._first :] if self._has_penalties else _NONE

    def generated(self, tokens: Int32s) -> NDArray[np.bool_]:
        """bool[n], which of `said` were generated."""
        return np.arange(self._first, self._first + len(self.said(tokens))) >= self._num_prompt

    def banned(self, tokens: Int32s) -> Int32s:
        """Tokens that cannot come after `tokens`."""
        early = _NONE if self.matcher is not None else self._early(tokens)
        answer = tokens[self._num_prompt :]
        ends = [
            word[-1:]
            for word in self._bad_words
            if len(word) <= len(answer) + 1 and np.array_equal(answer[len(answer) - len(word) + 1 :], word[:-1])
        ]
        return np.concatenate((early, *ends)) if ends else early

    def _early(self, tokens: Int32s) -> Int32s:
        """Stop tokens that come too early after `tokens`."""
        return self._stop_ids if len(tokens) - self._num_prompt < self._min_tokens else _NONE

    def mask_request(self, tokens: Int32s) -> MaskRequest:
        """What the grammar's mask after `tokens` depends on. A complete text ends even before `min_tokens`."""
        return MaskRequest(self.matcher, tokens[self._num_prompt :].copy(), self._early(tokens))


def join_edits(
    rows: Sequence[int],
    sequences: Sequence[SequenceEdits],
    tokens: Sequence[Int32s],
    grammars: GrammarBackend | None = None,
) -> LogitEdits | None:
    """Join the edits of several units of a plan. None means that no logit changes.

    Args:
        rows: indices of the units in the plan.
        sequences: edits of the units' sequences.
        tokens: int32, all known tokens of each sequence.
        grammars: what computes the masks of grammars. None means that no sequence has one.
    """
    pairs = list(zip(sequences, tokens, strict=True))
    said, banned = [own.said(known) for own, known in pairs], [own.banned(known) for own, known in pairs]
    biased = [own.bias_ids for own in sequences]
    masks = _masks(rows, pairs, grammars)
    if not masks and not any(len(ids) for ids in (*said, *banned, *biased)):
        return None
    return LogitEdits(
        said=_pairs(rows, said),
        generated=np.concatenate([own.generated(known) for own, known in pairs]),
        biased=_pairs(rows, biased),
        bias=np.concatenate([own.bias for own in sequences]),
        banned=_pairs(rows, banned),
        masks=masks,
    )


def _masks(
    rows: Sequence[int], pairs: Sequence[tuple[SequenceEdits, Int32s]], grammars: GrammarBackend | None
) -> tuple[tuple[int, TokenMask], ...]:
    """Masks of the units that have one."""
    requests = [own.mask_request(known) for own, known in pairs if own.matcher is not None]
    computed: Iterator[TokenMask] = iter(())
    if requests:
        assert grammars is not None, "a matcher comes from a backend"
        computed = iter(grammars.masks(requests))
    found: list[tuple[int, TokenMask]] = []
    for row, (own, _) in zip(rows, pairs, strict=True):
        mask = None if own.matcher is None else next(computed)
        if own.listed is not None:
            mask = ListedTokens(own.listed, mask)
        if mask is not None:
            found.append((row, mask))
    return tuple(found)


def _packed(token_ids: Sequence[int]) -> NDArray[np.int32]:
    """int32[words], mask that allows `token_ids`."""
    bits = np.zeros((max(token_ids) // _WORD_BITS + 1) * _WORD_BITS, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _pairs(rows: Sequence[int], token_ids: Sequence[Int32s]) -> Int32s:
    """int32[2, n], (row, token id) pairs."""
    counts = [len(ids) for ids in token_ids]
    if not any(counts):
        return _NO_PAIRS
    return np.stack([np.repeat(np.array(rows, np.int32), counts), np.concatenate(token_ids)])
