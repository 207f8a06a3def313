"""Single experts from a checkpoint, for a worker that gets other experts while it runs.

transformers converts a checkpoint's tensors to the network's (it merges experts, renames, dequantizes). So one layer is
loaded by transformers itself, into a network whose other weights have no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import logging as hf_logging

from moestro.errors import UnsupportedModelError
from moestro.model.expert_slots import ExpertWeights, pick_expert, write_expert
from moestro.model.experts import tag_of
from moestro.model.load import build_skeleton, draw_weights, pretrained_arguments, read_config
from moestro.model.network import Network, find_experts, layer_of_name
from moestro.model.refuse import find_weights
from moestro.model.settings import ModelSettings


def load_experts(network: Network, settings: ModelSettings, layer: int, logical_of: Mapping[int, int]) -> None:
    """Load experts of the checkpoint into slots of a network that was cut. No item in flight may use these slots.

    This reads the whole layer once, and takes its memory meanwhile.

    Args:
        network: the network.
        settings: those with which the network was loaded.
        layer: a layer with experts.
        logical_of: logical expert for each slot that is to be rewritten.

    Raises:
        UnsupportedModelError: the checkpoint changed since, and lacks the layer.
    """
    module = dict(network.experts)[layer]
    found = read_experts(settings, layer, list(logical_of.values()), tag_of(module).dtype)
    for (slot, logical), weights in zip(logical_of.items(), found, strict=True):
        write_expert(module, slot, logical, weights)


def read_experts(
    settings: ModelSettings, layer: int, experts: Sequence[int], dtype: torch.dtype
) -> list[ExpertWeights]:
    """Read experts of one layer, bit for bit as loading the whole network has them.

    Args:
        settings: those with which the network was loaded.
        layer: a layer with experts.
        experts: logical experts.
        dtype: dtype of the network's experts.

    Raises:
        UnsupportedModelError: the checkpoint cannot be loaded, or lacks the layer.
    """
    config = read_config(settings)
    if settings.load_format == "dummy":
        model = draw_weights(settings, config)
    else:
        model = _read_layer(settings, config, layer, dtype)
    modules: dict[int, Any] = dict(find_experts(model, config.get_text_config().num_hidden_layers))
    module = modules.get(layer)
    if module is None or any(parameter.is_meta for parameter in module.parameters()):
        raise UnsupportedModelError(f"The weights in {settings.model} cannot be loaded: layer {layer} has no experts.")
    with torch.no_grad():
        picked = (pick_expert(module, expert) for expert in experts)
        return [ExpertWeights(*(None if each is None else each.to(dtype) for each in weights)) for weights in picked]


def _read_layer(settings: ModelSettings, config: Any, layer: int, dtype: torch.dtype) -> nn.Module:
    """The network with weights of one layer; all others stay on the meta device."""
    whole = type(build_skeleton(config))
    # A weight that is missing is not initialized, and so needs no memory. The name selects transformers' conversions.
    skips = dict.fromkeys(("initialize_weights", "_move_missing_keys_from_meta_to_device"), _do_nothing)
    part: Any = type(whole.__name__, (whole,), {"__module__": whole.__module__, **skips})
    with ExitStack() as files:
        tensors = {}
        for path in find_weights(Path(settings.model)):
            file = files.enter_context(safe_open(path, framework="pt"))
            names = [name for name in file.keys() if layer_of_name(name) == layer]  # noqa: SIM118
            tensors |= {name: file.get_slice(name) for name in names}
        files.enter_context(_without_report())
        try:
            model: nn.Module = part.from_pretrained(
                None, config=config, state_dict=tensors, **pretrained_arguments(config, dtype)
            )
        except Exception as error:  # torn files, other shapes: each library below raises its own errors
            raise UnsupportedModelError(f"The weights in {settings.model} cannot be loaded: {error}") from error
    return model


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
