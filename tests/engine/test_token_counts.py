"""Counts of tokens and forbidden words: right by their definitions, at a cost that does not grow with the text."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from moestro.engine.logit_edits import TokenCounts, WordEnds


class CountingTokens:
    """Tokens of a sequence that count how many of them are read."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: slice) -> np.ndarray:
        found = self.tokens[at]
        self.num_read += len(found)
        return found


@pytest.mark.parametrize("counts_prompt", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_counts_of_a_growing_text_are_those_of_the_whole(seed, counts_prompt):
    rng = np.random.default_rng(seed)
    num_prompt = int(rng.integers(1, 200))
    tokens = rng.integers(0, 90, num_prompt + 400).astype(np.int32)
    counts, end = TokenCounts(num_prompt, counts_prompt=counts_prompt), num_prompt
    while end <= len(tokens):
        ids, times = counts.after(tokens[:end])
        generated = Counter(tokens[num_prompt:end].tolist())
        expected = dict.fromkeys(tokens[:num_prompt].tolist(), 0) if counts_prompt else {}
        assert len(ids) == len(set(ids.tolist())), "each token once"
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == expected | generated
        end += int(rng.integers(1, 9))  # an engine that resumes an answer reads several tokens at once


def test_each_token_is_read_once_however_long_the_text_grows():
    def cost(num_steps: int) -> int:
        tokens = CountingTokens(np.arange(1000 + num_steps, dtype=np.int32))
        counts, total = TokenCounts(1000, counts_prompt=True), 0
        for end in range(1001, 1001 + num_steps):
            known = CountingTokens(tokens.tokens[:end])
            counts.after(known)
            total += known.num_read
        return total

    assert cost(200) == 1000 + 200
    assert cost(400) <= 1000 + 2 * 200


def test_entries_of_a_long_prompt_are_no_more_than_its_different_tokens():
    ids, times = TokenCounts(100_000, counts_prompt=True).after(np.arange(100_000, dtype=np.int32) % 7)
    assert ids.tolist() == list(range(7))
    assert not times.any()


def test_words_are_completed_as_their_definition_says():
    rng = np.random.default_rng(0)
    for _ in range(300):
        words = [rng.integers(0, 3, rng.integers(1, 6)).tolist() for _ in range(rng.integers(1, 20))]
        answer = rng.integers(0, 3, rng.integers(0, 12))
        plain = [
            last
            for *before, last in words
            if len(before) <= len(answer) and answer[len(answer) - len(before) :].tolist() == before
        ]
        assert sorted(WordEnds(words).after(answer)) == sorted(plain)


def test_a_search_for_words_costs_the_longest_word_and_not_their_number():
    """All words begin as the answer ends, which is the worst case."""

    def cost(num_words: int, num_answer: int) -> int:
        answer = CountingTokens(np.zeros(num_answer, np.int32))
        words = [[0] * (i % 100) + [i] for i in range(num_words)]
        assert len(WordEnds(words).after(answer)) == num_words
        return answer.num_read

    assert cost(100, 1000) == cost(1000, 1000) == cost(1000, 9000) == 99


def test_words_that_one_token_more_would_complete_are_those_after_it():
    rng = np.random.default_rng(3)
    for _ in range(200):
        words = [rng.integers(0, 4, rng.integers(1, 5)).tolist() for _ in range(12)]
        found, answer = WordEnds(words), rng.integers(0, 4, rng.integers(0, 7)).astype(np.int32)
        pairs = found.after_one_more(answer)
        for token in range(4):
            ends = found.alone + [end for before, end in pairs if before == token]
            assert sorted(ends) == sorted(found.after(np.append(answer, token)))
