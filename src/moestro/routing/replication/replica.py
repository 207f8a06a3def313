"""Replica: applies what peers send to a router, and requests what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from moestro.routing.in_flight import PeerRequest
from moestro.routing.replication.journal import (
    Began,
    Computed,
    Digest,
    EngineFailed,
    Finished,
    Operation,
    OperationBatch,
    RouterRun,
    Snapshot,
    Want,
)
from moestro.routing.router import Router

_MODULUS = 1 << 32
MAX_PEERS = 256  # routers whose state is kept; a further one is ignored until one of them has been silent for long


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRules:
    """Intervals of replication.

    Attributes:
        beat_ns: longest time between two messages of a router, ns.
        silent_ns: time without a message after which a peer's requests in flight no longer count, ns.
        again_ns: time after which a request for missing operations is repeated, ns.
        forget_ns: time without a message after which a peer is forgotten, ns.
    """

    beat_ns: int = 250_000_000
    silent_ns: int = 2_000_000_000
    again_ns: int = 50_000_000
    forget_ns: int = 600_000_000_000


@dataclass(slots=True)
class ReplicaCounts:
    """Cumulative counts of a replica.

    Attributes:
        num_operations: operations applied.
        num_repeated: operations received again.
        num_gaps: requests for missing operations.
        num_snapshots: snapshots applied.
        num_differences: digests that did not equal the copy.
        num_expired: times that a peer's requests stopped counting because it was silent.
    """

    num_operations: int = 0
    num_repeated: int = 0
    num_gaps: int = 0
    num_snapshots: int = 0
    num_differences: int = 0
    num_expired: int = 0


@dataclass(slots=True)
class PeerState:
    """What is known of one peer.

    Attributes:
        incarnation: number of its run.
        applied_seq: number of its last applied operation; None means that only a snapshot helps.
        flights: its requests in flight by serial.
        computed: serials of those whose first token has come.
        checksum: sum of the serials in flight, as in `Digest`.
        received_ns: time of its last message on this router's clock.
        sent_ns: time of its newest message on its own clock; None before the first.
        is_silent: whether its requests stopped counting.
        wanted_ns: time of the last request for what is missing; None means that nothing is.
        parts: parts of a snapshot that is not complete, by number.
        has_all: whether all its operations up to some message have been applied.
    """

    incarnation: int
    received_ns: int
    applied_seq: int | None = 0
    flights: dict[int, Began] = field(default_factory=dict)
    computed: set[int] = field(default_factory=set)
    checksum: int = 0
    sent_ns: int | None = None
    is_silent: bool = False
    wanted_ns: int | None = None
    parts: dict[int, Snapshot] = field(default_factory=dict)
    has_all: bool = False


class Replica:
    """Keeps the requests of peers counted in a router.

    Args:
        own: this run of the router.
        row_of: returns the number of an engine by its URL; None means that this router has no such engine.
        check_engine: called with the number of an engine that a peer takes for dead.
    """

    def __init__(
        self,
        own: RouterRun,
        router: Router,
        row_of: Callable[[str], int | None],
        check_engine: Callable[[int], None] = lambda engine: None,
        rules: ReplicaRules = ReplicaRules(),
    ) -> None:
        self.rules = rules
        self.counts = ReplicaCounts()
        self._own = own
        self._router = router
        self._row_of = row_of
        self._check_engine = check_engine
        self._peers: dict[str, PeerState] = {}

    @property
    def num_peers(self) -> int:
        """Number of peers that are not silent."""
        return sum(not peer.is_silent for peer in self._peers.values())

    @property
    def num_flights(self) -> int:
        """Number of the peers' requests in flight."""
        return sum(len(peer.flights) for peer in self._peers.values())

    def ages_ns(self, now_ns: int) -> dict[str, int]:
        """Return the time since each peer's last message, ns; silent peers are left out."""
        return {name: now_ns - peer.received_ns for name, peer in self._peers.items() if not peer.is_silent}

    def knows(self, name: str) -> bool:
        """Return whether the requests in flight of a peer are counted here."""
        peer = self._peers.get(name)
        return peer is not None and peer.has_all

    def receive(self, message: OperationBatch | Snapshot, now_ns: int) -> Want | None:
        """Apply a message of a peer, and return what is to be requested of it."""
        origin = message.origin
        if origin.name == self._own.name:
            return None
        peer = self._peer_of(message, now_ns)
        if peer is None:
            return None
        if isinstance(message, Snapshot):
            self._take_part(peer, message, now_ns)
        else:
            self._take_batch(peer, message, now_ns)
        return self._lacking(peer, message, now_ns)

    def tick(self, now_ns: int) -> None:
        """Stop counting the requests of peers that have been silent for too long."""
        for name, peer in list(self._peers.items()):
            silence_ns = now_ns - peer.received_ns
            if silence_ns >= self.rules.silent_ns and not peer.is_silent:
                self.counts.num_expired += 1
                peer.is_silent = True
                self._drop_flights(name, peer, now_ns)
            if silence_ns >= self.rules.forget_ns:
                del self._peers[name]

    def engines_changed(self, now_ns: int) -> None:
        """Count the requests on engines that this router has got since."""
        for name, peer in self._peers.items():
            for serial, began in peer.flights.items():
                key = _key(name, peer, serial)
                if self._count(key, began, b"", now_ns) and serial in peer.computed:
                    self._router.first_token_elsewhere(key, now_ns)

    # --- inside

    def _peer_of(self, message: OperationBatch | Snapshot, now_ns: int) -> PeerState | None:
        """Return the state of the message's router; None for a message of an earlier run, or one peer too many.

        A router whose clock was set back starts with a lower number, which counts once its earlier run is silent.
        """
        name, incarnation = message.origin.name, message.origin.incarnation
        peer = self._peers.get(name)
        if peer is not None and incarnation < peer.incarnation and not peer.is_silent:
            return None
        if peer is None and len(self._peers) >= MAX_PEERS:
            return None
        if peer is None or incarnation != peer.incarnation:
            if peer is not None:
                self._drop_flights(name, peer, now_ns)
            peer = self._peers[name] = PeerState(incarnation, now_ns)
        # A message that was sent before another one may be a late repetition, which shows no sign of life.
        if peer.sent_ns is None or message.now_ns > peer.sent_ns:
            peer.sent_ns, peer.received_ns, peer.is_silent = message.now_ns, now_ns, False
        return peer

    def _take_batch(self, peer: PeerState, batch: OperationBatch, now_ns: int) -> None:
        applied = peer.applied_seq
        if applied is None or peer.is_silent or batch.first_seq > applied + 1:
            return
        num_known = min(applied + 1 - batch.first_seq, len(batch.operations))
        self.counts.num_repeated += num_known
        for operation in batch.operations[num_known:]:
            self._apply(batch.origin.name, peer, operation, now_ns, batch.now_ns)
            applied += 1
            self.counts.num_operations += 1
        peer.applied_seq = applied
        is_newest = applied == batch.head_seq
        if is_newest and batch.digest != Digest(len(peer.flights), peer.checksum):
            self.counts.num_differences += 1
            peer.applied_seq = None
        peer.has_all |= is_newest and peer.applied_seq is not None

    def _take_part(self, peer: PeerState, part: Snapshot, now_ns: int) -> None:
        if peer.applied_seq is not None and part.seq <= peer.applied_seq:
            return
        seq = next((each.seq for each in peer.parts.values()), part.seq)
        if part.seq < seq:
            return
        if part.seq > seq:
            peer.parts = {}
        peer.parts[part.part] = part
        last = next((each for each in peer.parts.values() if each.is_last), None)
        if last is None or len(peer.parts) <= last.part:
            return
        flights = {began.serial: began for each in peer.parts.values() for began in each.flights}
        name = part.origin.name
        for serial in [serial for serial in peer.flights if serial not in flights]:
            self._end(name, peer, serial, now_ns)
        for serial, began in flights.items():
            self._begin(name, peer, began, now_ns, part.now_ns)
            if began.is_computed:
                self._compute(name, peer, serial, now_ns)
        peer.applied_seq, peer.parts, peer.has_all = part.seq, {}, True
        self.counts.num_snapshots += 1

    def _lacking(self, peer: PeerState, message: OperationBatch | Snapshot, now_ns: int) -> Want | None:
        """Return what is missing of a peer after its message, unless it was requested a moment ago."""
        applied = peer.applied_seq
        if peer.is_silent:
            return None
        if isinstance(message, Snapshot):
            is_lacking = applied is None and message.is_last
        else:
            is_lacking = applied is None or message.first_seq > applied + 1
        if not is_lacking:
            return None
        if peer.wanted_ns is not None and now_ns - peer.wanted_ns < self.rules.again_ns:
            return None
        peer.wanted_ns = now_ns
        self.counts.num_gaps += 1
        return Want(message.origin, None if applied is None else applied + 1)

    def _apply(self, name: str, peer: PeerState, operation: Operation, now_ns: int, sent_ns: int) -> None:
        match operation:
            case Began():
                self._begin(name, peer, operation, now_ns, sent_ns)
            case Computed():
                self._compute(name, peer, operation.serial, now_ns)
            case Finished():
                self._end(name, peer, operation.serial, now_ns)
            case EngineFailed():
                row = self._row_of(operation.engine)
                if row is not None:
                    self._check_engine(row)

    def _begin(self, name: str, peer: PeerState, began: Began, now_ns: int, sent_ns: int) -> None:
        if began.serial in peer.flights:
            return
        age_ns = max(0, sent_ns - began.at_ns)  # clocks of machines differ, so only ages cross
        hashes = began.hashes
        began = msgspec.structs.replace(began, at_ns=now_ns - age_ns, hashes=b"")
        peer.flights[began.serial] = began
        peer.checksum = (peer.checksum + began.serial) % _MODULUS
        self._count(_key(name, peer, began.serial), began, hashes, now_ns)

    def _count(self, key: str, began: Began, hashes: bytes, now_ns: int) -> bool:
        """Count a request on its engine, and return whether that was new and the engine is known."""
        row = self._row_of(began.engine)
        if row is None or self._router.counts_elsewhere(key):
            return False
        request = PeerRequest(
            submit_ns=began.at_ns,
            num_known_tokens=began.num_known_tokens,
            num_prefill_tokens=began.num_prefill_tokens,
            block_hashes=hashes,
            session_id=began.session_id,
            user=began.user,
        )
        self._router.began_elsewhere(key, row, request, now_ns)
        return True

    def _compute(self, name: str, peer: PeerState, serial: int, now_ns: int) -> None:
        if serial in peer.flights:
            peer.computed.add(serial)
            self._router.first_token_elsewhere(_key(name, peer, serial), now_ns)

    def _end(self, name: str, peer: PeerState, serial: int, now_ns: int) -> None:
        if peer.flights.pop(serial, None) is not None:
            peer.computed.discard(serial)
            peer.checksum = (peer.checksum - serial) % _MODULUS
            self._router.ended_elsewhere(_key(name, peer, serial), now_ns)

    def _drop_flights(self, name: str, peer: PeerState, now_ns: int) -> None:
        """Stop counting a peer's requests. If it returns, its digest shows which of them are missing."""
        for serial in list(peer.flights):
            self._end(name, peer, serial, now_ns)
        peer.parts = {}


def _key(name: str, peer: PeerState, serial: int) -> str:
    return f"{name}/{peer.incarnation}/{serial}"
