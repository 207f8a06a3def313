"""A network's sizes and the link of its GPUs, as an operator names them."""

from __future__ import annotations

from pathlib import Path

from moestro.cost.gpus import Gpu
from moestro.cost.hf_config import CONFIGS, known_name, network_from_config, network_named
from moestro.cost.links import (
    INFINITY_FABRIC_MI300X,
    LOCAL_SOCKET,
    NVSWITCH_A100,
    NVSWITCH_B200,
    NVSWITCH_H100,
    Link,
    link_named,
)
from moestro.cost.networks import NetworkShape
from moestro.errors import ConfigError
from moestro.files.checkpoint import read_json_object
from moestro.files.config_fields import refuse_sizes

_WITHIN = {
    "a100-80g": NVSWITCH_A100,
    "a100-40g": NVSWITCH_A100,
    "h20-96g": NVSWITCH_H100,
    "h100": NVSWITCH_H100,
    "h200": NVSWITCH_H100,
    "b200": NVSWITCH_B200,
    "gb200": NVSWITCH_B200,
    "cpu": LOCAL_SOCKET,
    "mi300x": INFINITY_FABRIC_MI300X,
}


def read_network(model: str) -> NetworkShape:
    """Read the sizes of a network.

    Args:
        model: a name of `cost.hf_config` or of its repository (OWNER/NAME), a checkpoint directory, or its config.json.

    Raises:
        ConfigError: there is no such network, or its config lacks a size.
    """
    path = Path(model).expanduser()
    if not path.exists():
        if known_name(model) is not None:
            return network_named(model)
        raise ConfigError(
            f"no sizes for network {model!r}; known: {', '.join(CONFIGS)}. Give one of them, or a directory with the"
            " network's config.json"
        )
    file = path / "config.json" if path.is_dir() else path
    config = read_json_object(file)
    refuse_sizes(config, file)
    return network_from_config(path.resolve().name if path.is_dir() else path.stem, config)


def link_within(name: str | None, gpu: Gpu, flag: str = "--link-within") -> Link:
    """Look up the link between the GPUs of a machine.

    Args:
        name: its name; None means the NVSwitch of the GPU.
        gpu: the GPU.
        flag: flag that names the link, for messages.

    Raises:
        ConfigError: the name is unknown, or the GPU has no NVSwitch.
    """
    if name is not None:
        return link_named(name)
    link = _WITHIN.get(gpu.name)
    if link is None:
        raise ConfigError(f"{flag} has no default for {gpu.name}, which has no NVSwitch: name a link")
    return link
