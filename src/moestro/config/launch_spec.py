"""The launch spec, which the API server writes to a rank process's stdin before anything else.

The settings of `--kv-events-config` are a part of it: how engines publish changes of their prefix caches.
"""

from __future__ import annotations

import json
import re
import signal
import struct
from dataclasses import dataclass, fields
from typing import Annotated, BinaryIO, ClassVar, Literal

import msgspec
import numpy as np

from moestro.core.experts.expert_table import ExpertTable, TableMessage, slots_of_shares
from moestro.core.processes import CurveKeys, Worker, WorkerKind
from moestro.core.setting_checks import CheckedSettings, at_least
from moestro.cost.settings import PacedSettings
from moestro.engine.settings import SchedulerOptions
from moestro.errors import ConfigError
from moestro.flow.settings import GroupStepSettings, SteppingSettings
from moestro.model.settings import ModelSettings
from moestro.placement.settings import ExpertLoadSettings

_MAX_PORT = 65_535
_ENDPOINT = re.compile(r"tcp://([^:/\[\]]+|\[[^\[\]]+\]):[1-9][0-9]{0,4}")


@dataclass(frozen=True, kw_only=True)
class KvEventsSettings(CheckedSettings):
    """Publication of KV events, with the field names of vLLM.

    Attributes:
        enable_kv_cache_events: whether events are published.
        publisher: `zmq`, or `null` to publish nothing.
        endpoint: tcp://HOST:PORT on which engine 0 listens; engine r listens on PORT + r.
        replay_endpoint: the same for the replay of missed events. None means no replay.
        buffer_steps: number of batches kept for a replay and for slow subscribers.
        hwm: number of batches that a subscriber may be behind before it is disconnected. 0 means all that are kept.
        topic: first frame of every batch.
    """

    PLACE: ClassVar[str | None] = "--kv-events-config: "

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, at_least(1)] = 10_000
    hwm: Annotated[int, at_least(0)] = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("endpoint", "replay_endpoint"):
            given = getattr(self, name)
            if given is not None and not _ENDPOINT.fullmatch(given):
                raise ConfigError(f"--kv-events-config: {name} must be tcp://HOST:PORT, as tcp://*:5557, got {given!r}")

    def check_ports(self, num_engines: int) -> None:
        """Raise ConfigError if an engine's port is above the highest, or the port ranges of the engines overlap."""
        endpoints = [each for each in (self.endpoint, self.replay_endpoint) if each is not None]
        first, *others = ports = [int(each.rpartition(":")[2]) for each in endpoints]
        last = max(ports) + num_engines - 1
        if last > _MAX_PORT:
            raise ConfigError(f"--kv-events-config: engine {num_engines - 1} has port {last}, above {_MAX_PORT}")
        for second in others:
            if abs(first - second) < num_engines:
                raise ConfigError(
                    f"--kv-events-config: {num_engines} engines listen on {num_engines} ports from {first} and from"
                    f" {second} on. The port ranges overlap: choose another port for replay_endpoint"
                )


def kv_events_from(text: str | None) -> KvEventsSettings | None:
    """Parse the value of `--kv-events-config`. None means that nothing is published.

    Raises:
        ConfigError: the text is not JSON, or has an unknown field.
    """
    if text is None:
        return None
    try:
        settings = KvEventsSettings(**json.loads(text))
    except (ValueError, TypeError) as error:
        known = ", ".join(each.name for each in fields(KvEventsSettings))
        raise ConfigError(f"--kv-events-config must be a JSON object with fields among {known}: {error}") from None
    return settings if settings.enable_kv_cache_events and settings.publisher == "zmq" else None


STANDBY = ("forks-workers", "standby")  # last arguments of the process that forks the others
STACK_DUMP = signal.SIGUSR1  # makes a loaded rank write the stacks of all its threads to stderr


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's place in its group.

    Attributes:
        worker: number of the worker. The first ones have attention.
        num_homes: workers with attention.
        num_workers: most workers that the group can have.
        num_shares: parts into which the experts of each layer are divided at the start of the group.
        first_shares: shares that each worker holds at the start of the group.
        num_spare: slots of each worker that are empty at the start of the group.
        table: slots of all workers at the start of this process; None means the start of the group.
        is_colocated: whether the workers with attention hold the experts too.
        stepping: step policies, credits and the limit of inline tensors.
    """

    worker: int
    num_homes: int
    num_workers: int
    num_shares: int
    first_shares: tuple[tuple[int, ...], ...]
    num_spare: int = 0
    table: TableMessage | None = None
    is_colocated: bool
    stepping: GroupStepSettings

    @property
    def has_experts(self) -> bool:
        """Whether the worker has slots for experts, empty or not."""
        return self.is_colocated or not self.is_home

    @property
    def is_home(self) -> bool:
        """Whether the worker has attention."""
        return self.worker < self.num_homes

    @property
    def name(self) -> Worker:
        """The worker's name."""
        return name_of(self.worker, self)

    def expert_table(self, num_layers: int, num_experts: int) -> ExpertTable:
        """Make the table by which this process loads its experts.

        Args:
            num_layers, num_experts: of the network.
        """
        if self.table is not None:
            return self.table.whole_table()
        slots = slots_of_shares(num_experts, self.num_shares, self.first_shares, self.num_spare)
        by_layer = np.repeat(slots[:, None], num_layers, axis=1)
        return ExpertTable(0, by_layer, num_experts, np.ones(len(slots), np.bool_))


def name_of(worker: int, group: GroupSpec) -> Worker:
    """Return the name of a worker of a group by its number."""
    if worker >= group.num_homes:
        return Worker(WorkerKind.EXPERTS, worker - group.num_homes)
    return Worker(WorkerKind.BOTH if group.is_colocated else WorkerKind.ATTENTION, worker)


class LockStepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A group of ranks that compute together, in mode `ep`. All ranks of a group start and end together.

    Attributes:
        num_ranks: ranks of the group, numbered from 0.
        port: port of the group's store on the loopback interface; new for each start of the group.
        listen_fd: descriptor of the socket that listens on `port`, in the process of rank 0; None in the others.
        join_by_ns: time.monotonic_ns() by which all ranks, which run on one machine, must have joined.
        timeout_s: longest wait for another rank within a step, in seconds.
        num_redundant_experts: slots of a layer beyond one for each expert, of all ranks.
        placed: placement of the experts. None means an even one, as at the first start.
    """

    num_ranks: int
    port: int
    listen_fd: int | None
    join_by_ns: int
    timeout_s: float
    num_redundant_experts: int = 0
    placed: TableMessage | None = None

    def join_wait_s(self, now_ns: int) -> float:
        """Seconds that are left to join."""
        return max(self.join_by_ns - now_ns, 0) / 1e9


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's identity, its settings, and the address of the API server.

    `rank` numbers the processes of all kinds: engines first, then workers with experts alone.
    """

    rank: int
    launch: int  # number of restarts of this rank so far
    address: str
    launched_ns: int  # time at which the API server started this process, on its clock
    log_level: str
    model: ModelSettings
    scheduler: SchedulerOptions
    stepping: SteppingSettings
    expert_load: ExpertLoadSettings = ExpertLoadSettings()
    paced: PacedSettings | None = None
    kv_events: KvEventsSettings | None = None
    records_events: bool = False  # whether the rank reports what its scheduler does
    reports_cache: bool = False  # whether the rank reports which blocks enter and leave its prefix cache
    group: GroupSpec | None = None  # None means no group of mode `async`
    lock_step: LockStepSpec | None = None  # None means no group of mode `ep`
    beat_ms: int = 500  # time between heartbeats
    idle_beat_ms: int = 500  # the same while the process has nothing to do
    # ZeroMQ address at which it listens to the other workers of its group; the port * lets the system choose one.
    peer_address: str = ""
    num_local: int = 1  # processes that take the accelerators of this machine in turn, by their ranks
    cores: tuple[int, ...] = ()  # cores on which its threads run; () means all
    keys: CurveKeys | None = None  # None means that all processes run on the API server's machine

    @property
    def name(self) -> Worker:
        """The name of the process."""
        return Worker(WorkerKind.BOTH, self.rank) if self.group is None else self.group.name


_LENGTH = struct.Struct(">I")
_decode = msgspec.msgpack.Decoder(LaunchSpec, dec_hook=lambda kind, text: kind(text)).decode  # the hook makes a Path


def write_launch_spec(spec: LaunchSpec) -> bytes:
    """Encode `spec` for the process: a length, then MessagePack, because JSON has no infinite floats."""
    body = msgspec.msgpack.encode(spec, enc_hook=str)
    return _LENGTH.pack(len(body)) + body


def read_launch_spec(stream: BinaryIO) -> LaunchSpec:
    """Read the launch spec at the start of `stream`, and nothing after it.

    Raises:
        EOFError: the stream ended too early, because the API server ended.
    """
    header = stream.read(_LENGTH.size)
    length = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else 0
    body = stream.read(length)
    if not length or len(body) < length:
        raise EOFError("stdin ended before its launch spec")
    return _decode(body)
