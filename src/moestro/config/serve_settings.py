"""Everything `moestro serve` is told, as frozen values: the rooms' own settings, and the server's. No room but `serve`
reads it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from moestro.core.setting_checks import check_floats
from moestro.cost.gpus import gpu_named
from moestro.cost.hf_config import network_named
from moestro.engine.settings import make_policies
from moestro.errors import ConfigError
from moestro.flow.registry import make_step_policy
from moestro.model.settings import DeviceKind, Dtype, GenerationConfig, LoadFormat, ModelSettings

__all__ = [
    "PACED_NETWORK",
    "PACED_QLLM",
    "DeviceKind",
    "Dtype",
    "GenerationConfig",
    "KvEventsSettings",
    "LoadFormat",
    "Mode",
    "ModelSettings",
    "PacedArithmetic",
    "PacedSettings",
    "SchedulerLimits",
    "ServeSettings",
    "ServerSettings",
    "SteppingSettings",
]

PACED_NETWORK = "qwen3-30b-a3b"
PACED_QLLM = "paced:qllm"  # not a GPU, but an engine with a cost of its own
PacedArithmetic = Literal["demo", "none"]

Mode = Literal["fused", "preemptive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The part of `SchedulerSettings` that an operator chooses; the rest is known once the model is loaded."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_queued_reqs: int = 1024
    scheduling_policy: str = "fcfs"
    batch_policy: str = "decode_first"
    evict_policy: str = "last_in_order"
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _check_range("--max-num-seqs", self.max_num_seqs, 1)
        _check_range("--max-num-batched-tokens", self.max_num_batched_tokens, 1)
        _check_range("--max-num-queued-reqs", self.max_num_queued_reqs, 1)  # each request waits, be it for a step
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least --max-num-seqs"
                f" {self.max_num_seqs}, or not every running sequence could decode in one step"
            )
        make_policies(self.scheduling_policy, self.batch_policy, self.evict_policy)

    def for_scheduler(self) -> dict[str, Any]:
        """As keyword arguments of `SchedulerSettings`."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppingSettings:
    """In which pieces an engine computes.

    Attributes:
        mode: `fused`: one forward pass a step. `preemptive`: a step stops between any two expert batches for a request
            of class `ls`, and goes on from there when that one has passed.
        step_policy: what runs next in `preemptive` mode: `qllm`, urgent first; `in_order`, nobody is preempted; or
            FILE.py:NAME.
        pass_decodes: whether requests of class `ls` pass others for each of their tokens, not for the first alone.
        max_be_wait: seconds for which a best-effort request may be passed over in one step; inf means no limit.
        max_parked_bytes: of what is inside the network, taken from the KV cache's memory; None: two full steps.
    """

    mode: Mode = "fused"
    step_policy: str = "qllm"
    pass_decodes: bool = False
    max_be_wait: float = 1.0
    max_parked_bytes: int | None = None

    def __post_init__(self) -> None:
        check_floats(self, may_be_infinite={"max_be_wait"})
        _check_choice("--mode", self.mode, get_args(Mode))
        _check_range("--max-be-wait", self.max_be_wait, 0)
        make_step_policy(self.step_policy, self.max_be_wait)
        _check_range("--max-parked-bytes", self.max_parked_bytes or 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The front door.

    Attributes:
        served_model_name: what clients may call the model; at least one.
        host, port: where to listen; port 0: any free one.
        api_key: any of these opens the door; none: it is open.
        tokenizer: a directory, where it is not the model's own.
        engines: rank processes, each with the whole model.
        route_policy: how a request is given to one of them, as `policy_from` reads it.
        route_score: in its place, an expression over indicators.
        startup_timeout, shutdown_timeout: seconds that engines may take to be ready, and requests to finish.
        engine_timeout: seconds of silence after which an engine is taken for dead.
        watchdog_timeout, step_timeout: seconds in which an engine with requests may complete no step, until it is taken
            out of rotation, and until it is taken for dead.
        resume_streams: whether a stream whose engine ends goes on in another even where the tokens that come may differ
            from those that would have come.
        write_timeout: seconds that a client may leave its stream unread.
        max_connections: clients connected at a time.
        log_level: a name that `logging` knows.
        record: a file for a line of figures of each request that was answered.
    """

    served_model_name: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    tokenizer: Path | None = None
    engines: int = 1
    route_policy: str = "moestro"
    route_score: str | None = None
    startup_timeout: float = 600.0
    shutdown_timeout: float = 10.0
    engine_timeout: float = 10.0
    watchdog_timeout: float = 30.0
    step_timeout: float = 300.0
    resume_streams: bool = False
    write_timeout: float = 60.0
    max_connections: int = 4096
    log_level: str = "info"
    record: Path | None = None

    def __post_init__(self) -> None:
        check_floats(self)
        _check_range("--port", self.port, 0, 65535)
        _check_range("--engines", self.engines, 1, 1024)
        _check_range("--startup-timeout", self.startup_timeout, 1)
        _check_range("--shutdown-timeout", self.shutdown_timeout, 0)
        _check_range("--engine-timeout", self.engine_timeout, 2)  # a rank speaks twice a second
        _check_range("--watchdog-timeout", self.watchdog_timeout, 1)
        _check_range("--step-timeout", self.step_timeout, self.watchdog_timeout)
        _check_range("--write-timeout", self.write_timeout, 1)
        _check_range("--max-connections", self.max_connections, 1)
        if not all(self.api_key):
            raise ConfigError("--api-key is empty: give a key, or leave the flag out to serve without one")
        if not self.served_model_name or not all(self.served_model_name):
            raise ConfigError("--served-model-name is empty: give a name, or leave the flag out")


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedSettings:
    """A device that is not there: steps take as long as a cost model says.

    Attributes:
        device: as the operator wrote it: paced:GPU, paced:FILE of a table of `moestro calibrate`, or paced:qllm:
            QLLM's engine on an A100, the network in 4 bits.
        network: whose steps are priced, by the names that `cost` knows.
        arithmetic: demo: the demo network computes the answers, within the modelled time; none: nothing is computed,
            torch is not loaded, and answers are a fixed sequence of tokens.
        max_model_len: tokens of the longest sequence, where the operator names none.
        tokenizer: a directory, where it is not the demo model's.
        kv_cache_memory_bytes: of the network that is played; None: what its GPU has beside the weights.
    """

    device: str
    network: str = PACED_NETWORK
    arithmetic: PacedArithmetic = "demo"
    max_model_len: int = 32_768
    tokenizer: str | None = None
    kv_cache_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.device == PACED_QLLM:
            if network_named(self.network).experts is None:
                raise ConfigError(f"--device {PACED_QLLM} runs networks with experts, which {self.network} has not")
        elif self.table is None:
            gpu_named(self.gpu)
            network_named(self.network)
        elif self.arithmetic == "none":
            raise ConfigError("--paced-arithmetic none needs a GPU and a network by name: its KV cache is theirs")

    @property
    def gpu(self) -> str:
        """By name."""
        return self.device.removeprefix("paced:")

    @property
    def table(self) -> Path | None:
        """A file of measured steps; None: the GPU goes by name."""
        return Path(self.gpu) if self.gpu.endswith(".json") else None


_ENDPOINT = re.compile(r"tcp://([^:/\[\]]+|\[[^\[\]]+\]):[1-9][0-9]{0,4}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsSettings:
    """What the engines tell others of their prefix caches, by vLLM's names.

    Attributes:
        enable_kv_cache_events: False: nothing.
        publisher: `zmq`, or `null`: nothing.
        endpoint, replay_endpoint: tcp://HOST:PORT to listen on, of engine 0; engine r has PORT + r. The second answers
            who missed something; None: nobody does.
        buffer_steps: batches that are kept for that.
        hwm: batches that wait for a listener that does not keep up; with more, it misses some.
        topic: said with every batch.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            given = getattr(self, name)
            if given is not None and not _ENDPOINT.fullmatch(given):
                raise ConfigError(f"--kv-events-config: {name} must be tcp://HOST:PORT, as tcp://*:5557, got {given!r}")
        _check_range("--kv-events-config: buffer_steps", self.buffer_steps, 1)
        _check_range("--kv-events-config: hwm", self.hwm, 0)

    def check_ports(self, num_engines: int) -> None:
        """Raise ConfigError if the engines' ports run into each other."""
        if self.replay_endpoint is None:
            return
        first, second = (int(each.rpartition(":")[2]) for each in (self.endpoint, self.replay_endpoint))
        if abs(first - second) < num_engines:
            raise ConfigError(
                f"--kv-events-config: {num_engines} engines listen on {num_engines} ports from {first} and from"
                f" {second} on: set replay_endpoint so far apart from endpoint that none is the same"
            )


def kv_events_from(text: str | None) -> KvEventsSettings | None:
    """What `--kv-events-config` says; None: nothing is to be published.

    Raises:
        ConfigError: it is not JSON, or has a field that there is not.
    """
    if text is None:
        return None
    try:
        given = json.loads(text)
        settings = KvEventsSettings(**given)
    except (ValueError, TypeError) as error:
        known = ", ".join(each.name for each in fields(KvEventsSettings))
        raise ConfigError(f"--kv-events-config must be a JSON object with fields among {known}: {error}") from None
    return settings if settings.enable_kv_cache_events and settings.publisher == "zmq" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """All of `moestro serve`."""

    model: ModelSettings
    limits: SchedulerLimits
    server: ServerSettings
    paced: PacedSettings | None = None
    stepping: SteppingSettings = field(default_factory=SteppingSettings)
    kv_events: KvEventsSettings | None = None

    def __post_init__(self) -> None:
        limits = self.limits
        if self.kv_events is not None:
            self.kv_events.check_ports(self.server.engines)
            if not limits.enable_prefix_caching:
                raise ConfigError("--kv-events-config tells of the prefix cache: leave --no-enable-prefix-caching out")
        if self.stepping.mode == "preemptive" and self.paced is not None and self.paced.table is not None:
            raise ConfigError(
                f"--mode preemptive wants the prices of stages, and {self.paced.table} has those of whole steps: give"
                " --device paced:GPU, or leave --mode out"
            )
        if self.stepping.mode == "preemptive" and limits.max_num_batched_tokens < 2 * limits.max_num_seqs:
            raise ConfigError(
                f"--mode preemptive runs --max-num-seqs {limits.max_num_seqs} sequences of each class:"
                f" --max-num-batched-tokens {limits.max_num_batched_tokens} must be at least twice as many, or not"
                " every one could decode in one step"
            )


def _check_choice(flag: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ConfigError(f"{flag} {given!r} is unknown: give one of {', '.join(allowed)}")


def _check_range(flag: str, value: float, low: float, high: float = float("inf")) -> None:
    if not low <= value <= high:
        allowed = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise ConfigError(f"{flag} must be {allowed}, got {value:g}")
