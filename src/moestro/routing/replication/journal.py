"""Journal of one router's own requests, the outlet that sends it to one peer, its messages, and prompts for newcomers.

Messages are typed msgpack of bounded size.

Contents known from KV events are left out, because the other router receives these events itself. Blocks shared by
prompts occur once, so all parts together are no larger than the index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from moestro.core.hashing import HASH_BYTES, BlockRun
from moestro.core.request import Request
from moestro.routing.in_flight import Flight
from moestro.routing.router import Router

MAX_MESSAGE_BYTES = 1 << 20
MAX_OPERATIONS = 512  # of one message
MAX_OPERATION_BYTES = 256 << 10  # of block hashes in one message, apart from those of its last operation
MAX_BLOCKS = 4096  # leading blocks of a prompt that peers learn
MAX_HISTORY_PROMPTS = 256  # of one part
MAX_HISTORY_BYTES = 256 << 10  # of block names in one part, apart from those of its last prompt
MAX_HISTORY_BLOCKS = 1 << 15  # of one prompt; a longer one is left out
MAX_NAME = 256  # characters of a router's name; bytes of a session's or a user's, longer ones stay unknown to peers
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
    """Operation: a request has ended, for any reason. Its prompt counts as computed."""

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


_MAX_KEPT = 1 << 14  # operations that peers may request again; a peer that lacks more gets a snapshot
_MAX_KEPT_BYTES = 8 << 20  # block hashes of the same
_MODULUS = 1 << 32


class Journal:
    """Numbers the operations of one router, keeps the last ones and the requests in flight.

    Args:
        origin: this run of the router.
        url_of: returns the URL of an engine by its number in the router.
        has_prompts: whether peers compare prompts, so that operations name their blocks.

    Attributes:
        head_seq: number of the newest operation; 0 before the first.
        on_change: called after each new operation, and after one that replaces the newest.
    """

    def __init__(self, origin: RouterRun, url_of: Callable[[int], str], *, has_prompts: bool = True) -> None:
        self.origin = origin
        self.head_seq = 0
        self.on_change: Callable[[], None] = lambda: None
        self._url_of = url_of
        self._has_prompts = has_prompts
        self._kept: deque[Operation] = deque()
        self._num_kept_bytes = 0
        self._num_begun = 0
        self._serials: dict[str, int] = {}  # by request id
        self._flights: dict[int, Began] = {}
        self._computed: set[int] = set()  # serials of those in flight whose first token has come
        self._checksum = 0
        self._reported_seq = 0  # number of the newest operation that a message has reported

    # --- from the router

    def began(self, request: Request, flight: Flight) -> None:
        """Note a request that is sent now."""
        serial = self._num_begun
        self._num_begun += 1
        operation = Began(
            serial=serial,
            engine=self._url_of(flight.engine),
            at_ns=flight.submit_ns,
            num_known_tokens=flight.num_known_tokens,
            num_prefill_tokens=flight.num_prefill_tokens,
            hashes=request.block_hashes[: MAX_BLOCKS * HASH_BYTES] if self._has_prompts else b"",
            session_id=_short(request.session_id),
            user=_short(request.user),
        )
        self._serials[request.request_id] = serial
        self._flights[serial] = msgspec.structs.replace(operation, hashes=b"") if operation.hashes else operation
        self._checksum = (self._checksum + serial) % _MODULUS
        self._add(operation)

    def first_token(self, request_id: str) -> None:
        """Note a computed prompt."""
        serial = self._serials.get(request_id)
        if serial is not None and serial not in self._computed:
            self._computed.add(serial)
            self._add(Computed(serial))

    def ended(self, request_id: str) -> None:
        """Note the end of a request; requests from before the journal are unknown."""
        serial = self._serials.pop(request_id, None)
        if serial is None:
            return
        del self._flights[serial]
        self._computed.discard(serial)
        self._checksum = (self._checksum - serial) % _MODULUS
        newest = self._kept[-1] if self._kept else None
        if isinstance(newest, Computed) and newest.serial == serial and self._reported_seq < self.head_seq:
            self._kept[-1] = Finished(serial)  # whose prompt counts as computed
            self.on_change()
        else:
            self._add(Finished(serial))

    def engine_failed(self, engine: int) -> None:
        """Note that the router takes an engine for dead."""
        self._add(EngineFailed(self._url_of(engine)))

    # --- to peers

    @property
    def digest(self) -> Digest:
        """Summary of the requests in flight."""
        return Digest(len(self._flights), self._checksum)

    def keeps(self, seq: int) -> bool:
        """Return whether all operations from number `seq` on can be sent again."""
        return self.head_seq - len(self._kept) < seq <= self.head_seq + 1

    def batch(self, seq: int, now_ns: int) -> OperationBatch:
        """Return the operations from number `seq` on, as many as one message may have."""
        self._reported_seq = self.head_seq
        skipped = seq - (self.head_seq - len(self._kept) + 1)
        operations: list[Operation] = []
        num_bytes = 0
        for at in range(skipped, len(self._kept)):
            operation = self._kept[at]
            operations.append(operation)
            num_bytes += _bytes_of(operation)
            if len(operations) == MAX_OPERATIONS or num_bytes >= MAX_OPERATION_BYTES:
                break
        return OperationBatch(self.origin, seq, now_ns, self.head_seq, self.digest, operations)

    def snapshot(self, now_ns: int) -> list[Snapshot]:
        """Return the requests in flight, in parts."""
        self._reported_seq = self.head_seq
        flights = [
            msgspec.structs.replace(began, is_computed=True) if serial in self._computed else began
            for serial, began in self._flights.items()
        ]
        parts = [flights[at : at + MAX_OPERATIONS] for at in range(0, len(flights), MAX_OPERATIONS)] or [[]]
        last = len(parts) - 1
        return [
            Snapshot(self.origin, self.head_seq, now_ns, number, number == last, part)
            for number, part in enumerate(parts)
        ]

    def _add(self, operation: Operation) -> None:
        self.head_seq += 1
        self._kept.append(operation)
        self._num_kept_bytes += _bytes_of(operation)
        while len(self._kept) > _MAX_KEPT or self._num_kept_bytes > _MAX_KEPT_BYTES:
            self._num_kept_bytes -= _bytes_of(self._kept.popleft())
        self.on_change()


class Outlet:
    """Decides what one peer gets of a journal, and when.

    Args:
        beat_ns: time after which a message is sent although there is nothing new, ns.
    """

    def __init__(self, journal: Journal, beat_ns: int) -> None:
        self._journal = journal
        self._beat_ns = beat_ns
        self._next_seq = journal.head_seq + 1
        self._sent_ns: int | None = None  # None means that nothing was sent yet
        self._needs_snapshot = False
        self._parts: deque[Snapshot] = deque()  # of a snapshot, not sent yet

    def wanted(self, want: Want) -> None:
        """Take in what the peer lacks."""
        if want.origin != self._journal.origin:
            return
        if want.from_seq is None or not self._journal.keeps(want.from_seq):
            self._needs_snapshot = True
        else:
            self._next_seq = min(self._next_seq, want.from_seq)

    def due(self, now_ns: int) -> Iterator[Message]:
        """Yield all messages that are to be sent now."""
        while (message := self.next_due(now_ns)) is not None:
            yield message

    def next_due(self, now_ns: int) -> Message | None:
        """Return the next message that is to be sent now; None if there is none.

        The journal may have moved on since the last one, whose sending takes as long as the peer is slow.
        """
        journal = self._journal
        if self._needs_snapshot or not journal.keeps(self._next_seq):
            self._needs_snapshot = False
            self._next_seq = journal.head_seq + 1
            self._parts = deque(journal.snapshot(now_ns))
        if self._parts:
            self._sent_ns = now_ns
            return msgspec.structs.replace(self._parts.popleft(), now_ns=now_ns)
        is_due = self._sent_ns is None or now_ns - self._sent_ns >= self._beat_ns
        if self._next_seq > journal.head_seq and not is_due:
            return None
        batch = journal.batch(self._next_seq, now_ns)
        self._next_seq += len(batch.operations)
        self._sent_ns = now_ns
        return batch


def _short(name: str | None) -> str | None:
    """Return the name of a session or a user, or None if it is too long for peers.

    With four bytes for each character, the names of 512 requests would be more than one message may have.
    """
    is_short = name is not None and len(name) <= MAX_NAME and len(name.encode()) <= MAX_NAME
    return name if is_short else None


def _bytes_of(operation: Operation) -> int:
    return len(operation.hashes) if isinstance(operation, Began) else 0


_NO_PARENT = -1


def history_parts(router: Router, engines: Iterable[tuple[str, int]]) -> Iterator[HistoryPart]:
    """Yield the prompts of each engine, oldest first, while the router keeps changing them.

    The blocks of a yielded run stay valid up to its end, even if the run is split or dropped.

    Args:
        engines: URL and number in the router of each engine.
    """
    numbers: dict[BlockRun, int] = {}
    for url, row in engines:
        yield from _parts_of(url, router.prompts_sent(row), numbers)
    yield HistoryPart("", [], [], is_last=True)


def _parts_of(engine: str, last_runs: Iterable[BlockRun], numbers: dict[BlockRun, int]) -> Iterator[HistoryPart]:
    part, num_bytes = HistoryPart(engine, [], []), 0
    for last in last_runs:
        if last.depth > MAX_HISTORY_BLOCKS:
            continue
        num_before = len(part.runs)
        part.prompts.append(_number(last, numbers, part.runs))
        num_bytes += sum(len(blocks) for _, blocks in part.runs[num_before:])
        if len(part.prompts) == MAX_HISTORY_PROMPTS or num_bytes >= MAX_HISTORY_BYTES:
            yield part
            part, num_bytes = HistoryPart(engine, [], []), 0
    if part.prompts:
        yield part


def _number(last: BlockRun, numbers: dict[BlockRun, int], runs: list[tuple[int, bytes]]) -> int:
    """Return the number of a run, and append the run and its new ancestors to `runs` if needed."""
    new, run = [], last
    number = _NO_PARENT
    while run not in numbers:
        new.append(run)
        if run.parent is None:
            break
        run = run.parent
    else:
        number = numbers[run]
    for each in reversed(new):
        runs.append((number, each.blocks))
        number = numbers[each] = len(numbers)
    return number


class HistoryReader:
    """Reads the parts of one history, in order."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, bytes]] = []
        self._depths: list[int] = []  # blocks of a prompt up to the end of each run

    def prompts(self, part: HistoryPart) -> Iterator[bytes]:
        """Yield the packed blocks of each prompt of a part.

        Raises:
            ValueError: no router would send this part.
        """
        for parent, blocks in part.runs:
            if not blocks or len(blocks) % HASH_BYTES or not _NO_PARENT <= parent < len(self._runs):
                raise ValueError("a run is not a whole number of blocks, or precedes its parent")
            depth = len(blocks) // HASH_BYTES + (0 if parent == _NO_PARENT else self._depths[parent])
            if depth > MAX_HISTORY_BLOCKS:
                raise ValueError(f"a prompt has more than {MAX_HISTORY_BLOCKS:,} blocks")
            self._runs.append((parent, blocks))
            self._depths.append(depth)
        for last in part.prompts:
            yield self._prompt(last)

    def _prompt(self, last: int) -> bytes:
        if not 0 <= last < len(self._runs):
            raise ValueError("a part refers to an unknown run")
        pieces = []
        while last != _NO_PARENT:
            last, blocks = self._runs[last]
            pieces.append(blocks)
        return b"".join(reversed(pieces))
