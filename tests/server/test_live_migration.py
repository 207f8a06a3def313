"""`moestro serve --mode ep` while its experts move without a rest: the answers of a server whose experts stay."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.interrupted_answers import (
    NEAR_TIES,
    WHOLE,
    SentRequests,
    kill_an_engine,
    salted,
    streams,
    tokens_come,
    total,
)
from support.running import EXACT, PATIENCE_S, REAL, Running, complete, metrics, wait_until

NUM_ENGINES = 2
SCRIPT = str(Path(__file__).parents[1] / "support" / "restless_server.py")
PROMPTS = ["def fibonacci(n):\n", "import os\n" * 60, "class Stack:\n    def push(self, item):\n", "x = 1\n" * 90]
# So many that requests are being answered when an engine is killed.
NUM_TOKENS = 40
MOVED = re.compile(r"experts of (\d+) of (\d+) layers moved, ([\d.]+) MB(.*)")
EP = ("--mode", "ep", "--engines", str(NUM_ENGINES), "--route-policy", "round_robin")


@pytest.fixture(scope="module", params=["0", "4"])
def restless(request, short_command, tmp_path_factory) -> Iterator[Running]:
    """Without spare slots, where each layer swaps its experts, and with two for each engine."""
    command = (sys.executable, SCRIPT, *short_command[1:], *EXACT, *EP, "--num-redundant-experts", request.param)
    server = Running(command, tmp_path_factory.mktemp("restless"))
    try:
        yield server
        assert server.stop() == 0
    finally:
        server.kill()


def migrations(server: Running) -> list[tuple[int, int, float, str]]:
    return [(int(a), int(b), float(c), end) for a, b, c, end in MOVED.findall(server.text)]


def ask(server: Running, number: int) -> str:
    reply = complete(
        server, prompt=PROMPTS[number % len(PROMPTS)] + f"# {number}\n", max_tokens=12 + number, temperature=0
    )
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["text"]


def test_greedy_answers_are_those_of_one_engine(short_server, restless):
    before = len(migrations(restless))
    with ThreadPoolExecutor(12) as pool:
        found, expected = (list(pool.map(lambda i: ask(each, i), range(12))) for each in (restless, short_server))  # noqa: B023
    assert found == expected
    wait_until(lambda: len(migrations(restless)) > before + 1)
    num_moved, num_layers, megabytes, end = migrations(restless)[-1]
    assert num_moved == num_layers > 0
    assert megabytes > 0
    assert end == ""


def test_an_idle_group_goes_on_moving(restless):
    before = len(migrations(restless))
    wait_until(lambda: len(migrations(restless)) >= before + 2)


def uncached(answers: list[tuple[int, bytes]]) -> list[str]:
    """Answers without the number of cached tokens; engines that restarted have none."""
    return [re.sub(r'"cached_tokens":\d+', "", str(answer)) for answer in answers]


def test_an_engine_that_is_killed_while_experts_move_changes_no_answer(restless, tokenizer):
    """The group restarts with the placement that was committed, and goes on from there."""
    bodies = [*streams(tokenizer.encode("日é🙂", add_special_tokens=False)), *WHOLE]
    expected = SentRequests(restless, salted(bodies, 0, NUM_TOKENS)).answers()
    sent = SentRequests(restless, salted(bodies, 1, NUM_TOKENS))
    sent.begin()
    tokens_come(restless, 20)
    kill_an_engine(restless, at=1)
    found = sent.answers()
    assert [status for status, _ in found] == [200] * len(found)
    differing = [pair for pair in zip(uncached(found), uncached(expected), strict=True) if pair[0] != pair[1]]
    print("near-ties:", differing)
    assert len(differing) <= NEAR_TIES, "more than rounding"
    assert total(restless, "engine_restarts_total") == NUM_ENGINES
    ends = [end for *_, end in migrations(restless)]
    assert any("engine 1 ended" in end for end in ends), ends
    before = len(ends)
    wait_until(lambda: len(migrations(restless)) > before + 1)
    assert migrations(restless)[-1][3] == ""
    assert "Traceback" not in restless.text
    assert metrics(restless)['moestro:engine_restarts_total{engine="0"}'] == 1


def test_slots_that_do_not_divide_evenly_are_refused(short_command, tmp_path):
    command = (*REAL, *short_command[2:], *EP, "--num-redundant-experts", "3")
    server = Running(command, tmp_path, wait=False)
    assert server.process.wait(PATIENCE_S) == 2
    assert "are 19 slots, which do not divide evenly over --engines 2: give --num-redundant-experts 4" in server.text
