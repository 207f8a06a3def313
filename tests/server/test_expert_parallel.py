"""`moestro serve --mode ep`: the answers of the fused mode, whichever worker is idle or killed."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from parity import tiny
from support.expert_counts import ask_for_counts
from support.fake_rank import FAKE_STEP_S
from support.interrupted_answers import (
    NEAR_TIES,
    SCORED,
    STEP_S,
    TEXT,
    WHOLE,
    SentRequests,
    completion,
    disturbed,
    kill_an_engine,
    ready,
    running,
    salted,
    stream,
    streams,
    texts,
    tokens_come,
    total,
)
from support.running import EXACT, PATIENCE_S, REAL, Running, call_admin, complete, is_idle, metrics, wait_until

from moestro.config.serve_settings import ProcessSettings, ServeSettings
from moestro.core.experts.expert_table import EMPTY
from moestro.engine.lock_step import spread_over_ranks
from moestro.errors import ConfigError, GroupLostError
from moestro.flow.settings import SteppingSettings
from moestro.model.experts.exchange import GroupPlace, meet
from moestro.model.settings import ModelSettings

NUM_ENGINES = 3
NUM_TOKENS = 40  # of an answer that is interrupted
PROMPTS = ["def fibonacci(n):\n", "import os\n" * 60, "class Stack:\n    def push(self, item):\n", "x = 1\n" * 90]


@pytest.fixture(scope="module")
def spread(short_command, tmp_path_factory) -> Iterator[Running]:
    flags = ("--mode", "ep", "--engines", str(NUM_ENGINES), "--engine-timeout", "4", "--route-policy", "round_robin")
    with running((*short_command, *EXACT, *flags), tmp_path_factory.mktemp("spread")) as server:
        yield server


def ask(server: Running, number: int) -> str:
    fields = {"prompt": PROMPTS[number % len(PROMPTS)] + f"# {number}\n", "max_tokens": 12 + number, "temperature": 0}
    if number % 4 == 1:
        fields["guided_regex"] = "[a-z]{2,9}( [a-z]{2,9}){0,5}"
    reply = complete(server, **fields)
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["text"]


def by_engine(server: Running, name: str) -> list[float]:
    figures = metrics(server)
    return [figures[f'moestro:{name}{{engine="{engine}"}}'] for engine in range(NUM_ENGINES)]


def test_greedy_answers_are_those_of_the_fused_mode(short_server, spread):
    with ThreadPoolExecutor(12) as pool:
        found, expected = (list(pool.map(lambda i: ask(each, i), range(12))) for each in (spread, short_server))  # noqa: B023
    assert found == expected


def test_the_experts_are_those_of_the_fused_mode(short_server, spread):
    assert (ask_for_counts(spread, "ep") == ask_for_counts(short_server, "ep")).all()
    engines = call_admin(spread, "GET", "/admin/experts?arrays=true").json
    num_steps = {engine["num_steps"] for engine in engines["engines"]}
    assert len(num_steps) == 1, "all engines take part in each step"
    tokens = np.array(engines["arrays"]["tokens"])
    assert (tokens.sum(axis=(1, 2)) > 0).all(), "each engine had one of the requests"


def test_one_request_alone_is_answered_and_the_other_engines_take_part(short_server, spread):
    wait_until(lambda: is_idle(spread))
    before, steps = by_engine(spread, "group_idle_steps_total"), by_engine(spread, "group_steps_total")
    assert ask(spread, 3) == ask(short_server, 3)
    gained = [b - a for a, b in zip(before, by_engine(spread, "group_idle_steps_total"), strict=True)]
    assert sorted(gained)[0] == 0
    wait_until(lambda: by_engine(spread, "group_steps_total") == [steps[0] + 15] * NUM_ENGINES)
    assert sorted(b - a for a, b in zip(before, by_engine(spread, "group_idle_steps_total"), strict=True)) == [
        0,
        15,
        15,
    ]


def test_a_group_without_requests_sleeps(spread):
    wait_until(lambda: is_idle(spread))
    busy_s = [sum(rank.cpu_times()[:2]) for rank in spread.ranks()]
    time.sleep(3)
    after_s = [sum(rank.cpu_times()[:2]) for rank in spread.ranks()]
    assert max(b - a for a, b in zip(busy_s, after_s, strict=True)) < 0.3


def test_metrics_show_the_mode_and_the_group(spread):
    figures = metrics(spread)
    for engine in range(NUM_ENGINES):
        assert figures[f'moestro:engine_info{{engine="{engine}",group="0",mode="ep"}}'] == 1
    largest, tokens = by_engine(spread, "group_largest_tokens_total"), by_engine(spread, "group_tokens_total")
    assert 1 <= largest[0] * NUM_ENGINES / tokens[0] <= NUM_ENGINES


def test_metrics_tell_which_experts_are_near(spread):
    def near(distance: str) -> list[float | None]:
        names = [f'moestro:expert_near_share{{distance="{distance}",engine="{i}"}}' for i in range(NUM_ENGINES)]
        return [metrics(spread).get(name) for name in names]

    assert ask(spread, 0)
    wait_until(lambda: None not in near("device"))
    assert near("device") == [6 / 16, 5 / 16, 5 / 16]
    assert near("machine") == [10 / 16, 11 / 16, 11 / 16]


def uncached(answer: object) -> str:
    """An answer without the number of its prompt's tokens that were cached; engines that restarted have none."""
    return re.sub(r'"cached_tokens":\d+', "", str(answer))


@pytest.fixture(scope="module")
def bodies(tokenizer) -> list[tuple[str, dict]]:
    """Requests whose answers are compared to the byte."""
    return [*streams(tokenizer.encode("日é🙂", add_special_tokens=False)), *WHOLE]


@pytest.fixture(scope="module")
def undisturbed(spread, bodies) -> tuple[list, list]:
    """Answers to `bodies` and to the scored requests of a group that loses nothing."""
    expected, scored = (SentRequests(spread, salted(each, 0, NUM_TOKENS)).answers() for each in (bodies, SCORED))
    return expected, scored


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_group_of_a_lost_engine_comes_back_and_no_answer_differs(spread, bodies, undisturbed, number):
    rng, (expected, scored) = random.Random(int(number)), undisturbed
    restarts, processes = by_engine(spread, "engine_restarts_total"), spread.ranks()
    sent = SentRequests(spread, salted([*bodies, *SCORED], 1, NUM_TOKENS))
    sent.begin()
    tokens_come(spread, rng.randrange(20, 200))
    victim = rng.randrange(NUM_ENGINES)
    os.kill(processes[victim].pid, number)
    both = sent.answers()
    answers, found = both[: len(bodies)], both[len(bodies) :]
    assert [body for status, body in answers + found if status != 200] == []
    given, wanted = [*answers, *texts(found)], [*expected, *texts(scored)]
    differing = [(a, b) for a, b in zip(map(uncached, given), map(uncached, wanted), strict=True) if a != b]
    print("near-ties:", differing)
    assert len(differing) <= NEAR_TIES, "more than rounding"
    assert by_engine(spread, "engine_restarts_total") == [count + 1 for count in restarts]
    assert not {*processes} & {*spread.ranks()}
    wait_until(lambda: is_idle(spread))


def test_the_log_names_the_engine_that_was_lost(spread):
    """After the test before this one."""
    lines = [line for line in spread.text.splitlines() if "restart together in" in line]
    assert len(lines) == 2
    assert "killed by SIGKILL" in lines[0]
    assert "no message for 4 s (--engine-timeout)" in lines[1]
    assert "Traceback" not in spread.text


# --- the rules of a group, before fake ranks --------------------------------------------------------------------------


@pytest.fixture
def start(fake_command, tmp_path, monkeypatch):
    monkeypatch.setenv(FAKE_STEP_S, str(STEP_S))
    servers: list[Running] = []

    def start(*flags: str) -> Running:
        command = (
            *fake_command,
            "--mode",
            "ep",
            "--engines",
            "2",
            "--no-standby",
            "--route-policy",
            "round_robin",
            *flags,
        )
        servers.append(Running(command, tmp_path))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
        server.kill()


def test_engines_of_a_group_restart_together_and_share_the_requests_that_they_lost(start):
    server = start(*EXACT)
    processes = server.ranks()
    long = {"max_tokens": 200}  # 2 s, so that none ends before the kill
    bodies = stream(TEXT, **long), stream(TEXT, **long, stop=["never"]), completion(TEXT, **long)
    expected, found = disturbed(server, *bodies)
    assert found == expected
    assert not {*processes} & {*server.ranks()}
    figures = metrics(server)
    assert [figures[f'moestro:engine_restarts_total{{engine="{engine}"}}'] for engine in (0, 1)] == [1, 1]
    assert total(server, "requests_moved_total") == 6
    wait_until(lambda: ready(server))
    assert server.text.count("engines 0, 1 restart together in") == 1
    answered = [
        metrics(server)[f'moestro:request_success_total{{engine="{i}",finished_reason="length"}}'] for i in (0, 1)
    ]
    assert answered == [6, 6]


def test_in_bfloat16_the_streams_of_all_engines_of_a_group_end_with_an_error_event(start):
    server = start()
    expected, found = disturbed(server, stream(TEXT), completion(TEXT))
    broken = [b"engine_died" in body for _, body in found]
    assert sorted(broken) == [False, False, True, True]
    assert all(a == b for a, b, is_broken in zip(found, expected, broken, strict=True) if not is_broken)


def test_a_group_that_cannot_be_started_any_more_is_given_up(start):
    server = start("--seed", "4")
    kill_an_engine(server)
    assert server.process.wait(PATIENCE_S) == 1
    assert "the group of engines 0, 1 is not restarted: it ended 5 times in a row before it was ready" in server.text


def test_an_engine_that_does_not_start_is_named(fake_command, tmp_path):
    flags = ("--mode", "ep", "--engines", "2", "--no-standby", "--seed", "3", "--startup-timeout", "8")
    server = Running((*fake_command, *flags), tmp_path, wait=False)
    assert server.process.wait(PATIENCE_S) == 1
    assert "not ready within 8 s (engine 0 after 'pretend', engine 1 after 'pretend')" in server.text


# --- the start of a group ---------------------------------------------------------------------------------------------


def place(worker: int) -> GroupPlace:
    return GroupPlace(worker=worker, num_workers=3, timeout_s=10)


def test_workers_meet_and_name_the_one_that_does_not_come():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, errors, both_failed = listener.getsockname()[1], [], threading.Barrier(2)

        def join(worker: int) -> None:
            try:
                meet(place(worker), port, os.dup(listener.fileno()) if worker == 0 else None, 1.0)
            except GroupLostError as error:
                both_failed.wait(PATIENCE_S)  # the error holds the store, which worker 0 keeps for the other one too
                errors.append(str(error))

        threads = [threading.Thread(target=join, args=(worker,)) for worker in (0, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert errors == ["engine 1 did not join its group within 1 s"] * 2


# --- settings ---------------------------------------------------------------------------------------------------------


def settings(engines: int, **model: object) -> ServeSettings:
    return ServeSettings(
        model=ModelSettings(**model),
        stepping=SteppingSettings(mode="ep"),
        processes=ProcessSettings(engines=engines),
    )


def test_settings_that_contradict_the_mode_are_refused():
    with pytest.raises(ConfigError, match="--engines 1 is one: give --engines 2 or more"):
        settings(1)
    with pytest.raises(ConfigError, match="this model has none: leave --mode out"):
        spread_over_ranks(4, 0, 2)
    with pytest.raises(ConfigError, match="16 experts a layer, so give --engines 16 or less"):
        spread_over_ranks(4, 16, 17)


def test_experts_are_spread_evenly():
    table = spread_over_ranks(2, 16, 3)
    assert (table.logical_of != EMPTY).sum(axis=2).tolist() == [[6, 6], [5, 5], [5, 5]]


def test_a_model_without_experts_fails_the_start_with_the_reason(demo_dir, tmp_path):
    checkpoint = str(tiny.save_checkpoint(tmp_path / "dense", tiny.make_config("llama")))
    flags = ("--mode", "ep", "--engines", "2", "--tokenizer", str(demo_dir))
    server = Running((*REAL, checkpoint, *flags), tmp_path, wait=False)
    assert server.process.wait(PATIENCE_S) == 2
    assert "this model has none: leave --mode out" in server.text
