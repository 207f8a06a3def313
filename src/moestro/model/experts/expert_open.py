"""Opens the device of an expert worker, and reads single experts for a worker that gets others while it serves.

The device has routed experts alone, without attention and without KV cache. Its memory hardly exceeds its share and the
largest layer, because layers are read one after the other. The homes of its group load the network whole and check it.

transformers converts a checkpoint's tensors to the network's (it merges experts, renames, dequantizes). So one layer is
loaded by transformers itself, into a network whose other weights have no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from moestro.core.request import ModelInfo
from moestro.core.stages import StageShape
from moestro.errors import UnsupportedModelError
from moestro.files.checkpoint import find_weights
from moestro.files.config_fields import layer_of_name
from moestro.model.attention import register_attention
from moestro.model.device import CheckpointFacts, open_network, read_facts, use_threads
from moestro.model.experts.expert_pieces import ExpertRunner
from moestro.model.experts.expert_slots import pick_expert, write_expert
from moestro.model.experts.routed import ExpertWeights, register_experts
from moestro.model.kernels.kernel_choice import begin_search, choose_kernels
from moestro.model.kernels.library import KernelBuild
from moestro.model.load import (
    build_skeleton,
    choose_dtype,
    choose_float8,
    draw_weights,
    finish_dequantizing,
    keeps_float8,
    pretrained_arguments,
    read_config,
)
from moestro.model.network import Network, WorkerShare, find_experts
from moestro.model.settings import LocalRank, ModelSettings
from moestro.model.staged.arena import TokenForm
from moestro.model.staged.staged_device import ExpertTorchDevice
from moestro.model.tensors import open_device_of


class ExpertReader:
    """Reads experts of a checkpoint, bit for bit as loading the whole network has them.

    The first read checks the checkpoint and keeps its config, because each check builds the network without weights.

    Args:
        settings: those with which the network was loaded.
        device: the network's device, where random weights are drawn: their numbers depend on its kind. It decides also
            whether weights stay in float8.
    """

    def __init__(self, settings: ModelSettings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._checked: tuple[Any, type[Any]] | None = None  # config, and class of the network

    def read(self, layer: int, experts: Sequence[int]) -> list[ExpertWeights]:
        """Read experts of one layer.

        Args:
            layer: a layer with experts.
            experts: logical experts.

        Raises:
            UnsupportedModelError: the checkpoint cannot be loaded, or lacks the layer.
        """
        if self._settings.load_format == "dummy":
            config = read_config(self._settings)
            model = draw_weights(self._settings, config, self._device)
            module = dict(find_experts(model, config.get_text_config().num_hidden_layers))[layer]
        else:
            if self._checked is None:
                config = read_config(self._settings)
                choose_float8(self._settings, config, self._device)
                self._checked = config, type(build_skeleton(config))
            _, module = read_layer(self._settings, self._checked[0], layer, self._checked[1])
        return [pick_expert(module, expert) for expert in experts]


def read_layer(settings: ModelSettings, config: Any, layer: int, whole: type[Any]) -> tuple[Any, Any]:
    """Read one layer of a checkpoint.

    Args:
        settings: those of the network.
        config: config of the checkpoint, from `read_config`, after `choose_float8`.
        layer: a layer with experts.
        whole: class of the network, from `build_skeleton`.

    Returns:
        transformers' network, all other layers of which are on the meta device; and the layer's experts module.

    Raises:
        UnsupportedModelError: the checkpoint cannot be loaded, or lacks the layer.
    """
    register_attention()
    register_experts()
    config = deepcopy(config)  # transformers edits what it gets
    is_quantized = getattr(config, "quantization_config", None) is not None
    dtype = choose_dtype(settings, config) or config.get_text_config().dtype
    # A weight that is missing is not initialized, and so needs no memory. The name selects transformers' conversions.
    skips = dict.fromkeys(("initialize_weights", "_move_missing_keys_from_meta_to_device"), _do_nothing)
    part: Any = type(whole.__name__, (whole,), {"__module__": whole.__module__, **skips})
    with ExitStack() as files:
        tensors: dict[str, Any] = {}
        for path in find_weights(Path(settings.model)):
            file = files.enter_context(safe_open(path, framework="pt"))
            names = [name for name in file.keys() if layer_of_name(name) == layer]  # noqa: SIM118
            tensors |= {name: file.get_slice(name) for name in names}
            if names and dtype is None:  # transformers would look for it in tensors, and these are slices
                dtype = file.get_tensor(names[0]).dtype
        files.enter_context(_without_report())
        try:
            model = part.from_pretrained(None, config=config, state_dict=tensors, **pretrained_arguments(config, dtype))
        except Exception as error:  # torn files, other shapes: each library below raises its own errors
            raise UnsupportedModelError(f"The weights in {settings.model} cannot be loaded: {error}") from error
    if is_quantized and dtype is not None and not keeps_float8(config):
        finish_dequantizing(model, dtype)
    modules = dict(find_experts(model, config.get_text_config().num_hidden_layers))
    if layer not in modules or any(parameter.is_meta for parameter in modules[layer].parameters()):
        raise UnsupportedModelError(f"The weights in {settings.model} cannot be loaded: layer {layer} has no experts.")
    return model, modules[layer]


@contextmanager
def _without_report() -> Iterator[None]:
    """Keep transformers from listing all weights that are missing on purpose."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def open_expert_device(
    settings: ModelSettings,
    share: WorkerShare,
    on_phase: Callable[[str], None] = lambda _: None,
    rank: int = 0,
) -> tuple[ExpertTorchDevice, ModelInfo]:
    """Open the device of an expert worker.

    Args:
        settings: as for `open_device`; the sizes of the KV cache are not used.
        share: experts to keep, and the number of remote places.
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
        num_remote_places=share.num_remote_places,
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


class TorchSlots:
    """Slots of a cut network; implements `worker.expert_loader.SlotMemory`.

    Args:
        network: The network, or the part of it that the worker keeps.
        settings: Those with which it was loaded.
    """

    def __init__(self, network: Network, settings: ModelSettings) -> None:
        self._modules, self._reader = dict(network.experts), ExpertReader(settings, network.device)
        self.expert_bytes = network.bytes_per_expert

    def read(self, layer: int, experts: Sequence[int]) -> list[ExpertWeights | None]:
        """Read experts from the checkpoint. This reads the whole layer once, and takes its memory meanwhile.

        A thread may do so beside the network's steps, which depend on no default of torch: transformers changes torch's
        default dtype for all threads while it builds the layer.

        Returns:
            Weights of each expert. None means that the layer has fewer experts, so that no token visits this one.

        Raises:
            UnsupportedModelError: The checkpoint cannot be loaded, or lacks the layer.
        """
        num_experts = int(self._modules[layer].num_experts)
        present = [expert for expert in experts if expert < num_experts]
        weights = dict(zip(present, self._reader.read(layer, present), strict=True))
        return [weights.get(expert) for expert in experts]

    def write(self, layer: int, slot: int, expert: int, weights: ExpertWeights | None) -> None:
        """Write weights into a slot that no item in flight uses."""
        if weights is not None:
            write_expert(self._modules[layer], slot, expert, weights)
