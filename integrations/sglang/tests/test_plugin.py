"""The plug-in's registration and messages without SGLang, and the answer to its balancer of experts."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from moestro_sglang import interface, order_hooks, placement_hooks, plugin, rank_hooks
from moestro_sglang.interface import SglangInterfaceError
from moestro_sglang.placement_hooks import load_of, slots_by_expert

from moestro.errors import ConfigError

VARIABLES = ("MOESTRO_SGLANG_ORDER", "MOESTRO_SGLANG_PLACEMENT", "MOESTRO_SGLANG_DP_POLICY")


@pytest.fixture(autouse=True)
def without_variables(monkeypatch):
    for name in (*VARIABLES, order_hooks.BE_PRIORITY):
        monkeypatch.delenv(name, raising=False)


def test_an_idle_plugin_loads_nothing():
    code = (
        "import sys, moestro_sglang.plugin as p; p.register();"
        "print([m for m in ('torch', 'sglang', 'numpy', 'moestro') if m in sys.modules])"
    )
    source = interface.__file__.rsplit("/moestro_sglang/", 1)[0]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source}, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MOESTRO_SGLANG_PLACEMENT", "best", "MOESTRO_SGLANG_PLACEMENT=best: unknown place policy 'best'; known: "),
        ("MOESTRO_SGLANG_DP_POLICY", "best", "MOESTRO_SGLANG_DP_POLICY=best: "),
        ("MOESTRO_SGLANG_ORDER", "lifo", "MOESTRO_SGLANG_ORDER=lifo: unknown scheduling_policy 'lifo'; known: "),
        ("MOESTRO_SGLANG_ORDER", "sjf:theta_age=2", "MOESTRO_SGLANG_ORDER=sjf:theta_age=2: .*has no setting"),
    ],
)
def test_a_wrong_value_ends_the_server_because_sglang_would_serve_without_the_plugin(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"moestro-sglang: {message}"):
        plugin.register()


def test_a_priority_of_the_class_without_an_order_that_reads_it_is_refused(monkeypatch):
    monkeypatch.setenv(order_hooks.BE_PRIORITY, "0")
    with pytest.raises(SystemExit, match="MOESTRO_SGLANG_BE_PRIORITY is read by an order policy: set MOESTRO_SGLANG_O"):
        plugin.register()


class Broken:
    """An order, and a choice of ranks, whose policy raises."""

    is_failing = False

    def sort(self, _requests: object) -> None:
        raise ZeroDivisionError("no order")

    def report(self, _loads: object, _now_ns: int) -> None:
        raise ZeroDivisionError("no report")

    def set_available(self, _ranks: object) -> None:
        raise ZeroDivisionError("no rank")


def test_an_exception_of_an_order_policy_leaves_sglangs_order_and_is_logged_once(caplog):
    waiting, policy = ["b", "a"], SimpleNamespace(moestro_order=Broken())
    for _ in range(3):
        order_hooks._sort(None, policy, waiting)
    assert waiting == ["b", "a"]
    assert [record.message.split(";")[0] for record in caplog.records] == ["Moestro cannot order the waiting requests"]


def test_an_exception_of_a_routing_policy_leaves_the_request_to_sglang(caplog):
    budget = SimpleNamespace(moestro_choice=Broken())
    for _ in range(2):
        rank_hooks._report(None, budget, [])
    controller = SimpleNamespace(
        maybe_external_dp_rank_routing=lambda req: False, dp_budget=budget, workers=["a"], status=[True]
    )
    sent: list[object] = []
    rank_hooks._choose(lambda _controller, req: sent.append(req), controller, "request")
    assert sent == ["request"]
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "Moestro cannot read the loads of the ranks",
        "Moestro chose no rank",
    ]


def test_a_priority_of_the_class_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="MOESTRO_SGLANG_BE_PRIORITY must be a whole number, got 'low'"):
        order_hooks.order_hooks("qllm", {"MOESTRO_SGLANG_BE_PRIORITY": "low"})


def test_without_sglang_the_message_says_so(monkeypatch):
    monkeypatch.setattr(interface, "sglang_version", lambda: None)
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(SglangInterfaceError, match="it needs SGLang, which is not installed: install SGLang 0"):
        interface.check_interface([interface.REBALANCE])


def stand_in(monkeypatch, version: str, **arguments: object) -> None:
    monkeypatch.setattr(interface, "sglang_version", lambda: version)
    monkeypatch.setattr(interface, "_named", lambda name: arguments.get(name.rpartition(".")[2], SimpleNamespace()))


def test_a_target_with_other_arguments_is_refused(monkeypatch):
    stand_in(monkeypatch, "0.6.1", rebalance_experts=lambda counts, algorithm: None)
    with pytest.raises(SglangInterfaceError) as caught:
        interface.check_interface([interface.REBALANCE])
    assert str(caught.value).startswith(
        "it cannot work with SGLang 0.6.1: sglang.srt.eplb.eplb_algorithms.rebalance_experts takes (counts, algorithm)"
        " and not (tokens_per_expert,"
    )
    assert "\n" not in str(caught.value)


def test_a_report_that_lacks_a_field_is_refused_and_an_untested_version_is_a_warning(monkeypatch, caplog):
    fields = tuple(interface.SNAPSHOT_FIELDS - {"token_usage"})
    stand_in(
        monkeypatch,
        "0.6.1",
        update_budget=lambda self, loads: None,
        LoadSnapshot=SimpleNamespace(__struct_fields__=fields),
        total_tokens_scheduler=lambda self, req: None,
    )
    with pytest.raises(SglangInterfaceError, match=r"LoadSnapshot has no token_usage"):
        interface.check_interface([interface.UPDATE_BUDGET])
    interface.check_interface([interface.CHOOSE_RANK])
    assert "tested with SGLang 0.5.23 and not with 0.6.1; its interface looks the same" in caplog.text


def test_slots_of_each_expert_are_listed_as_sglang_does():
    slots, counts = slots_by_expert(np.array([[2, 0, 1, 0], [1, 1, 2, 0]]), 3)
    assert counts.tolist() == [[2, 1, 1], [1, 2, 1]]
    assert slots.tolist() == [[[1, 3], [2, -1], [0, -1]], [[3, -1], [0, 1], [2, -1]]]


@pytest.mark.parametrize("seed", range(5))
def test_slots_of_each_expert_name_all_slots_once(seed):
    rng = np.random.default_rng(seed)
    placed = rng.integers(0, 6, (4, 20))
    slots, counts = slots_by_expert(placed, 6)
    for layer, row in enumerate(slots):
        for expert, found in enumerate(row):
            assert found[found >= 0].tolist() == np.flatnonzero(placed[layer] == expert).tolist()
            assert counts[layer, expert] == (found >= 0).sum()


def test_one_step_of_counts_is_the_sum_of_an_interval():
    summed = load_of(np.array([[[10, 20]]]), 10)
    assert (summed.tokens.tolist(), summed.num_steps) == ([[1.0, 2.0]], 10)
    stepwise = load_of(np.array([[[10, 20]], [[0, 20]]]), 10)
    assert (stepwise.variance.tolist(), stepwise.num_steps) == ([[25.0, 0.0]], 2)


def test_hooks_of_each_variable_are_on_checked_targets():
    assert set(placement_hooks.placement_hooks("eplb", {})) <= set(interface.ARGUMENTS)
    assert set(interface.NAMES) <= set(interface.ARGUMENTS)
