"""The settings of a simulation, read from a TOML file. An unknown key is an error.

`examples/` holds complete files.
"""

from __future__ import annotations

import inspect
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from moestro.core.setting_checks import (
    MAX_SETTING,
    CheckedSettings,
    above,
    at_least,
    between,
    check_settings,
    choices_of,
    name_of,
)
from moestro.cost.links import link_named
from moestro.cost.model import PopularityForm
from moestro.engine.settings import SchedulerLimits, SchedulerPolicies
from moestro.errors import ConfigError
from moestro.files.text_files import read_text
from moestro.flow.registry import make_step_policy
from moestro.flow.settings import PreemptionSettings
from moestro.model.settings import CacheSettings
from moestro.placement.contract import PLACE_POLICIES
from moestro.placement.settings import has_payback_gate
from moestro.routing.route_queue import NO_QUEUE
from moestro.sim.signals import AT_ONCE, SignalSettings
from moestro.workload.generated.draws import Shape

SimMode = Literal["fused", "preemptive", "ep", "ep-overlap", "afd", "async"]
GROUP_MODES: tuple[SimMode, ...] = ("ep", "ep-overlap", "afd", "async")


@dataclass(frozen=True, kw_only=True)
class GroupSettings(CheckedSettings):
    """The workers of each group, and the links between them, in the modes `ep`, `ep-overlap`, `afd` and `async`.

    Attributes:
        num_workers: GPUs of a group.
        workers_per_machine: workers of a machine; consecutive ones are together. Workers with attention and workers
            with experts alone are spread over all machines alike.
        link_within, link_across: links inside a machine and between machines, by their names in `cost.links`.
        two_phase: whether a message of `async` is announced before it is sent, as in AMoE.
        slowdown: factor on the stage times of each worker, from worker 0 on; 1 for the remaining workers.
        jitter: standard deviation of a factor with mean 1 on the time of each stage.
    """

    PLACE: ClassVar[str | None] = "[group] "

    num_workers: Annotated[int, at_least(1)]
    workers_per_machine: Annotated[int, at_least(1)] = 8
    link_within: str = "nvswitch-a100"
    link_across: str = "infiniband-hdr"
    two_phase: bool = True
    slowdown: tuple[float, ...] = ()
    jitter: Annotated[float, at_least(0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("link_within", "link_across"):
            try:
                link_named(getattr(self, name))
            except ConfigError as error:
                raise ConfigError(f"{name_of(self, name)}: {error}") from None
        for factor in self.slowdown:
            if not abs(factor) <= MAX_SETTING:
                raise ConfigError(f"[group] slowdown must be a number up to {MAX_SETTING:g}, got {factor:g}")
        if len(self.slowdown) > self.num_workers or not all(factor > 0 for factor in self.slowdown):
            raise ConfigError(
                f"[group] slowdown must hold at most one factor above 0 for each of the {self.num_workers} workers,"
                f" got {list(self.slowdown)}"
            )

    @property
    def machine_of(self) -> tuple[int, ...]:
        """Machine of each worker."""
        return tuple(worker // self.workers_per_machine for worker in range(self.num_workers))


@dataclass(frozen=True, kw_only=True)
class GroupModeSettings(CheckedSettings):
    """What one of the policies to compare makes of a group.

    Attributes:
        mode: `fused` or `preemptive`: each engine computes alone. `ep`: all workers of a group share the experts and
            step together. `ep-overlap`: the same with two-batch overlap. `afd`: experts on workers of their own, and
            micro-batches in ping-pong. `async`: no worker waits for another one but for the tokens that it lacks.
        num_expert_workers: workers that have experts alone, in `afd` and `async`; the others have attention. 0 puts
            attention and experts on every worker.
        attention_step_policy, expert_step_policy: step policies of `async`; the first is also for workers with both.
        num_credits: tokens of one attention worker that may be at one expert worker at once, in `async`; unset: no
            bound.
        launch_ahead: items that a device holds at once, in `async`; with 2, the host prepares one while another runs.
        stall_share: share of a step for which the workers stall at least, in `ep`, as published for a real system.
        free_links: whether messages and collectives take no time, as in ideal `ep`.
        place: placement policy that plans anew while the group serves, in `ep` and `ep-overlap`.
        place_interval_steps: steps between two plans; the first one comes after a quarter of them, as in vLLM.
        place_drift: fall of the observed balance below that of the last plan, at which the policy plans at once, as
            --placement-drift; 0: never by drift.
        place_payback_steps: steps within which a plan must pay for itself, as --placement-payback-horizon; unset:
            `place_interval_steps`, and 0 for gimbal_v1; 0: no such gate, as in vLLM and SGLang.
        place_bytes_per_step: bytes of weights that a worker sends or receives between two steps, one expert at least;
            unset: one step waits for all.
        num_spare_slots: expert slots of each worker and layer beyond its share, in `ep` and `ep-overlap`.
    """

    mode: SimMode = "fused"
    num_expert_workers: Annotated[int, at_least(0)] = 0
    attention_step_policy: str = "defrag"
    expert_step_policy: str = "defrag"
    num_credits: Annotated[int | None, at_least(1)] = None
    launch_ahead: Annotated[int, at_least(1)] = 1
    stall_share: Annotated[float | None, at_least(0)] = None
    free_links: bool = False
    place: str = "static"
    place_interval_steps: Annotated[int, at_least(4)] = 3000
    place_drift: Annotated[float, between(0, 1)] = 0.0
    place_payback_steps: Annotated[float | None, at_least(0)] = None
    place_bytes_per_step: Annotated[int | None, at_least(1)] = None
    num_spare_slots: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_expert_workers and self.mode not in {"afd", "async"}:
            raise ConfigError(
                f"{name_of(self, 'num_expert_workers')} {self.num_expert_workers} goes with mode 'afd' or 'async', not"
                f" with {self.mode!r}"
            )
        if self.mode == "afd" and not self.num_expert_workers:
            raise ConfigError(f"{name_of(self, 'mode')} = 'afd' needs num_expert_workers of at least 1")
        if self.stall_share is not None and (self.mode != "ep" or self.stall_share >= 1):
            raise ConfigError(
                f"{name_of(self, 'stall_share')} goes with mode 'ep' and is below 1, got {self.stall_share:g} with"
                f" {self.mode!r}"
            )
        self._check_placement()
        for text in (self.attention_step_policy, self.expert_step_policy):
            make_step_policy(text, math.inf)

    def _check_placement(self) -> None:
        if self.place == "static" and not self.num_spare_slots:
            return
        if self.mode not in {"ep", "ep-overlap"}:
            name = "place" if self.place != "static" else "num_spare_slots"
            raise ConfigError(f"{name_of(self, name)} goes with mode 'ep' or 'ep-overlap', not with {self.mode!r}")
        PLACE_POLICIES.make(self.place)

    @property
    def payback_horizon_steps(self) -> float:
        """Steps within which a plan must pay for itself; 0 means no such gate."""
        if self.place_payback_steps is not None:
            return self.place_payback_steps
        return self.place_interval_steps if has_payback_gate(self.place) else 0

    @property
    def plans_placement(self) -> bool:
        """Whether the group plans its placement while it serves."""
        return self.place != "static"

    @property
    def has_group(self) -> bool:
        """Whether the mode needs a group of workers."""
        return self.mode in GROUP_MODES

    def num_attention_workers(self, group: GroupSettings) -> int:
        """Workers of `group` that compute attention.

        Raises:
            ConfigError: none is left.
        """
        left = group.num_workers - self.num_expert_workers
        if left < 1:
            raise ConfigError(
                f"{name_of(self, 'num_expert_workers')} {self.num_expert_workers} leaves none of the"
                f" {group.num_workers} workers of [group] for attention"
            )
        return left


Pattern = Literal["trace", "poisson", "gamma", "weibull", "constant"]


class WorkloadSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workload, from exactly one source: a trace, generated sessions, or requests of one size.

    Attributes:
        trace: file that `workload.traces` reads; a relative path starts at the configuration file.
        start_s, duration_s: part of a trace with times that is used, in seconds of its own time; unset: to its end.
        sessions: shape of `workload.session_shapes`. A turn arrives after the answer to the previous turn has ended.
        prompt_tokens, output_tokens: tokens of each request, for requests of one size.
        num_requests: number of requests; of a trace, the first ones of its part.
        arrivals: arrival pattern. `trace` keeps the recorded times; the others draw or space them at `rate`.
        rate: requests a second. Recorded times are scaled to it.
        load: the rate as a share of the most that the engines answer under the first policy, in place of `rate`.
        burstiness: shape parameter of gamma and Weibull arrivals; below 1, requests come in bursts.
        closed_loop: whether a turn of a trace's conversation arrives a think time after the end of the turn before.
        think_s: think time of every turn, seconds; unset: the recorded gap less the assumed duration of the answer
            (`workload.sessions.Pace`).
        shape: one of Gimbal's five shapes, in which the lengths of a trace are drawn anew.
        ls_share: share of latency-sensitive requests, drawn at random; unset: as in the workload.
        max_tokens: `max_tokens` of every request; unset: the longest answer of the workload.
    """

    PLACE: ClassVar[str] = "[workload] "

    trace: str | None = None
    start_s: Annotated[float, at_least(0)] = 0.0
    duration_s: Annotated[float | None, above(0)] = None
    sessions: str | None = None
    prompt_tokens: Annotated[int | None, at_least(1)] = None
    output_tokens: Annotated[int | None, at_least(1)] = None
    num_requests: Annotated[int | None, at_least(1)] = None
    arrivals: Pattern | None = None
    rate: Annotated[float | None, above(0)] = None
    load: Annotated[float | None, above(0)] = None
    burstiness: Annotated[float, above(0)] = 1.0
    closed_loop: bool = False
    think_s: Annotated[float | None, at_least(0)] = None
    shape: Shape | None = None
    ls_share: float | None = None
    max_tokens: Annotated[int | None, at_least(1)] = None

    def __post_init__(self) -> None:
        check_settings(self)
        given = [self.trace is not None, self.sessions is not None, self.prompt_tokens is not None]
        if sum(given) != 1:
            raise ConfigError("[workload] needs exactly one of trace, sessions, and prompt_tokens with output_tokens")
        if (self.prompt_tokens is None) != (self.output_tokens is None):
            raise ConfigError("[workload] prompt_tokens and output_tokens go together")
        if self.rate is not None and self.load is not None:
            raise ConfigError("[workload] load finds the rate: give rate or load")
        if self.trace is None and (self.num_requests is None or not self.has_rate):
            raise ConfigError("[workload] num_requests and rate (or load) are required: how many requests, how fast")
        self._check_trace_keys()
        self._check_arrivals()

    @property
    def has_rate(self) -> bool:
        """Whether the rate is given, or to be found."""
        return self.rate is not None or self.load is not None

    @property
    def has_window(self) -> bool:
        """Whether only a part of the trace is used."""
        return self.start_s > 0 or self.duration_s is not None

    def _check_trace_keys(self) -> None:
        if self.shape is not None and self.trace is None:
            raise ConfigError("[workload] shape draws the lengths of a trace anew: give a trace, or drop it")
        if self.trace is None and (self.has_window or self.closed_loop):
            raise ConfigError(
                "[workload] start_s, duration_s and closed_loop belong to a trace: give one, or drop them"
            )
        if self.think_s is not None and not self.closed_loop:
            raise ConfigError("[workload] think_s needs closed_loop = true, in which turns wait for answers")
        if self.closed_loop and self.shape is not None:
            raise ConfigError("[workload] shape draws single requests, without conversations: drop it, or closed_loop")

    def _check_arrivals(self) -> None:
        if self.sessions is not None and self.arrivals is not None:
            raise ConfigError("[workload] sessions have arrival times of their own: drop arrivals")
        if self.arrivals not in {None, "trace"} and not self.has_rate:
            raise ConfigError(f"[workload] arrivals = {self.arrivals!r} needs a rate, in requests a second")
        if self.arrivals == "trace" and self.trace is None:
            raise ConfigError("[workload] arrivals = 'trace' needs a trace")
        if self.burstiness != 1 and self.arrivals not in {"gamma", "weibull"}:
            raise ConfigError("[workload] burstiness shapes arrivals = 'gamma' and 'weibull': give one, or drop it")


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
        if self.tensor_parallel_size > 1 and (self.engine or (self.table and self.table_gpu is None)):
            what = "a table" if self.table else f"engine {self.engine!r}"
            raise ConfigError(
                f"[engines] {what} prices its engine as it is: drop tensor_parallel_size = {self.tensor_parallel_size}"
            )
        if self.table and self.table_gpu is None and (self.host_step_us or self.host_sequence_us):
            raise ConfigError("[engines] a table has the host's time in it: drop host_step_us and host_sequence_us")


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
    queue_waiting: Annotated[int, at_least(1)] = 2
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

    ttft_ms: Annotated[float | None, above(0)] = None
    tpot_ms: Annotated[float | None, above(0)] = None
    e2e_ms: Annotated[float | None, above(0)] = None

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
    "slos": SloSettings,
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
        _refuse_unknown_keys(tables)  # first: a misspelt key may be what contradicts another
        settings = msgspec.convert(tables, SimSettings)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_in_words(str(error))}") from error
    return settings


def _refuse_unknown_keys(tables: Mapping[str, object]) -> None:
    for name, kind in _TABLES.items():
        given = tables.get(name)
        for index, table in enumerate(given if isinstance(given, list) else [given]):
            if isinstance(table, dict):  # msgspec refuses anything else
                refuse_unknown(table, kind, f"{name}[{index}]" if isinstance(given, list) else name)


def refuse_unknown(table: Mapping[str, object], kind: type, place: str) -> None:
    """Raise ConfigError for a key that is not a field of `kind`."""
    known = set(inspect.signature(kind).parameters)
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
