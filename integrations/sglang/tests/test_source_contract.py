"""SGLang's source as the installed version has it, read and not run; skipped where SGLang is not installed.

`pip install --no-deps sglang` is enough for these tests: none of them imports SGLang.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest
from moestro_sglang import interface, waiting_order
from moestro_sglang.rank_choice import RankLoad

from moestro.planner.systems import RunLimits, ServerLaunch, system_named

if importlib.util.find_spec("sglang") is None:
    pytest.skip(
        "SGLang is not installed; integrations/sglang/README.md says how to run these tests", allow_module_level=True
    )
ROOT = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]).parent


@cache
def module(name: str) -> ast.Module:
    path = ROOT / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def definition(dotted: str) -> ast.AST:
    """Return the class or function of a dotted name."""
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:split])
        if (folder.is_dir() and (folder / "__init__.py").exists()) or folder.with_suffix(".py").exists():
            found: ast.AST = module(".".join(parts[:split]))
            for part in parts[split:]:
                named = [
                    node
                    for node in ast.walk(found)
                    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part
                ]
                assert named, f"SGLang has no {dotted}"
                found = named[0]
            return found
    raise AssertionError(f"SGLang has no module of {dotted}")


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """Return the calls of anything that is named `name` within a node."""
    return [
        call
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and name in (getattr(call.func, "attr", None), getattr(call.func, "id", None))
    ]


def attributes_set(node: ast.AST) -> set[str]:
    """Return the names that a node assigns to as attributes or annotates as fields."""
    targets = {
        each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    }
    fields = {
        each.target.id for each in ast.walk(node) if isinstance(each, ast.AnnAssign) and hasattr(each.target, "id")
    }
    return targets | fields


@pytest.mark.parametrize("target", interface.ARGUMENTS)
def test_each_hooked_name_takes_the_arguments_that_the_hook_expects(target):
    found = definition(target)
    names = [each.arg for each in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
    assert tuple(name for name in names if name != "cls") == interface.ARGUMENTS[target]
    assert found.args.vararg is None
    assert found.args.kwarg is None


def test_reports_of_ranks_have_the_fields_that_the_choice_reads():
    fields = attributes_set(definition(interface.SNAPSHOT))
    assert fields >= interface.SNAPSHOT_FIELDS
    assert set(RankLoad.__annotations__) == interface.SNAPSHOT_FIELDS


def test_requests_have_the_attributes_that_the_order_reads():
    request = definition("sglang.srt.managers.schedule_batch.Req")
    wanted = set(waiting_order.SglangRequest.__annotations__) | {"num_matched_prefix_tokens"}
    assert wanted <= attributes_set(request)
    assert definition("sglang.srt.managers.schedule_batch.Req.finished")
    assert "custom_params" in attributes_set(definition("sglang.srt.sampling.sampling_params.SamplingParams"))


def test_a_schedule_policy_has_the_attributes_that_the_order_reads():
    found = attributes_set(definition(interface.INIT_ORDER))
    assert found >= {"policy", "tree_cache", "enable_priority_scheduling", "priority_sign"}


def test_the_scheduler_sorts_before_it_forms_a_batch_of_prompts():
    scheduler = definition("sglang.srt.managers.scheduler.Scheduler")
    where = [
        function.name
        for function in ast.walk(scheduler)
        if isinstance(function, ast.FunctionDef) and calls(function, "calc_priority")
    ]
    assert where


@pytest.mark.parametrize(
    "function",
    [
        "sglang.srt.managers.scheduler.run_scheduler_process",
        "sglang.srt.managers.data_parallel_controller.run_data_parallel_controller_process",
        "sglang.srt.entrypoints.engine.Engine",
    ],
)
def test_sglang_loads_plugins_in_each_process_that_a_hook_needs(function):
    assert calls(definition(function), "load_plugins")


def test_the_balancer_of_experts_is_called_by_keyword_from_the_module():
    (call,) = calls(
        definition("sglang.srt.eplb.expert_location.ExpertLocationMetadata.init_by_eplb"), "rebalance_experts"
    )
    assert isinstance(call.func, ast.Attribute)  # so that the hook on the module is seen
    assert [each.arg for each in call.keywords] == list(interface.ARGUMENTS[interface.REBALANCE])
    metadata = definition("sglang.srt.eplb.expert_location.ExpertLocationMetadata")
    assert "physical_to_logical_map_cpu" in attributes_set(metadata)


def test_algorithms_that_know_of_failed_ranks_have_the_name_that_the_hook_leaves_alone():
    algorithms = definition("sglang.srt.eplb.eplb_algorithms.EplbAlgorithm")
    names = {each.id for each in ast.walk(algorithms) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    reads_ranks = {name for name in names if name.startswith("elasticity")}
    assert reads_ranks
    assert names - reads_ranks == {"deepseek", "deepseek_hierarchical", "deepseek_vec", "deepseek_vec_hierarchical"}


def test_records_of_times_copy_an_attribute_that_the_class_has():
    source = ast.unparse(definition("sglang.srt.observability.req_time_stats.ReqTimeStatsBase.new_from_obj"))
    assert "obj.__dict__.items()" in source
    assert "hasattr(new_obj, key)" in source
    state = ast.unparse(definition("sglang.srt.observability.req_time_stats.ReqTimeStatsBase.__setstate__"))
    assert "key.endswith('time')" in state  # which SGLang converts from clock to clock
    assert not waiting_order.ARRIVAL.endswith("time")


def test_the_controller_reads_loads_before_it_dispatches_by_tokens():
    controller = definition("sglang.srt.managers.data_parallel_controller.DataParallelController")
    assert calls(definition("sglang.srt.managers.data_parallel_controller.DataParallelController.refresh_load_budget"),
                 "update_budget")  # fmt: skip
    assert attributes_set(controller) >= {"dp_budget", "workers", "status", "refresh_load_budget_on_dispatch"}
    budget = calls(controller, "DPBudget")
    assert len(budget) == 1


def test_commands_of_moestro_plan_have_flags_of_the_installed_version():
    launch = ServerLaunch(
        model="m", mode="ep-overlap", gpus_per_server=16, tensor_parallel_size=2, num_redundant_experts=16,
        limits=RunLimits(max_num_seqs=8, max_num_batched_tokens=256), max_model_len=512, block_size=16, num_blocks=9,
        memory_share=0.8, caches_prefixes=False,
    )  # fmt: skip
    system = system_named("sglang")
    assert system.flags.source == "installed package"
    assert len(system.commands(launch)) == 2
