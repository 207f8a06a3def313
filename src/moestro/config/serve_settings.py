"""All settings of `moestro serve`, composed of the rooms' dataclasses. The command line and `--config` fill them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from moestro.config.kv_events_settings import KvEventsSettings, kv_events_from
from moestro.config.server_settings import LauncherSettings, ProcessSettings, ServerSettings
from moestro.cost.settings import PACED, PACED_NETWORK, PACED_QLLM, PacedOptions, PacedSettings, overridden_popularity
from moestro.engine.settings import SchedulerOptions
from moestro.errors import ConfigError
from moestro.flow.settings import GroupOptions, SteppingSettings
from moestro.model.settings import DEMO_MODEL, ModelSettings
from moestro.placement.live_settings import LivePlacementSettings
from moestro.placement.settings import ExpertLoadSettings
from moestro.routing.settings import RoutePolicySettings
from moestro.text.settings import ChatSettings
from moestro.web.access.access_settings import AccessSettings
from moestro.web.ports.tls_settings import TlsSettings
from moestro.web.tracing.tracing_settings import TracingSettings


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
