"""The settings of `moestro plan`. A docstring under a field is its text in `--help`.

Lengths and objectives have the names of NVIDIA's planners (`isl`, `osl`, `ttft`, `itl`), limits those of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from moestro.core.setting_checks import CheckedSettings, above, at_least
from moestro.cost.gpus import GPUS
from moestro.cost.links import LINKS

_HARDWARE = Parameter(group=Group.create_ordered("Hardware", help="The GPUs, and what connects them."))
_TRAFFIC = Parameter(group=Group.create_ordered("Workload", help="The requests, and the experts that they visit."))
_OBJECTIVES = Parameter(group=Group.create_ordered("Objectives", help="What must hold; then throughput decides."))
_SEARCH = Parameter(group=Group.create_ordered("Search", help="What is tried, and for how long."))

_GPU = f"One of {', '.join(GPUS)}."
_LINK = f"one of {', '.join(LINKS)}."
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
    gpu_memory_utilization: Annotated[float, above(0, at_most=1), _HARDWARE] = 0.9
    "Share of a GPU's memory for weights, workspace and KV cache."
    max_kv_offloading_size: Annotated[float | None, above(0), _HARDWARE] = None
    "Most GiB of host memory of each engine: says how much of it pays for --dataset-path. Unset: no answer."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrafficSettings(CheckedSettings):
    """The workload."""

    isl: Annotated[int, at_least(1), _TRAFFIC] = 1024
    "Tokens of a prompt. No prefix cache is assumed."
    osl: Annotated[int, at_least(2), _TRAFFIC] = 256
    "Tokens of an answer."
    dataset_path: Annotated[Path | None, _TRAFFIC] = None
    "A trace, whose lengths replace --isl and --osl; its times and shared prefixes are not used."
    request_rate: Annotated[float | None, above(0), _TRAFFIC] = None
    "Requests a second that must be served. Unset: as many as the objectives allow."
    popularity: Annotated[str, _TRAFFIC] = "zipf:0.6"
    "Popularity of the experts: uniform, zipf:EXPONENT or exponential:RATE (0.53: AMoE's fit of Mixtral)."
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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanSearchSettings(CheckedSettings):
    """The search."""

    time: Annotated[float, above(0), _SEARCH] = 180.0
    "Seconds for the simulations. What they did not reach is named."
    served_only: Annotated[bool, Parameter(negative=()), _SEARCH] = False
    "Try only what moestro serve can run."
    num_seeds: Annotated[int, at_least(2), _SEARCH] = 4
    "Seeds of the comparison between the best two: other hot experts, other requests."
    seed: Annotated[int, at_least(0), _SEARCH] = 0
    "First seed."
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
        model: name of a network that `cost` knows, or a directory with config.json, or that file.
    """

    model: str
    hardware: HardwareSettings = HardwareSettings()
    traffic: TrafficSettings = TrafficSettings()
    objectives: ObjectiveSettings = ObjectiveSettings()
    search: PlanSearchSettings = PlanSearchSettings()
