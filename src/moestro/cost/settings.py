"""The settings of a paced device, whose steps take as long as a cost model says, and parts that an operator names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from moestro.core.setting_checks import CheckedSettings, at_least, flag_help
from moestro.cost.gpus import Gpu, gpu_named
from moestro.cost.links import (
    INFINITY_FABRIC_MI300X,
    LINKS,
    LOCAL_SOCKET,
    NVSWITCH_A100,
    NVSWITCH_B200,
    NVSWITCH_H100,
    Link,
    link_named,
)
from moestro.cost.model import PopularityForm
from moestro.cost.networks import CONFIGS, NetworkShape, known_name, network_from_config, network_named
from moestro.errors import ConfigError
from moestro.files.checkpoint import read_json_object
from moestro.files.config_fields import longest_context, refuse_sizes

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
        model: a name of `cost.networks` or of its repository (OWNER/NAME), a checkpoint directory, or its config.json.

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
    return network_from_config(path.resolve().name if path.is_dir() else path.stem, _read_config(path))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    config = read_json_object(file)
    refuse_sizes(config, file)
    return config


def positions_of(model: str) -> int | None:
    """Return the tokens of the longest sequence for which a network was made, with those that YaRN adds.

    None: `model` is a name, or its config.json does not say.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = Path(model).expanduser()
    if not path.exists():
        return None
    config = _read_config(path)
    text = config.get("text_config") or config
    return longest_context(text.get("max_position_embeddings"), text.get("rope_scaling") or text.get("rope_parameters"))


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


PACED = "paced:"  # begins the name of a device whose durations are modelled
PACED_NETWORK = "qwen3-30b-a3b"
PACED_QLLM = "paced:qllm"  # not a GPU, but an engine with its own cost model

_LINK = f"Link between the paced GPUs of --mode ep and async, one of {', '.join(LINKS)}."


@dataclass(frozen=True, kw_only=True)
class PacedOptions(CheckedSettings):
    """What an operator chooses of a paced device beside its name."""

    paced_arithmetic: Literal["demo", "none"] = "demo"
    "Answers of a paced device. demo: tokens of the demo model; none: a fixed text, without loading torch."
    paced_link: Annotated[str, flag_help(_LINK)] = "nvswitch-a100"
    pace_dilation: Annotated[float, at_least(1)] = 1.0
    "Factor on all modelled durations. At 4, this machine's own work weighs a quarter; divide the load by 4 too."

    def __post_init__(self) -> None:
        super().__post_init__()
        link_named(self.paced_link)


@dataclass(frozen=True, kw_only=True)
class PacedSettings(PacedOptions):
    """One paced device.

    Attributes:
        device: paced:GPU, paced:FILE with a table of `moestro calibrate`, or paced:qllm: QLLM's engine on an A100, with
            the network in 4 bits.
        network: the network whose steps are priced, as `read_network` takes it.
        popularity: popularity of the experts that tokens visit. None means that of the prices.
    """

    device: str
    network: str = PACED_NETWORK
    popularity: PopularityForm | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device == PACED_QLLM:
            if self.shape.experts is None:
                raise ConfigError(f"--device {PACED_QLLM} runs networks with experts, and {self.network} has none")
        elif self.table is None:
            gpu_named(self.gpu)
            read_network(self.network)
        elif self.paced_arithmetic == "none":
            raise ConfigError("--paced-arithmetic none needs a named GPU and network: they determine its KV cache")

    @property
    def shape(self) -> NetworkShape:
        """Sizes of the network. A config.json is read at each call."""
        return read_network(self.network)

    @property
    def gpu(self) -> str:
        """The GPU's name."""
        return self.device.removeprefix(PACED)

    @property
    def table(self) -> Path | None:
        """A file of measured steps; None: the GPU is known by name."""
        return Path(self.gpu) if self.gpu.endswith(".json") else None


def overridden_popularity(gate_override: str, seed: int) -> PopularityForm:
    """Make the popularity that `--gate-override` names; as in a loaded network, `seed` shuffles each layer's experts.

    Raises:
        ConfigError: it replays a trace, whose tokens a paced device does not have.
    """
    kind, _, rate = gate_override.partition(":")
    if kind == "uniform":
        return PopularityForm(family="uniform")
    if kind == "exponential":
        return PopularityForm(family="exponential", skew=float(rate), hot_ids="permuted", seed=seed)
    raise ConfigError(
        f"--gate-override {gate_override} replays the choices of a network's own tokens, and a paced GPU draws them:"
        " give uniform or exponential:LAMBDA"
    )
