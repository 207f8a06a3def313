"""Engines that die or hang behind a server that stays: who hears of it, who does not, and when they are back."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from support.fake_rank import BABBLE, CRASH, CRASH_AT_ONCE, HANG, STUCK
from support.fake_server import STOPPED_S
from support.running import (
    PATIENCE_S,
    Reply,
    Running,
    call,
    complete,
    has_ended,
    is_idle,
    load,
    metrics,
    open_stream,
    read_to_end,
    read_to_end_of_answer,
    wait_until,
)

ONE_AT_A_TIME = ("--max-num-seqs", "1", "--max-num-batched-tokens", "64")


@pytest.fixture
def start(fake_command, tmp_path):
    """Starts servers, and looks after their end."""
    running: list[Running] = []

    def start(*flags: str) -> Running:
        running.append(Running((*fake_command, *flags), tmp_path))
        return running[-1]

    yield start
    for server in running:
        try:
            assert server.stop() == 0
            assert server.left_behind() == []
        finally:
            server.kill()


class Later:
    """A request whose answer is looked at later."""

    def __init__(self, server: Running, **fields: object) -> None:
        self.reply: Reply | None = None
        self._thread = threading.Thread(target=self._ask, args=(server, fields))
        self._thread.start()

    def _ask(self, server: Running, fields: dict[str, object]) -> None:
        self.reply = complete(server, **fields)

    def wait(self) -> Reply:
        self._thread.join(PATIENCE_S)
        assert self.reply is not None, "no answer came"
        return self.reply


def status(server: Running, path: str = "/health") -> int:
    return call(server, "GET", path).status


def num_waiting(server: Running) -> int:
    return int(sum(engine["num_waiting"] for engine in load(server)))


def signal_first_engine(server: Running, number: int = signal.SIGKILL) -> None:
    os.kill(server.ranks()[0].pid, number)


def test_a_killed_engine_ends_streams_that_had_begun_with_an_error_and_is_started_again(start):
    server = start()
    streaming, waiting = open_stream(server, max_tokens=4000), Later(server, max_tokens=500)
    wait_until(lambda: load(server)[0]["num_running"] == 2)
    ranks = server.ranks()
    signal_first_engine(server)
    stream = read_to_end(streaming)
    assert b"event: error\n" in stream
    assert b"engine_died" in stream
    assert b"[DONE]" not in stream
    assert not stream.endswith(b"0\r\n\r\n")
    assert waiting.wait().status == 200
    assert "killed by SIGKILL" in server.text
    wait_until(lambda: status(server) == 200)
    assert complete(server, max_tokens=2).status == 200
    assert is_idle(server)
    figures = metrics(server)
    assert figures['moestro:engine_restarts_total{engine="0"}'] == 1
    assert figures['moestro:request_success_total{engine="0",finished_reason="error"}'] == 1
    assert server.ranks() != ranks
    assert len(server.ranks()) == 1


def test_health_is_503_only_while_no_engine_is_ready(start):
    server = start("--engines", "2", "--route-policy", "round_robin")
    bystander = open_stream(server, max_tokens=400)
    victim = read_to_end(open_stream(server, max_tokens=400, priority=CRASH))
    assert b"engine_died" in victim
    assert status(server) == 200
    assert "ordered to crash" in server.text
    assert b"data: [DONE]" in read_to_end_of_answer(bystander)
    wait_until(lambda: all(metrics(server)[f'moestro:engine_ready{{engine="{i}"}}'] for i in (0, 1)))
    for rank in server.ranks():
        rank.kill()
    wait_until(lambda: status(server) == 503)
    reply = complete(server)
    assert (reply.status, reply.headers["retry-after"], reply.json["error"]["code"]) == (503, "1", "no_engine")
    assert status(server, "/ready") == 503
    wait_until(lambda: status(server) == 200)
    assert status(server, "/readyz") == 200


def test_requests_go_around_a_silent_engine_until_it_speaks_again(start, monkeypatch):
    monkeypatch.setenv(STOPPED_S, "1000")  # a stopped engine is not replaced
    server = start("--engines", "2", "--route-policy", "round_robin")
    silent = server.ranks()[0]
    silent.suspend()
    wait_until(lambda: sum(metrics(server)[f'moestro:engine_ready{{engine="{i}"}}'] for i in (0, 1)) == 1)
    assert [complete(server, max_tokens=2).status for _ in range(4)] == [200] * 4
    silent.resume()
    wait_until(lambda: all(metrics(server)[f'moestro:engine_ready{{engine="{i}"}}'] for i in (0, 1)))
    assert silent in server.ranks()


def test_the_last_engine_keeps_its_requests_while_it_is_silent(start):
    server = start()
    [silent] = server.ranks()
    silent.suspend()
    time.sleep(1.5)  # twice the silence after which another engine would get the request
    answer = Later(server, max_tokens=2)
    silent.resume()
    assert answer.wait().status == 200


def test_an_engine_that_says_what_cannot_be_read_is_killed_and_started_again(start):
    server = start()
    reply = complete(server, priority=BABBLE)
    assert (reply.status, reply.json["error"]["code"]) == (500, "engine_died")
    assert "killed: one of its messages could not be read" in server.text
    wait_until(lambda: status(server) == 200)
    assert complete(server, max_tokens=2).status == 200


def test_a_request_without_output_moves_to_another_engine(start):
    server = start("--engines", "2", *ONE_AT_A_TIME)
    running = [open_stream(server, max_tokens=600) for _ in range(2)]
    wait_until(lambda: sum(engine["num_running"] for engine in load(server)) == 2)
    queued = [Later(server, max_tokens=5) for _ in range(4)]
    wait_until(lambda: num_waiting(server) == 4)
    signal_first_engine(server)
    assert [each.wait().status for each in queued] == [200] * 4
    assert sum(b"engine_died" in read_to_end_of_answer(stream) for stream in running) == 1
    wait_until(lambda: is_idle(server))
    assert metrics(server)['moestro:requests_moved_total{engine="0"}'] == 2


def test_a_request_that_ends_every_engine_it_meets_ends_two_at_most(start):
    server = start("--engines", "3")
    reply = complete(server, priority=CRASH_AT_ONCE)
    assert (reply.status, reply.json["error"]["code"]) == (500, "engine_died")
    assert server.text.count("it restarts in") == 2
    assert status(server) == 200
    wait_until(lambda: len(server.ranks()) == 3)


@pytest.fixture(scope="module")
def strict(fake_command, tmp_path_factory) -> Iterator[Running]:
    """One engine, one request at a time, and short timeouts."""
    timeouts = ("--engine-timeout", "2", "--watchdog-timeout", "1", "--step-timeout", "2.5")
    server = Running((*fake_command, *ONE_AT_A_TIME, *timeouts), tmp_path_factory.mktemp("strict"))
    yield server
    server.kill()


def test_requests_that_wait_while_nothing_runs_are_found_by_the_watchdog(strict):
    waiting = open_stream(strict, priority=STUCK, stream=False)
    wait_until(lambda: status(strict) == 503)
    assert load(strict)[0]["num_running"] == 0
    assert load(strict)[0]["num_waiting"] == 1
    wait_until(lambda: 'fake_rank.py", line' in strict.text)
    waiting.close()
    wait_until(lambda: status(strict) == 200)
    assert "makes progress again" in strict.text


def test_a_process_that_stands_still_is_killed_and_its_queue_waits_for_the_next_one(strict):
    streaming = open_stream(strict, max_tokens=4000)
    queued = Later(strict, max_tokens=5)
    wait_until(lambda: num_waiting(strict) == 1)
    signal_first_engine(strict, signal.SIGSTOP)
    assert b"engine_died" in read_to_end(streaming)
    assert queued.wait().status == 200
    assert "no message for 2 s (--engine-timeout)" in strict.text


@pytest.mark.parametrize("stops_engine", [False, True], ids=["the server alone", "the whole machine"])
def test_a_pause_of_the_server_itself_costs_no_engine_and_no_request(strict, stops_engine):
    wait_until(lambda: status(strict) == 200)
    [rank] = strict.ranks()
    stream, queued = open_stream(strict, max_tokens=1000), Later(strict, max_tokens=5)  # 2 s of tokens
    wait_until(lambda: num_waiting(strict) == 1)
    stopped = [strict.process.pid, *([rank.pid] if stops_engine else [])]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.5)  # longer than each of --engine-timeout, --watchdog-timeout and --step-timeout
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert b"data: [DONE]" in read_to_end_of_answer(stream)
    assert queued.wait().status == 200
    time.sleep(1)  # a few looks at the engine
    assert strict.ranks() == [rank]
    assert re.search("this process was stopped for [345] s", strict.text)
    assert status(strict) == 200


def test_an_engine_that_hangs_in_a_step_is_out_of_rotation_dumps_its_stacks_and_then_is_killed(strict):
    server, stalls = strict, metrics(strict)['moestro:engine_stalls_total{engine="0"}']
    hanging = open_stream(server, priority=HANG, stream=False)
    wait_until(lambda: status(server) == 503)
    assert status(server, "/ready") == 503
    assert "no step for 1 s with 1 requests" in server.text
    assert metrics(server)['moestro:engine_stalls_total{engine="0"}'] == stalls + 1
    wait_until(lambda: "(--step-timeout)" in server.text)
    hanging.close()  # or it would go to the engine's next life
    wait_until(lambda: status(server) == 200)


def test_a_server_whose_engines_cannot_be_started_any_more_says_why_and_ends(fake_command, tmp_path):
    server = Running((*fake_command, "--seed", "4"), tmp_path)
    signal_first_engine(server)
    assert server.process.wait(PATIENCE_S) == 1
    assert "engine 0 is not restarted: it ended 5 times in a row before it was ready" in server.text
    assert server.text.strip().splitlines()[-1].endswith("status 7; its output is above")
    assert server.left_behind() == []


def test_a_signal_while_an_engine_is_started_again_leaves_nothing_behind(fake_command, tmp_path):
    server = Running((*fake_command, "--engines", "2"), tmp_path)
    first = server.ranks()
    signal_first_engine(server)
    wait_until(lambda: len({*server.ranks()} - {*first}) == 1)
    ranks = [*first, *server.ranks()]
    assert server.stop() == 0
    wait_until(lambda: all(map(has_ended, ranks)))
    assert server.left_behind() == []
