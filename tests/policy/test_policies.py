import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.request import Request, SamplingParams
from moestro.core.views import BatchLimits, BatchView, EngineTable, EvictView
from moestro.policy.batching import decode_first
from moestro.policy.eviction import last_in_order
from moestro.policy.routing.basic import least_loaded, round_robin

REQUEST = Request(request_id="r", num_prompt_tokens=1, sampling=SamplingParams(), arrival_ns=0)


def plain_decode_first(num_left, is_decode, limits):
    """The same in a loop, as one would say it."""
    given_tokens, budget = [0] * len(num_left), limits.token_budget
    rows = [i for i, d in enumerate(is_decode) if d] + [i for i, d in enumerate(is_decode) if not d]
    for i in rows:
        given_tokens[i] = min(num_left[i], limits.max_chunk, budget)
        budget -= given_tokens[i]
    return given_tokens


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=12),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_decode_first_equals_its_plain_twin(rows, token_budget, max_chunk):
    num_left = [1 if decode else left for left, decode in rows]
    is_decode = [decode for _, decode in rows]
    limits = BatchLimits(token_budget=token_budget, max_chunk=max_chunk)
    view = BatchView(np.array(num_left, np.int32), np.array(is_decode, np.bool_), np.zeros(len(rows), np.bool_))
    assert decode_first(view, limits).tolist() == plain_decode_first(num_left, is_decode, limits)


def test_the_last_in_the_order_of_admission_is_evicted():
    assert last_in_order(EvictView(np.array([1, 3, 0, 2]), np.zeros(4, np.int32))) == 1


def table(routable, load):
    return EngineTable(np.array(routable, np.bool_), np.array(load, np.int32))


def test_round_robin_visits_the_routable_engines_in_turn():
    engines = table([True, False, True], [9, 0, 9])
    assert [round_robin(REQUEST, engines, i).engine for i in range(4)] == [0, 2, 0, 2]


@pytest.mark.parametrize(
    ("routable", "load", "engines"),
    [([True] * 3, [2, 1, 3], {1}), ([True, False, True], [2, 0, 3], {0}), ([True] * 3, [1, 1, 3], {0, 1})],
)
def test_least_loaded_takes_the_emptiest_routable_engine_and_shares_ties(routable, load, engines):
    assert {least_loaded(REQUEST, table(routable, load), i).engine for i in range(6)} == engines
