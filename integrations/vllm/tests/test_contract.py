"""vLLM's interface as the installed version has it; skipped where vLLM is not installed.

Run them in an environment with vLLM: `python -m pytest integrations/vllm/tests`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; integrations/vllm/README.md says how to run these tests")

import moestro_vllm
import torch
from moestro_vllm import eplb_policy, interface
from moestro_vllm.plugin import PLACEMENT, START_FILE, register
from moestro_vllm.schedulers import PolicyRequestQueue, PolicyScheduler
from moestro_vllm.stall_alarm import StallAlarm
from vllm.config.scheduler import SchedulerConfig
from vllm.distributed.eplb import policy as vllm_eplb
from vllm.distributed.eplb.eplb_state import EplbModelState, EplbState
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from moestro.engine.hosted_order import HostOrder, host_order
from moestro.engine.registry import ORDER_POLICIES
from moestro.planner.systems import flag_list


def request(name: str, length: int, arrival_s: float | None = None, priority: int = 0, **xargs: object) -> Request:
    sampling = SamplingParams(max_tokens=4, extra_args=xargs or None)
    return Request(name, list(range(length)), sampling, None, arrival_time=arrival_s, priority=priority)


def ordered(policy: str, be_priority: int | None = None, *, reads_priority: bool = False) -> HostOrder:
    return host_order(policy, be_priority, reads_priority=reads_priority)


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
    queue = PolicyRequestQueue(ordered("sjf"), time.time_ns)
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
    queue = PolicyRequestQueue(ordered("edf"), time.time_ns)
    for each in (late, request("soon", 10, now_s - 50, service_class="ls")):
        queue.add_request(each)
    assert [each.request_id for each in queue] == ["soon", "late"]
    assert late.num_tokens - late.num_prompt_tokens == 0
    assert late.skip_reading_prefix_cache is False


def test_the_priority_of_a_request_of_vllm_is_a_level_or_a_class():
    requests = [request("a", 5, 1.0, 3), request("b", 90, 2.0, 0), request("c", 9, 3.0, 0)]
    for order, names in (
        (ordered("sjf", reads_priority=True), "cba"),
        (ordered("qllm", 3, reads_priority=True), "bca"),
    ):
        queue = PolicyRequestQueue(order, lambda: 4_000_000_000)
        for each in requests:
            queue.add_request(each)
        assert "".join(each.request_id for each in queue) == names


def test_vllms_scheduler_still_has_the_methods_that_ours_extends():
    for name in interface.SCHEDULER_METHODS:
        assert callable(getattr(AsyncScheduler, name))
        assert getattr(PolicyScheduler, name) is not getattr(AsyncScheduler, name)


@pytest.fixture
def placement(monkeypatch):
    """Register a placement as vLLM's plugin loader does, and put vLLM's own back afterwards."""
    own = dict(vllm_eplb.EPLB_POLICIES)
    methods = {name: vars(EplbState)[name] for name in interface.EPLB_STATE_METHODS}

    def put(name: str, **variables: str) -> type:
        monkeypatch.setenv(PLACEMENT, name)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        register()
        return vllm_eplb.EPLB_POLICIES["default"]

    yield put
    vllm_eplb.EPLB_POLICIES.update(own)
    for name, method in methods.items():
        setattr(EplbState, name, method)


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


def test_a_placement_that_fails_is_replaced_by_vllms_own(placement):
    policy = placement("eplb")
    load = torch.full((2, 8), float("nan"))
    old = torch.arange(8).repeat(2, 1)
    own = vllm_eplb.DefaultEplbPolicy.rebalance_experts(load, 8, 1, 1, 2, old)
    assert policy.rebalance_experts(load, 8, 1, 1, 2, old).tolist() == own.tolist()


def test_sizes_may_come_by_name(placement):
    policy = placement("eplb")
    load, old = torch.arange(16).reshape(2, 8), torch.arange(8).repeat(2, 1)
    named = dict(zip(interface.EPLB_ARGUMENTS[2:], (1, 1, 2, old), strict=True))
    given = policy.rebalance_experts(load, 8, 1, 1, 2, old)
    assert policy.rebalance_experts(load, 8, **named).tolist() == given.tolist()


def test_a_state_that_does_not_show_its_moves_ends_no_step():
    reports: list[str] = []
    watched = eplb_policy._watched(lambda _state: None, StallAlarm(1.0, reports.append))
    for _ in range(2):
        watched(SimpleNamespace())
    assert len(reports) == 1
    assert reports[0].startswith("no alarm watches the moves of experts: this vLLM does not show whether experts move")


def test_a_start_file_is_vllms_first_placement_and_a_second_registration_changes_nothing(placement, tmp_path):
    row = [3, 2, 1, 0, 3, 3]
    (tmp_path / "start.json").write_text(json.dumps({"physical_to_logical_map": [row, row]}))
    policy = placement("eplb", **{START_FILE: str(tmp_path / "start.json")})
    assert EplbState.build_initial_global_physical_to_logical_map(4, 2) == row
    step = EplbState.step
    register()
    assert vllm_eplb.EPLB_POLICIES["default"] is policy
    assert EplbState.step is step


def test_the_alarm_reads_what_vllms_state_has(placement, caplog):
    placement("eplb", MOESTRO_VLLM_STALL_S="1")
    assert "rebalanced" in EplbModelState.__dataclass_fields__
    state = EplbState(SimpleNamespace(), torch.device("cpu"))
    assert (state.async_worker, state.model_states) == (None, {})
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    state.async_worker = ended
    steps: list[object] = []
    watched = eplb_policy._watched(lambda _state, *args: steps.append(args), StallAlarm(1.0, steps.append))
    watched(state, True)
    assert steps[0] == (True,)
    assert "has ended" in steps[1]


@dataclass
class Plan:
    physical_to_logical_map: torch.Tensor


@pytest.mark.parametrize("name", ["plan_rebalance", "rebalance_experts"])
def test_the_hook_that_is_proposed_upstream_gets_a_plan(placement, monkeypatch, name):
    """A context and a plan with the fields of vLLM's pull request 49700, which no release has."""
    monkeypatch.setattr(vllm_eplb, "EplbPlan", Plan, raising=False)
    present = (torch.arange(24) % 16).repeat(3, 1)
    window = torch.from_numpy(np.random.default_rng(2).integers(0, 50, (20, 3, 16)))
    context = SimpleNamespace(
        load_window_cpu=window,
        physical_to_logical_map_cpu=present,
        topology=SimpleNamespace(num_groups=1, num_nodes=1, num_ranks=8),
        num_replicas=24,
        cpu_group=None,
    )
    plan = getattr(placement("moestro")(), name)(context, object())
    assert isinstance(plan, Plan)
    assert (plan.physical_to_logical_map.dtype, plan.physical_to_logical_map.shape) == (torch.int64, (3, 24))
    assert all(set(row) == set(range(16)) for row in plan.physical_to_logical_map.tolist())


def test_without_the_variable_vllm_keeps_its_own_placement(monkeypatch):
    monkeypatch.delenv(PLACEMENT, raising=False)
    register()
    assert {"default": vllm_eplb.DefaultEplbPolicy} == vllm_eplb.EPLB_POLICIES


def test_vllm_finds_the_plugin():
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="moestro")
    if not found:
        pytest.skip("moestro-vllm is not installed here, only on the path")
    assert next(iter(found)).load() is register


def test_the_flags_that_moestro_plan_reads_from_the_sources_are_those_of_the_parser():
    """Deprecated flags and `--help` are left out of them."""
    modules = ("common", "launchers", "openai")
    found = (importlib.util.find_spec(f"vllm.entrypoints.{name}.cli_args") for name in modules)
    module = importlib.import_module(next(spec.name for spec in found if spec is not None))
    actions = module.make_arg_parser(FlexibleArgumentParser())._actions
    real = {name for action in actions for name in action.option_strings if name.startswith("--")}
    read = {name for name in flag_list("vllm").names if name.startswith("--")}
    assert read <= real
    assert len([name for name in real - read if not name.startswith("--no-")]) <= 5
