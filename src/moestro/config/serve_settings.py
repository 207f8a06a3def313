"""All settings of `moestro serve`, composed of the rooms' dataclasses. The command line and `--config` fill them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from moestro.config.launch_spec import KvEventsSettings, kv_events_from
from moestro.core.setting_checks import PORT, CheckedSettings, at_least, between
from moestro.cost.settings import PACED, PACED_NETWORK, PACED_QLLM, PacedOptions, PacedSettings, overridden_popularity
from moestro.engine.settings import SchedulerOptions
from moestro.errors import ConfigError
from moestro.flow.settings import GroupOptions, SteppingSettings
from moestro.model.settings import DEMO_MODEL, ModelSettings
from moestro.placement.settings import ExpertLoadSettings, LivePlacementSettings
from moestro.routing.settings import RoutePolicySettings
from moestro.text.settings import ChatSettings
from moestro.web.settings import AccessSettings, TlsSettings, TracingSettings

# The settings of the API server and of the engine processes behind it. A docstring under a field is its text in
# `--help`.


@dataclass(frozen=True, kw_only=True)
class LauncherSettings(CheckedSettings):
    """Choice of the launcher, which starts the processes of engines and workers."""

    launcher: Literal["local", "ray"] = "local"
    (
        "local: processes of this machine. ray: an existing Ray cluster, one of whose nodes this machine is, places"
        " them; all sockets between them are encrypted. The model has to be at the same path on every node."
    )
    ray_address: str | None = None
    "With --launcher ray, HOST:PORT of the cluster's head. Unset: RAY_ADDRESS, else the cluster that runs here."
    ray_worker_cpus: Annotated[int, between(1, 1024)] = 1
    "With --launcher ray, cores that each process reserves, and threads with which it computes."
    ray_timeout: Annotated[float, at_least(1)] = 60.0
    "With --launcher ray, seconds in which the cluster must have room for the processes, and its nodes answer."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.launcher != "ray" and self.ray_address is not None:
            raise ConfigError("--ray-address is for --launcher ray: add it, or leave the address out")
        if self.ray_address is not None and self.ray_address.startswith("ray://"):
            raise ConfigError(
                f"--ray-address {self.ray_address} is for Ray's remote client, and Moestro's API server is a node's own"
                " process: run it on a node of the cluster, and give HOST:PORT of the head"
            )


_ROOT_PATH = re.compile(r"(/(?!\.{1,2}(/|\Z))[A-Za-z0-9._~-]+)+")


@dataclass(frozen=True, kw_only=True)
class ServerSettings(CheckedSettings):
    """The API server."""

    host: str = "127.0.0.1"
    "Address to listen on; 0.0.0.0 opens the server to the network: set --api-key too."
    port: Annotated[int, PORT] = 8000
    "Port to listen on; 0 chooses a free port, shown at the start."
    root_path: str = ""
    "Prefix that a proxy in front of the server leaves in each path, such as /llm."
    served_model_name: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    "One or more names of the model for clients. Unset: the name on the command line."
    api_key: Annotated[tuple[str, ...], Parameter(consume_multiple=True, show_default=False)] = ()
    "Accepted keys: clients send one as a bearer token or in x-api-key. Unset: no key is required."
    router_api_key: Annotated[tuple[str, ...], Parameter(consume_multiple=True, show_default=False)] = ()
    (
        "Further accepted keys, of routers (moestro route --engine-api-key). A request with one counts for the client"
        " that the router names in X-Moestro-Client."
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    "Lowest severity that is logged. Prompts and answers are never logged."
    record: Path | None = None
    "Append each request's way through all levels, without text, to this file: for moestro explain, replay and sim."
    record_key_file: Path | None = None
    "File with the key of the record's block hashes, made if it does not exist. Unset: one in the state directory."
    record_max_size: Annotated[float, at_least(0)] = 16.0
    "GiB that the file of --record does not exceed; lines beyond are lost and counted. A request takes about 5 kB."
    strict_fields: bool = False
    "Refuse a request with an unknown field with a 400. Unset: the answer has a Warning header that names the field."
    users_are_clients: bool = False
    (
        "The user of a request is its API key, where there are several, or its address, whatever its field user says:"
        " then --scheduling-policy weighted_fair divides each engine between clients."
    )
    enable_force_include_usage: bool = False
    "End each stream with its usage, as stream_options.include_usage does."
    enable_tokenizer_info_endpoint: bool = False
    "Answer GET /tokenizer_info with the tokenizer's settings and the chat template."
    shutdown_timeout: Annotated[float, at_least(0)] = 10.0
    "Seconds in which running requests can finish after SIGTERM or Ctrl-C."
    write_timeout: Annotated[float, at_least(1)] = 60.0
    "Seconds that a client may leave its stream unread before it is disconnected."
    max_connections: Annotated[int, at_least(1)] = 4096
    (
        "Maximum number of connected clients. A further one takes the place of an idle one, or is refused with 503 and"
        " Retry-After."
    )

    admin_port: Annotated[int | None, PORT] = None
    "Port on 127.0.0.1 for operators: /admin/experts, /admin/placement, and in async mode /admin/workers. Unset: none."
    admin_api_key: Annotated[str | None, Parameter(show_default=False)] = field(default=None, repr=False)
    "Bearer token of the operators' port, which --api-key does not open. Unset: no key is required."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.admin_api_key == "":
            raise ConfigError("--admin-api-key is empty: give a key, or leave the flag out")
        if self.admin_api_key is not None and self.admin_port is None:
            raise ConfigError("--admin-api-key protects --admin-port: add the port, or leave the key out")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"--root-path must begin with / and not end with one, such as /llm, got {self.root_path!r}"
            )
        if not all(self.api_key):
            raise ConfigError("--api-key is empty: give a key, or leave the flag out to serve without one")
        if not all(self.router_api_key):
            raise ConfigError("--router-api-key is empty: give a key, or leave the flag out to trust no router")
        if both := set(self.api_key) & set(self.router_api_key):
            raise ConfigError(
                f"--api-key and --router-api-key have {len(both)} keys in common: a client with a router's key could"
                " take any name, so give routers keys of their own"
            )
        if not all(self.served_model_name):
            raise ConfigError("--served-model-name is empty: give a name, or leave the flag out")


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(CheckedSettings):
    """The engine processes: their number, and the time-outs after which one counts as dead."""

    engines: Annotated[int, between(1, 1024)] = 1
    "Number of engines; a router spreads requests over them. Each has the whole model, in ep mode its share of experts."
    num_redundant_experts: Annotated[int, at_least(0)] = 0
    (
        "In async and ep mode, empty slots for experts in each layer, spread evenly over the workers that hold experts"
        " (async: rounded up; ep: all slots must divide evenly). Placement fills them with copies, and moves experts"
        " through empty ones."
    )
    kv_events_config: str | None = None
    (
        "KV events that each engine publishes for routers, in the form of vLLM:"
        """ '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'."""
        " Engine r listens on port + r; there is no password."
    )
    bind_cores: bool = True
    "On one machine, give each engine an equal part of the cores for itself, if there are as many cores as engines."
    startup_timeout: Annotated[float, at_least(1)] = 600.0
    "Seconds in which engines must become ready."
    engine_timeout: Annotated[float, at_least(2)] = 10.0  # a rank sends a message four times a second
    "Seconds without a message, while the server runs, after which an engine is killed and restarted."
    watchdog_timeout: Annotated[float, at_least(1)] = 30.0
    "Seconds without a step, despite requests, after which an engine's stacks are dumped and it gets no new ones."
    step_timeout: float = 300.0
    "Seconds without a step after which an engine is killed and restarted; set it above the longest step."
    resume_streams: bool = False
    (
        "Continue the streams of an ended engine on another one in bfloat16 and float16 too, where the continuation may"
        " differ from the first engine's. Unset: such a stream ends with an error event."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_timeout < self.watchdog_timeout:
            raise ConfigError(
                f"--step-timeout {self.step_timeout:g} must be at least --watchdog-timeout {self.watchdog_timeout:g}"
            )


def _panel(name: str, text: str, sort_key: int) -> Parameter:
    """Return the parameter of a settings group whose flags have no prefix and a separate panel in `--help`."""
    return Parameter(name="*", group=Group(name, help=text, sort_key=sort_key))


_MODEL = _panel("Model", "The model, and how it is loaded.", 1)
_SCHEDULING = _panel("Scheduling", "The contents of one step of one engine.", 3)
_SERVER = _panel("Server", "The address of the server, and the access to it.", 4)
_CHAT = _panel("Chats", "Chat templates, calls of tools, and reasoning.", 4)
_PROCESSES = _panel("Engines", "The processes behind the API server.", 5)
_GROUP = _panel("Workers", "The workers of --mode async.", 6)
_PLACEMENT = _panel("Placement", "Where experts live while a group serves, in --mode ep and async.", 7)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """All settings of `moestro serve`."""

    model: Annotated[ModelSettings, _MODEL] = field(default_factory=ModelSettings, kw_only=False)
    pacing: Annotated[PacedOptions, _MODEL] = field(default_factory=PacedOptions)
    scheduler: Annotated[SchedulerOptions, _SCHEDULING] = field(default_factory=SchedulerOptions)
    stepping: Annotated[SteppingSettings, _SCHEDULING] = field(default_factory=SteppingSettings)
    server: Annotated[ServerSettings, _SERVER] = field(default_factory=ServerSettings)
    chat: Annotated[ChatSettings, _CHAT] = field(default_factory=ChatSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)
    processes: Annotated[ProcessSettings, _PROCESSES] = field(default_factory=ProcessSettings)
    launching: Annotated[LauncherSettings, _PROCESSES] = field(default_factory=LauncherSettings)
    routing: Annotated[RoutePolicySettings, _PROCESSES] = field(default_factory=RoutePolicySettings)
    group: Annotated[GroupOptions, _GROUP] = field(default_factory=GroupOptions)
    expert_load: Annotated[ExpertLoadSettings, _SERVER] = field(default_factory=ExpertLoadSettings)
    placement: Annotated[LivePlacementSettings, _PLACEMENT] = field(default_factory=LivePlacementSettings)

    def __post_init__(self) -> None:
        scheduler = self.scheduler
        if (kv_events := self.kv_events) is not None:
            kv_events.check_ports(self.num_engines)
            if not scheduler.enable_prefix_caching:
                raise ConfigError("--kv-events-config publishes the prefix cache: leave --no-enable-prefix-caching out")
        self._check_group()
        self.placement.check_mode(self.stepping.mode)
        if self.stepping.mode == "ep":
            self._check_expert_parallelism()
        if self.stepping.mode in {"preemptive", "async"}:
            self._check_stages()
        if self.launching.launcher == "ray":
            self._check_machines()

    def _check_machines(self) -> None:
        """Refuse what works on one machine only."""
        mode = self.stepping.mode
        if mode == "ep":
            raise ConfigError(
                "--launcher ray runs --mode fused, preemptive and async: --mode ep exchanges on one machine"
            )
        if mode == "async" and self.model.device.startswith(PACED):
            raise ConfigError(
                f"--device {self.model.device} with --mode async stamps messages with the clock of one machine, and"
                " --launcher ray has several: leave one of them out"
            )
        if self.kv_events is not None:
            raise ConfigError("--kv-events-config publishes without encryption: leave it or --launcher ray out")

    def _check_expert_parallelism(self) -> None:
        if self.processes.engines < 2:
            raise ConfigError(
                "--mode ep spreads the experts over engines, and --engines 1 is one: give --engines 2 or more, or leave"
                " --mode out"
            )
        if self.paced is not None and (self.paced.table is not None or self.paced.device == PACED_QLLM):
            raise ConfigError(
                f"--mode ep needs prices of attention and of single experts, and {self.paced.device} has none: give"
                " --device paced:GPU with the name of a GPU, or leave --mode out"
            )

    def _check_stages(self) -> None:
        scheduler, mode = self.scheduler, self.stepping.mode
        if self.paced is not None and self.paced.table is not None:
            raise ConfigError(
                f"--mode {mode} needs prices of stages, and {self.paced.table} has prices of whole steps: give"
                " --device paced:GPU, or leave --mode out"
            )
        if scheduler.max_num_batched_tokens < 2 * scheduler.max_num_seqs:
            raise ConfigError(
                f"--mode {mode} runs --max-num-seqs {scheduler.max_num_seqs} sequences of each class:"
                f" --max-num-batched-tokens {scheduler.max_num_batched_tokens} must be at least twice as many, so that"
                " all of them can decode in one step"
            )

    def _check_group(self) -> None:
        group = self.group
        if self.stepping.mode == "async":
            if self.processes.engines != 1:
                raise ConfigError(
                    f"--mode async has an engine for each attention worker: give --attention {self.processes.engines}"
                    " instead of --engines"
                )
        elif group.attention is not None or group.experts is not None:
            raise ConfigError("--attention and --experts number the workers of --mode async: add it, or leave them out")
        if self.processes.num_redundant_experts and self.stepping.mode not in {"async", "ep"}:
            raise ConfigError(
                f"--num-redundant-experts {self.processes.num_redundant_experts} gives slots to workers that share the"
                " experts: add --mode async or ep, or leave it out"
            )

    @property
    def num_engines(self) -> int:
        """Engines behind the API server: in `async` mode, the workers with attention."""
        return self.group.num_homes if self.stepping.mode == "async" else self.processes.engines

    @property
    def num_first_processes(self) -> int:
        """Processes behind the API server at the start: in `async` mode, workers may be added later."""
        experts_alone = self.group.num_expert_workers if self.stepping.mode == "async" else 0
        return self.num_engines + experts_alone

    @property
    def paced(self) -> PacedSettings | None:
        """The paced device that `with_derived` found in the settings. None means that the engines compute."""
        return self.pacing if isinstance(self.pacing, PacedSettings) else None

    @property
    def kv_events(self) -> KvEventsSettings | None:
        """The settings of KV events. None means that the engines publish none."""
        return kv_events_from(self.processes.kv_events_config)


def with_derived(
    settings: ServeSettings, locate: Callable[[str], Path], locate_tokenizer: Callable[[str], Path]
) -> ServeSettings:
    """Complete `settings` with the paced device, the directories of model and tokenizer, and the served name.

    Args:
        settings: settings as given.
        locate: function that finds the directory of a model by name.
        locate_tokenizer: function that does the same for a tokenizer.

    Raises:
        ConfigError: settings contradict each other, or the model or the tokenizer does not exist.
    """
    model, pacing = settings.model, settings.pacing
    name = model.model
    if model.device.startswith(PACED):
        if model.kv_offloading_size:
            raise ConfigError("--kv-offloading-size does not work with a paced device, which models no host memory")
        name = PACED_NETWORK if name == DEMO_MODEL else name
        pacing = PacedSettings(device=model.device, network=name, **asdict(pacing))
        # A table has measured durations, whatever its experts; the demo network alone obeys the override there.
        if model.gate_override is not None and pacing.table is None:
            pacing = replace(pacing, popularity=overridden_popularity(model.gate_override, model.seed))
        model = replace(model, model=DEMO_MODEL, device="cpu")  # the demo network computes the answers
    elif pacing.paced_arithmetic == "none":
        raise ConfigError("--paced-arithmetic none needs --device paced:GPU: only paced devices answer without torch")
    served = settings.server.served_model_name or (name,)
    tokenizer = None if model.tokenizer is None else str(locate_tokenizer(model.tokenizer))
    return replace(
        settings,
        model=replace(model, model=str(locate(model.model)), tokenizer=tokenizer),
        pacing=pacing,
        server=replace(settings.server, served_model_name=served),
    )
