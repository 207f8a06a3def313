"""Memory of each GPU of a deployment: whether weights and the longest request fit, and what is left for KV."""

from __future__ import annotations

import msgspec

from moestro.cost.capacity import WORKSPACE_BYTES
from moestro.cost.networks import NetworkShape
from moestro.cost.tensor_parallel import network_share
from moestro.errors import ConfigError
from moestro.planner.divisions import GpuDivision, why_not_served
from moestro.planner.question import PlanQuestion

_GB = 1e9
_MOST_GPUS = 4096  # up to which `fewest_gpus` looks


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the GPUs of one deployment.

    Attributes:
        usable_gb: memory of a GPU that may be used.
        weights_gb: weights on a GPU with attention.
        expert_weights_gb: weights on a GPU with experts alone. None means that there is none.
        kv_gb: memory left for KV on a GPU with attention, beside the workspace; negative if something is missing.
        num_blocks: KV blocks of each engine.
        kv_tokens: tokens in them.
        why_not: reason why the deployment does not fit. None means that it fits.
    """

    usable_gb: float
    weights_gb: float
    expert_weights_gb: float | None
    kv_gb: float
    num_blocks: int
    kv_tokens: int
    why_not: str | None = None


def share_of(question: PlanQuestion, division: GpuDivision) -> NetworkShape:
    """Return the network as one GPU of the deployment computes it.

    Raises:
        ConfigError: tensor parallelism does not divide a size.
    """
    network = question.network
    if division.mode != "fused" or division.gpus_per_group == 1:
        return network
    return network_share(network, division.gpus_per_group)


def memory_of(question: PlanQuestion, division: GpuDivision) -> MemoryUse:
    """Compute the memory that a deployment uses."""
    usable = question.gpu.memory_bytes * question.settings.hardware.gpu_memory_utilization
    try:
        network = share_of(question, division)
    except ConfigError as error:
        return MemoryUse(
            usable_gb=usable / _GB, weights_gb=0.0, expert_weights_gb=None, kv_gb=0.0, num_blocks=0, kv_tokens=0,
            why_not=str(error),
        )  # fmt: skip
    num_experts = network.experts.num_experts if network.experts else 0
    num_slots = -(-num_experts // (1 if division.mode == "fused" else division.num_holders))
    slots = network.slot_weight_bytes(num_slots)
    weights = network.attention_weight_bytes + (0 if division.num_expert_workers else slots)
    kv = usable - weights - WORKSPACE_BYTES
    block_size = question.settings.search.block_size
    num_blocks = max(int(kv // (network.kv_bytes_per_token * block_size)), 0)
    use = MemoryUse(
        usable_gb=usable / _GB,
        weights_gb=weights / _GB,
        expert_weights_gb=slots / _GB if division.num_expert_workers else None,
        kv_gb=kv / _GB,
        num_blocks=num_blocks,
        kv_tokens=num_blocks * block_size,
    )
    return msgspec.structs.replace(use, why_not=_why_not(question, use))


def _why_not(question: PlanQuestion, use: MemoryUse) -> str | None:
    workspace = f"{WORKSPACE_BYTES / _GB:.0f} GB of workspace"
    limit = f"more than the {use.usable_gb:.1f} GB that may be used of a {question.gpu.name}"
    if use.expert_weights_gb is not None and use.expert_weights_gb + WORKSPACE_BYTES / _GB > use.usable_gb:
        return f"experts of {use.expert_weights_gb:.1f} GB on a GPU and {workspace} are {limit}"
    if use.kv_gb <= 0:
        return f"weights of {use.weights_gb:.1f} GB on a GPU and {workspace} are {limit}"
    # A simulated request in progress asks for as many tokens as the longest answer has, so both lengths must fit.
    longest = question.lengths.longest_requested
    if use.kv_tokens < longest:
        return (
            f"{use.kv_gb:.1f} GB are left for KV, {use.kv_tokens:,} tokens, and the longest request needs {longest:,}"
        )
    return None


def fewest_gpus(question: PlanQuestion) -> tuple[int, GpuDivision] | None:
    """Find the least number of GPUs on which one group fits, by any division. None means that no number helps."""
    network, size = question.network, 1
    num_experts = network.experts.num_experts if network.experts else 0
    while size <= _MOST_GPUS:
        tried = [GpuDivision("fused", 1, size)] if size & (size - 1) == 0 else []
        if 1 < size <= num_experts:
            tried += [GpuDivision("ep", 1, size)]
        if num_experts:
            tried += [GpuDivision("async", 1, size, experts) for experts in (size - 1, size // 2) if 0 < experts < size]
        for division in tried:
            is_allowed = why_not_served(question, division) is None or not question.settings.search.served_only
            if is_allowed and memory_of(question, division).why_not is None:
                return size, division
        size += 1
    return None
