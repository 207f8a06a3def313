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
    # For the operator's eyes:
    model_type: str
    dtype: str
    device: str
    num_layers: int
    num_experts: int  # of a layer; 0: a dense model
    notes: tuple[str, ...] = ()  # what the operator should know, one sentence each


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
    is_config: bool = False  # the operator asked for something impossible: a `ConfigError` over there


FromRank = Phase | Ready | Outputs | Refused | Failed

MAX_MESSAGE_BYTES = 64 << 20  # the longest prompt is a few MiB
MAX_QUEUED_MESSAGES = 100_000


def identity_of(rank: int) -> bytes:
    """Under which name a rank connects. (ZeroMQ keeps names that begin with a zero byte for itself.)"""
    return f"rank-{rank}".encode()


encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
