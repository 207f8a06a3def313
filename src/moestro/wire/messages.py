"""Messages between the API server and the ranks: msgspec structs, never pickle.

A message is data and is never executed. A message that cannot be decoded ends its rank, the sender or the reader.
Between Moestro's own processes it is a bug, and a request whose message is lost would never end. Messages of unknown
processes are dropped and counted.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import LayerPairs, SourceLoad
from moestro.core.experts.expert_table import ExpertLayers, TableMessage
from moestro.core.experts.layer_moves import LayerPlan, SettledLayer
from moestro.core.load_figures import LoadFigures, PaceCounts
from moestro.core.request import ModelInfo, NewOutputs, Request
from moestro.core.scheduling_events import SchedulingEvent

# Expert load of a rank as a message: a rank sends it only when the API server requests it.

_INT, _FLOAT, _SHORT = np.dtype("<i8"), np.dtype("<f8"), np.dtype("<i4")


class ReadExperts(msgspec.Struct, frozen=True, tag=True):
    """Ask a rank for an `ExpertReport`.

    Attributes:
        number: Number of the question, which the report repeats.
        with_pairs: Whether the report has pairs of experts too, for which the rank looks through a large table.
        clear: Whether the rank empties its window first.
    """

    number: int
    with_pairs: bool = False
    clear: bool = False


class PairColumns(msgspec.Struct, frozen=True):
    """A `LayerPairs` as bytes: int32 layer, expert and next_expert, float64 count."""

    layer: bytes
    expert: bytes
    next_expert: bytes
    count: bytes


class ExpertReport(msgspec.Struct, frozen=True, tag=True):
    """A `SourceLoad` as bytes: int64 counts, float64 mean, variance and activated, each [layers, experts].

    Attributes:
        number: Number of the question.
        num_layers, num_experts: Shape of the arrays; 0 while the rank has counted nothing.
        weight, num_steps: As in `SourceLoad`.
        pairs: None means that none were requested, or that none were collected.
        error: Why the rank counts no longer; "" means that it does.
    """

    number: int
    num_layers: int = 0
    num_experts: int = 0
    counts: bytes = b""
    mean: bytes = b""
    variance: bytes = b""
    activated: bytes = b""
    weight: float = 0.0
    num_steps: int = 0
    pairs: PairColumns | None = None
    error: str = ""


def report_of(number: int, load: SourceLoad) -> ExpertReport:
    """Make the report that answers question `number`."""
    num_layers, num_experts = load.counts.shape
    return ExpertReport(
        number=number,
        num_layers=num_layers,
        num_experts=num_experts,
        counts=_bytes(load.counts, _INT),
        mean=_bytes(load.mean, _FLOAT),
        variance=_bytes(load.variance, _FLOAT),
        activated=_bytes(load.activated, _FLOAT),
        weight=load.weight,
        num_steps=load.num_steps,
        pairs=None if load.pairs is None else _columns(load.pairs),
    )


def load_of(report: ExpertReport) -> SourceLoad | None:
    """Return the load that a report has; None means that the rank has counted nothing.

    Raises:
        ValueError: The arrays do not have the shape that the report states.
    """
    if not report.num_layers:
        return None
    shape = (report.num_layers, report.num_experts)
    pairs = report.pairs
    return SourceLoad(
        counts=np.frombuffer(report.counts, _INT).reshape(shape),
        mean=np.frombuffer(report.mean, _FLOAT).reshape(shape),
        variance=np.frombuffer(report.variance, _FLOAT).reshape(shape),
        activated=np.frombuffer(report.activated, _FLOAT).reshape(shape),
        weight=report.weight,
        num_steps=report.num_steps,
        pairs=None if pairs is None else _pairs(pairs),
    )


def _columns(pairs: LayerPairs) -> PairColumns:
    return PairColumns(
        layer=_bytes(pairs.layer, _SHORT),
        expert=_bytes(pairs.expert, _SHORT),
        next_expert=_bytes(pairs.next_expert, _SHORT),
        count=_bytes(pairs.count, _FLOAT),
    )


def _pairs(columns: PairColumns) -> LayerPairs:
    return LayerPairs(
        layer=np.frombuffer(columns.layer, _SHORT),
        expert=np.frombuffer(columns.expert, _SHORT),
        next_expert=np.frombuffer(columns.next_expert, _SHORT),
        count=np.frombuffer(columns.count, _FLOAT),
    )


def _bytes(array: NDArray[np.generic], dtype: np.dtype[np.generic]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


# Messages about moves of experts between the ranks of a group in mode `ep`.

# From the API server to all ranks of a group.


class MoveLayer(msgspec.Struct, frozen=True, tag=True):
    """Move the experts of a layer. All ranks of the group get the same plan, and begin when all of them know it."""

    plan: LayerPlan


class DropLayer(msgspec.Struct, frozen=True, tag=True):
    """End the moves of a layer before their commit. `version`: number of the plan."""

    version: int


# From rank 0 to the API server.


class ExpertsPlaced(msgspec.Struct, frozen=True, tag=True):
    """Tell by which placement the group serves from its start on."""

    placed: TableMessage


class LayerMoving(msgspec.Struct, frozen=True, tag=True):
    """Tell how far a layer's moves are, after each step with moves.

    Attributes:
        version: Number of the plan.
        num_bytes: Bytes of weights that went from one rank to another, so far.
    """

    version: int
    num_bytes: int


class LayerSettled(msgspec.Struct, frozen=True, tag=True):
    """Tell what became of a layer's moves."""

    settled: SettledLayer


# From the API server to a rank.


class Add(msgspec.Struct, frozen=True, tag=True):
    """Start a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop requests. Unknown ids are ignored, because these requests may have just ended."""

    request_ids: tuple[str, ...]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process now."""


class Members(msgspec.Struct, frozen=True, tag=True):
    """The workers of a group, as they are from now on. Later messages replace earlier ones.

    Attributes:
        version: Number of the message; its expert table has the same.
        addresses: Address of each worker for the others; "" means that it does not run.
        launches: Number of each worker's present process; another number than before means a new process.
        table: Slots whose tokens each worker gets. A worker that does not run keeps the experts that no other one
            holds, because their tokens wait for it. A worker that is not alive there is silent, and others have copies.
    """

    version: int
    addresses: tuple[str, ...]
    launches: tuple[int, ...]
    table: TableMessage


class PrepareExperts(msgspec.Struct, frozen=True, tag=True):
    """Load experts into slots that no token visits, between two pieces of work. The latest message counts.

    Attributes:
        ticket: Number of the message, which the answer echoes.
        layer: Layer of the network.
        slots, experts: Each slot, and the logical expert that it gets.
        max_bytes: Bytes of weights that are written between two pieces of work, at most; one expert is the least.
    """

    ticket: int
    layer: int
    slots: tuple[int, ...]
    experts: tuple[int, ...]
    max_bytes: int


class ClockReading(msgspec.Struct, frozen=True, tag=True):
    """Tell a rank on another machine the time of the API server's clock.

    Attributes:
        requested_ns: Time of the rank's question, on its own clock.
        server_ns: Time of the answer, on the API server's clock.
    """

    requested_ns: int
    server_ns: int


class WakeGroup(msgspec.Struct, frozen=True, tag=True):
    """Take part in a step of the group, in mode `ep`.

    A rank of a group that sleeps sends it when it has a plan; the API server passes it on to the other ranks. `step`
    counts the handshakes of the group, so that a rank recognizes a message that came after its step.
    """

    step: int


ToRank = (
    Add | Abort | Shutdown | Members | PrepareExperts | ClockReading | WakeGroup | ReadExperts | MoveLayer | DropLayer
)


# From a rank to the API server.


class ReadClock(msgspec.Struct, frozen=True, tag=True):
    """Ask for a `ClockReading`; `requested_ns` comes back in it."""

    requested_ns: int


class Phase(msgspec.Struct, frozen=True, tag=True):
    """Report that a phase of the start is over, and its duration."""

    name: str
    seconds: float


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Announce that a worker of a group has loaded its part, and listens to the others at `address`."""

    address: str
    experts: ExpertLayers


class ExpertsPrepared(msgspec.Struct, frozen=True, tag=True):
    """Answer `PrepareExperts`.

    Attributes:
        ticket: Number of the question.
        num_bytes: Bytes of weights that were written.
        error: Why the worker cannot load the experts; "" means that it has them.
    """

    ticket: int
    num_bytes: int = 0
    error: str = ""


class TableServed(msgspec.Struct, frozen=True, tag=True):
    """Announce that a home sends by the table of `version`, and waits for no slot outside of it."""

    version: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Announce that the rank accepts requests.

    Attributes:
        info: Properties of the model. None means a worker without attention, which takes tokens and no requests.
    """

    info: ModelInfo | None


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Outputs of one step, and the rank's load figures and prefix cache after it.

    Attributes:
        as_of_ns: When the rank last read its inbox: the figures exclude requests that were sent later.
        stored: Packed hashes of the blocks that are on the device now.
        removed: Packed hashes of the blocks that left the prefix cache.
        hosted: Packed hashes of the blocks that host memory alone has now.
    """

    outputs: NewOutputs
    load: LoadFigures
    as_of_ns: int = 0
    stored: bytes = b""
    removed: bytes = b""
    hosted: bytes = b""


class EngineEvents(msgspec.Struct, frozen=True, tag=True):
    """What the rank's scheduler did since the last one, where a record or `moestro explain` wants it."""

    events: tuple[SchedulingEvent, ...]


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sign of life of the communication thread. A growing `num_steps` shows that the main loop makes progress.

    A process that owes nothing need not make progress: it has nothing to do, or waits for other workers. One that has
    made no step since the heartbeat before is idle, and its next heartbeat comes later.
    """

    num_steps: int
    owes: bool = True
    is_idle: bool = False


class WorkerFigures(msgspec.Struct, frozen=True, tag=True):
    """Queues and links of a worker of a group. Counts and times are totals of its process.

    Attributes:
        num_waiting: Tokens before each layer's attention and pairs before its experts; the last entry is the sampler.
        oldest_ns: For how long the oldest of them waits in its queue, by layer; 0 where none waits.
        idle_ns, lived_ns: Time in which nothing could run, and all time since the worker serves.
        num_sent, sent_bytes: Messages to each worker, and their bytes.
        num_dropped: Messages and parts of them that were late, repeated, unreadable, or for a worker that does not run.
        pace: Items of a paced device; None means another device.
        num_two_phase, two_phase_bytes: Those of the messages whose tensors went on a channel of their own.
    """

    num_waiting: tuple[int, ...]
    oldest_ns: tuple[int, ...]
    idle_ns: int
    lived_ns: int
    num_sent: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    num_dropped: int
    pace: PaceCounts | None = None
    num_two_phase: tuple[int, ...] = ()
    two_phase_bytes: tuple[int, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Refusal of a request, with the fields of its `RequestError`."""

    request_id: str
    http_status: int
    error_type: str
    message: str
    param: str | None
    code: str | None
    retry_after_s: int | None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Announce that the rank cannot continue; `cause` is one line with the reason and the remedy."""

    cause: str
    is_config: bool = False  # The cause is a `ConfigError`: the operator's settings cannot be honoured.


FromRank = (
    ReadClock
    | Phase
    | WorkerFigures
    | Joined
    | ExpertsPrepared
    | TableServed
    | Ready
    | Outputs
    | Heartbeat
    | Refused
    | Failed
    | WakeGroup
    | ExpertReport
    | EngineEvents
    | ExpertsPlaced
    | LayerMoving
    | LayerSettled
)

MAX_MESSAGE_BYTES = 64 << 20  # The longest prompt is a few MiB.
MAX_QUEUED_MESSAGES = 100_000


def identity_of(rank: int, launch: int) -> bytes:
    """Return the identity of a rank's `launch`-th process on its connection.

    Each launch has its own identity, so that late messages of an earlier process are not taken for those of the new
    one. ZeroMQ reserves identities that begin with a zero byte.
    """
    return f"rank-{rank}.{launch}".encode()


encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
