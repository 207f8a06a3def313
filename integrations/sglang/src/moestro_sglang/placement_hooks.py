"""The hook of SGLang's expert-parallel load balancer, which asks one of Moestro's placement policies."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moestro.placement.hosted import HostLoad, HostSizes, HostVariables, Int64s, Planner, or_else, planner_from
from moestro.workload.experts.expert_profile import read_profile_file
from moestro_sglang.interface import ARGUMENTS, REBALANCE

PREFIX = "MOESTRO_SGLANG_"


def placement_hooks(text: str, environment: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    """Return the hook of a placement policy by its target, with its kind.

    Raises:
        ConfigError: A variable has a wrong value; the text names it.
    """
    planner = planner_from(text, HostVariables(PREFIX, environment), read_profile_file)
    return {REBALANCE: ("AROUND", _rebalance(planner))}


def _rebalance(planner: Planner) -> Callable[..., Any]:
    def rebalance_experts(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Place experts. Where ranks have failed, SGLang's own algorithm places them, because it knows which."""
        question = dict(zip(ARGUMENTS[REBALANCE], args, strict=False)) | kwargs
        if question["algorithm"].name.startswith("elasticity"):
            return original(*args, **kwargs)
        torch = importlib.import_module("torch")
        own: list[Any] = []

        def placed_by_sglang() -> Int64s:
            own.append(original(*args, **kwargs))
            return np.empty((0, 0), np.int64)

        placed = or_else(lambda: _place(planner, question), placed_by_sglang)
        if own:
            return own[0]
        num_experts = question["tokens_per_expert"].shape[-1]
        return tuple(torch.from_numpy(each) for each in (placed, *slots_by_expert(placed, num_experts)))

    return rebalance_experts


def _place(planner: Planner, question: Mapping[str, Any]) -> Int64s:
    """Return int64[layers, slots], the expert in each slot."""
    num_slots = question["num_physical_experts"]
    num_ranks = num_slots // question["num_local_physical_experts"]
    sizes = HostSizes(num_slots, question["num_groups"] or 1, question["num_nodes"], num_ranks)
    interval = importlib.import_module("sglang.srt.runtime_context").get_exec().moe.eplb_rebalance_num_iterations
    load = load_of(question["tokens_per_expert"].cpu().numpy(), interval)
    present = importlib.import_module("sglang.srt.eplb.expert_location").get_global_expert_location_metadata()
    old = None if present is None else present.physical_to_logical_map_cpu.numpy()
    return planner.place(load, sizes, old, interval)


def load_of(counts: Any, interval: int) -> HostLoad:
    """Make the load of SGLang's counts.

    Args:
        counts: [steps, layers, experts], tokens of each step. One step is the sum of an interval, as in a file of
            `--init-expert-location`.
        interval: Steps of an interval.
    """
    return HostLoad.of_sum(counts[0], interval) if len(counts) == 1 else HostLoad.of_steps(counts)


def slots_by_expert(placed: Int64s, num_experts: int) -> tuple[Int64s, Int64s]:
    """Return int64[layers, experts, most copies], the slots of each expert padded with -1, and their number."""
    num_layers, num_slots = placed.shape
    counts = np.stack([np.bincount(row, minlength=num_experts) for row in placed]).astype(np.int64)
    slots = np.full((num_layers, num_experts, int(counts.max())), -1, np.int64)
    by_expert = np.argsort(placed, axis=1, kind="stable")
    experts = np.take_along_axis(placed, by_expert, axis=1)
    firsts = np.cumsum(counts, axis=1) - counts
    copies = np.arange(num_slots) - np.take_along_axis(firsts, experts, axis=1)
    slots[np.arange(num_layers)[:, None], experts, copies] = by_expert
    return slots, counts
