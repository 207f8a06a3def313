"""`bench/serving/accuracy.py`: its rule of equality, and the placements that it draws."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from serving import accuracy
from shared.token_parity import MAX_LOGPROB_DIFFERENCE, NEAR_TIE, TOKENS_A_TIE, Parity, ScoredAnswer, scored


def answer(tokens: str, *, gap: float = 1.0, shift: float = 0.0) -> ScoredAnswer:
    return ScoredAnswer(tuple(tokens), tuple(-0.5 + shift for _ in tokens), (gap,) * len(tokens))


def parity(*pairs: tuple[ScoredAnswer, ScoredAnswer]) -> Parity:
    found = Parity("a feature")
    for number, pair in enumerate(pairs):
        found.add(number, *pair)
    return found


def test_equal_answers_hold_with_their_largest_difference():
    found = parity((answer("abc"), answer("abc")), (answer("ab"), answer("ab", shift=3e-6)))
    assert (found.num_prompts, found.num_tokens, found.num_equal) == (2, 5, 5)
    assert found.max_difference == pytest.approx(3e-6)
    assert found.holds


def test_a_near_tie_is_counted_once_and_what_follows_is_not_compared():
    found = parity((answer("abcd", gap=NEAR_TIE / 2), answer("axyz")))
    assert found.near_ties == [(0, 1, NEAR_TIE / 2)]
    assert (found.num_tokens, found.num_equal) == (2, 1)
    assert found.holds


def test_a_difference_with_a_lead_does_not_hold():
    found = parity((answer("abcd"), answer("axcd")))
    assert not found.holds
    assert found.differences == ["prompt 0, token 1: 'x' for 'b', whose lead is 1"]


@pytest.mark.parametrize("other", ["ab", "abcd"])
def test_another_length_does_not_hold(other):
    assert not parity((answer("abc", gap=0.0), answer(other))).holds


def test_another_log_probability_does_not_hold():
    assert not parity((answer("abc"), answer("abc", shift=2 * MAX_LOGPROB_DIFFERENCE))).holds


def test_near_ties_are_rarer_than_one_in_ten_thousand_tokens():
    tie = (answer("ab", gap=0.0), answer("ax"))
    assert parity(tie).holds
    assert not parity(tie, tie).holds
    long = (answer("a" * 2 * TOKENS_A_TIE), answer("a" * 2 * TOKENS_A_TIE))
    assert parity(tie, tie, long).holds
    assert not parity(tie, tie, tie, long).holds


def test_what_was_not_compared_does_not_hold():
    assert not Parity("a feature").holds
    assert not Parity("a feature", num_prompts=1, why_not="there is no placement").holds


def test_gaps_are_those_of_the_two_best():
    tops = [{"a": -0.1, "b": -2.4}, {"c": 0.0}]
    body = {"choices": [{"logprobs": {"tokens": ["a", "c"], "token_logprobs": [-0.1, 0.0], "top_logprobs": tops}}]}
    assert scored(body).gaps == (pytest.approx(2.3), float("inf"))


def test_dealt_placements_keep_every_copy_and_none_twice_on_a_worker():
    rng = random.Random(3)
    table = [[[0, 1, 4, -1], [2, 3, 4, 5]], [[0, 1, 2, 3], [4, 5, 0, -1]]]
    for _ in range(50):
        for before, after in zip(table, accuracy.shuffled(table, rng), strict=True):
            assert sorted(itertools.chain(*before)) == sorted(itertools.chain(*after))
            assert [len(slots) for slots in after] == [4, 4]
            for slots in after:
                filled = [expert for expert in slots if expert >= 0]
                assert len(set(filled)) == len(filled) > 0


def test_prompts_are_fixed_and_differ():
    assert accuracy.prompts() == accuracy.prompts()
    assert len(set(accuracy.prompts())) == accuracy.NUM_PROMPTS
