"""`moestro serve --mode preemptive`: the same answers as the fused mode's, whoever passes whom."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serve.running import Running, complete, metrics

from moestro.config import ModelSettings, SchedulerLimits, ServerSettings, ServeSettings, SteppingSettings
from moestro.errors import ConfigError

PROMPTS = ["def fibonacci(n):\n", "import os\n" * 60, "class Stack:\n    def push(self, item):\n", "x = 1\n" * 90]


OFFLOAD = f"{Path(__file__).parents[2] / 'examples' / 'offload_kv.py'}:OffloadKV"
LIMITS = ("--mode", "preemptive", "--max-be-wait", "inf", "--max-num-batched-tokens", "128", "--max-num-seqs", "8")
SCARCE = ("--num-gpu-blocks-override", "40", "--max-model-len", "640", "--kv-offloading-size", "0.1")
OFFLOADING = (*SCARCE, "--scheduling-policy", "qllm", "--evict-policy", OFFLOAD)


@pytest.fixture(params=["plenty of KV", "KV in host memory"])
def preemptive(request, real_command, tmp_path):
    flags = () if request.param == "plenty of KV" else OFFLOADING
    running = Running((*real_command, "--dtype", "float32", *LIMITS, *flags), tmp_path)
    yield running
    try:
        assert (metrics(running)['moestro:kv_restored_tokens_total{engine="0"}'] > 0) == (flags == OFFLOADING)
        assert running.stop() == 0
    finally:
        running.kill()


def answers(server: Running) -> list[str]:
    """Greedy answers to best-effort and latency-sensitive requests that run at the same time."""

    def ask(number: int) -> str:
        body = {
            "model": "moestro-demo",
            "prompt": PROMPTS[number % len(PROMPTS)] + f"# {number}\n",
            "max_tokens": 12 + number,
            "temperature": 0,
            "service_class": "ls" if number % 3 == 0 else "be",
        }
        reply = complete(server, **body)
        assert reply.status == 200, reply.body
        return reply.json["choices"][0]["text"]

    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(ask, range(24)))


def test_the_answers_are_those_of_the_fused_mode(server, preemptive):
    assert answers(preemptive) == answers(server)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "asynchronous"}, "--mode 'asynchronous' is unknown: give one of fused, preemptive"),
        ({"step_policy": "lifo"}, "--step-policy 'lifo' is unknown: give one of qllm, in_order, or FILE.py:NAME"),
        ({"max_be_wait": -1}, "--max-be-wait must be at least 0, got -1"),
        ({"max_parked_bytes": -1}, "--max-parked-bytes must be at least 1, got -1"),
    ],
)
def test_a_stepping_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        SteppingSettings(**wrong)


def test_a_budget_that_does_not_let_both_classes_decode_is_refused_in_preemptive_mode_alone():
    limits = SchedulerLimits(max_num_seqs=100, max_num_batched_tokens=150)
    given = {"model": ModelSettings(model="m"), "limits": limits, "server": ServerSettings(served_model_name=("m",))}
    ServeSettings(**given)
    with pytest.raises(ConfigError, match=r"sequences of each class.*at least twice as many"):
        ServeSettings(**given, stepping=SteppingSettings(mode="preemptive"))
