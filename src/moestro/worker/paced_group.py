"""Paced ranks of a group in mode `ep`: every step ends for all of them when the cost model says so. No torch here.

Rank 0 prices. The other ranks send it their units when they open a step, over sockets on the loopback interface. It
draws the experts of all tokens, and tells every rank when the step ends, on the clock that the processes share.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from moestro.config.launch_spec import LaunchSpec, LockStepSpec
from moestro.core.clock import NS_PER_S
from moestro.core.experts.layer_moves import LayerPlan
from moestro.core.load_figures import PaceCounts
from moestro.core.request import ModelInfo
from moestro.core.work import Forward, Keys, StepResult, Units, token_keys
from moestro.cost.drawn_step import Deployment, KeyedBatch, StepPricer
from moestro.cost.gpus import A100, Gpu, check_experts_fit, gpu_named, worker_kv_blocks
from moestro.cost.links import Link, all_to_all, link_named, two_phase
from moestro.cost.model import Batch
from moestro.cost.networks import NetworkShape
from moestro.cost.priced_device import PricedStages, StageSetup, worker_shape
from moestro.cost.roofline import VLLM_HOST
from moestro.cost.settings import PACED_QLLM, PacedSettings
from moestro.cost.tables import in_4_bits
from moestro.engine.lock_step import LockStepRank, build_lock_step_rank, spread_over_ranks
from moestro.errors import ConfigError, GroupLostError, InvariantError
from moestro.wire.messages import WakeGroup
from moestro.worker.paced import Answers, RequestKeys, TimedAnswers, dilated, pace_of_stages, paced_gate, stage_cost_of
from moestro.worker.peer_links import LinkPace, StampFrames
from moestro.worker.rank_builder import Send, scheduler_settings
from moestro.worker.rank_process import WorkerPart, WorkerSizes

_LOOPBACK = "127.0.0.1"
_LENGTH = struct.Struct(">I")
_COUNT = np.dtype("<i4")


class OpenedStep(msgspec.Struct, frozen=True, array_like=True):
    """Units that a rank brings to a step; empty for a rank without a plan.

    Attributes:
        rank: the rank.
        start, num_tokens: int32[n] as bytes, the units.
        keys: uint64[n] as bytes, keys of their requests.
    """

    rank: int
    start: bytes = b""
    num_tokens: bytes = b""
    keys: bytes = b""


class PricedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step of the group.

    Attributes:
        num_tokens: tokens of each rank.
        end_ns: time.monotonic_ns() at which it ends for all ranks.
        took_ns: its duration, dilated.
        busy_ns: part of it in which each rank computes.
        expert_counts: int32[layers, experts] as bytes, tokens of the rank that gets the message, by drawn expert. Empty
            for a dense network, and for a rank without a plan.
        num_layers: layers of the counts.
    """

    num_tokens: list[int]
    end_ns: int
    took_ns: int
    busy_ns: list[int]
    expert_counts: bytes = b""
    num_layers: int = 0


class StepMember:
    """The connection of a rank to the rank that prices.

    Args:
        spec: the group.

    Raises:
        GroupLostError: rank 0 cannot be reached.
    """

    def __init__(self, spec: LockStepSpec, rank: int) -> None:
        try:
            wait_s = spec.join_wait_s(time.monotonic_ns())
            self._host = socket.create_connection((_LOOPBACK, spec.port), wait_s)
            self._host.settimeout(spec.timeout_s)
        except OSError as error:
            raise GroupLostError(f"engine 0 did not join its group: {error}") from error
        _send(self._host, OpenedStep(rank))

    def open(self, opened: OpenedStep) -> PricedStep:
        """Send the units of this rank, and wait until all ranks have sent theirs.

        Raises:
            GroupLostError: another rank ended.
        """
        _send(self._host, opened)
        return _receive(self._host, PricedStep)


class StepHost:
    """The connections of the rank that prices. The call returns when all ranks are connected.

    Args:
        spec: the group.
        pricer: prices of its steps.
        dilation: factor on the prices.

    Raises:
        GroupLostError: a rank did not connect in time.
    """

    def __init__(self, spec: LockStepSpec, pricer: StepPricer, dilation: float = 1.0) -> None:
        assert spec.listen_fd is not None, "rank 0 inherits the socket at which its group meets"
        self._pricer, self._dilation = pricer, dilation
        self._members: list[socket.socket] = []
        self._ranks = [0]  # this rank, and that of each member
        with contextlib.ExitStack() as stack, socket.socket(fileno=spec.listen_fd) as listener:
            while len(self._ranks) < spec.num_ranks:
                listener.settimeout(max(spec.join_wait_s(time.monotonic_ns()), 1e-3))
                try:
                    member, _ = listener.accept()
                except TimeoutError as error:
                    absent = ", ".join(str(rank) for rank in range(spec.num_ranks) if rank not in self._ranks)
                    raise GroupLostError(f"engine {absent} did not join its group in time") from error
                self._members.append(stack.enter_context(member))
                member.settimeout(spec.timeout_s)
                self._ranks.append(_receive(member, OpenedStep).rank)
            stack.pop_all()

    def open(self, opened: OpenedStep) -> PricedStep:
        """Implement `StepMember.open`, for all ranks."""
        every = sorted(
            [opened, *(_receive(member, OpenedStep) for member in self._members)], key=lambda each: each.rank
        )
        now_ns = time.monotonic_ns()
        batches = [_keyed_batch(each) for each in every]
        num_tokens = [0 if batch is None else len(batch.keys) for batch in batches]
        step = PricedStep(num_tokens, now_ns, 0, [0] * len(batches))
        counts = None
        if any(batches):
            drawn = self._pricer.draw(batches)
            times, counts = drawn.micro_batches(1), drawn.counts_by_source
            took_ns = round(times.lock_step_ns * self._dilation)
            busy_ns = np.rint(times.busy_ns * self._dilation).astype(np.int64).tolist()
            step = PricedStep(num_tokens, now_ns + took_ns, took_ns, busy_ns)
        for number, member in enumerate(self._members, 1):
            _send(member, _with_counts(step, counts, self._ranks[number]))
        return _with_counts(step, counts, 0)


def _with_counts(step: PricedStep, counts: NDArray[np.int64] | None, rank: int) -> PricedStep:
    """Return the step as one rank gets it. `counts`: int64[ranks, layers, experts]."""
    if counts is None or not step.num_tokens[rank]:
        return step
    own = counts[rank]
    return msgspec.structs.replace(step, expert_counts=own.astype(_COUNT).tobytes(), num_layers=len(own))


class PacedGroupDevice(TimedAnswers):
    """Answers when the step of the group ends; implements `engine.lock_step.LockStepDevice`.

    Args:
        group: handshake with the other ranks.
        rank: this rank.
        answers: supplier of the results.
        dilation: factor on modelled durations.

    Attributes:
        is_moving: False, because a device without weights moves none.
    """

    is_moving = False

    def __init__(self, group: StepMember | StepHost, rank: int, answers: Answers, dilation: float = 1.0) -> None:
        super().__init__(answers, dilation)
        self._group, self._rank = group, rank
        self._step = PricedStep([], 0, 0, [])
        self._wait_ns = 0
        self.keys_of: Callable[[Units], Keys] | None = None  # set when the rank exists, which knows the requests

    def open_step(self, units: Units | None) -> NDArray[np.int64]:
        """Implement `LockStepDevice.open_step`."""
        opened = OpenedStep(self._rank)
        if units is not None:
            assert self.keys_of is not None, "set by the builder of the rank"
            keys = self.keys_of(units)
            opened = OpenedStep(self._rank, units.start.tobytes(), units.num_tokens.tobytes(), keys.tobytes())
        self._step = self._group.open(opened)
        self._wait_ns += self._step.took_ns - self._step.busy_ns[self._rank]
        return np.array(self._step.num_tokens, np.int64)

    def move_layer(self, plan: LayerPlan) -> None:
        """Refuse: prices are those of an even placement."""
        raise InvariantError("a paced device has no experts to move")

    def drop_layer(self, version: int) -> None:
        """Ignore: no layer moves."""

    def pace_counts(self) -> PaceCounts:
        """Return the counts of the steps so far; `wait_ns` is that of the steps begun."""
        return msgspec.structs.replace(super().pace_counts(), wait_ns=self._wait_ns)

    def launch(self, item: Forward, now_ns: int) -> None:
        """Implement `Device.launch`."""
        self.answer_at(self._step.end_ns, self._step.took_ns, item, now_ns)

    def _answer(self, item: Forward, now_ns: int) -> StepResult:
        """Answer with the experts that the step's price was drawn for."""
        counts = None
        if self._step.expert_counts:
            counts = np.frombuffer(self._step.expert_counts, _COUNT).reshape(self._step.num_layers, -1).astype(np.int64)
        return msgspec.structs.replace(super()._answer(item, now_ns), expert_counts=counts)

    def take_part(self, now_ns: int) -> None:
        """Sleep until the step ends."""
        step = self._step
        time.sleep(max(step.end_ns - time.monotonic_ns(), 0) / 1e9)
        self.count(step.end_ns, step.took_ns, time.monotonic_ns())


def build_paced_group_rank(
    spec: LaunchSpec, lock_step: LockStepSpec, answers: Answers, info: ModelInfo, send: Send
) -> LockStepRank:
    """Join the group, and build a rank of it.

    Raises:
        ConfigError: the GPU, the network or the link is unknown, or the network has too few experts.
        GroupLostError: another rank did not start.
    """
    assert spec.paced is not None, "started for a paced device"
    pricer = make_step_pricer(spec.paced, lock_step.num_ranks, spec.model.seed)
    dilation = spec.paced.pace_dilation
    group = StepHost(lock_step, pricer, dilation) if spec.rank == 0 else StepMember(lock_step, spec.rank)
    device = PacedGroupDevice(group, spec.rank, answers, dilation)
    rank = build_lock_step_rank(scheduler_settings(spec, info), device, lambda step: send(WakeGroup(step)))
    device.keys_of = RequestKeys(rank.scheduler.table).of
    rank.pace_counts = device.pace_counts
    return rank


def make_step_pricer(paced: PacedSettings, num_ranks: int, seed: int) -> StepPricer:
    """Make the prices of a group whose ranks share the experts evenly: the simulator's `ep`.

    Args:
        seed: seed of the experts that tokens visit.

    Raises:
        ConfigError: a name is unknown, or the network has fewer experts than ranks.
    """
    network = paced.shape
    experts = network.experts
    table = spread_over_ranks(network.num_layers, 0 if experts is None else experts.num_experts, num_ranks)
    cost = stage_cost_of(paced)
    deployment = Deployment(
        cost=cost,
        gate=paced_gate(cost, paced, seed),
        table=table,
        num_ranks=num_ranks,
        exchange=all_to_all(link_named(paced.paced_link), network),
        host=VLLM_HOST,  # as for a rank alone, whose prices contain it
    )
    pricer = StepPricer(deployment, num_segments=1)
    pricer.joins_sources = False  # each rank reports the experts of its own tokens
    return pricer


def _keyed_batch(opened: OpenedStep) -> KeyedBatch | None:
    if not opened.start:
        return None
    start, num_tokens = (np.frombuffer(column, np.int32) for column in (opened.start, opened.num_tokens))
    return KeyedBatch(Batch(start, num_tokens), token_keys(np.frombuffer(opened.keys, np.uint64), start, num_tokens))


_Message = TypeVar("_Message", OpenedStep, PricedStep)


def _send(connection: socket.socket, message: OpenedStep | PricedStep) -> None:
    body = msgspec.msgpack.encode(message)
    with _losing_group():
        connection.sendall(_LENGTH.pack(len(body)) + body)


def _receive(connection: socket.socket, kind: type[_Message]) -> _Message:
    with _losing_group():
        length = _LENGTH.unpack(_read(connection, _LENGTH.size))[0]
        return msgspec.msgpack.decode(_read(connection, length), type=kind)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    body = bytearray()
    while len(body) < num_bytes:
        part = connection.recv(num_bytes - len(body))
        if not part:
            raise ConnectionError("another engine closed its connection")
        body += part
    return bytes(body)


@contextlib.contextmanager
def _losing_group() -> Iterator[None]:
    try:
        yield
    except (OSError, msgspec.DecodeError) as error:
        raise GroupLostError(f"the handshake with the other engines of the group failed: {error}") from error


# The paced device of a worker of a group: its share of the stages, at a cost model's prices. No torch here.


def num_part_blocks(spec: LaunchSpec, paced: PacedSettings) -> int:
    """Compute the KV blocks of the modelled device of a worker with attention.

    Raises:
        ConfigError: the worker's weights do not fit the GPU, or the network has no experts.
    """
    network, model = paced.shape, spec.model
    num_slots = _num_slots(spec, paced)
    if model.num_gpu_blocks_override is not None:
        return model.num_gpu_blocks_override
    if model.kv_cache_memory_bytes is not None:
        return model.kv_cache_memory_bytes // (network.kv_bytes_per_token * model.block_size)
    network, gpu = _modelled(paced)
    return worker_kv_blocks(
        network, gpu, model.block_size, num_slots=num_slots, gpu_memory_utilization=model.gpu_memory_utilization
    )


def load_paced_part(
    spec: LaunchSpec, sizes: WorkerSizes, answers: Answers | None, info: ModelInfo | None
) -> WorkerPart:
    """Make the paced device of a worker of a group.

    Args:
        answers: supplier of the results of units at the sampler; None without attention.
        info: the network and its KV cache; None without attention.

    Raises:
        ConfigError: the network has no experts.
    """
    assert spec.group is not None
    assert spec.paced is not None, "loaded for a paced device"
    cost, num_slots = stage_cost_of(spec.paced), _num_slots(spec, spec.paced)
    if not spec.group.is_home:
        utilization = spec.model.gpu_memory_utilization
        check_experts_fit(*_modelled(spec.paced), num_slots, gpu_memory_utilization=utilization)
    shape = worker_shape(
        cost.network,
        num_rows=sizes.num_rows,
        num_places=sizes.num_rows,
        num_slots=num_slots,
        num_remote_places=sizes.num_remote_places,
    )
    gate = paced_gate(cost, spec.paced, spec.model.seed) if sizes.num_rows else None
    setup = StageSetup(shape=shape, block_size=spec.model.block_size, gate=gate)

    def answer(units: Units, now_ns: int) -> StepResult:
        assert answers is not None, "a worker without attention cannot sample"
        return answers.of(Forward(units), now_ns)

    experts = cost.network.experts
    assert experts is not None, "checked by _num_slots"
    keys: list[RequestKeys] = []  # of the home, which is made after the device

    def keys_of(units: Units) -> Keys:
        return keys[0].of(units)

    paced = spec.paced
    device = PricedStages(cost, dilated(setup, paced), answer, keys_of)
    link_pace = LinkPace(two_phase(link_named(paced.paced_link)), cost.network, paced.pace_dilation)

    def pace_counts() -> PaceCounts:
        counts = pace_of_stages(device, paced)
        return replace(counts, num_messages=link_pace.num_messages, message_late_ns=link_pace.late_ns)

    return WorkerPart(
        device=device,
        num_experts=experts.num_experts,
        info=info,
        tensors=StampFrames(),
        memory=PacedSlots(cost.network, link_named(paced.paced_link), paced.pace_dilation) if num_slots else None,
        link_pace=link_pace,
        pace_counts=pace_counts,
        on_home=lambda rank: keys.append(RequestKeys(rank.scheduler.table)),
    )


class PacedSlots:
    """Slots of a modelled device; implements `worker.expert_loader.SlotMemory`.

    Args:
        network: network whose experts would come.
        link: link that would bring them, each worker's alone.
        dilation: factor on its times.
    """

    def __init__(self, network: NetworkShape, link: Link, dilation: float) -> None:
        self.expert_bytes = round(network.expert_bytes)
        self._expert_s = dilation * (link.latency_ns / NS_PER_S + network.expert_bytes / link.bytes_per_s)

    def read(self, layer: int, experts: Sequence[int]) -> Sequence[None]:
        """Wait for as long as the link would take."""
        time.sleep(self._expert_s * len(experts))
        return [None] * len(experts)

    def write(self, layer: int, slot: int, expert: int, weights: None) -> None:
        """Do nothing: all slots of a modelled device cost the same."""


def _modelled(paced: PacedSettings) -> tuple[NetworkShape, Gpu]:
    network = paced.shape
    return (in_4_bits(network), A100) if paced.device == PACED_QLLM else (network, gpu_named(paced.gpu))


def _num_slots(spec: LaunchSpec, paced: PacedSettings) -> int:
    """Slots for experts of each layer that the worker has."""
    assert spec.group is not None, "a part belongs to a group"
    experts = paced.shape.experts
    if experts is None:
        raise ConfigError(f"--mode async spreads experts over workers, and {paced.network} has none")
    if experts.num_experts < spec.group.num_shares:
        raise ConfigError(
            f"{paced.network} has {experts.num_experts} experts a layer, too few for {spec.group.num_shares} workers:"
            " lower --experts"
        )
    if not spec.group.has_experts:
        return 0
    return int(spec.group.expert_table(1, experts.num_experts).logical_of.shape[2])
