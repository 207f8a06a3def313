"""What an operator reads when vLLM is missing or has moved; stand-in modules play the part of vLLM."""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from types import ModuleType

import moestro_vllm
import pytest
from moestro_vllm import interface
from moestro_vllm.interface import EPLB_ARGUMENTS, QUEUE_METHODS, VllmInterfaceError


@pytest.fixture
def stand_in(monkeypatch):
    """Put modules under vLLM's names in the place of vLLM, and a version under its name."""

    def put(version: str, **modules: dict[str, object]) -> None:
        monkeypatch.setattr(interface, "vllm_version", lambda: version)
        for name, contents in modules.items():
            module = ModuleType(name)
            vars(module).update(contents)
            monkeypatch.setitem(
                sys.modules,
                {
                    "queue": interface._QUEUE,
                    "scheduler": interface._SCHEDULER,
                    "eplb": interface._EPLB,
                    "state": interface._EPLB_STATE,
                }[name],
                module,
            )

    return put


def queue_class(methods) -> type:
    return type("RequestQueue", (ABC,), {name: abstractmethod(lambda self: None) for name in methods})


class Scheduler:
    def schedule(self): ...

    def _free_request(self): ...


class EplbPolicy:
    def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices=None): ...


class EplbState:
    def step(self): ...

    def build_initial_global_physical_to_logical_map(num_routed_experts, num_redundant_experts): ...


def message_of(check) -> str:
    with pytest.raises(VllmInterfaceError) as caught:
        check()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_without_vllm_the_message_says_so(monkeypatch):
    monkeypatch.setattr(interface, "vllm_version", lambda: None)
    for name in (interface._QUEUE, interface._SCHEDULER, interface._EPLB):
        monkeypatch.setitem(sys.modules, name, None)
    for check in (interface.check_scheduler_interface, interface.check_eplb_interface):
        assert message_of(check).startswith("moestro-vllm needs vLLM, which is not installed: install vLLM 0.33")
    with pytest.raises(VllmInterfaceError):
        _ = moestro_vllm.SJF


def test_tested_versions_pass_without_a_word(stand_in, caplog):
    stand_in("0.33.0", queue={"RequestQueue": queue_class(QUEUE_METHODS)}, scheduler={"AsyncScheduler": Scheduler})
    policies = {"EPLB_POLICIES": {"default": EplbPolicy}, "AbstractEplbPolicy": EplbPolicy}
    stand_in("0.33.0", eplb=policies, state={"EplbState": EplbState})
    interface.check_scheduler_interface()
    interface.check_eplb_interface()
    assert not caplog.records


def test_another_version_with_the_same_interface_is_used_with_a_warning(stand_in, caplog):
    stand_in("0.40.1", queue={"RequestQueue": queue_class(QUEUE_METHODS)}, scheduler={"AsyncScheduler": Scheduler})
    interface.check_scheduler_interface()
    assert "tested with vLLM 0.32.x and 0.33.x and not with 0.40.1; its interface looks the same" in caplog.text


@pytest.mark.parametrize(
    ("methods", "difference"),
    [
        (QUEUE_METHODS | {"requeue"}, "also asks for requeue"),
        (QUEUE_METHODS - {"prepend_requests"}, "no longer has prepend_requests"),
    ],
)
def test_a_queue_with_other_methods_is_refused(stand_in, methods, difference):
    stand_in("0.40.1", queue={"RequestQueue": queue_class(methods)}, scheduler={"AsyncScheduler": Scheduler})
    assert message_of(interface.check_scheduler_interface) == (
        f"moestro-vllm cannot work with vLLM 0.40.1: vllm.v1.core.sched.request_queue.RequestQueue {difference};"
        " tested with 0.32.x and 0.33.x: install vLLM 0.33, or a later moestro-vllm, or leave out --scheduler-cls and"
        " MOESTRO_VLLM_PLACEMENT"
    )


def test_a_scheduler_without_a_method_or_an_attribute_is_refused(stand_in):
    stand_in("0.40.1", queue={"RequestQueue": queue_class(QUEUE_METHODS)}, scheduler={"AsyncScheduler": object})
    assert "AsyncScheduler has no _free_request, schedule;" in message_of(interface.check_scheduler_interface)
    assert "AsyncScheduler has no waiting;" in message_of(lambda: interface.check_scheduler(object()))


def test_a_module_that_is_gone_is_named(stand_in, monkeypatch):
    stand_in("0.40.1", scheduler={"AsyncScheduler": Scheduler})
    monkeypatch.setitem(sys.modules, interface._QUEUE, None)
    assert "vllm.v1.core.sched.request_queue.RequestQueue cannot be imported" in message_of(
        interface.check_scheduler_interface
    )


def test_an_eplb_table_or_policy_that_moved_is_refused(stand_in):
    stand_in("0.40.1", eplb={"EPLB_POLICIES": {"fast": EplbPolicy}, "AbstractEplbPolicy": EplbPolicy})
    assert "EPLB_POLICIES has no 'default', only ['fast'];" in message_of(interface.check_eplb_interface)
    other = type("Other", (), {"rebalance_experts": lambda load, ranks: None})
    stand_in("0.40.1", eplb={"EPLB_POLICIES": {"default": other}, "AbstractEplbPolicy": other})
    assert "rebalance_experts takes ('load', 'ranks');" in message_of(interface.check_eplb_interface)
    assert len(EPLB_ARGUMENTS) == 6
    stand_in("0.40.1", eplb={"EPLB_POLICIES": {"default": EplbPolicy}, "AbstractEplbPolicy": EplbPolicy})
    stand_in("0.40.1", state={"EplbState": type("EplbState", (), {"step": EplbState.step})})
    assert "EplbState has no build_initial_global_physical_to_logical_map;" in message_of(
        interface.check_eplb_interface
    )


@pytest.mark.parametrize("name", ["plan_rebalance", "rebalance_experts"])
def test_the_hook_that_is_proposed_upstream_passes_with_either_name(stand_in, name):
    policy = type("Policy", (), {name: lambda self, context, policy_state: None})
    policies = {"EPLB_POLICIES": {"default": policy}, "AbstractEplbPolicy": policy}
    stand_in("0.40.1", eplb={**policies, "EplbPlan": object}, state={"EplbState": EplbState})
    interface.check_eplb_interface()
    stand_in("0.40.1", eplb=policies, state={"EplbState": EplbState})
    with pytest.raises(VllmInterfaceError, match=r"eplb.policy.EplbPlan cannot be imported"):
        interface.check_eplb_interface()


def test_an_unknown_class_is_answered_with_the_known_ones():
    with pytest.raises(AttributeError, match="'LIFO'; scheduler classes: EDF, FCFS, QLLM, SJF, "):
        _ = moestro_vllm.LIFO


def test_neither_the_package_nor_an_idle_plugin_loads_anything_heavy():
    code = (
        "import sys, moestro_vllm.plugin as p; p.register();"
        "print([m for m in ('torch', 'vllm', 'numpy', 'moestro') if m in sys.modules])"
    )
    source = interface.__file__.rsplit("/moestro_vllm/", 1)[0]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source}, check=True
    )
    assert done.stdout.strip() == "[]"
