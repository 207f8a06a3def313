"""Which sequences enter the next plan: each policy against a plain twin, and what every policy owes the scheduler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.views import BE, LS, BatchLimits, BatchView
from moestro.engine.policies.batching import DecodeFirst, PrefillFirst, QllmBatches, QllmMixed, RunToCompletion
from moestro.engine.registry import BATCH_POLICIES
from moestro.errors import ConfigError

# (tokens left, decode, class): a decode has one token left, whatever is drawn.
ROWS = st.lists(st.tuples(st.integers(1, 50), st.booleans(), st.sampled_from([LS, BE])), min_size=1, max_size=12)
LIMITS = st.builds(BatchLimits, token_budget=st.integers(1, 60), max_chunk=st.integers(1, 60))
PLENTY = BatchLimits(token_budget=1000, max_chunk=1000)


def view_of(rows, num_in_flight=0) -> BatchView:
    is_decode = np.array([decode for _, decode, _ in rows], np.bool_)
    num_left = np.array([1 if decode else left for left, decode, _ in rows], np.int32)
    classes = np.array([service_class for *_, service_class in rows], np.uint8)
    view = BatchView(num_left, (num_left == 1) & ~is_decode, classes, num_in_flight)
    assert (view.is_decode == is_decode).all()
    return view


def plain_fill(rows, limits, chosen):
    """What `chosen` rows get, one after the other."""
    given_tokens, budget = [0] * len(rows), limits.token_budget
    for i in chosen:
        left, decode, _ = rows[i]
        given_tokens[i] = min(1 if decode else left, limits.max_chunk, budget)
        budget -= given_tokens[i]
    return given_tokens


def queue(rows, service_class, decode):
    return [i for i, row in enumerate(rows) if row[1:] == (decode, service_class)]


@given(ROWS, LIMITS)
def test_decode_first_equals_its_plain_twin(rows, limits):
    decodes = [i for i, row in enumerate(rows) if row[1]]
    chosen = decodes + [i for i in range(len(rows)) if i not in decodes]
    assert DecodeFirst().plan(view_of(rows), limits).tolist() == plain_fill(rows, limits, chosen)


@given(ROWS, LIMITS)
def test_prefill_first_equals_its_plain_twin(rows, limits):
    prefills = [i for i, row in enumerate(rows) if not row[1]]
    chosen = prefills or list(range(len(rows)))
    assert PrefillFirst().plan(view_of(rows), limits).tolist() == plain_fill(rows, limits, chosen)


def algorithm_1(rows, max_batch):
    """QLLM, section 3.2, the lines of Algorithm 1 as the text numbers them."""
    ls_decode, ls_prefill = queue(rows, LS, True), queue(rows, LS, False)
    be_decode, be_prefill = queue(rows, BE, True), queue(rows, BE, False)
    if len(ls_decode) >= max_batch:  # 2-3: fill the batch with LS jobs at the decode stage
        batch = ls_decode[:max_batch]
    elif ls_prefill:
        batch = ls_prefill[:max_batch]  # 4-5: else produce more of them
        batch += be_prefill[: max_batch - len(batch)]  # 6-7: fill the batch with BE jobs
    elif ls_decode:
        batch = ls_decode[:max_batch]  # 10-14: no LS at the prefill stage
        batch += be_decode[: max_batch - len(batch)]
    else:
        batch = be_decode[:max_batch] or be_prefill[:max_batch]  # 16-19: no LS at all, decode over prefill
    return batch


@given(ROWS, LIMITS, st.integers(1, 8))
def test_qllm_is_algorithm_1_line_by_line(rows, limits, max_batch):
    chosen = algorithm_1(rows, max_batch)
    assert len({rows[i][1] for i in chosen}) == 1, "prefill and decode are never mixed"
    given_tokens = QllmBatches(max_batch=max_batch).plan(view_of(rows), limits)
    assert given_tokens.tolist() == plain_fill(rows, limits, chosen)


@pytest.mark.parametrize(
    ("rows", "unmixed", "mixed"),
    [
        # B is 3. Enough LS decodes: nothing else runs.
        (
            [(1, True, LS), (9, False, LS), (1, True, LS), (1, True, LS), (1, True, BE)],
            [1, 0, 1, 1, 0],
            [1, 0, 1, 1, 0],
        ),
        # An LS prompt: a prefill batch, filled up with BE prompts; or LS decodes, LS prompts, then BE.
        ([(1, True, LS), (9, False, BE), (9, False, LS), (1, True, BE)], [0, 9, 9, 0], [1, 0, 9, 1]),
        # No LS prompt: LS decodes, filled up with BE decodes, and no BE prompt even where there is room.
        ([(9, False, BE), (1, True, BE), (1, True, LS)], [0, 1, 1], [0, 1, 1]),
        # BE alone: decodes; their prompts only when none decodes, or beside them.
        ([(9, False, BE), (1, True, BE)], [0, 1], [9, 1]),
        ([(9, False, BE), (7, False, BE)], [9, 7], [9, 7]),
    ],
)
def test_qllm_on_small_tables_unmixed_and_mixed(rows, unmixed, mixed):
    view = view_of(rows)
    assert QllmBatches(max_batch=3).plan(view, PLENTY).tolist() == unmixed
    assert QllmMixed(max_batch=3).plan(view, PLENTY).tolist() == mixed


@pytest.mark.parametrize(("rows", "num_in_flight", "room"), [([], 0, 1000), ([(1, True, LS)], 0, 0), ([], 1, 0)])
def test_run_to_completion_has_room_only_when_none_runs(rows, num_in_flight, room):
    assert RunToCompletion().room(view_of(rows, num_in_flight), PLENTY) == room


@given(st.sampled_from(BATCH_POLICIES.names()), ROWS, LIMITS)
def test_every_policy_gives_a_row_something_and_no_row_too_much(name, rows, limits):
    view = view_of(rows)
    given_tokens = BATCH_POLICIES.make(name).plan(view, limits)
    assert (given_tokens >= 0).all()
    assert (given_tokens <= np.minimum(view.num_left, limits.max_chunk)).all()
    assert 0 < given_tokens.sum() <= limits.token_budget


@given(
    st.sampled_from(sorted(set(BATCH_POLICIES.names()) - {"run_to_completion"})),
    ROWS,
    LIMITS,
    st.sampled_from([LS, BE]),
)
def test_a_newcomer_that_would_get_tokens_finds_room(name, rows, limits, service_class):
    policy = BATCH_POLICIES.make(name)
    with_newcomer = view_of([*rows, (30, False, service_class)])
    with_newcomer.is_waiting[-1] = True
    if policy.plan(with_newcomer, limits)[-1] > 0:
        assert policy.room(view_of(rows), limits) > 0


@pytest.mark.parametrize("max_batch", [0, 2.5, float("inf")])
def test_a_batch_size_that_is_no_number_of_sequences_is_refused(max_batch):
    with pytest.raises(ConfigError, match="max_batch must be a whole number"):
        BATCH_POLICIES.make(f"qllm:max_batch={max_batch}")


@pytest.mark.parametrize("name", ["qllm", "qllm_mixed"])
def test_as_many_ls_decodes_as_the_papers_batch_leave_no_room(name):
    policy, decodes = BATCH_POLICIES.make(name), [(1, True, LS)] * 33
    assert np.count_nonzero(policy.plan(view_of(decodes), PLENTY)) == 32
    assert policy.room(view_of(decodes[:32]), PLENTY) == 0
    assert policy.room(view_of(decodes[:31]), PLENTY) > 0
