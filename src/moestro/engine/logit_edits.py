"""Changes to a sequence's logits before sampling: penalties, biases, bans and masks of the allowed tokens.

The changes are a function of the request and its tokens, gathered anew at each step. There is no state that a
preemption could lose or a batch could mix up: counts of tokens, and a grammar's matcher, only remember how far they
have read the text.

In a step that is launched ahead, the host lacks one token of a sequence at most, its last. The device has that token,
so it adds it to the counts and decides the bans that depend on it. Only a grammar needs it on the host.
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
from moestro.engine.token_counts import TokenCounts, word_ends

_NONE = np.empty(0, np.int32)
_NO_PAIRS = np.empty((2, 0), np.int32)


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
        listed: int32[words], mask of the request's `allowed_tokens`. None means all tokens.
    """

    __slots__ = (
        "_bad_words",
        "_counts",
        "_min_tokens",
        "_num_prompt",
        "_stop_ids",
        "bias",
        "bias_ids",
        "listed",
        "matcher",
    )  # fmt: skip

    def __init__(self, request: Request, matcher: Any = None) -> None:
        sampling = request.sampling
        self._num_prompt = request.num_prompt_tokens
        counts_prompt = sampling.repetition_penalty != 1
        self._counts = TokenCounts(self._num_prompt, counts_prompt=counts_prompt) if sampling.has_penalties else None
        self._min_tokens = sampling.min_tokens
        self._stop_ids = np.array(sampling.stop_token_ids, np.int32)
        self._bad_words = word_ends(sampling.bad_words) if sampling.bad_words else None
        self.bias_ids = np.array([token_id for token_id, _ in sampling.logit_bias], np.int32)
        self.bias = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self.matcher = matcher
        self.listed = np.frombuffer(sampling.allowed_tokens, np.int32) if sampling.allowed_tokens else None

    def counted(self, tokens: Int32s) -> tuple[Int32s, Int32s]:
        """Those of `tokens`, all known tokens of the sequence, to which penalties apply, and how often generated."""
        return (_NONE, _NONE) if self._counts is None else self._counts.after(tokens)

    @property
    def counts_tokens(self) -> bool:
        """Whether penalties apply."""
        return self._counts is not None

    def banned(self, tokens: Int32s, *, lacks_last: bool = False) -> Int32s:
        """Tokens that cannot come after `tokens`; with `lacks_last`, whatever the one token more is behind them."""
        early = _NONE if self.matcher is not None else self._early(len(tokens) + lacks_last)
        if self._bad_words is None:
            return early
        ends = self._bad_words.alone if lacks_last else self._bad_words.after(tokens[self._num_prompt :])
        return np.concatenate((early, np.array(ends, np.int32))) if ends else early

    def banned_after(self, tokens: Int32s) -> list[tuple[int, int]]:
        """(token that may come after `tokens`, token that cannot come after it)."""
        return [] if self._bad_words is None else self._bad_words.after_one_more(tokens[self._num_prompt :])

    def _early(self, num_tokens: int) -> Int32s:
        """Stop tokens that come too early after so many tokens."""
        return self._stop_ids if num_tokens - self._num_prompt < self._min_tokens else _NONE

    def mask_request(self, tokens: Int32s) -> MaskRequest:
        """What the grammar's mask after `tokens` depends on. A complete text ends even before `min_tokens`."""
        return MaskRequest(self.matcher, tokens[self._num_prompt :].copy(), self._early(len(tokens)))


def join_edits(
    rows: Sequence[int],
    sequences: Sequence[SequenceEdits],
    tokens: Sequence[Int32s],
    lack_last: Sequence[bool],
    grammars: GrammarBackend | None = None,
) -> LogitEdits | None:
    """Join the edits of several units of a plan. None means that no logit changes.

    Args:
        rows: indices of the units in the plan.
        sequences: edits of the units' sequences.
        tokens: int32, all tokens of each sequence that the host has.
        lack_last: whether the sequence has one more, FROM_STEP_BEFORE. Sequences with a grammar have not.
        grammars: what computes the masks of grammars. None means that no sequence has one.
    """
    pairs = list(zip(sequences, tokens, strict=True))
    counts = [own.counted(known) for own, known in pairs]
    banned = [own.banned(known, lacks_last=lacks) for (own, known), lacks in zip(pairs, lack_last, strict=True)]
    ahead = [(row, pair) for row, pair, lacks in zip(rows, pairs, lack_last, strict=True) if lacks]
    uncounted = [row for row, (own, _) in ahead if own.counts_tokens]
    banned_after = [(row, *two) for row, (own, known) in ahead for two in own.banned_after(known)]
    counted = [ids for ids, _ in counts]
    biased = [own.bias_ids for own in sequences]
    masks = _masks(rows, pairs, grammars)
    if not (masks or uncounted or banned_after or any(len(ids) for ids in (*counted, *banned, *biased))):
        return None
    return LogitEdits(
        counted=_pairs(rows, counted),
        num_generated=np.concatenate([times for _, times in counts]),
        biased=_pairs(rows, biased),
        bias=np.concatenate([own.bias for own in sequences]),
        banned=_pairs(rows, banned),
        masks=masks,
        uncounted=np.array(uncounted, np.int32),
        banned_after=np.array(banned_after, np.int32).reshape(-1, 3).T,
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


def _pairs(rows: Sequence[int], token_ids: Sequence[Int32s]) -> Int32s:
    """int32[2, n], (row, token id) pairs."""
    counts = [len(ids) for ids in token_ids]
    if not any(counts):
        return _NO_PAIRS
    return np.stack([np.repeat(np.array(rows, np.int32), counts), np.concatenate(token_ids)])
