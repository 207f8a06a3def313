import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from shared.workload_statistics import measure

from moestro.core.hashing import split_hashes
from moestro.errors import ConfigError
from moestro.workload.generated.sessions import (
    PUBLISHED_SHAPES,
    SHAPES,
    App,
    LogNormal,
    Pace,
    SessionShape,
    generate,
    steady_rows,
    steady_sessions,
)
from moestro.workload.rows import RequestForm, RequestMaker, labelled

S = 1_000_000_000
SMALL = SessionShape(
    like="nothing",
    single_share=0.5,
    mean_turns=2.5,
    apps=(App(0.6, 40), App(0.4, 24)),
    num_users=5,
    user_skew=1.0,
    user_tokens=LogNormal(12, 0.5),
    first_tokens=LogNormal(30, 1.0),
    next_tokens=LogNormal(10, 1.0),
    output_tokens=LogNormal(8, 0.5),
    think_s=LogNormal(3, 1.0),
    max_model_len=600,
)
# What is published of the traces that the shapes are made like; docs/workloads.md has the sources.
PUBLISHED = {
    "chat": {"mean": 2331, "p50": 1046, "out": 430, "hit": 0.579, "own": 0.711, "single": 0.61, "gap": 110.6},
    "api_agent": {"mean": 915, "p50": 574, "out": 92, "hit": 0.542, "single": 1.0},
    "coder": {"mean": 5748, "p50": 4540, "out": 808, "hit": 0.664, "own": 0.398, "single": 0.747, "gap": 117.7},
    "tool_agent": {"mean": 8596, "p50": 6346, "out": 182, "hit": 0.553},
}


@given(st.sampled_from([SMALL, *SHAPES.values()]), st.integers(1, 400), st.floats(0.01, 1000), st.integers(0, 3))
def test_a_turn_is_the_conversation_so_far_and_new_input(shape, num_requests, rate, seed):
    sessions = generate(shape, num_requests, rate, seed)
    rows = sessions.rows
    assert len(rows) == num_requests
    assert rows.is_generated
    before = None
    for i in range(num_requests):
        same = before is not None and rows.session[i] == rows.session[before]
        if same:
            assert rows.stream[i] == rows.stream[before]
            assert rows.user[i] == rows.user[before]
            assert rows.num_prompt_tokens[i] > rows.num_prompt_tokens[before] + rows.num_output_tokens[before]
            assert sessions.next_turn(before, 100) == (i, 100 + sessions.think_ns[i])
        else:
            assert rows.session[i] == (0 if before is None else rows.session[before] + 1)
            assert rows.num_prompt_tokens[i] > rows.streams.start[rows.stream[i]]
            assert before is None or sessions.next_turn(before, 100) is None
        before = i
    assert sessions.next_turn(num_requests - 1, 0) is None
    assert (rows.num_prompt_tokens + rows.num_output_tokens <= shape.max_model_len).all()
    assert len(sessions) == rows.session[-1] + 1


def driven(sessions, pace):
    """When each turn arrives, by row, as the driver of the closed loop finds it."""
    arrivals = {}
    for row, start in zip(sessions.first_rows.tolist(), sessions.start_ns.tolist(), strict=True):
        turn = (row, start)
        while turn is not None:
            arrivals[turn[0]] = turn[1]
            lasts = int(pace.service_ns(sessions.rows.num_output_tokens[turn[0]]))
            turn = sessions.next_turn(turn[0], turn[1] + lasts)
    assert sorted(arrivals) == list(range(len(sessions.rows)))
    return arrivals


@given(st.integers(1, 200), st.integers(0, 3))
def test_open_loop_is_closed_loop_with_answers_that_last_as_guessed(num_requests, seed):
    sessions, pace = generate(SMALL, num_requests, 5, seed), Pace(ttft_s=0.25, tpot_s=0.125)
    rows = sessions.open_loop(pace)
    assert rows.timestamp_ns.tolist() == sorted(driven(sessions, pace).values())
    assert sorted(rows.num_prompt_tokens) == sorted(sessions.rows.num_prompt_tokens)


@given(st.integers(2, 200), st.integers(0, 3), st.data())
def test_a_window_holds_the_turns_of_its_time_and_no_others(num_requests, seed, data):
    begin = data.draw(st.integers(0, num_requests - 1))
    end = data.draw(st.integers(begin + 1, num_requests))
    sessions, pace = generate(SMALL, num_requests, 5, seed), Pace(ttft_s=0.25, tpot_s=0.125)
    window, whole = sessions.window(begin, end, pace), sessions.open_loop(pace)
    arrivals = driven(window, pace)
    in_order = sorted(arrivals, key=lambda row: (arrivals[row], window.rows.session[row]))
    assert [arrivals[row] for row in in_order] == (whole.timestamp_ns - whole.timestamp_ns[begin])[begin:end].tolist()
    for name in ("num_prompt_tokens", "num_output_tokens", "stream", "user"):
        assert sorted(getattr(window.rows, name)) == sorted(getattr(whole, name)[begin:end]), name
    assert (np.diff(window.start_ns) >= 0).all()
    assert len(window) == len(window.start_ns) == window.rows.session[-1] + 1


def test_every_turn_finds_the_conversation_before_it():
    sessions = generate(SMALL, 300, 5, 0)
    maker = RequestMaker(sessions.rows, RequestForm(block_size=16))
    before = None
    for i in range(300):
        request, script = maker.make(i, 0)
        if before is not None and request.session_id == before[0].session_id:
            assert request.block_hashes.startswith(before[0].block_hashes + before[1].block_hashes)
        before = request, script


def test_sessions_of_an_app_share_its_system_prompt_and_a_users_share_more():
    rows = generate(SMALL, 400, 5, 0).rows
    maker = RequestMaker(rows, RequestForm(block_size=1))
    shared = {True: set(), False: set()}
    names = [split_hashes(maker.make(i, 0)[0].block_hashes) for i in range(60)]
    for i in range(60):
        for j in range(i):
            if rows.session[i] != rows.session[j]:
                common = sum(a == b for a, b in zip(names[i], names[j], strict=False))
                shared[rows.user[i] == rows.user[j]].add(common)
    assert shared[False] == {0, 24, 40}
    assert max(shared[True]) > 40


def test_the_same_seed_gives_the_same_sessions_and_another_others():
    first, again, other = (generate(SMALL, 50, 5, seed) for seed in (1, 1, 2))
    assert (first.rows.num_prompt_tokens == again.rows.num_prompt_tokens).all()
    assert (first.start_ns == again.start_ns).all()
    assert (first.rows.num_prompt_tokens != other.rows.num_prompt_tokens).any()


@pytest.mark.parametrize("name", PUBLISHED_SHAPES)
def test_a_shape_has_the_figures_of_the_trace_that_it_is_made_like(name):
    rate = 6
    found = measure(steady_rows(SHAPES[name], 20_000, rate, 5), 64)
    values = {
        "mean": found.prompt_tokens.mean,
        "p50": found.prompt_tokens.p50,
        "out": found.output_tokens.mean,
        "hit": found.reuse.hit_share,
        "own": found.reuse.own_session_share,
        "single": found.turns.single_share,
        "gap": found.turns.gap_s.p50 if found.turns.gap_s else None,
    }
    assert found.is_generated
    assert found.rate == pytest.approx(rate, rel=0.05)
    for word, value in PUBLISHED[name].items():
        assert values[word] == pytest.approx(value, rel=0.2), word


@pytest.mark.parametrize("name", SHAPES)
def test_steady_sessions_come_at_their_rate_from_the_first_turn_to_the_last(name):
    rate, count = 6, 6000
    sessions = steady_sessions(SHAPES[name], count, rate, 3)
    at_s = np.array(sorted(driven(sessions, Pace()).values())) / S
    assert at_s[0] == 0
    thirds = np.histogram(at_s, 3, (0, count / rate))[0]
    assert thirds == pytest.approx(np.full(3, count / 3), rel=0.12)
    assert at_s[-1] == pytest.approx(count / rate, rel=0.1)


def test_a_window_of_sessions_begins_amid_them_at_its_full_rate():
    rows = steady_rows(SMALL, 4000, 10, 0)
    assert rows.timestamp_ns[0] == 0
    thirds = np.histogram(rows.timestamp_ns, 3, (0, rows.timestamp_ns[-1]))[0]
    assert thirds.min() > 0.85 * 4000 / 3


def test_labels_have_the_requested_share_and_leave_the_rest_alone():
    rows = labelled(generate(SMALL, 5000, 5, 0).rows, 0.2, seed=3)
    assert rows.is_ls.mean() == pytest.approx(0.2, abs=0.02)
    assert (rows.is_ls == labelled(rows, 0.2, seed=3).is_ls).all()
    assert not labelled(rows, 0, seed=1).is_ls.any()
    assert labelled(rows, 1, seed=1).is_ls.all()
    with pytest.raises(ConfigError, match=r"within 0 .. 1, got 20"):
        labelled(rows, 20, seed=0)


@pytest.mark.parametrize(("count", "rate"), [(0, 1), (1, 0), (1, float("inf")), (1, float("nan"))])
def test_a_workload_that_cannot_be_is_refused(count, rate):
    with pytest.raises(ConfigError, match=r"at least 1|above 0"):
        generate(SMALL, count, rate, 0)
