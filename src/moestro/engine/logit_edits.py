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
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.request import GrammarBackend, MaskRequest, Request, TokenMask
from moestro.core.work import Int32s, LogitEdits

_FIRST_ROOM = 64  # new tokens for which arrays have room at first
_KEPT_WORD_LISTS = 4  # lists of words kept for further choices of the same request; each has at most some MB


class TokenCounts:
    """Tokens to which penalties apply, each once, and how often each was generated.

    Each token is read once, so a step costs what its new tokens cost; the ids are never more than the vocabulary.

    Args:
        num_prompt: tokens of the prompt.
        counts_prompt: whether the prompt's tokens belong to them.
    """

    __slots__ = ("_counts_prompt", "_ids", "_num", "_num_prompt", "_num_prompt_ids", "_num_read", "_places", "_times")

    def __init__(self, num_prompt: int, *, counts_prompt: bool) -> None:
        self._num_prompt = num_prompt
        self._counts_prompt = counts_prompt
        self._num_read = 0

    def after(self, tokens: Int32s) -> tuple[Int32s, Int32s]:
        """Return int32[n], the ids, and int32[n], how often each was generated; views that hold until the next call.

        Args:
            tokens: all known tokens of the sequence, which begin with those of the call before.
        """
        if not self._num_read:
            self._begin(tokens[: self._num_prompt])
        for token in tokens[self._num_read :].tolist():
            place = self._place(token)  # first, because it may replace the array
            self._times[place] += 1
        self._num_read = len(tokens)
        return self._ids[: self._num], self._times[: self._num]

    def _begin(self, prompt: Int32s) -> None:
        own = np.empty(0, np.int32)
        if self._counts_prompt:  # in ascending order; marks take a tenth of the time of a sort
            is_there = np.zeros(int(prompt.max()) + 1, np.bool_)
            is_there[prompt] = True
            own = np.flatnonzero(is_there).astype(np.int32)
        self._num = self._num_prompt_ids = len(own)
        self._ids = np.concatenate((own, np.empty(_FIRST_ROOM, np.int32)))
        self._times = np.zeros(len(self._ids), np.int32)
        self._places: dict[int, int] = {}  # of generated tokens
        self._num_read = self._num_prompt

    def _place(self, token: int) -> int:
        """Return the place of a generated token, which is added if it is new."""
        place = self._places.get(token)
        if place is not None:
            return place
        own = self._ids[: self._num_prompt_ids]
        place = int(own.searchsorted(token))
        if place == len(own) or own[place] != token:
            place = self._num
            self._num += 1
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty(len(self._ids), np.int32)))
                self._times = np.concatenate((self._times, np.zeros(len(self._times), np.int32)))
            self._ids[place] = token
        self._places[token] = place
        return place


class _Node:
    """Place in a tree of words that are spelt from the last token but one to the first."""

    __slots__ = ("ends", "longer")

    def __init__(self) -> None:
        self.ends: list[int] = []  # last tokens of the words that begin here
        self.longer: dict[int, _Node] = {}


class WordEnds:
    """Finds the tokens that would complete a word.

    A search follows the answer's last tokens backwards as far as a word agrees with them. So its cost is bounded by the
    longest word, whatever the number of words.
    """

    __slots__ = ("_followers", "_longest", "_pairs", "_root")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._root = _Node()
        self._longest = max(map(len, words)) - 1
        for word in words:
            node = self._root
            for token in reversed(word[:-1]):
                node = node.longer.setdefault(token, _Node())
            node.ends.append(word[-1])
        self._pairs = [(token, end) for token, node in self._root.longer.items() for end in node.ends]
        self._followers: dict[int, list[tuple[int, _Node]]] = {}  # by token, those after which a longer word goes on
        for token, node in self._root.longer.items():
            for before, longer in node.longer.items():
                self._followers.setdefault(before, []).append((token, longer))

    @property
    def alone(self) -> list[int]:
        """Words of one token, which cannot come after any answer."""
        return self._root.ends

    def after(self, answer: Int32s) -> list[int]:
        """Return the last tokens of all words whose other tokens are the end of `answer`."""
        return self.alone + self._ends(self._root, self._last(answer))

    def after_one_more(self, answer: Int32s) -> list[tuple[int, int]]:
        """Return what would complete a longer word after `answer` and one token more, as (that token, last token)."""
        *before, last = self._last(answer) or [-1]
        longer = [(token, node.ends + self._ends(node, before)) for token, node in self._followers.get(last, ())]
        return self._pairs + [(token, end) for token, ends in longer for end in ends]

    def _last(self, answer: Int32s) -> list[int]:
        """Tokens at the end of `answer` that may belong to a word."""
        last: list[int] = answer[max(0, len(answer) - self._longest) :].tolist()
        return last

    def _ends(self, node: _Node, before: list[int]) -> list[int]:
        """Last tokens of the words that spell the end of `before` and go on with `node`, without its own."""
        ends = list[int]()
        for token in reversed(before):
            found = node.longer.get(token)
            if found is None:
                break
            node = found
            ends += node.ends
        return ends


@lru_cache(_KEPT_WORD_LISTS)
def word_ends(words: tuple[tuple[int, ...], ...]) -> WordEnds:
    """Return the tree of `words`, which all choices of a request share."""
    return WordEnds(words)


_NONE = np.empty(0, np.int32)
_NO_PAIRS = np.empty((2, 0), np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class ListedTokens:
    """Mask of the tokens that a request lists, perhaps narrowed by another mask; implements `core.request.TokenMask`.

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
