"""Prices of a placement from the cost model: what a token, an expert, a row and a move take on a GPU and its links."""

from __future__ import annotations

from moestro.cost.gpus import Gpu
from moestro.cost.links import Link
from moestro.cost.networks import NetworkShape
from moestro.errors import ConfigError
from moestro.placement.devices import PlacePrices

_ACTIVATION_BYTES = 2


def place_prices(network: NetworkShape, gpu: Gpu, within: Link, across: Link) -> PlacePrices:
    """Price the work of a network's experts, as `cost.kernels` does for many tokens.

    A token takes the time of its arithmetic and an expert that of reading its weights, each at the efficiency that
    fused experts reach on this GPU. A row is one hidden state of 2 bytes an element. Fixed delays are left out, because
    they are the same under every placement.

    Raises:
        ConfigError: The network has no experts.
    """
    if network.experts is None:
        raise ConfigError(f"{network.name} has no experts to place")
    flops_per_s = gpu.fp8_flops_per_s if network.is_fp8 and gpu.fp8_flops_per_s else gpu.bf16_flops_per_s
    flops = 6.0 * network.hidden_size * network.experts.intermediate_size
    row_bytes = _ACTIVATION_BYTES * network.hidden_size
    return PlacePrices(
        token_s=flops / (flops_per_s * gpu.expert_compute),
        expert_s=network.expert_bytes / (gpu.memory_bytes_per_s * gpu.expert_memory),
        row_s=(0.0, row_bytes / within.bytes_per_s, row_bytes / across.bytes_per_s),
        expert_bytes=round(network.expert_bytes),
        move_bytes_per_s=(gpu.memory_bytes_per_s, within.bytes_per_s, across.bytes_per_s),
    )
