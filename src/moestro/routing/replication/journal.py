"""Journal of one router's own requests, and the outlet that sends it to one peer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from moestro.core.hashing import HASH_BYTES
from moestro.core.request import Request
from moestro.routing.in_flight import Flight
from moestro.routing.replication.messages import (
    MAX_BLOCKS,
    MAX_NAME,
    MAX_OPERATION_BYTES,
    MAX_OPERATIONS,
    Began,
    Computed,
    Digest,
    EngineFailed,
    Finished,
    Message,
    Operation,
    OperationBatch,
    RouterRun,
    Snapshot,
    Want,
)

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
        on_change: called after each new operation.
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
        self._checksum = 0

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
        self._flights[serial] = msgspec.structs.replace(operation, hashes=b"")
        self._checksum = (self._checksum + serial) % _MODULUS
        self._add(operation)

    def first_token(self, request_id: str) -> None:
        """Note a computed prompt."""
        serial = self._serials.get(request_id)
        if serial is not None and not self._flights[serial].is_computed:
            self._flights[serial] = msgspec.structs.replace(self._flights[serial], is_computed=True)
            self._add(Computed(serial))

    def ended(self, request_id: str) -> None:
        """Note the end of a request; requests from before the journal are unknown."""
        serial = self._serials.pop(request_id, None)
        if serial is not None:
            del self._flights[serial]
            self._checksum = (self._checksum - serial) % _MODULUS
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
        flights = list(self._flights.values())
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

    def wanted(self, want: Want) -> None:
        """Take in what the peer lacks."""
        if want.origin != self._journal.origin:
            return
        if want.from_seq is None or not self._journal.keeps(want.from_seq):
            self._needs_snapshot = True
        else:
            self._next_seq = min(self._next_seq, want.from_seq)

    def due(self, now_ns: int) -> Iterator[Message]:
        """Yield the messages that are to be sent now, each before the next is made."""
        journal = self._journal
        if self._needs_snapshot or not journal.keeps(self._next_seq):
            self._needs_snapshot = False
            self._next_seq = journal.head_seq + 1
            self._sent_ns = now_ns
            yield from journal.snapshot(now_ns)
        is_due = self._sent_ns is None or now_ns - self._sent_ns >= self._beat_ns
        while self._next_seq <= journal.head_seq or is_due:
            batch = journal.batch(self._next_seq, now_ns)
            self._next_seq += len(batch.operations)
            self._sent_ns, is_due = now_ns, False
            yield batch


def _short(name: str | None) -> str | None:
    """Return the name of a session or a user, or None if it is too long for peers."""
    return name if name is not None and len(name) <= MAX_NAME else None


def _bytes_of(operation: Operation) -> int:
    return len(operation.hashes) if isinstance(operation, Began) else 0
