"""What penalties and forbidden words need of a sequence's tokens, at a cost that does not grow with the text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from moestro.core.work import Int32s

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
