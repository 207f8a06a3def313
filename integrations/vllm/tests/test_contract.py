"""vLLM's interface as the installed version has it; skipped where vLLM is not installed.

Run them in an environment with vLLM: `python -m pytest integrations/vllm/tests`.
"""

from __future__ import annotations

import importlib.metadata
import logging
import time

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; integrations/vllm/README.md says how to run these tests")

import moestro_vllm
import torch
from moestro_vllm import interface
from moestro_vllm.plugin import PLACEMENT, register
from moestro_vllm.schedulers import PolicyRequestQueue, PolicyScheduler
from vllm.config.scheduler import SchedulerConfig
from vllm.distributed.eplb import policy as vllm_eplb
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from moestro.engine.registry import ORDER_POLICIES


def request(name: str, length: int, arrival_s: float | None = None, **xargs: object) -> Request:
    sampling = SamplingParams(max_tokens=4, extra_args=xargs or None)
    return Request(name, list(range(length)), sampling, None, arrival_time=arrival_s)


def test_the_installed_version_is_one_that_was_tested(caplog):
    with caplog.at_level(logging.WARNING):
        interface.check_scheduler_interface()
        interface.check_eplb_interface()
    assert not [record for record in caplog.records if record.name == interface.__name__]
    assert interface.vllm_version().startswith(interface.TESTED)


@pytest.mark.parametrize("name", moestro_vllm.SCHEDULER_CLASSES)
def test_vllm_finds_each_class_by_its_name_and_keeps_scheduling_asynchronously(name):
    config = SchedulerConfig.default_factory(scheduler_cls=f"moestro_vllm.{name}")
    found = config.get_scheduler_cls()
    assert issubclass(found, AsyncScheduler)
    assert found.order in ORDER_POLICIES.names()


def test_our_queue_is_a_complete_queue_of_vllm():
    queue = PolicyRequestQueue(ORDER_POLICIES.make("sjf"), time.time_ns)
    assert isinstance(queue, RequestQueue)
    requests = [request("a", 90), request("b", 10), request("c", 50)]
    for each in requests:
        queue.add_request(each)
    assert [each.request_id for each in queue] == ["b", "c", "a"]
    assert queue.peek_request() is queue.pop_request()
    queue.prepend_requests([requests[1]])
    queue.remove_requests({requests[0], requests[2]})
    assert [each.request_id for each in queue] == ["b"]


def test_a_request_of_vllm_has_what_a_policy_reads():
    now_s = time.time()
    late = request("late", 10, now_s - 60, service_class="be", user="ann")
    queue = PolicyRequestQueue(ORDER_POLICIES.make("edf"), time.time_ns)
    for each in (late, request("soon", 10, now_s - 50, service_class="ls")):
        queue.add_request(each)
    assert [each.request_id for each in queue] == ["soon", "late"]
    assert late.num_tokens - late.num_prompt_tokens == 0
    assert late.skip_reading_prefix_cache is False


def test_vllms_scheduler_still_has_the_methods_that_ours_extends():
    for name in interface.SCHEDULER_METHODS:
        assert callable(getattr(AsyncScheduler, name))
        assert getattr(PolicyScheduler, name) is not getattr(AsyncScheduler, name)


@pytest.fixture
def placement(monkeypatch):
    """Register a placement as vLLM's plugin loader does, and put vLLM's own back afterwards."""
    own = dict(vllm_eplb.EPLB_POLICIES)

    def put(name: str) -> type:
        monkeypatch.setenv(PLACEMENT, name)
        register()
        return vllm_eplb.EPLB_POLICIES["default"]

    yield put
    vllm_eplb.EPLB_POLICIES.update(own)


@pytest.mark.parametrize("name", ["eplb", "moestro"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_a_placement_answers_as_vllms_own_does(placement, name, dtype):
    policy = placement(name)
    assert issubclass(policy, vllm_eplb.AbstractEplbPolicy)
    rng = np.random.default_rng(3)
    load = torch.from_numpy(rng.integers(0, 5000, (3, 16))).to(dtype)
    old = (torch.arange(24) % 16).repeat(3, 1)
    ours = policy.rebalance_experts(load, 24, 1, 2, 8, old)
    theirs = vllm_eplb.DefaultEplbPolicy.rebalance_experts(load, 24, 1, 2, 8, old)
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    assert all(set(row) == set(range(16)) for row in ours.tolist())


def test_without_the_variable_vllm_keeps_its_own_placement(monkeypatch):
    monkeypatch.delenv(PLACEMENT, raising=False)
    register()
    assert {"default": vllm_eplb.DefaultEplbPolicy} == vllm_eplb.EPLB_POLICIES


def test_vllm_finds_the_plugin():
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="moestro")
    if not found:
        pytest.skip("moestro-vllm is not installed here, only on the path")
    assert next(iter(found)).load() is register
