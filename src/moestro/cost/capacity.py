"""Memory of a GPU: the KV cache that fits beside the weights, and whether the weights of a worker fit."""

from __future__ import annotations

from moestro.cost.gpus import Gpu
from moestro.cost.networks import NetworkShape
from moestro.errors import ConfigError

# Activations of the largest step, CUDA graphs, communication buffers. A worker of a group has as much.
WORKSPACE_BYTES = 6_000_000_000


def kv_blocks(
    network: NetworkShape, gpu: Gpu, block_size: int, *, gpu_memory_utilization: float = 0.9, num_ep_ranks: int = 1
) -> int:
    """Compute the KV blocks that one GPU holds beside its weights.

    Args:
        network, gpu: the network and the GPU that runs it.
        block_size: tokens of a block.
        gpu_memory_utilization: fraction of the GPU's memory that the engine uses (vLLM's name).
        num_ep_ranks: ranks among which the routed experts are spread.

    Raises:
        ConfigError: no block fits.
    """
    weights = network.weight_bytes(num_ep_ranks)
    num_blocks = _blocks_beside(weights, network, gpu, block_size, gpu_memory_utilization)
    if num_blocks < 1:
        raise _does_not_fit(network, gpu, weights, gpu_memory_utilization)
    return num_blocks


def worker_kv_blocks(
    network: NetworkShape, gpu: Gpu, block_size: int, *, num_slots: int = 0, gpu_memory_utilization: float = 0.9
) -> int:
    """Compute the KV blocks of an attention worker.

    Args:
        network, gpu: the network and the GPU that runs the worker.
        block_size: tokens of a block.
        num_slots: routed experts of each layer that the worker holds too; 0 for attention alone.
        gpu_memory_utilization: fraction of the GPU's memory that the engine uses.

    Raises:
        ConfigError: no block fits.
    """
    weights = network.attention_weight_bytes + network.slot_weight_bytes(num_slots)
    num_blocks = _blocks_beside(weights, network, gpu, block_size, gpu_memory_utilization)
    if num_blocks < 1:
        raise _does_not_fit(network, gpu, weights, gpu_memory_utilization)
    return num_blocks


def check_experts_fit(network: NetworkShape, gpu: Gpu, num_slots: int, *, gpu_memory_utilization: float = 0.9) -> None:
    """Check that an expert worker can hold `num_slots` routed experts of each layer.

    Raises:
        ConfigError: the weights leave no workspace.
    """
    weights = network.slot_weight_bytes(num_slots)
    if weights + WORKSPACE_BYTES > gpu.memory_bytes * _checked(gpu_memory_utilization):
        raise ConfigError(
            f"{num_slots} experts of each layer of {network.name} weigh {weights / 1e9:.1f} GB, which do not fit a"
            f" {gpu.name} of {gpu.memory_bytes / 1e9:.1f} GB beside {WORKSPACE_BYTES / 1e9:.0f} GB of workspace at"
            f" gpu_memory_utilization {gpu_memory_utilization}. Spread the experts over more workers."
        )


def _blocks_beside(weights: float, network: NetworkShape, gpu: Gpu, block_size: int, utilization: float) -> int:
    left = gpu.memory_bytes * _checked(utilization) - weights - WORKSPACE_BYTES
    return int(left // (network.kv_bytes_per_token * block_size))


def _checked(utilization: float) -> float:
    if not 0 < utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {utilization}")
    return utilization


def _does_not_fit(network: NetworkShape, gpu: Gpu, weights: float, utilization: float) -> ConfigError:
    return ConfigError(
        f"{network.name} does not fit a {gpu.name}: {weights / 1e9:.1f} GB of weights and"
        f" {WORKSPACE_BYTES / 1e9:.0f} GB of workspace leave no KV cache of {gpu.memory_bytes / 1e9:.1f} GB at"
        f" gpu_memory_utilization {utilization}."
        " Spread its experts over more ranks, or take a larger GPU."
    )
