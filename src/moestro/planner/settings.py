"""The settings of `moestro plan`. A docstring under a field is its text in `--help`.

Lengths and objectives have the names of NVIDIA's planners (`isl`, `osl`, `ttft`, `itl`), limits those of vLLM.
"""

from __future__ import annotations

import shlex
from collections.abc import Container
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from moestro.core.setting_checks import CheckedSettings, above, at_least, flag_of
from moestro.cost.gpus import GPUS, gpu_named
from moestro.cost.links import LINKS
from moestro.cost.networks import known_name
from moestro.errors import ConfigError
from moestro.planner.systems import SystemName

_HARDWARE = Parameter(group=Group.create_ordered("Hardware", help="The GPUs, and what connects them."))
_TRAFFIC = Parameter(group=Group.create_ordered("Workload", help="The requests, and the experts that they visit."))
_OBJECTIVES = Parameter(group=Group.create_ordered("Objectives", help="What must hold; then throughput decides."))
_SERVERS = Parameter(group=Group.create_ordered("Servers", help="What the printed commands start."))
_SEARCH = Parameter(group=Group.create_ordered("Search", help="What is tried, and for how long."))

_FIND = (
    "throughput: the deployment of all GPUs with the most tokens a second at constant concurrency. fewest-gpus: the"
    " fewest of them that hold the objectives over the times of the requests. figures: what all of them give over these"
    " times. The last two also find the load that breaks the objectives. Unset: throughput for a network, fewest-gpus"
    " for an engine file."
)
_WINDOW = (
    "Seconds of a window. The objectives of means hold for the requests that arrive in each window, so that quiet hours"
    " do not hide the peak; windows with fewer than 20 requests join the next."
)
_FURTHER = "Further flags of the printed commands, as one text, that a plan does not decide; they are not checked."
_GPU = f"One of {', '.join(GPUS)}."
_LINK = f"one of {', '.join(LINKS)}."
# Fields that only some questions read.
_FOR_TIMES = ("load_factor", "redundant_experts", "max_num_seqs", "window")
_FOR_THROUGHPUT = (
    *("popularity", "hot_experts", "max_kv_offloading_size"),
    *("num_seeds", "host_attention_us", "host_expert_us"),
)
_OF_NETWORKS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "redundant_experts")
# Host time of an item of `async` on a GPU machine: the budgets of our own engine, as in docs/modes.md.
_HOST_ATTENTION_US, _HOST_EXPERT_US = 250.0, 100.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class HardwareSettings(CheckedSettings):
    """The machines."""

    gpu: Annotated[str, Parameter(help=_GPU), _HARDWARE] = "h100"
    num_gpus: Annotated[int, at_least(1), _HARDWARE] = 8
    "GPUs of this kind in all."
    gpus_per_machine: Annotated[int, at_least(1), _HARDWARE] = 8
    "GPUs of one machine."
    link_within: Annotated[
        str | None,
        Parameter(help=f"Link between the GPUs of a machine. Unset: NVSwitch of the GPU; {_LINK}"),
        _HARDWARE,
    ] = None
    link_across: Annotated[str, Parameter(help=f"Link between machines: {_LINK}"), _HARDWARE] = "infiniband-hdr"
    gpus_per_engine: Annotated[int, at_least(1), _HARDWARE] = 1
    "GPUs of each engine of an engine file."
    calibrated_gpu: Annotated[str | None, _HARDWARE] = None
    "GPU on which an engine file was calibrated, to ask for another --gpu. It needs --network."
    network: Annotated[str | None, _HARDWARE] = None
    "Network of an engine file, by name or by its config.json; with --calibrated-gpu."
    gpu_memory_utilization: Annotated[float, above(0, at_most=1), _HARDWARE] = 0.9
    "Share of a GPU's memory for weights, workspace and KV cache."
    max_kv_offloading_size: Annotated[float | None, above(0), _HARDWARE] = None
    "Most GiB of host memory of each engine: says how much of it pays for --dataset-path. Unset: no answer."

    @property
    def is_other_gpu(self) -> bool:
        """Whether an engine file was calibrated on another GPU.

        Raises:
            ConfigError: one of them is unknown.
        """
        return self.calibrated_gpu is not None and gpu_named(self.calibrated_gpu) is not gpu_named(self.gpu)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrafficSettings(CheckedSettings):
    """The workload."""

    isl: Annotated[int, at_least(1), _TRAFFIC] = 1024
    "Tokens of a prompt. No prefix cache is assumed."
    osl: Annotated[int, at_least(2), _TRAFFIC] = 256
    "Tokens of an answer."
    dataset_path: Annotated[Path | None, _TRAFFIC] = None
    (
        "A trace, or a record of moestro serve or moestro route, whose lengths replace --isl and --osl. --find"
        " fewest-gpus and figures use its times and shared prefixes too, and throughput does not."
    )
    request_rate: Annotated[float | None, above(0), _TRAFFIC] = None
    (
        "Requests a second that must be served. Unset: as many as the objectives allow. Recorded times are scaled to"
        " it; without any, arrivals are Poisson."
    )
    load_factor: Annotated[float, above(0), _TRAFFIC] = 1.0
    "Factor on the rate of the requests: 2 asks about twice the load."
    popularity: Annotated[str, _TRAFFIC] = "zipf:0.6"
    (
        "Popularity of the experts, with --find throughput: uniform, zipf:EXPONENT or exponential:RATE (0.53: AMoE's"
        " fit of Mixtral)."
    )
    hot_experts: Annotated[Literal["permuted", "same"], _TRAFFIC] = "permuted"
    "permuted: each layer has other hot experts, as networks do. same: all layers have the same, as in paced devices."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings(CheckedSettings):
    """The objectives."""

    max_itl: Annotated[float, above(0), _OBJECTIVES] = 100.0
    "Largest mean time between two tokens of an answer, in milliseconds."
    max_ttft: Annotated[float | None, above(0), _OBJECTIVES] = None
    "Largest mean time from a request to its first token, in milliseconds. Unset: any."
    max_ttft_p99: Annotated[float | None, above(0), _OBJECTIVES] = None
    "Largest 99th percentile of that time over all requests, in milliseconds. Unset: any."
    window: Annotated[float, Parameter(help=_WINDOW), above(0), _OBJECTIVES] = 600.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServingSettings(CheckedSettings):
    """The servers whose commands are printed."""

    system: Annotated[SystemName, Parameter(name="--for"), _SERVERS] = "moestro"
    "Server of the printed commands."
    for_version: Annotated[str | None, _SERVERS] = None
    "Its version, against whose flags commands are checked. Unset: the installed one, else the newest that is known."
    serve_model: Annotated[str | None, _SERVERS] = None
    "Model in the printed commands. Unset: MODEL, or the name that the calibrated server lists."
    server_flags: Annotated[str, Parameter(help=_FURTHER, allow_leading_hyphen=True), _SERVERS] = ""
    redundant_experts: Annotated[int, at_least(0), _SERVERS] = 0
    "Further copies of experts in each layer where experts are spread (EPLB); with --find fewest-gpus or figures."

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            shlex.split(self.server_flags)
        except ValueError as error:
            raise ConfigError(f"--server-flags {self.server_flags!r} is no list of flags: {error}") from None

    @property
    def further(self) -> tuple[str, ...]:
        """The words of --server-flags."""
        return tuple(shlex.split(self.server_flags))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanSearchSettings(CheckedSettings):
    """The search."""

    find: Annotated[Literal["throughput", "fewest-gpus", "figures"] | None, Parameter(help=_FIND), _SEARCH] = None
    time: Annotated[float, above(0), _SEARCH] = 180.0
    "Seconds for the simulations. What they did not reach is named."
    served_only: Annotated[bool, Parameter(negative=()), _SEARCH] = False
    "Try only what the server of --for can run."
    num_seeds: Annotated[int, at_least(2), _SEARCH] = 4
    "Seeds of the comparison between the best two: other hot experts, other requests."
    seed: Annotated[int, at_least(0), _SEARCH] = 0
    "First seed."
    max_num_seqs: Annotated[int, at_least(1), _SEARCH] = 256
    "Sequences of a step of each engine, with --find fewest-gpus or figures; an engine file has its own."
    max_num_batched_tokens: Annotated[int, at_least(1), _SEARCH] = 2048
    "Tokens of a step of each engine; more where its sequences need them."
    block_size: Annotated[int, at_least(1), _SEARCH] = 16
    "Tokens of a KV block."
    host_attention_us: Annotated[float, at_least(0), _SEARCH] = _HOST_ATTENTION_US
    "Time of the engine's own code for each attention item in async mode, in microseconds."
    host_expert_us: Annotated[float, at_least(0), _SEARCH] = _HOST_EXPERT_US
    "Time of the engine's own code for each expert item in async mode, in microseconds."
    out: Annotated[Path | None, _SEARCH] = None
    "Write plan.json here, and, where matplotlib is installed, curves.png."


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """All of `moestro plan`.

    Attributes:
        model: name of a network that `cost` knows, a directory with config.json, that file, or the engine file (.toml)
            of a server that `moestro calibrate` has probed.
    """

    model: str
    hardware: HardwareSettings = HardwareSettings()
    traffic: TrafficSettings = TrafficSettings()
    objectives: ObjectiveSettings = ObjectiveSettings()
    serving: ServingSettings = ServingSettings()
    search: PlanSearchSettings = PlanSearchSettings()

    @property
    def is_calibrated(self) -> bool:
        """Whether the model is an engine file."""
        return self.model.endswith(".toml")

    @property
    def finds(self) -> str:
        """Word of `--find`, or its default."""
        return self.search.find or ("fewest-gpus" if self.is_calibrated else "throughput")

    def __post_init__(self) -> None:
        hardware = self.hardware
        if self.is_calibrated and self.finds == "throughput":
            raise ConfigError(
                f"--find throughput divides the GPUs of a network, and {self.model} describes one engine: give"
                " --find fewest-gpus or figures"
            )
        if (hardware.calibrated_gpu is None) != (hardware.network is None):
            raise ConfigError("--calibrated-gpu and --network go together: another GPU is priced for a network")
        if hardware.calibrated_gpu is not None and not self.is_calibrated:
            raise ConfigError(f"--calibrated-gpu is for an engine file (.toml), and MODEL is {self.model}: drop it")
        self._refuse_unused()
        if self.finds == "fewest-gpus" and self.objectives.max_ttft is None and self.objectives.max_ttft_p99 is None:
            raise ConfigError(
                "--find fewest-gpus needs --max-ttft or --max-ttft-p99: without it, any queue would hold the objectives"
            )

    def _refuse_unused(self) -> None:
        """Refuse flags that the question does not read: an answer that leaves one out would be taken for its answer."""
        if self.finds == "throughput":
            self._refuse(_FOR_TIMES, "goes with --find fewest-gpus or figures")
        else:
            self._refuse(_FOR_THROUGHPUT, "goes with --find throughput")
        if self.is_calibrated:
            self._refuse(_OF_NETWORKS, f"is for a network, and MODEL is {self.model}: drop it, or change that file")
        else:
            self._refuse(("gpus_per_engine",), f"is for an engine file (.toml), and MODEL is {self.model}: drop it")
        if self.is_calibrated and self.hardware.calibrated_gpu is None:
            self._refuse(("gpu",), f"needs --calibrated-gpu and --network: on which GPU was {self.model} calibrated?")

    def _refuse(self, names: Container[str], why: str) -> None:
        for part in (self.hardware, self.traffic, self.objectives, self.serving, self.search):
            for each in fields(part):
                if each.name in names and getattr(part, each.name) != each.default:
                    raise ConfigError(f"{flag_of(each.name)} {why}")


def unnamed_notes(settings: PlanSettings) -> list[str]:
    """Note that commands of other servers name a network whose checkpoint is unknown."""
    serving = settings.serving
    if serving.system == "moestro" or serving.serve_model is not None or known_name(settings.model) != settings.model:
        return []
    return [f"{settings.model} is the name of a network's sizes: give --serve-model with its checkpoint."]
