"""`moestro serve --mode preemptive`: the same answers as the fused mode's, whichever request overtakes."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.expert_counts import ask_for_counts
from support.running import (
    PATIENCE_S,
    Reply,
    Running,
    complete,
    free_port,
    load,
    metrics,
    open_stream,
    wait_until,
)

from moestro.config.serve_settings import ServeSettings
from moestro.engine.settings import SchedulerOptions
from moestro.errors import ConfigError
from moestro.flow.settings import SteppingSettings

PROMPTS = ["def fibonacci(n):\n", "import os\n" * 60, "class Stack:\n    def push(self, item):\n", "x = 1\n" * 90]


OFFLOAD = f"{Path(__file__).parents[2] / 'examples' / 'offload_kv.py'}:OffloadKV"
LIMITS = ("--mode", "preemptive", "--max-be-wait", "inf", "--max-num-batched-tokens", "128", "--max-num-seqs", "8")
SCARCE = ("--num-gpu-blocks-override", "40", "--max-model-len", "640", "--kv-offloading-size", "0.1")
SLOW = ("--dtype", "float32")  # With steps of a millisecond, requests end before the KV cache is full.
OFFLOADING = (*SCARCE, "--scheduling-policy", "qllm", "--evict-policy", OFFLOAD)


@pytest.fixture(params=["plenty of KV", "KV in host memory"])
def preemptive(request, real_command, tmp_path):
    flags = () if request.param == "plenty of KV" else OFFLOADING
    running = Running((*real_command, *SLOW, *LIMITS, *flags), tmp_path, admin_port=free_port())
    yield running
    try:
        assert (metrics(running)['moestro:kv_restored_tokens_total{engine="0"}'] > 0) == (flags == OFFLOADING)
        assert running.stop() == 0
    finally:
        running.kill()


@pytest.fixture(scope="module")
def fused(real_command, tmp_path_factory):
    server = Running((*real_command, *SLOW), tmp_path_factory.mktemp("fused"), admin_port=free_port())
    yield server
    server.kill()


def answers(server: Running) -> list[str]:
    """Greedy answers to best-effort and latency-sensitive requests that run at the same time."""

    def ask(number: int) -> str:
        body = {
            "model": "moestro-demo",
            "prompt": PROMPTS[number % len(PROMPTS)] + f"# {number}\n",
            "max_tokens": 12 + number,
            "temperature": 0,
            "service_class": "ls" if number % 3 == 0 else "be",
            "guided_regex": "[a-z]{2,9}( [a-z]{2,9}){0,5}" if number % 4 == 1 else None,
        }
        reply = complete(server, **body)
        assert reply.status == 200, reply.body
        return reply.json["choices"][0]["text"]

    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(ask, range(24)))


def test_the_answers_and_the_experts_are_those_of_the_fused_mode(fused, preemptive):
    assert answers(preemptive) == answers(fused)
    salt = preemptive.directory.name
    assert (ask_for_counts(preemptive, salt) == ask_for_counts(fused, salt)).all()


MAX_BE_WAIT_S = 0.5
NUM_LONG, LONG_TOKENS = 8, 1900  # a step of seconds: several times the bound
KV_BYTES = 450_000_000
PASSED_OVER = 'moestro:passed_over_seconds_total{engine="0"}'


@pytest.fixture(scope="module")
def long_steps(real_command, tmp_path_factory):
    assert real_command[-2] == "--kv-cache-memory-bytes"
    flags = ("--mode", "preemptive", "--pass-decodes", "--max-be-wait", str(MAX_BE_WAIT_S))
    budget = ("--max-num-batched-tokens", str(NUM_LONG * LONG_TOKENS))
    command = (*real_command[:-1], str(KV_BYTES), *flags, *budget)
    running = Running(command, tmp_path_factory.mktemp("long_steps"))
    yield running
    try:
        assert running.stop() == 0
    finally:
        running.kill()


class LongStep:
    """Best-effort prompts, each time others. One alone keeps the engine busy until all others are there for a step."""

    serials = itertools.count()

    def __init__(self, server: Running, pool: ThreadPoolExecutor) -> None:
        first = next(self.serials) * (NUM_LONG + 1)
        alone, *prompts = [[300 + first + i, *range(100, 100 + LONG_TOKENS - 1)] for i in range(NUM_LONG + 1)]
        pool.submit(complete, server, prompt=alone, max_tokens=1, service_class="be")
        wait_until(lambda: load(server)[0]["num_running"] == 1)
        self.reply: Future[Reply] = pool.submit(complete, server, prompt=prompts, max_tokens=1, service_class="be")
        wait_until(lambda: load(server)[0]["num_running"] > NUM_LONG // 2)

    def is_over(self) -> bool:
        return self.reply.done()


def test_a_step_that_has_run_for_longer_than_the_bound_is_passed(long_steps):
    with ThreadPoolExecutor(2) as pool:
        step = LongStep(long_steps, pool)
        time.sleep(1.2 * MAX_BE_WAIT_S)
        assert not step.is_over(), "the step is too short for this test"
        assert complete(long_steps, max_tokens=1, service_class="ls").status == 200
        assert not step.is_over(), "the urgent request waited for the end of the step"
        assert step.reply.result().status == 200
    found = metrics(long_steps)
    assert found['moestro:batch_passes_total{engine="0"}'] == 1
    assert found['moestro:withdrawals_total{engine="0"}'] >= 1
    assert found['moestro:parked_tokens_max{engine="0"}'] > LONG_TOKENS * NUM_LONG // 2
    assert found['moestro:parked_tokens{engine="0"}'] == 0
    urgent_s, best_effort_s = (
        found[f'moestro:time_to_first_token_seconds_sum{{engine="0",service_class="{each}"}}'] for each in ("ls", "be")
    )
    assert 0 < found[PASSED_OVER] < urgent_s < best_effort_s / NUM_LONG


def test_best_effort_that_was_passed_for_the_bound_goes_on(long_steps):
    with ThreadPoolExecutor(2) as pool:
        before_s = metrics(long_steps)[PASSED_OVER]
        step = LongStep(long_steps, pool)
        urgent = open_stream(long_steps, max_tokens=2000, service_class="ls")
        try:
            assert step.reply.result(PATIENCE_S).status == 200
            assert load(long_steps)[0]["num_running"] == 1, "the urgent request has ended, and proves nothing"
            assert metrics(long_steps)[PASSED_OVER] - before_s >= MAX_BE_WAIT_S
        finally:
            urgent.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "asynchronous"}, "--mode 'asynchronous' is unknown: give one of fused, preemptive"),
        ({"step_policy": "lifo"}, "unknown step policy 'lifo'; known: .*qllm.*, or FILE.py:NAME"),
        ({"max_be_wait": -1}, "--max-be-wait must be at least 0, got -1"),
    ],
)
def test_a_stepping_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        SteppingSettings(**wrong)


def test_a_budget_that_does_not_let_both_classes_decode_is_refused_in_preemptive_mode_alone():
    scheduler = SchedulerOptions(max_num_seqs=100, max_num_batched_tokens=150)
    ServeSettings(scheduler=scheduler)
    with pytest.raises(ConfigError, match=r"sequences of each class.*at least twice as many"):
        ServeSettings(scheduler=scheduler, stepping=SteppingSettings(mode="preemptive"))
