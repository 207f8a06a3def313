"""The settings of a paced device, whose steps take as long as a cost model says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from moestro.core.setting_checks import CheckedSettings, at_least
from moestro.cost.gpus import gpu_named
from moestro.cost.hf_config import network_named
from moestro.cost.links import LINKS, link_named
from moestro.cost.popularity import PopularityForm
from moestro.errors import ConfigError

PACED = "paced:"  # begins the name of a device whose durations are modelled
PACED_NETWORK = "qwen3-30b-a3b"
PACED_QLLM = "paced:qllm"  # not a GPU, but an engine with its own cost model

_LINK = f"Link between the paced GPUs of --mode ep and async, one of {', '.join(LINKS)}."


@dataclass(frozen=True, kw_only=True)
class PacedOptions(CheckedSettings):
    """What an operator chooses of a paced device beside its name."""

    paced_arithmetic: Literal["demo", "none"] = "demo"
    "Answers of a paced device. demo: tokens of the demo model; none: a fixed text, without loading torch."
    paced_link: Annotated[str, Parameter(help=_LINK)] = "nvswitch-a100"
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
        network: the network whose steps are priced, by the names that `cost` knows.
        popularity: popularity of the experts that tokens visit. None means that of the prices.
    """

    device: str
    network: str = PACED_NETWORK
    popularity: PopularityForm | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device == PACED_QLLM:
            if network_named(self.network).experts is None:
                raise ConfigError(f"--device {PACED_QLLM} runs networks with experts, and {self.network} has none")
        elif self.table is None:
            gpu_named(self.gpu)
            network_named(self.network)
        elif self.paced_arithmetic == "none":
            raise ConfigError("--paced-arithmetic none needs a named GPU and network: they determine its KV cache")

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
