"""The settings of a simulation, read from a TOML file. An unknown key is an error.

`examples/` holds complete files.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from moestro.core.setting_checks import CheckedSettings, above, at_least, between, check_settings, choices_of
from moestro.cost.popularity import PopularityForm
from moestro.engine.settings import SchedulerLimits, SchedulerPolicies
from moestro.errors import ConfigError
from moestro.files.text_files import read_text
from moestro.flow.settings import PreemptionSettings
from moestro.model.settings import CacheSettings
from moestro.routing.route_queue import NO_QUEUE
from moestro.sim.groups.group_settings import GROUP_MODES, GroupModeSettings, GroupSettings
from moestro.sim.load.workload_settings import WorkloadSettings
from moestro.sim.signals import AT_ONCE, SignalSettings


@dataclass(frozen=True, kw_only=True)
class SimEngineSettings(SchedulerLimits, CacheSettings):
    """The engines, all alike, and the cost of their steps.

    Attributes:
        count: groups of `ep_ranks` ranks each; the router sees every rank as an engine.
        ep_ranks: ranks that share the experts and step together.
        gpu: GPU of the roofline, by its name in `cost`.
        network: network of the roofline: a name in `cost`, a checkpoint directory, or its config.json.
        tensor_parallel_size: GPUs of a rank, among which attention heads and intermediate sizes are divided. Two
            all-reduces a layer are priced, and one where experts are spread over several ranks.
        link_within: link of these GPUs, by its name in `cost.links`; unset: the NVSwitch of the GPU.
        engine: `qllm` uses the cost of QLLM's engine with that network in 4 bits, whatever the GPU, and requires
            num_blocks. `amoe` uses the cost of AMoE's prototype for workers of a group. Unset: a roofline.
        table: file that `moestro calibrate` wrote, which replaces these and requires num_blocks.
        table_gpu: GPU on which the table was measured, where `gpu` is another one: a step takes as much longer or
            shorter as the roofline of `network` says. Unset: the table's prices as they are.
        host_step_us, host_sequence_us: host time added to each step, and to each sequence in it; unset: vLLM's, as
            listed in `cost`, in `fused` mode, and none in groups of workers.
        api_us, api_token_us: time of a request outside its engine, and for each token of its prompt, as
            `moestro calibrate --server` finds it. It delays all tokens of an answer alike.
        host_attention_us, host_expert_us: host time of each attention item and each expert item in `async` mode.
        gpu_memory_utilization: share of the GPU's memory that the engine uses.
        num_blocks: KV blocks of a rank; unset: as many as fit beside the weights.
        dummy_kv: whether requests enter with the KV of their prompts and decode at once, as behind prefill engines
            whose transfers cost nothing.
    """

    PLACE: ClassVar[str | None] = "[engines] "

    count: Annotated[int, at_least(1)] = 1
    ep_ranks: Annotated[int, at_least(1)] = 1
    gpu: str = "h20"
    network: str = "qwen3-30b-a3b"
    tensor_parallel_size: Annotated[int, at_least(1)] = 1
    link_within: str | None = None
    engine: Literal["qllm", "amoe"] | None = None
    table: str | None = None
    table_gpu: str | None = None
    host_step_us: Annotated[float | None, at_least(0)] = None
    host_sequence_us: Annotated[float | None, at_least(0)] = None
    api_us: Annotated[float, at_least(0)] = 0.0
    api_token_us: Annotated[float, at_least(0)] = 0.0
    host_attention_us: Annotated[float, at_least(0)] = 0.0
    host_expert_us: Annotated[float, at_least(0)] = 0.0
    gpu_memory_utilization: float = 0.9
    num_blocks: Annotated[int | None, at_least(1)] = None
    dummy_kv: bool = False
    # Defaults that differ from a server's: the simulated GPU is a large one, and no request is refused.
    max_num_seqs: int = 256
    max_num_queued_reqs: int = 1_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table is not None and self.engine is not None:
            raise ConfigError("[engines] a table prices whole steps: give it, or engine")
        if (self.table or self.engine == "qllm") and (self.num_blocks is None or self.ep_ranks > 1):
            what = "a table" if self.table else f"engine {self.engine!r}"
            raise ConfigError(f"[engines] {what} prices single ranks, and needs num_blocks and ep_ranks 1")
        if self.table_gpu is not None and self.table is None:
            raise ConfigError(
                f"[engines] table_gpu = {self.table_gpu!r} says where a table was measured: give table too"
            )
        if self.tensor_parallel_size > 1 and (self.table or self.engine):
            what = "a table" if self.table else f"engine {self.engine!r}"
            raise ConfigError(
                f"[engines] {what} prices its engine as it is: drop tensor_parallel_size = {self.tensor_parallel_size}"
            )


@dataclass(frozen=True, kw_only=True)
class PolicySettings(PreemptionSettings, SchedulerPolicies, GroupModeSettings):
    """One combination of policies, under which the workload runs.

    In `preemptive` and `async` mode every stage is an event, so a simulation takes longer, and the time of prefill is
    unknown.

    Attributes:
        name: title in tables; unset: the name of the routing policy, and the mode where it has groups of workers.
        route: routing policy.
        route_score: expression over indicators that replaces the policy, as --route-score of `moestro serve`.
        max_num_urgent_seqs: sequences of each engine beyond max_num_seqs, reserved for latency-sensitive requests;
            unset: none in `fused` mode and max_num_seqs in `preemptive` mode, as in `moestro serve`.
        signals: signals that reach the router, and their delays; unset: the file's [signals].
        queue_policy: order policy of a queue in front of the router, as --queue-policy of `moestro route`. none means
            that engines get every request at once.
        queue_waiting: requests that may wait in an engine before it is saturated.
        queue_kv_usage: fraction of its KV cache in use from which an engine is saturated.
        routers: routers before the engines, to which requests go at random.
        router_delay_ms: time of a message between two routers, ms; unset: routers exchange nothing.
        router_loss: share of these messages that are lost.
    """

    PLACE: ClassVar[str | None] = "[[policies]] "

    name: str = ""
    route: str = "moestro"
    route_score: str | None = None
    max_num_urgent_seqs: Annotated[int | None, at_least(0)] = None
    signals: SignalSettings | None = None
    queue_policy: str = NO_QUEUE
    queue_waiting: Annotated[int, at_least(1)] = 4
    queue_kv_usage: Annotated[float, above(0, at_most=1)] = 0.95
    routers: Annotated[int, between(1, 64)] = 1
    router_delay_ms: Annotated[float | None, at_least(0)] = None
    router_loss: Annotated[float, between(0, 0.9)] = 0.0

    def check_engines(self, engines: SimEngineSettings, group: GroupSettings | None) -> None:
        """Raise ConfigError if the mode needs other prices than those of `engines`, or another group of workers."""
        if self.mode != "fused" and (engines.table is not None or engines.ep_ranks > 1):
            raise ConfigError(
                f"[[policies]] mode = {self.mode!r} needs prices of stages and single ranks: no table, ep_ranks 1"
            )
        if self.mode != "fused" and engines.tensor_parallel_size > 1:
            raise ConfigError(
                f"[[policies]] mode = {self.mode!r} has one GPU for each worker: drop tensor_parallel_size of [engines]"
            )
        if not self.has_group and engines.engine == "amoe":
            raise ConfigError(
                f"[engines] engine = 'amoe' prices workers of a group, mode {' or '.join(GROUP_MODES)}, not"
                f" {self.mode!r}"
            )
        if self.has_group and group is None:
            raise ConfigError(f"[[policies]] mode = {self.mode!r} needs a table [group] with num_workers")
        if self.has_group and group is not None:
            self.num_attention_workers(group)

    def num_urgent_seqs(self, max_num_seqs: int) -> int:
        """`max_num_urgent_seqs`, or its default for the mode."""
        if self.max_num_urgent_seqs is not None:
            return self.max_num_urgent_seqs
        return max_num_seqs if self.mode == "preemptive" else 0

    @property
    def title(self) -> str:
        """Name of the combination in tables."""
        return self.name or (self.mode if self.has_group else self.route_score or self.route)


class SloSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency objectives of a request, ms; unset: no objective."""

    PLACE: ClassVar[str] = "[slos] "

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        check_settings(self)


class SimSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a simulation.

    Attributes:
        seed: random seed of every draw.
        num_seeds: runs of each policy, with seeds from `seed` on; with several, figures have confidence intervals.
        policies: combinations of policies, one run each; the others are compared with the first.
        group: workers of each group, for the modes that need them.
        popularity: popularity of the experts; unset: as the prices of the engines have it.
        slos: objectives that count towards goodput.
    """

    PLACE: ClassVar[str] = ""

    workload: WorkloadSettings
    engines: SimEngineSettings = SimEngineSettings()
    group: GroupSettings | None = None
    popularity: PopularityForm | None = None
    signals: SignalSettings = AT_ONCE
    policies: tuple[PolicySettings, ...] = (PolicySettings(),)
    slos: SloSettings | None = None
    seed: Annotated[int, at_least(0)] = 0
    num_seeds: Annotated[int, at_least(1)] = 1

    def __post_init__(self) -> None:
        check_settings(self)
        for policy in self.policies:
            policy.check_engines(self.engines, self.group)
        titles = [policy.title for policy in self.policies]
        if not titles or len(set(titles)) < len(titles):
            raise ConfigError(
                f"[[policies]] must be one or more with distinct names; got {', '.join(titles) or 'none'}"
            )


_TABLES: dict[str, type] = {
    "workload": WorkloadSettings,
    "engines": SimEngineSettings,
    "group": GroupSettings,
    "popularity": PopularityForm,
    "policies": PolicySettings,
}


def read_settings(
    path: Path,
    *,
    load: float | None = None,
    num_seeds: int | None = None,
    kv_offloading_size: float | None = None,
) -> SimSettings:
    """Read the simulation that a TOML file describes.

    Args:
        path: the file.
        load: share of saturation that replaces rate and load of the file's workload. None leaves them.
        num_seeds: number of seeds that replaces the file's. None leaves it.
        kv_offloading_size: GiB of host memory that replace those of the file's engines. None leaves them.

    Raises:
        ConfigError: the file cannot be read, or a key or value is not allowed; the text names the file and the key.
    """
    try:
        tables = tomllib.loads(read_text(path))
        if load is not None and isinstance(workload := tables.get("workload"), dict):
            tables["workload"] = {name: value for name, value in workload.items() if name != "rate"} | {"load": load}
        if num_seeds is not None:
            tables["num_seeds"] = num_seeds
        if kv_offloading_size is not None:
            tables["engines"] = {**tables.get("engines", {}), "kv_offloading_size": kv_offloading_size}
        settings = msgspec.convert(tables, SimSettings)
        for name, kind in (("engines", SimEngineSettings), ("group", GroupSettings), ("popularity", PopularityForm)):
            refuse_unknown(tables.get(name, {}), kind, name)
        for index, table in enumerate(tables.get("policies", ())):
            refuse_unknown(table, PolicySettings, f"policies[{index}]")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_in_words(str(error))}") from error
    return settings


def refuse_unknown(table: Mapping[str, object], kind: type[CheckedSettings], place: str) -> None:
    """Raise ConfigError for a key that is not a field of the dataclass `kind`; msgspec checks only its own structs."""
    known = {each.name for each in fields(kind)}
    for key in table:
        if key not in known:
            raise ConfigError(f"unknown field `{key}` in [{place}]; known: {', '.join(sorted(known))}")


def _in_words(text: str) -> str:
    """Rewrite msgspec's message with the place as TOML writes it, and what is allowed there."""
    what, _, where = text.partition(" - at `$")
    place = where.removesuffix("`").removeprefix(".").replace("[...]", "")
    table, _, key = place.partition(".")
    choices = choices_of(_TABLES.get(table.partition("[")[0], SimSettings), key)
    allowed = f": give one of {', '.join(map(str, choices))}" if choices else ""
    return f"{what} in [{place}]{allowed}" if place else what
