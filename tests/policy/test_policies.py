import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.views import BatchLimits, BatchView, EvictView
from moestro.policy.batching import decode_first
from moestro.policy.eviction import last_in_order


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
