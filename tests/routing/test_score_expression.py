import numpy as np
import pytest
from support.routers import decide, request, table

from moestro.core.rng import Draws
from moestro.errors import ConfigError
from moestro.routing.policies.lmetric import LMetric
from moestro.routing.registry import expression_policy, policy_from
from moestro.routing.scoring import lowest


def test_lmetric_can_be_written_as_an_expression():
    known = table(prefill_tokens=[1000, 0, 0], num_in_flight=[3, 9, 0])
    what = {"req": request(num_prompt_tokens=4000), "hit_tokens": [3200, 3200, 0]}
    ours = decide(expression_policy("p_tokens * (batch_size + 1)"), known, **what)
    theirs = decide(LMetric(), known, **what)
    assert ours.scores.tolist() == theirs.scores.tolist()
    assert ours.engine == theirs.engine


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ("4 * num_waiting + num_running", [4, 5]),
        ("-batch_size ** 2 // 3", [-1, -9]),
        ("where(batch_size > 3, 100, batch_size % 2)", [1, 100]),
        ("max(batch_size, 2) - min(num_waiting, 3)", [1, 5]),
        ("sqrt(abs(batch_size - 5)) + 0 * log(exp(1))", [2, 0]),
        ("prompt_tokens - hit_ratio + (speed == 1) + kv_usage", [101, 101]),
    ],
)
def test_an_expression_is_arithmetic_over_columns(text, scores):
    known = table(num_in_flight=[1, 5], num_waiting=[1, 0], num_running=[0, 5])
    assert decide(expression_policy(text), known, req=request(num_prompt_tokens=100)).scores.tolist() == scores


def test_an_expression_says_what_it_looks_at():
    needs = expression_policy("p_tokens / (1 - kv_usage)").needs
    assert (needs.hits, needs.figures) == (True, ("kv_usage", "queued_prefill_tokens"))
    assert not expression_policy("batch_size").needs.hits


def test_an_engine_whose_score_is_no_number_is_chosen_last():
    known = table(num_in_flight=[0, 3, 0])
    assert decide(expression_policy("1 / batch_size"), known).engine == 1
    assert np.isinf(decide(expression_policy("1 / batch_size"), known).scores[0])
    assert {decide(expression_policy("0 * batch_size / 0"), known, i).engine for i in range(30)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("p_tokens *", "not an expression"),
        ("batch", "'batch' is not an indicator; known: p_tokens"),
        ("__import__('os').system('true')", "at \"__import__('os').system('true')\": allowed are numbers"),
        ("batch_size.__class__", "allowed are numbers"),
        ("[x for x in batch_size]", "allowed are numbers"),
        ("(lambda: batch_size)()", "allowed are numbers"),
        ("batch_size if 1 else 2", "allowed are numbers"),
        ("min(batch_size)", "min takes 2 arguments, got 1"),
        ("batch_size ** 99", "exponent 99 is beyond 8"),
        ("True * batch_size", "at 'True'"),
        ("'a' * batch_size", "allowed are numbers"),
        ("1 + 2", "the same for all engines"),
        ("batch_size+" * 200 + "1", "at most 1000"),
        ("(" * 400 + "batch_size" + ")" * 400, "not an expression"),
        ("1 < batch_size < 3", "allowed are numbers"),
        ("max(batch_size, p_tokens, key=1)", "allowed are numbers"),
    ],
)
def test_anything_else_is_refused_with_its_place(text, problem):
    with pytest.raises(ConfigError) as refused:
        policy_from("lmetric", score=text)
    assert problem in str(refused.value)


@pytest.mark.parametrize("text", [f"p_tokens * 1{'0' * 400}", "-" * 990 + "p_tokens"])
def test_a_number_or_a_nesting_beyond_all_measure_is_refused_in_words(text):
    with pytest.raises(ConfigError, match="is not an expression"):
        expression_policy(text)


@pytest.mark.parametrize("seed", range(20))
def test_the_lowest_score_is_the_same_in_short_and_in_long_columns(seed):
    """Rows that may not be chosen make a column long, in which arrays take the place of lists."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 65))
    values = rng.integers(0, 6, size=num)
    scores = values if seed % 4 == 0 else np.where(rng.random(num) < 0.2, rng.choice([np.nan, np.inf, -np.inf]), values)
    among = rng.random(num) < 0.8
    among[rng.integers(num)] = True
    found = lowest(scores, among, Draws(1, seed))
    padded = np.concatenate([scores, np.zeros(100, scores.dtype)]), np.concatenate([among, np.zeros(100, np.bool_)])
    assert found == lowest(*padded, Draws(1, seed))
    assert among[found]
    if not np.isneginf(scores).any():
        assert scores[found] == np.fmin.reduce(scores[among]) or np.isnan(scores[among]).all()
