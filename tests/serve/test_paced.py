"""`moestro serve --device paced:h20`: real processes, modelled durations."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from fake_device import KvDevice, make_request
from serve.running import REAL, Running, call, complete, is_idle, load, wait_until

from moestro.cli import main
from moestro.config import PacedSettings
from moestro.cost.gpus import H20
from moestro.cost.hf_config import network_named
from moestro.cost.model import Batch
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.engine.rank import build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError
from moestro.serve.paced import FixedAnswers, NetworkAnswers, PacedDevice
from moestro.workload.request_record import read_request_record

COST = Roofline(RooflineSettings(network=network_named("qwen3-30b-a3b"), gpu=H20))
BOUNDS = SchedulerSettings(num_blocks=64, block_size=4, max_model_len=64)
DECODE_S = COST.step_ns(Batch(np.array([20]), np.array([1]))) / 1e9


@pytest.fixture(scope="module", params=["none", "demo"])
def paced(request, tmp_path_factory):
    flags = ("--device", "paced:h20", "--paced-arithmetic", request.param, "--engines", "2", "--dtype", "float32")
    server = Running((*REAL, *flags), tmp_path_factory.mktemp("paced"))
    server.arithmetic = request.param
    yield server
    try:
        assert server.stop() == 0
    finally:
        server.kill()


def test_an_answer_takes_as_long_as_on_the_device_that_is_played(paced):
    complete(paced, max_tokens=1)  # whatever happens once
    began = time.monotonic()
    answer = complete(paced, max_tokens=21, ignore_eos=True)
    took = time.monotonic() - began
    assert answer.status == 200
    assert answer.json["usage"]["completion_tokens"] == 21
    assert answer.json["model"] == "qwen3-30b-a3b"
    assert took > 21 * DECODE_S * 0.95
    assert "paced:h20" in paced.text


def test_the_same_prompt_has_the_same_answer_and_its_prefix_is_found(paced):
    asked = {"prompt": "def f(x):\n    return x\n" * 12, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    first = complete(paced, **asked)
    texts = {complete(paced, **asked).json["choices"][0]["text"] for _ in range(4)}
    assert texts == {first.json["choices"][0]["text"]}
    wait_until(lambda: is_idle(paced))
    assert sum(engine["num_hit_tokens"] for engine in load(paced)) > 0


def test_without_arithmetic_no_process_loads_torch(paced):
    complete(paced, max_tokens=1)
    mapped = [Path(f"/proc/{rank.pid}/maps").read_text() for rank in paced.ranks()]
    assert mapped
    assert all(("libtorch" in maps) == (paced.arithmetic == "demo") for maps in mapped)


def test_log_probabilities_can_be_asked_for(paced):
    answer = complete(paced, max_tokens=3, logprobs=1, echo=True, ignore_eos=True)
    assert len(answer.json["choices"][0]["logprobs"]["token_logprobs"]) > 3
    assert call(paced, "GET", "/health").status == 200


def run_rank(device, **sampling):
    """Times and tokens of one request, on a clock that goes from result to result."""
    rank, now_ns, found = build_rank(BOUNDS, device), 0, []
    rank.add(make_request("r", range(5), **sampling), now_ns)
    while rank.has_work:
        outputs = rank.step(now_ns)
        found += [(now_ns, token) for output in outputs for token in output.token_ids]
        ready_ns = rank.ready_at_ns()
        now_ns = now_ns if ready_ns is None else ready_ns
    return found


@pytest.mark.parametrize("answers", [FixedAnswers, lambda: NetworkAnswers(KvDevice(64, 4))], ids=["fixed", "network"])
def test_each_step_ends_at_its_price(answers):
    found = run_rank(PacedDevice(COST, answers()), max_tokens=4)
    prefill = COST.step_ns(Batch(np.array([0]), np.array([5])))
    decodes = [COST.step_ns(Batch(np.array([start]), np.array([1]))) for start in (5, 6, 7)]
    assert [at_ns for at_ns, _ in found] == np.cumsum([prefill, *decodes]).tolist()


def test_a_network_s_tokens_are_passed_on():
    plain = [token for _, token in run_rank(KvDevice(64, 4), max_tokens=6)]
    assert [token for _, token in run_rank(PacedDevice(COST, NetworkAnswers(KvDevice(64, 4))), max_tokens=6)] == plain


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": "paced:abacus"}, "no constants for GPU 'abacus'"),
        ({"device": "paced:h20", "network": "gpt-5"}, "no sizes for network 'gpt-5'"),
        ({"device": "paced:table.json", "arithmetic": "none"}, "a GPU and a network by name"),
    ],
)
def test_a_device_that_nobody_knows_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        PacedSettings(**given)


def test_a_record_of_the_server_can_be_replayed_under_another_policy(tmp_path, capsys):
    record = tmp_path / "record.jsonl"
    flags = ("--device", "paced:h20", "--paced-arithmetic", "none", "--engines", "2", "--record", str(record))
    server = Running((*REAL, *flags), tmp_path)
    try:
        for i in range(6):
            complete(server, prompt="def f(x):\n    return x\n" * (1 + i), max_tokens=5)
        assert complete(server, prompt="", max_tokens=-1).status == 400, "what is refused is in no record"
        assert server.stop() == 0
    finally:
        server.kill()
    read = read_request_record(record)
    assert [request.num_output_tokens for request in read.requests] == [5] * 6
    assert {request.engine for request in read.requests} == {0, 1}
    for request in read.requests:
        assert request.arrival_ns <= request.admitted_ns < request.first_token_ns < request.last_token_ns
        assert len(request.block_hashes) == request.num_prompt_tokens // 16 * 16
    with pytest.raises(SystemExit):
        main(["sim", "--replay", str(record), "--policy", "lmetric"])
    said = capsys.readouterr().out
    assert "Under lmetric (simulated):" in said
    assert "6 requests recorded under least_loaded" in said
