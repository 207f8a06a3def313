"""Messages between routers, as typed msgpack of bounded size."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from moestro.core.hashing import HASH_BYTES

MAX_MESSAGE_BYTES = 1 << 20
MAX_OPERATIONS = 512  # of one message
MAX_OPERATION_BYTES = 256 << 10  # of block hashes in one message, apart from those of its last operation
MAX_BLOCKS = 4096  # leading blocks of a prompt that peers learn
MAX_HISTORY_PROMPTS = 256  # of one part
MAX_HISTORY_BYTES = 256 << 10  # of block names in one part, apart from those of its last prompt
MAX_HISTORY_BLOCKS = 1 << 15  # of one prompt; a longer one is left out
MAX_NAME = 256  # characters of a session, a user or a router; longer sessions and users stay unknown to peers
_MAX_URL = 2048

Count = Annotated[int, Meta(ge=0, le=1 << 48)]
Serial = Annotated[int, Meta(ge=0, le=(1 << 62))]
Nanoseconds = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
EngineName = Annotated[str, Meta(min_length=1, max_length=_MAX_URL)]
Hashes = Annotated[bytes, Meta(max_length=MAX_BLOCKS * HASH_BYTES)]


class Began(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Operation: a request was sent to an engine.

    Attributes:
        serial: number of the request among those of its router.
        engine: URL of the engine.
        at_ns: time of sending on the router's clock.
        num_known_tokens: tokens of the prompt and of a resumed answer.
        num_prefill_tokens: those of them that the engine was expected to compute.
        hashes: packed names of the prompt's leading blocks.
        is_computed: whether the first token has come; only in snapshots.
    """

    serial: Serial
    engine: EngineName
    at_ns: Nanoseconds
    num_known_tokens: Count
    num_prefill_tokens: Count
    hashes: Hashes = b""
    session_id: Annotated[str, Meta(max_length=MAX_NAME)] | None = None
    user: Annotated[str, Meta(max_length=MAX_NAME)] | None = None
    is_computed: bool = False


class Computed(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Operation: the first token of a request has come."""

    serial: Serial


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Operation: a request has ended, for any reason."""

    serial: Serial


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Operation: the router takes an engine for dead. Peers check it at once, and believe their own check."""

    engine: EngineName


Operation = Began | Computed | Finished | EngineFailed


class RouterRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of a router.

    Attributes:
        name: name of the router.
        incarnation: number of the run; a later run has a higher one.
    """

    name: Name
    incarnation: Serial


class Digest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Summary of a router's requests in flight, by which a peer notices that its own copy differs.

    Attributes:
        num_flights: number of requests.
        checksum: sum of their serials, modulo 2**32.
    """

    num_flights: Count
    checksum: Count


class OperationBatch(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Operations of one router, in order; without any it shows that the router is alive.

    Attributes:
        first_seq: number of the first operation, or of the next one if there is none.
        now_ns: time of sending on the router's clock.
        head_seq: number of the router's newest operation.
        digest: summary of the router's requests behind its newest operation.
    """

    origin: RouterRun
    first_seq: Serial
    now_ns: Nanoseconds
    head_seq: Serial
    digest: Digest
    operations: Annotated[list[Operation], Meta(max_length=MAX_OPERATIONS)] = []


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Part of a router's requests in flight behind one of its operations.

    Attributes:
        seq: number of that operation.
        part: number of this part, from 0.
        flights: requests, without the names of their blocks.
    """

    origin: RouterRun
    seq: Serial
    now_ns: Nanoseconds
    part: Serial
    is_last: bool
    flights: Annotated[list[Began], Meta(max_length=MAX_OPERATIONS)]


class Want(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Request for what a peer lacks of a router.

    Attributes:
        origin: the router's run.
        from_seq: number of the first missing operation; None requests a snapshot.
    """

    origin: RouterRun
    from_seq: Serial | None


class WantHistory(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Request for the prompts that a router knows of."""


class HistoryPart(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Some prompts of one engine, oldest first.

    Attributes:
        engine: URL of the engine.
        runs: new runs as (number of the parent run or -1, packed blocks). Runs are numbered from 0 in order, across all
            parts.
        prompts: number of each prompt's last run.
    """

    engine: Annotated[str, Meta(max_length=_MAX_URL)]
    runs: Annotated[list[tuple[int, bytes]], Meta(max_length=1 << 16)]
    prompts: Annotated[list[int], Meta(max_length=MAX_HISTORY_PROMPTS)]
    is_last: bool = False


Message = OperationBatch | Snapshot | Want | WantHistory | HistoryPart

encode_message = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def decode_message(data: bytes) -> Message:
    """Return the message that `data` encodes.

    Raises:
        ValueError: `data` is longer than a message may be, or is none.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has {len(data)} bytes, and may have {MAX_MESSAGE_BYTES}")
    try:
        message: Message = _decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"a message cannot be read: {error}") from None
    for operation in _operations(message):
        if isinstance(operation, Began) and len(operation.hashes) % HASH_BYTES:
            raise ValueError("the hashes of a prompt are no whole number of blocks")
    return message


def _operations(message: Message) -> list[Operation] | list[Began]:
    match message:
        case OperationBatch():
            return message.operations
        case Snapshot():
            return message.flights
        case _:
            return []
