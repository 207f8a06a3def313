"""The settings of `moestro place`. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from moestro.config.user_files import check_files
from moestro.core.setting_checks import CheckedSettings, above, at_least, between
from moestro.cost.gpus import GPUS
from moestro.cost.links import LINKS
from moestro.errors import ConfigError
from moestro.placement.contract import PLACE_POLICIES, PlaceLimits

_READING = Parameter(group=Group.create_ordered("Profile", help="How the recorded load is read."))
_DEVICES = Parameter(group=Group.create_ordered("Devices", help="Where experts can be, and where they are now."))
_PRICES = Parameter(group=Group.create_ordered("Prices", help="What tokens, rows and moves cost."))
_POLICY = Parameter(group=Group.create_ordered("Policy", help="What decides, and what it may move."))
_OUTPUT = Parameter(group=Group.create_ordered("Output", help="What is written."))
_POLICIES = f"Policy (NAME or NAME:SETTING=VALUE,...), or FILE.py:NAME.\n\n{PLACE_POLICIES.help_text()}"

# vLLM's and SGLang's usual batch of one engine in decode is a few hundred sequences, a token each in a step.
DEFAULT_TOKENS_PER_STEP = 256
# Three times as many devices as the largest group that DeepSeek-V3 publishes (320), and twice as many slots as a layer
# of the known networks with the most experts has (512, Qwen3-Next). More would only keep a machine busy for hours.
MOST_DEVICES = 1024
MOST_SLOTS = 1024
MOST_MTP_LAYERS = 64  # networks have 1 to 3, and a draft is as many tokens long
# The default policy for engines that divide tokens evenly among copies.
EVEN_POLICY = "moestro:weighted=0"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ProfileSettings(CheckedSettings):
    """The profile."""

    tokens_per_step: Annotated[int | None, at_least(1), _READING] = None
    (
        "Tokens of a step of all sources, for recordings that have no steps (choices per token, plain counts). Unset:"
        f" {DEFAULT_TOKENS_PER_STEP}."
    )
    num_experts: Annotated[int | None, at_least(1), _READING] = None
    "Experts of a layer. Unset: as in the profile; for choices per token those of --model, or the largest one seen."
    routing_index: Annotated[Path | None, _READING] = None
    "Index of a routing trace (JSON lines with dataset, offset and num_tokens)."
    dataset: Annotated[tuple[str, ...], Parameter(show_default=False), _READING] = ()
    "Data set of --routing-index to use; may be repeated. Unset: all."
    offline: Annotated[str | None, _READING] = None
    (
        "Run this model on random tokens too, as Gimbal's offline profile does, and print how far its pairs of experts"
        " in consecutive layers overlap those of the profile."
    )
    save_profile: Annotated[Path | None, _READING] = None
    "Write the profile here in Moestro's own form: one compressed file without pickle."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DeviceSettings(CheckedSettings):
    """The devices."""

    devices: Annotated[int | None, between(1, MOST_DEVICES), _DEVICES] = None
    "Devices of the expert-parallel group."
    slots_per_device: Annotated[int | None, between(1, MOST_SLOTS), _DEVICES] = None
    "Copies of experts that a device has room for in each layer. Unset: just enough for one copy of each expert."
    nodes: Annotated[int, at_least(1), _DEVICES] = 1
    "Machines; each has equally many consecutive devices."
    topology: Annotated[Path | None, _DEVICES] = None
    "YAML file of the devices, in place of the three flags above: node, slots, speed, alive and count of each."
    dead: Annotated[str | None, _DEVICES] = None
    "Devices that no longer compute, by number from 0: 3,7."
    current: Annotated[Path | None, _DEVICES] = None
    (
        "Present placement: a file of --out, SGLang's with physical_to_logical_map, or the answer of a server's"
        " /admin/placement?arrays=true. Unset: that of the server of --apply, or experts in order."
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PriceSettings(CheckedSettings):
    """The prices."""

    model: Annotated[str | None, _PRICES] = None
    (
        "Network by name or repository, or its config.json. Unset: the one that the profile names, or the known network"
        " whose experts and layers match the profile's."
    )
    gpu: Annotated[str, Parameter(help=f"One of {', '.join(GPUS)}."), _PRICES] = "h100"
    link_within: Annotated[
        str | None,
        Parameter(help=f"Link between the GPUs of a machine. Unset: NVSwitch of the GPU; one of {', '.join(LINKS)}."),
        _PRICES,
    ] = None
    link_across: Annotated[str, Parameter(help=f"Link between machines: one of {', '.join(LINKS)}."), _PRICES] = (
        "infiniband-hdr"
    )


Sources = Literal["own", "mean"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlacePolicySettings(CheckedSettings):
    """The policy and its limits."""

    policy: Annotated[str, Parameter(help=_POLICIES), _POLICY] = "moestro"
    compare: Annotated[bool, Parameter(negative=()), _POLICY] = False
    "Ask every policy under its default settings, and show all answers in a table."
    sources: Annotated[Sources | None, _POLICY] = None
    (
        "Whose tokens a plan knows. own: each source's, which pays where sources keep sending different mixes. mean:"
        " the mean of all sources. Unset: mean for files that engines load, whose ranks get requests by load; else own."
    )
    num_groups: Annotated[int, at_least(1), _POLICY] = 1
    "Groups of experts that the gate chooses first (DeepSeek-V3: 8)."
    check: Annotated[Path | None, _POLICY] = None
    "Another profile (the next window, another domain), under whose load both placements are priced too."
    max_bytes: Annotated[int | None, at_least(0), _POLICY] = None
    "Largest number of bytes of weights that move. Policies of other systems ignore limits."
    max_receives: Annotated[int | None, at_least(0), _POLICY] = None
    "Largest number of experts that one device receives."
    max_layers: Annotated[int | None, at_least(0), _POLICY] = None
    "Largest number of layers that change."
    horizon_steps: Annotated[float, above(0), _POLICY] = PlaceLimits().horizon_steps
    "Steps within which a move must pay for itself."

    @property
    def limits(self) -> PlaceLimits:
        """The limits as policies read them."""
        return PlaceLimits(
            max_bytes=self.max_bytes,
            max_receives=self.max_receives,
            max_layers=self.max_layers,
            horizon_steps=self.horizon_steps,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OutputSettings(CheckedSettings):
    """The files."""

    out: Annotated[Path | None, _OUTPUT] = None
    "Write the placement, its shares, moves and figures here as JSON."
    sglang: Annotated[Path | None, _OUTPUT] = None
    "Write the file for SGLang's --init-expert-location here. Every slot then gets an expert, and copies share evenly."
    tensorrt_llm: Annotated[Path | None, _OUTPUT] = None
    "Write TensorRT-LLM's YAML of a load balancer here, under the same two conditions."
    mtp_layers: Annotated[int, between(0, MOST_MTP_LAYERS), _OUTPUT] = 0
    "Layers for multi-token prediction that TensorRT-LLM runs: each gets a row too, with experts in order."
    png: Annotated[Path | None, _OUTPUT] = None
    "Draw load by layer and device, pairs of experts and moves here. Needs matplotlib."
    apply: Annotated[str | None, _OUTPUT] = None
    (
        "Let a running server of Moestro move its experts to the placement: the address of its --admin-port, such as"
        " http://localhost:8100. Its devices are the workers that hold experts, in order."
    )
    admin_api_key: Annotated[str | None, Parameter(show_default=False), _OUTPUT] = None
    "Its --admin-api-key. Unset: it needs none."

    def check_folders(self) -> None:
        """Refuse files that cannot be written, before the work on what goes into them.

        Raises:
            ConfigError: A file cannot be written, or a name has no form of picture.
        """
        check_files(
            {"--out": self.out, "--sglang": self.sglang, "--tensorrt-llm": self.tensorrt_llm, "--png": self.png}
        )
        if self.png is not None and not self.png.suffix:  # matplotlib would write another file than is named
            raise ConfigError(f"--png {self.png}: the name must end in the form of the picture, such as .png")
        if self.mtp_layers and self.tensorrt_llm is None:
            raise ConfigError(f"--mtp-layers {self.mtp_layers} adds rows to the file of --tensorrt-llm: give that too")

    @property
    def is_for_engines(self) -> bool:
        """Whether an engine loads the placement that has an expert in every slot and knows no shares."""
        return self.sglang is not None or self.tensorrt_llm is not None


@dataclass(frozen=True, kw_only=True)
class PlaceSettings:
    """All of `moestro place`.

    Attributes:
        paths: Files of the profile.
    """

    paths: tuple[Path, ...]
    profile: ProfileSettings = ProfileSettings()
    devices: DeviceSettings = DeviceSettings()
    prices: PriceSettings = PriceSettings()
    policy: PlacePolicySettings = PlacePolicySettings()
    output: OutputSettings = OutputSettings()
