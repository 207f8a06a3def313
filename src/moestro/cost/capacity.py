"""The KV cache that fits beside the weights."""

from __future__ import annotations

from moestro.cost.gpus import Gpu
from moestro.cost.networks import NetworkShape
from moestro.errors import ConfigError

# Activations of the largest step, CUDA graphs, communication buffers.
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
    if not 0 < gpu_memory_utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {gpu_memory_utilization}")
    weights = network.weight_bytes(num_ep_ranks)
    left = gpu.memory_bytes * gpu_memory_utilization - weights - WORKSPACE_BYTES
    num_blocks = int(left // (network.kv_bytes_per_token * block_size))
    if num_blocks < 1:
        raise ConfigError(
            f"{network.name} does not fit a {gpu.name}: {weights / 1e9:.1f} GB of weights and"
            f" {WORKSPACE_BYTES / 1e9:.0f} GB of workspace leave no KV cache of {gpu.memory_bytes / 1e9:.1f} GB at"
            f" gpu_memory_utilization {gpu_memory_utilization}."
            " Spread its experts over more ranks, or take a larger GPU."
        )
    return num_blocks
