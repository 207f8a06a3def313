"""What the front door and a rank say to each other: msgspec structs over ZeroMQ, never pickle.

A message that does not decode is dropped and counted; nothing in it is ever executed.
"""

from __future__ import annotations

import msgspec

from moestro.core.request import Output, Request


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front door must know of a loaded model."""

    model_id: str  # under which block hashes are keyed
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    num_parameters: int


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
    """What the requests of one step gained, and how full the rank is."""

    outputs: tuple[Output, ...]
    num_running: int
    num_waiting: int
    kv_usage: float  # fraction of KV blocks held by sequences, 0 .. 1


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


FromRank = Phase | Ready | Outputs | Refused | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
