"""Opens the device of an expert worker: routed experts alone, without attention and without KV cache.

Its memory hardly exceeds its share and the largest layer, because layers are read one after the other. The homes of its
group load the network whole and check it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moestro.core.model_info import ModelInfo
from moestro.core.stages import StageShape
from moestro.model.accelerator import open_device_of
from moestro.model.device import CheckpointFacts, open_network, read_facts, use_threads
from moestro.model.experts.expert_files import read_layer
from moestro.model.experts.expert_pieces import ExpertRunner
from moestro.model.experts.worker_share import WorkerShare
from moestro.model.kernels.kernel_build import KernelBuild
from moestro.model.kernels.kernel_choice import begin_search, choose_kernels
from moestro.model.loading.load import build_skeleton, choose_float8
from moestro.model.network import Network, find_experts
from moestro.model.settings import LocalRank, ModelSettings
from moestro.model.staged.arena import TokenForm
from moestro.model.staged.staged_device import ExpertTorchDevice


def open_expert_device(
    settings: ModelSettings,
    share: WorkerShare,
    on_phase: Callable[[str], None] = lambda _: None,
    rank: int = 0,
) -> tuple[ExpertTorchDevice, ModelInfo]:
    """Open the device of an expert worker.

    Args:
        settings: as for `open_device`; the sizes of the KV cache are not used.
        share: experts to keep, and the number of guests.
        on_phase: as for `open_device`.
        rank: number of the process, by which it takes an accelerator.

    Raises:
        ConfigError: as `open_device`.
        UnsupportedModelError: as `open_device`.
    """
    use_threads(settings)
    kernels = begin_search(settings)
    on_phase("read config")
    facts = read_facts(settings)
    on_phase("load weights")
    network, num_chosen = _load_share(settings, facts, share, kernels, rank)
    sparse = {layer for layer, _ in network.experts}
    shape = StageShape(
        is_sparse=tuple(layer in sparse for layer in range(network.num_layers)),
        num_experts=network.num_slots,
        num_chosen=num_chosen,
        num_rows=0,
        num_places=0,
        num_guests=share.num_guests,
    )
    form = TokenForm(
        hidden_size=network.config.hidden_size,
        num_chosen=num_chosen,
        dtype=network.dtype,
        keeps_mixed=False,
        columns=(),
    )
    device = ExpertTorchDevice(ExpertRunner(network, form, shape))
    on_phase("ready")
    return device, facts.describe(settings, network, num_chosen)


def _load_share(
    settings: ModelSettings, facts: CheckpointFacts, share: WorkerShare, kernels: KernelBuild | None, rank: int
) -> tuple[Network, int]:
    """A network that has the share's experts alone, and the number of experts that a token visits."""
    if settings.load_format == "dummy":  # random weights are drawn in the order of the whole network
        return _load_whole(settings, share, rank)
    device = open_device_of(settings, rank)
    choose_float8(settings, facts.config, device)
    skeleton = build_skeleton(facts.config)
    layers = [layer for layer, _ in find_experts(skeleton, facts.config.get_text_config().num_hidden_layers)]
    if not layers:
        return Network(skeleton, device), 0
    model, loaded = read_layer(settings, facts.config, layers[0], type(skeleton))
    network = Network(model, device)
    num_chosen = _count_chosen(network, loaded)
    if num_chosen is None:
        return _load_whole(settings, share, rank)
    choose_kernels(network, kernels, settings)
    slots = share.slots(network)
    for layer in layers:
        if layer != layers[0]:
            _, loaded = read_layer(settings, facts.config, layer, type(skeleton))
        network.adopt_experts(layer, loaded, slots[layer])
    network.drop_all_but_experts()
    return network, num_chosen


def _load_whole(settings: ModelSettings, share: WorkerShare, rank: int) -> tuple[Network, int]:
    checked = open_network(settings, local=LocalRank(rank=rank))
    share.cut(checked.network, keeps_attention=False)
    checked.network.pack_experts()
    return checked.network, checked.num_chosen


@torch.inference_mode()
def _count_chosen(network: Network, experts: nn.Module) -> int | None:
    """Count the experts that a token visits, by running the gate beside an experts module.

    Returns:
        The number; None if the part of the layer that has gate and experts takes more than hidden states.
    """
    assert network.routing is not None
    found: list[int] = []

    def count(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found.append(top_k_index.shape[1])
        return torch.zeros_like(hidden)

    name = next(name for name, module in network.model.named_modules() if module is experts)
    block = network.model.get_submodule(name.rpartition(".")[0])
    network.routing.stand_in = count
    try:
        block(torch.zeros(1, 1, network.config.hidden_size, dtype=network.dtype))
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError):
        return None  # this block has another interface
    finally:
        network.routing.stand_in = None
    return found[0] if found else None
