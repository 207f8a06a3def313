"""What the front door and a rank say to each other: msgspec structs over ZeroMQ, never pickle.

Nothing in a message is ever executed. One that does not decode ends the rank that sent it, or was to read it: between
our own processes it is a bug, and a request whose message is lost would never end. A stranger's is dropped and counted.
"""

from __future__ import annotations

import msgspec

from moestro.core.load_figures import LoadFigures
from moestro.core.model_info import ModelInfo
from moestro.core.request import Output, Request

# From the front door to a rank.


class Add(msgspec.Struct, frozen=True, tag=True):
    """Serve this request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop these; unknown ids are ignored (they may have just ended)."""

    request_ids: tuple[str, ...]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Exit now."""


ToRank = Add | Abort | Shutdown


# From a rank to the front door.


class Phase(msgspec.Struct, frozen=True, tag=True):
    """One phase of the start is over."""

    name: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The rank takes requests from now on."""

    info: ModelInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What the requests of one step gained, and how full the rank is now."""

    outputs: tuple[Output, ...]
    load: LoadFigures
    as_of_ns: int = 0  # when the rank last read its inbox: no request sent later is in these figures


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The rank's communication thread lives; `num_steps` says whether its main loop gets on."""

    num_steps: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request was not taken: the fields of the `RequestError` that says why."""

    request_id: str
    http_status: int
    error_type: str
    message: str
    param: str | None
    code: str | None
    retry_after_s: int | None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank cannot go on; `cause` is one line that names the reason and the remedy."""

    cause: str
    is_config: bool = False  # the operator asked for something impossible: a `ConfigError` over there


FromRank = Phase | Ready | Outputs | Heartbeat | Refused | Failed

MAX_MESSAGE_BYTES = 64 << 20  # the longest prompt is a few MiB
MAX_QUEUED_MESSAGES = 100_000


def identity_of(rank: int, launch: int) -> bytes:
    """Under which name the process of a rank's `launch`-th start connects: what an earlier one said last is not taken
    for its words. (ZeroMQ keeps names that begin with a zero byte for itself.)
    """
    return f"rank-{rank}.{launch}".encode()


encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
