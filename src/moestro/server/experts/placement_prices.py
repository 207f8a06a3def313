"""Prices by which the plans of a server's live placement are judged."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moestro.config.idle_flags import may_have_gpu
from moestro.config.serve_settings import ServeSettings
from moestro.cost.gpus import gpu_named
from moestro.cost.links import link_named
from moestro.cost.named_parts import link_within, read_network
from moestro.cost.networks import NetworkShape
from moestro.placement.devices import PlacePrices
from moestro.placement.prices import place_prices

_DEFAULT_GPU, _CPU = "h100", "cpu"  # the first as in `moestro place`
_BYTES = {"float32": 4, "float64": 8}  # of a weight, where it is not 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePrices:
    """Prices by which plans of a running group are judged.

    Attributes:
        network: Sizes of the model.
        gpu, link, link_across: Names of the GPU, and of the links between GPUs within a machine and between machines.
        prices: The prices.
    """

    network: NetworkShape
    gpu: str
    link: str
    link_across: str
    prices: PlacePrices


def live_prices(settings: ServeSettings, dtype: str) -> LivePrices:
    """Return the prices of the model on the paced GPU, on the one that `--placement-gpu` names, or on CPUs.

    Engines that compute on CPUs are priced as CPUs: with a GPU's prices, plans would give up balance to read fewer
    experts.

    Args:
        settings: Settings of the server.
        dtype: Type of the served weights. Experts of 2 bytes a weight move in that type; packed ones move packed.

    Raises:
        ConfigError: The model has no experts or unknown sizes, or the GPU needs the name of a link.
    """
    live, paced = settings.placement, settings.paced
    is_priced = paced is not None and paced.table is None
    name = paced.gpu if paced is not None and is_priced else _DEFAULT_GPU
    if paced is None and not may_have_gpu(settings):
        name = _CPU
    link_name = paced.paced_link if paced is not None and is_priced else None
    gpu = gpu_named(live.placement_gpu or name)
    link = link_within(live.placement_link or link_name, gpu, "--placement-link")
    network = read_network(paced.network if paced is not None and is_priced else settings.model.model)
    across = link_named(live.placement_link_across)
    prices = place_prices(network, gpu, link, across)
    if not is_priced and network.experts is not None and network.experts.bytes_per_weight == 2:
        prices = replace(prices, expert_bytes=prices.expert_bytes * _BYTES.get(dtype, 2) // 2)
    return LivePrices(network=network, gpu=gpu.name, link=link.name, link_across=across.name, prices=prices)
