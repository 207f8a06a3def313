"""Conversations of a trace in closed loop: a turn waits for the answer before it, and then for its think time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moestro.errors import ConfigError
from moestro.sim.cluster import ClosedLoop, think_times
from moestro.sim.scenario import make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
from moestro.workload.generated.sessions import Pace

S = 1_000_000_000


def trace(path, num_sessions=6, num_turns=4, gap_s=30.0):
    """Bailian's form: sessions that begin a second apart, whose turns come every `gap_s`."""
    rows = []
    for session in range(num_sessions):
        for turn in range(num_turns):
            number = session * num_turns + turn
            rows.append(
                {
                    "timestamp": session + turn * gap_s,
                    "input_length": 32 * (turn + 1),
                    "output_length": 10,
                    "hash_ids": list(range(number * 100, number * 100 + 2 * (turn + 1))),
                    "chat_id": number,
                    "parent_chat_id": number - 1 if turn else -1,
                }
            )
    rows.sort(key=lambda row: row["timestamp"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def served(directory, **workload):
    settings = SimSettings(
        workload=WorkloadSettings(trace="trace.jsonl", **workload),
        engines=SimEngineSettings(gpu="h20", max_num_seqs=2),
        policies=(PolicySettings(route="round_robin"),),
    )
    scenario = make_scenario(settings, directory)
    return scenario.workload.rows.session, run(scenario, settings.policies[0])


def follows(session):
    """Pairs of rows of consecutive turns, found the slow way."""
    return [
        (i, j)
        for i in range(len(session))
        for j in range(i + 1, len(session))
        if session[i] == session[j] and not (session[i + 1 : j] == session[i]).any()
    ]


def test_a_turn_comes_its_think_time_after_the_simulated_end(tmp_path):
    trace(tmp_path / "trace.jsonl")
    session, results = served(tmp_path, closed_loop=True, think_s=3.0)
    pairs = follows(session)
    assert len(pairs) == 18
    assert [results.arrival_ns[j] - results.last_token_ns[i] for i, j in pairs] == [3 * S] * 18


def test_the_recorded_gap_less_the_assumed_answer_is_the_think_time(tmp_path):
    trace(tmp_path / "trace.jsonl")
    session, results = served(tmp_path, closed_loop=True)
    took_ns = int(Pace().service_ns(np.array([10]))[0])
    for i, j in follows(session):
        assert results.arrival_ns[j] - results.last_token_ns[i] == 30 * S - took_ns
    _, opened = served(tmp_path)
    assert (results.arrival_ns != opened.arrival_ns).any()
    firsts = np.unique(session, return_index=True)[1]
    assert results.arrival_ns[firsts].tolist() == opened.arrival_ns[firsts].tolist()


def test_a_rate_moves_beginnings_and_leaves_think_times(tmp_path):
    trace(tmp_path / "trace.jsonl")
    session, results = served(tmp_path, closed_loop=True, think_s=3.0, rate=50.0)
    firsts = np.unique(session, return_index=True)[1]
    assert results.arrival_ns[firsts].max() < S, "they began within 5 s in the trace, which lasts 95"
    assert {int(results.arrival_ns[j] - results.last_token_ns[i]) for i, j in follows(session)} == {3 * S}


def test_an_answer_that_takes_longer_than_the_recorded_gap_is_followed_at_once():
    session, arrival_ns = np.array([0, 0]), np.array([0, 5 * S])
    assert think_times(session, arrival_ns, np.array([9 * S, 9 * S])).tolist() == [0, 0]
    loop = ClosedLoop(session, arrival_ns, np.array([0, 0]))
    assert loop.next_turn(0, 7 * S) == (1, 7 * S)
    assert loop.next_turn(1, 8 * S) is None


def test_any_order_of_sessions_gives_each_turn_its_successor():
    rng = np.random.default_rng(0)
    for _ in range(20):
        session = rng.integers(0, 8, 30)
        loop = ClosedLoop(session, np.arange(30), np.zeros(30, np.int64))
        found = [(i, loop.next_turn(i, 0)[0]) for i in range(30) if loop.next_turn(i, 0) is not None]
        assert found == follows(session)
        assert sorted(loop.first_rows.tolist() + [j for _, j in found]) == list(range(30))


def test_a_window_is_cut_out_of_the_trace_and_its_conversations_go_on_inside(tmp_path):
    trace(tmp_path / "trace.jsonl")
    session, results = served(tmp_path, start_s=31.0, duration_s=32.0, closed_loop=True, think_s=1.0)
    # Of the turns at 0 .. 5, 30 .. 35, 60 .. 65 and 90 .. 95 s: those at 31 .. 35 and 60 .. 62.
    assert len(results) == 8
    assert results.arrival_ns[:5].tolist() == [i * S for i in range(5)]
    assert len(follows(session)) == 2


def test_a_window_counts_its_first_requests(tmp_path):
    trace(tmp_path / "trace.jsonl")
    _, results = served(tmp_path, start_s=60.0, num_requests=3)
    assert results.arrival_ns.tolist() == [0, S, 2 * S]
    assert results.num_prompt_tokens.tolist() == [96, 96, 96], "third turns"


@pytest.mark.parametrize(
    ("lines", "workload", "words"),
    [
        (None, {"start_s": 1000.0}, "no request of the trace, which lasts 95.0 s"),
        ('{"input_length": 5, "output_length": 5}\n', {"start_s": 1.0, "rate": 1.0}, "need a trace with times"),
        ('{"input_length": 5, "output_length": 5}\n', {"closed_loop": True, "rate": 1.0}, "names none"),
    ],
)
def test_what_a_trace_does_not_have_is_named(tmp_path, lines, workload, words):
    trace(tmp_path / "trace.jsonl")
    if lines is not None:
        (tmp_path / "trace.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match=words):
        served(tmp_path, **workload)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sessions": "chat", "num_requests": 3, "rate": 1.0, "closed_loop": True}, "belong to a trace"),
        ({"trace": "x", "think_s": 1.0}, "think_s needs closed_loop"),
        ({"trace": "x", "closed_loop": True, "shape": "central"}, "without conversations"),
        ({"trace": "x", "rate": 1.0, "load": 0.5}, "give rate or load"),
        ({"trace": "x", "load": 0.0}, "load must be above 0"),
        ({"trace": "x", "start_s": -1.0}, "start_s must be at least 0"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        WorkloadSettings(**fields)
