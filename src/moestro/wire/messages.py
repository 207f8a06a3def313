"""Messages between the API server and the ranks: msgspec structs over ZeroMQ, never pickle.

A message is data and is never executed. A message that cannot be decoded ends its rank, the sender or the reader.
Between Moestro's own processes it is a bug, and a request whose message is lost would never end. Messages of unknown
processes are dropped and counted.
"""

from __future__ import annotations

import msgspec

from moestro.core.load_figures import LoadFigures
from moestro.core.model_info import ModelInfo
from moestro.core.request import Output, Request

# From the API server to a rank.


class Add(msgspec.Struct, frozen=True, tag=True):
    """Start a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop requests. Unknown ids are ignored, because these requests may have just ended."""

    request_ids: tuple[str, ...]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process now."""


class WakeGroup(msgspec.Struct, frozen=True, tag=True):
    """Take part in a step of the group, in mode `ep`.

    A rank of a group that sleeps sends it when it has a plan; the API server passes it on to the other ranks. `step`
    counts the handshakes of the group, so that a rank recognizes a message that came after its step.
    """

    step: int


ToRank = Add | Abort | Shutdown | WakeGroup


# From a rank to the API server.


class Phase(msgspec.Struct, frozen=True, tag=True):
    """Report that a phase of the start is over, and its duration."""

    name: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Announce that the rank accepts requests."""

    info: ModelInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Outputs of one step, and the rank's load figures after it."""

    outputs: tuple[Output, ...]
    load: LoadFigures
    as_of_ns: int = 0  # When the rank last read its inbox: the figures exclude requests that were sent later.


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sign of life of the communication thread. A growing `num_steps` shows that the main loop makes progress."""

    num_steps: int


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


FromRank = Phase | Ready | Outputs | Heartbeat | Refused | Failed | WakeGroup

MAX_MESSAGE_BYTES = 64 << 20  # The longest prompt is a few MiB.
MAX_QUEUED_MESSAGES = 100_000


def identity_of(rank: int, launch: int) -> bytes:
    """Return the ZeroMQ identity of a rank's `launch`-th process.

    Each launch has its own identity, so that late messages of an earlier process are not taken for those of the new
    one. ZeroMQ reserves identities that begin with a zero byte.
    """
    return f"rank-{rank}.{launch}".encode()


encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
