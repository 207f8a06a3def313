"""Single experts from a checkpoint, for a worker that gets other experts while it runs.

transformers converts a checkpoint's tensors to the network's (it merges experts, renames, dequantizes). So one layer is
loaded by transformers itself, into a network whose other weights have no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import logging as hf_logging

from moestro.errors import UnsupportedModelError
from moestro.files.checkpoint import find_weights
from moestro.files.config_fields import layer_of_name
from moestro.model.attention import register_attention
from moestro.model.experts.expert_slots import pick_expert
from moestro.model.experts.routed import ExpertWeights, register_experts
from moestro.model.loading.float8_files import keeps_float8
from moestro.model.loading.load import (
    build_skeleton,
    choose_dtype,
    choose_float8,
    draw_weights,
    finish_dequantizing,
    pretrained_arguments,
    read_config,
)
from moestro.model.network import find_experts
from moestro.model.settings import ModelSettings


def read_experts(
    settings: ModelSettings, layer: int, experts: Sequence[int], device: torch.device
) -> list[ExpertWeights]:
    """Read experts of one layer, bit for bit as loading the whole network has them.

    Args:
        settings: those with which the network was loaded.
        layer: a layer with experts.
        experts: logical experts.
        device: the network's device, where random weights are drawn: their numbers depend on its kind. It decides also
            whether weights stay in float8.

    Raises:
        UnsupportedModelError: the checkpoint cannot be loaded, or lacks the layer.
    """
    config = read_config(settings)
    if settings.load_format == "dummy":
        model = draw_weights(settings, config, device)
        module = dict(find_experts(model, config.get_text_config().num_hidden_layers))[layer]
    else:
        choose_float8(settings, config, device)
        _, module = read_layer(settings, config, layer, type(build_skeleton(config)))
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
