"""From a running server to an affinity policy in a replay: sessions and users go all the way."""

from __future__ import annotations

import pytest
from support.running import Running, call

from moestro.cli import main
from moestro.core.hashing import name_key
from moestro.sim.replay import WhatIfSettings, what_if
from moestro.workload.traces.request_record import read_request_record

NUM_SESSIONS, NUM_TURNS = 3, 6


def ask(server: Running, turn: int, session: int) -> int:
    """A turn of a conversation, which is named in each of the ways that `moestro route` knows."""
    name = f"s{session}"
    body: dict[str, object] = {"prompt": "def f(x):", "max_tokens": 2, "user": f"u{session}"}
    headers = [{}, {"x_session_id": name}, {"x_session_affinity": name, "x_session_id": "another"}][turn % 3]
    if not headers:
        body |= {"session_id": name} if turn % 2 else {"prompt_cache_key": name}
    return call(server, "POST", "/v1/completions", body, **headers).status


@pytest.fixture(scope="module")
def record(fake_command, tmp_path_factory):
    """What round robin over two engines recorded: each conversation is on both."""
    directory = tmp_path_factory.mktemp("sessions")
    path = directory / "record.jsonl"
    server = Running(
        (*fake_command, "--engines", "2", "--route-policy", "round_robin", "--record", str(path)), directory
    )
    try:
        for turn in range(NUM_TURNS):
            assert [ask(server, turn, session) for session in range(NUM_SESSIONS)] == [200] * NUM_SESSIONS
        assert call(server, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200
        assert server.stop() == 0
    finally:
        server.kill()
    return path


def test_a_record_has_the_number_of_each_session_and_user(record):
    requests = read_request_record(record).requests
    assert [each.session for each in requests[:-1]] == [name_key(f"s{i % 3}") for i in range(18)]
    assert [each.user for each in requests[:-1]] == [name_key(f"u{i % 3}") for i in range(18)]
    assert (requests[-1].session, requests[-1].user) == (0, 0)


def test_a_replay_keeps_a_session_on_its_engine(record):
    fields = WhatIfSettings(policies=("session_affinity", "user_affinity"), cost="h20/qwen3-30b-a3b")
    answer = what_if(read_request_record(record), fields)
    recorded, _, by_session, by_user = (results.engine for _, results in answer.runs)
    for session in range(NUM_SESSIONS):
        rows = slice(session, NUM_SESSIONS * NUM_TURNS, NUM_SESSIONS)
        assert set(recorded[rows].tolist()) == {0, 1}
        assert len(set(by_session[rows].tolist())) == 1
        assert len(set(by_user[rows].tolist())) == 1
    notes = [note for note in answer.report.notes if "affinity" in note]
    assert [note.partition(" goes by ")[0] for note in notes] == [
        "session_affinity (simulated)", "user_affinity (simulated)",
    ]  # fmt: skip
    assert all("5% of the requests do not name" in note for note in notes), "one of 19"


def test_the_commands_show_it(record, capsys):
    for arguments in (["sim", "--replay"], ["replay"]):
        more = ["--cost", "h20/qwen3-30b-a3b"] if arguments[0] == "sim" else []
        with pytest.raises(SystemExit) as ended:
            main([*arguments, str(record), "--policy", "session_affinity", *more])
        assert not ended.value.code
        text = capsys.readouterr().out
        assert "Under session_affinity" in text
        assert "goes by session_id, which 5% of the requests do not name" in text
    assert "of 19 decisions (" in text
    assert "choose another engine than under round_robin" in text


def test_a_replay_in_closed_loop_waits_for_the_simulated_answer(record):
    fields = WhatIfSettings(cost="h20/qwen3-30b-a3b", is_closed_loop=True)
    read = read_request_record(record)
    (_, recorded), (_, simulated) = what_if(read, fields).runs
    for row in range(NUM_SESSIONS, NUM_SESSIONS * NUM_TURNS):
        think = recorded.arrival_ns[row] - recorded.last_token_ns[row - NUM_SESSIONS]
        assert simulated.arrival_ns[row] - simulated.last_token_ns[row - NUM_SESSIONS] == max(think, 0)
