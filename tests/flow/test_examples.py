"""The policies of `examples/` do what they say, in fewer than 50 lines, and change no token."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.fake_device import make_request
from support.fake_stages import FakeStages, expected_tokens, make_shape
from support.running import EXACT, REAL, Running, complete

from moestro.config.user_files import read_user_code
from moestro.core.policy_registry import PolicyKind
from moestro.core.request import ServiceClass
from moestro.core.views import StepFunction
from moestro.engine.rank import build_preemptive_rank
from moestro.engine.settings import SchedulerSettings
from moestro.flow.policies.one_queue import in_order

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def accepts_files_of_users(monkeypatch):
    """What every command does when it starts, and what another test of this process may have done or not."""
    monkeypatch.setattr(PolicyKind, "read_user_code", read_user_code)


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


def serve(policy) -> FakeStages:
    """Six requests under `policy`, to their ends; the device."""
    device = FakeStages(make_shape(96), 64, 4)
    bounds = SchedulerSettings(num_blocks=64, block_size=4, max_model_len=32, max_num_seqs=8, max_num_batched_tokens=48)
    rank, tokens = build_preemptive_rank(bounds, device, policy), {}
    requests = [make_request(f"r{i}", np.arange(3 + i) * 5 % 50, max_tokens=6) for i in range(6)]
    for request in requests:
        rank.add(request, 0)
    for now_ns in range(3000):
        for output in rank.step(now_ns):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert not rank.has_work
    assert tokens == {request.request_id: expected_tokens(request, device.shape) for request in requests}
    return device


@pytest.mark.parametrize("min_tokens", [1, 6, 1000])
def test_selective_experts_change_no_token_and_starve_none(min_tokens):
    module = load("selective_experts")
    serve(module.SelectiveExperts(frozenset({0, 1}), min_tokens=min_tokens, max_wait_ns=10**9))


def test_selective_experts_run_what_is_at_hand_first():
    module = load("selective_experts")
    chosen = []
    policy = module.SelectiveExperts(frozenset({0, 1}), min_tokens=1000, max_wait_ns=10**9)

    @StepFunction
    def watched(view, now_ns):
        run = policy(view, now_ns)
        chosen.append((run.group, view.runnable[:, :, [0, 1, 2]].any()))
        return run

    serve(watched)
    fetched = [at_hand for group, at_hand in chosen if group > 2]
    assert fetched
    assert not any(fetched), "an expert was fetched while another could run"


def requests_for_scarce_kv() -> list:
    """Two of best effort, long and short, and one that is urgent; each has a prompt and 40 tokens to say."""
    requests = []
    for name, length, service_class in (("long", 90, "be"), ("short", 8, "be"), ("urgent", 60, "ls")):
        request = make_request(name, np.arange(length) * 7 % 50, max_tokens=40)
        requests.append(msgspec.structs.replace(request, service_class=ServiceClass(service_class)))
    return requests


@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_offloaded_kv_makes_way_comes_back_and_is_not_computed_again(num_host_blocks):
    """The long one makes way for the urgent one, and has no token computed twice where host memory keeps it."""
    device = FakeStages(make_shape(256), 48, 4, num_host_blocks=num_host_blocks)
    bounds = SchedulerSettings(
        num_blocks=48,
        num_host_blocks=num_host_blocks,
        block_size=4,
        max_model_len=160,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        scheduling_policy="qllm",
        evict_policy=f"{EXAMPLES / 'offload_kv.py'}:OffloadKV",
    )
    rank, tokens, preempted = build_preemptive_rank(bounds, device, in_order), {}, set()
    requests = requests_for_scarce_kv()
    for now_ns in range(600):
        if requests and now_ns in (0, 1, 20):
            request = requests.pop(0)
            rank.add(request, now_ns)
            tokens[request.request_id] = []
        for output in rank.step(now_ns):
            tokens[output.request_id].extend(output.token_ids)
        preempted |= {name for name, sequence in rank.scheduler.by_id.items() if sequence.num_preemptions}
        rank.scheduler.check()
    assert not rank.has_work
    all_requests = requests_for_scarce_kv()
    assert tokens == {request.request_id: expected_tokens(request, device.shape) for request in all_requests}
    stats = rank.stats()
    assert stats.num_kept_tokens == stats.num_restored_tokens
    computed, least = rank.expert_counts.sum(1).max(), sum(request.num_total_tokens - 1 for request in all_requests)
    if num_host_blocks:
        assert preempted == {"long"}
        assert stats.num_kept_tokens > 90
        assert computed == least * device.shape.num_chosen
    else:
        assert stats.num_kept_tokens == 0
        assert computed > least * device.shape.num_chosen


def command_of(name: str) -> list[str]:
    """The flags of the command in the docstring of an example."""
    [line] = [
        line for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if line.startswith("    moestro serve")
    ]
    return [str(ROOT / word) if word.startswith("examples/") else word for word in line.split()[2:]]


@pytest.mark.parametrize("name", ["offload_kv", "selective_experts"])
def test_the_command_of_an_example_starts_a_server_that_answers(name, tmp_path):
    server = Running((*REAL, *EXACT, *command_of(name)), tmp_path)
    try:
        answer = complete(server, prompt="def read_file(path):\n", max_tokens=8, temperature=0)
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["completion_tokens"] == 8
        assert server.stop() == 0
    finally:
        server.kill()


@pytest.mark.parametrize("name", ["offload_kv", "selective_experts"])
def test_an_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 50
