"""SGLang's own objects with the hooks applied by its own registry, as far as a CPU goes; skipped where it cannot load.

Run them in an environment with SGLang: `python -m pytest integrations/sglang/tests`.
"""

from __future__ import annotations

import importlib.metadata
import pickle
from array import array
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip(
    "sglang.srt.managers.schedule_policy",
    reason="SGLang cannot be imported; integrations/sglang/README.md says how to run these tests",
    exc_type=ImportError,
)

import torch
from moestro_sglang import interface, plugin
from moestro_sglang.waiting_order import ARRIVAL
from sglang.srt.eplb import eplb_algorithms, expert_location
from sglang.srt.eplb.eplb_algorithms import EplbAlgorithm
from sglang.srt.managers import data_parallel_controller as controller_module
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.observability import req_time_stats
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams

from moestro.errors import ConfigError

VARIABLES = ("MOESTRO_SGLANG_ORDER", "MOESTRO_SGLANG_PLACEMENT", "MOESTRO_SGLANG_DP_POLICY")
PATCHED = [
    (schedule_policy.SchedulePolicy, "__init__"),
    (schedule_policy.SchedulePolicy, "calc_priority"),
    (req_time_stats.APIServerReqTimeStats, "__getstate__"),
    (req_time_stats.DPControllerReqTimeStats, "__getstate__"),
    (controller_module.DPBudget, "__init__"),
    (controller_module.DPBudget, "update_budget"),
    (controller_module.DataParallelController, "total_tokens_scheduler"),
    (controller_module.LoadBalanceMethod, "from_str"),
    (eplb_algorithms, "rebalance_experts"),
]


@pytest.fixture
def hooked(monkeypatch):
    """Register the plug-in as SGLang does, apply its hooks, and take them out afterwards."""
    own = [(owner, name, vars(owner)[name]) for owner, name in PATCHED]
    for name in (*VARIABLES, "MOESTRO_SGLANG_BE_PRIORITY"):
        monkeypatch.delenv(name, raising=False)

    def hook(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(f"MOESTRO_SGLANG_{name}", value)
        plugin.register()
        HookRegistry.apply_hooks()
        assert not {target for target in HookRegistry._hooks if target not in HookRegistry._patched}

    yield hook
    HookRegistry.reset()
    for owner, name, value in own:
        setattr(owner, name, value)


def request(name: str, length: int, arrival_ns: int, priority: int | None = None, **params: object) -> Req:
    stats = req_time_stats.APIServerReqTimeStats()
    setattr(stats, ARRIVAL, arrival_ns)
    return Req(
        name,
        "",
        array("q", range(length)),
        SamplingParams(custom_params=params or None),
        priority=priority,
        time_stats=pickle.loads(pickle.dumps(stats)),
        vocab_size=1000,
    )


def policy(monkeypatch, name: str = "fcfs", *, by_priority: bool = False, low_first: bool = False):
    """Return a real policy beside a cache that holds nothing."""
    disagg = SimpleNamespace(disaggregation_mode="null")
    monkeypatch.setattr(schedule_policy, "get_disagg", lambda: disagg)
    monkeypatch.setattr(schedule_policy, "get_memory", lambda: SimpleNamespace(radix_eviction_policy="lru"))
    monkeypatch.setattr(schedule_policy.RadixCache, "create_simulated", staticmethod(lambda: None))
    cache = SimpleNamespace(
        disable=False, supports_fast_match_prefix=lambda: False, supports_prefix_sharing=lambda: False
    )
    return schedule_policy.SchedulePolicy(name, cache, False, by_priority, low_first)


def test_the_installed_version_is_one_that_was_tested(caplog):
    interface.check_interface(interface.ARGUMENTS)
    assert not [record for record in caplog.records if record.name == interface.__name__]
    assert interface.sglang_version().startswith(interface.TESTED)


def test_sglang_sorts_its_waiting_list_by_the_policy(hooked, monkeypatch):
    hooked(ORDER="sjf:theta_age_s=5")
    found = policy(monkeypatch)
    waiting = [request("a", 90, 10**9), request("b", 5, 2 * 10**9), request("c", 50, 3 * 10**9)]
    found.calc_priority(waiting)
    assert [each.rid for each in waiting] == ["b", "c", "a"]
    waiting.append(request("d", 1, 6 * 10**9))
    found.calc_priority(waiting, None, processed_tokens=3)
    assert [each.rid for each in waiting] == ["a", "d", "b", "c"]


def test_priorities_of_sglang_are_levels_above_the_policy_or_classes(hooked, monkeypatch):
    hooked(ORDER="sjf")
    waiting = [request("a", 9, 10**9, 0), request("b", 5, 2 * 10**9, 0), request("c", 90, 3 * 10**9, 7)]
    policy(monkeypatch, by_priority=True).calc_priority(waiting)
    assert [each.rid for each in waiting] == ["c", "b", "a"]


def test_a_class_of_sglangs_priority(hooked, monkeypatch):
    hooked(ORDER="qllm", BE_PRIORITY="-1")
    waiting = [
        request("a", 9, 10**9, -1),
        request("b", 5, 2 * 10**9, 0),
        request("c", 5, 3 * 10**9, service_class="be"),
    ]
    policy(monkeypatch, by_priority=False).calc_priority(waiting)
    assert [each.rid for each in waiting] == ["b", "a", "c"]


def test_another_policy_of_sglang_beside_the_order_is_refused(hooked, monkeypatch):
    hooked(ORDER="sjf")
    with pytest.raises(ConfigError, match="--schedule-policy lof does not go with MOESTRO_SGLANG_ORDER=sjf"):
        policy(monkeypatch, "lof")


def test_the_stamp_of_the_api_server_reaches_the_scheduler_through_the_controller(hooked):
    hooked(ORDER="fcfs")
    sent = req_time_stats.APIServerReqTimeStats()
    at_controller = pickle.loads(pickle.dumps(sent))
    passed_on = req_time_stats.DPControllerReqTimeStats.new_from_obj(at_controller)
    ranks = [req_time_stats.SchedulerReqTimeStats.new_from_obj(pickle.loads(pickle.dumps(passed_on))) for _ in range(2)]
    assert getattr(sent, ARRIVAL) > 10**18
    assert {getattr(each, ARRIVAL) for each in ranks} == {getattr(sent, ARRIVAL)}


def test_without_variables_sglang_stays_as_it_is(hooked):
    before = [vars(owner)[name] for owner, name in PATCHED]
    hooked()
    assert [vars(owner)[name] for owner, name in PATCHED] == before


@pytest.mark.parametrize("name", ["eplb", "moestro"])
def test_a_placement_answers_as_sglangs_own_does(hooked, monkeypatch, name):
    moe = SimpleNamespace(eplb_rebalance_num_iterations=1000)
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: SimpleNamespace(moe=moe))
    counts = torch.from_numpy(np.random.default_rng(3).integers(0, 5000, (20, 3, 16)))
    counts[:, 0] = 0  # a dense layer
    question = {
        "tokens_per_expert": counts, "num_physical_experts": 24, "num_local_physical_experts": 3,
        "num_groups": None, "num_nodes": 2, "algorithm": EplbAlgorithm.deepseek,
    }  # fmt: skip
    theirs = eplb_algorithms.rebalance_experts(**question)
    old = torch.arange(24).repeat(3, 1) % 16
    present = SimpleNamespace(physical_to_logical_map_cpu=old)
    monkeypatch.setattr(expert_location, "get_global_expert_location_metadata", lambda: present)
    hooked(PLACEMENT=name)
    ours = eplb_algorithms.rebalance_experts(**question)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.dtype, mine.device, mine.dim()) == (other.dtype, other.device, other.dim())
    assert all(set(row) == set(range(16)) for row in ours[0].tolist())
    assert ours[0][0].tolist() == old[0].tolist()
    assert ours[2].tolist() == [[row.count(expert) for expert in range(16)] for row in ours[0].tolist()]


def test_a_placement_that_fails_is_replaced_by_sglangs_own(hooked, monkeypatch):
    counts = torch.ones(5, 2, 8, dtype=torch.int64)
    question = (counts, 8, 4, None, 1, EplbAlgorithm.deepseek)
    theirs = eplb_algorithms.rebalance_experts(*question)

    def no_context() -> None:
        raise RuntimeError("no context")

    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", no_context)
    hooked(PLACEMENT="eplb")
    ours = eplb_algorithms.rebalance_experts(*question)
    assert [each.tolist() for each in ours] == [each.tolist() for each in theirs]


class Controller(controller_module.DataParallelController):
    """SGLang's controller without its processes."""

    def __init__(self, num_ranks: int) -> None:
        self.dp_budget = controller_module.DPBudget(num_ranks)
        self.workers = list(range(num_ranks))
        self.status = [True] * num_ranks
        self._active_workers = self.workers


def sent(name: str, tokens: list[int], rank: int | None = None, **params: object) -> SimpleNamespace:
    return SimpleNamespace(
        rid=name,
        input_ids=array("q", tokens),
        routed_dp_rank=rank,
        sampling_params=SamplingParams(custom_params=params),
    )


def test_the_controller_asks_the_policy_and_obeys_a_request_that_names_its_rank(hooked, monkeypatch):
    hooked(DP_POLICY="lmetric")
    found: list[int] = []
    monkeypatch.setattr(controller_module, "sock_send", lambda worker, req: found.append(worker))
    controller = Controller(3)
    prompts = [np.random.default_rng(seed).integers(0, 999, 640).tolist() for seed in range(3)]
    for tokens in (*prompts, prompts[0]):
        controller.total_tokens_scheduler(sent("r", tokens))
    assert sorted(found[:3]) == [0, 1, 2]
    assert found[3] == found[0]
    controller.total_tokens_scheduler(sent("r", prompts[0], rank=2))
    assert found[4] == 2
    controller.status = [False, True, False]
    controller.total_tokens_scheduler(sent("r", prompts[0]))
    assert found[5] == 1
    controller.status = [False] * 3
    controller.total_tokens_scheduler(sent("r", prompts[0]))  # SGLang decides
    assert len(found) == 7


def test_reports_of_ranks_reach_the_policy(hooked, monkeypatch):
    hooked(DP_POLICY="gimbal-v1")
    found: list[int] = []
    monkeypatch.setattr(controller_module, "sock_send", lambda worker, req: found.append(worker))
    controller = Controller(2)
    now_s = 1.7e9
    monkeypatch.setattr("moestro_sglang.rank_hooks.time.time_ns", lambda: int((now_s + 1) * 1e9))
    loads = [
        LoadSnapshot(timestamp=now_s, dp_rank=rank, num_running_reqs=1, token_usage=usage, max_total_num_tokens=9000)
        for rank, usage in enumerate((0.95, 0.2))
    ]
    controller.dp_budget.update_budget(loads)
    assert controller.dp_budget.total_requests == [1, 1]
    for _ in range(3):
        controller.total_tokens_scheduler(sent("r", [1, 2, 3]))
    assert found == [1, 1, 1]


def test_a_method_of_balancing_that_asks_no_policy_is_refused(hooked):
    hooked(DP_POLICY="moestro")
    assert controller_module.LoadBalanceMethod.from_str("total_tokens").name == "TOTAL_TOKENS"
    with pytest.raises(ConfigError, match="--load-balance-method round_robin does not go with"):
        controller_module.LoadBalanceMethod.from_str("round_robin")


def test_sglang_finds_the_plugin():
    found = importlib.metadata.entry_points(group="sglang.srt.plugins", name="moestro")
    if not found:
        pytest.skip("moestro-sglang is not installed here, only on the path")
    assert next(iter(found)).load() is plugin.register
