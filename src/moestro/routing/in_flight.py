"""Exact, current state of the requests in flight: the router's own, and those that other routers have reported."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

import msgspec

from moestro.core.hashing import BlockRun
from moestro.core.views import NEVER_NS
from moestro.errors import InvariantError
from moestro.routing.columns import EngineColumns, SentTiming

_NUM_DEPARTED = 256  # ended requests remembered per engine until its next report


class Flight(msgspec.Struct, eq=False, gc=False):
    """One request between `submit` and `ended`.

    Attributes:
        num_known_tokens: tokens of the prompt and of a resumed answer.
        num_prefill_tokens: those of `num_known_tokens` that the engine was expected to compute.
        num_hit_tokens: those that it was expected to have cached. None means that its process was replaced since.
        num_host_tokens: those of `num_hit_tokens` that it was expected to copy from host memory.
        pending: handle to return to the prefix index at the end; None means no handle.
        serial: sequence number among all requests of the router.
        timing: times from which the speed of the engine is learnt. None means that it is not.
    """

    engine: int
    submit_ns: int
    num_known_tokens: int
    num_prefill_tokens: int
    num_hit_tokens: int | None
    num_host_tokens: int = 0
    pending: BlockRun | None = None
    is_prefilling: bool = True
    serial: int = 0
    timing: SentTiming | None = None


@dataclass(slots=True)
class _Row:
    """The requests in flight on one engine.

    Attributes:
        flights: flights by request id, in the order of `submit`.
        departed: (ended_ns, submit_ns) of requests that ended since the last report, at most _NUM_DEPARTED.
        seen: serial of the newest request included in the engine's last report of request counts.
        seen_prefill: serial of the newest request included in its last report of prompt tokens to compute.
    """

    flights: dict[str, Flight] = field(default_factory=dict)
    departed: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_NUM_DEPARTED))
    seen: int = -1
    seen_prefill: int = -1

    def serial_at(self, as_of_ns: int, otherwise: int) -> int:
        """Return the serial of the newest request sent by `as_of_ns`, at least `otherwise`."""
        for flight in reversed(self.flights.values()):
            if flight.submit_ns <= as_of_ns:
                return max(flight.serial, otherwise)
        return otherwise


class InFlight:
    """Requests in flight by id and by engine; maintains the router's own counts in the engine columns.

    Args:
        columns: engine columns to update.
    """

    def __init__(self, columns: EngineColumns) -> None:
        self._columns = columns
        self._by_id: dict[str, Flight] = {}
        self._rows: defaultdict[int, _Row] = defaultdict(_Row)
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request_id: str, flight: Flight) -> None:
        """Count a request that is sent now.

        Raises:
            InvariantError: a request with this id is in flight already.
        """
        if request_id in self._by_id:
            raise InvariantError(f"request id {request_id!r} is in flight already")
        counts, row = self._columns.counts, flight.engine
        flight.serial = self._num_added
        self._num_added += 1
        self._by_id[request_id] = flight
        self._rows[row].flights[request_id] = flight
        counts.num_in_flight[row] += 1
        counts.num_prefilling[row] += 1
        counts.num_unseen[row] += 1
        counts.prefill_tokens[row] += flight.num_prefill_tokens
        counts.context_tokens[row] += flight.num_known_tokens
        counts.reported_prefill_tokens[row] += flight.num_prefill_tokens

    def first_token(self, request_id: str) -> Flight | None:
        """Record a computed prompt. Return the flight, or None if that was known or the id is not in flight."""
        flight = self._by_id.get(request_id)
        if flight is None or not flight.is_prefilling:
            return None
        flight.is_prefilling = False
        counts, row = self._columns.counts, flight.engine
        counts.num_prefilling[row] -= 1
        counts.prefill_tokens[row] -= flight.num_prefill_tokens
        if flight.serial > self._rows[row].seen_prefill:
            counts.reported_prefill_tokens[row] -= flight.num_prefill_tokens
        return flight

    def ended(self, request_id: str, now_ns: int) -> Flight:
        """Remove a request that has ended, and return its flight.

        Raises:
            InvariantError: no request with this id is in flight.
        """
        flight = self._by_id.get(request_id)
        if flight is None:
            raise InvariantError(f"request {request_id!r} ended and was not in flight")
        if flight.is_prefilling:
            self.first_token(request_id)
        del self._by_id[request_id]
        counts, row = self._columns.counts, self._rows[flight.engine]
        del row.flights[request_id]
        row.departed.append((now_ns, flight.submit_ns))
        counts.num_in_flight[flight.engine] -= 1
        counts.context_tokens[flight.engine] -= flight.num_known_tokens
        if flight.serial > row.seen:
            counts.num_unseen[flight.engine] -= 1
        return flight

    def is_computed(self, request_id: str) -> bool:
        """Return whether a request in flight has had its first token."""
        flight = self._by_id.get(request_id)
        return flight is not None and not flight.is_prefilling

    def engine_of(self, request_id: str) -> int | None:
        """Return the engine of a request; None if it is not in flight."""
        flight = self._by_id.get(request_id)
        return None if flight is None else flight.engine

    def num_on(self, engine: int) -> int:
        """Return the number of requests on one engine."""
        return len(self._rows[engine].flights)

    def departed(self, engine: int, submit_ns: int, now_ns: int) -> None:
        """Record the end of another router's request, which the engine's next report may still include."""
        self._rows[engine].departed.append((now_ns, submit_ns))

    def of_engine(self, engine: int) -> tuple[str, ...]:
        """Return the ids of the requests on one engine, in sending order."""
        return tuple(self._rows[engine].flights)

    def waits_since_ns(self, engine: int) -> int | None:
        """Return when the oldest request on one engine without a first token was sent; None means that none waits."""
        flights = self._rows[engine].flights.values()
        return next((flight.submit_ns for flight in flights if flight.is_prefilling), None)

    def forget(self, engine: int) -> None:
        """Discard what a replaced engine process had reported about its requests."""
        row = self._rows[engine]
        row.seen = row.seen_prefill = self._num_added - 1
        row.departed.clear()
        for flight in row.flights.values():
            flight.num_hit_tokens = None
        self._columns.num_unseen[engine] = self._columns.num_foreign[engine] = 0
        self._columns.reported_prefill_tokens[engine] = math.inf

    def recount_requests(self, engine: int, num_reported: int, as_of_ns: int, of_peers: tuple[int, int]) -> None:
        """Recount unseen and foreign requests after an engine reported `num_reported` requests.

        Unseen requests of this router and its peers were sent after the report; foreign requests belong to routers that
        are no peers. A request that was on its way counts as seen, so that it is never taken for a foreign one.

        Args:
            of_peers: number of the peers' requests that the report includes, and of those that it does not.
        """
        row = self._rows[engine]
        row.seen = row.serial_at(as_of_ns, row.seen)
        unseen = 0
        for flight in reversed(row.flights.values()):
            if flight.serial <= row.seen:
                break
            unseen += 1
        gone_since = sum(submit_ns <= as_of_ns < ended_ns for ended_ns, submit_ns in row.departed)
        num_seen_of_peers, num_unseen_of_peers = of_peers
        mine = len(row.flights) - unseen + gone_since + num_seen_of_peers
        self._columns.num_unseen[engine] = unseen + num_unseen_of_peers
        self._columns.num_foreign[engine] = max(0, num_reported - mine)
        while row.departed and row.departed[0][0] <= as_of_ns:
            row.departed.popleft()

    def recount_prefill(self, engine: int, num_reported: int, as_of_ns: int, of_peers: int) -> None:
        """Add the unseen requests' prompt tokens to the `num_reported` tokens that an engine has yet to compute.

        Args:
            of_peers: prompt tokens of the peers' unseen requests.
        """
        row = self._rows[engine]
        row.seen_prefill = row.serial_at(as_of_ns, row.seen_prefill)
        tokens = num_reported + of_peers
        for flight in reversed(row.flights.values()):
            if flight.serial <= row.seen_prefill:
                break
            tokens += flight.num_prefill_tokens if flight.is_prefilling else 0
        self._columns.reported_prefill_tokens[engine] = tokens


class PeerRequest(msgspec.Struct, frozen=True, eq=True, gc=False):
    """A request that another router has sent to an engine.

    Attributes:
        submit_ns: time of its sending on this router's clock.
        num_known_tokens: tokens of the prompt and of a resumed answer.
        num_prefill_tokens: those of them that the engine was expected to compute.
        block_hashes: packed names of the prompt's leading blocks.
        session_id, user: names by which policies keep requests together; None means unknown.
    """

    submit_ns: int
    num_known_tokens: int
    num_prefill_tokens: int
    block_hashes: bytes = b""
    session_id: str | None = None
    user: str | None = None


class PeerFlight(msgspec.Struct, eq=False, gc=False):
    """One request of another router between its begin and its end.

    Attributes:
        pending: handle to return to the prefix index at the end; None means no handle.
        is_unseen: whether it was sent after the engine's last report of request counts.
        is_prefill_unseen: whether it was sent after the engine's last report of prompt tokens to compute.
    """

    engine: int
    submit_ns: int
    num_known_tokens: int
    num_prefill_tokens: int
    pending: BlockRun | None = None
    is_prefilling: bool = True
    is_unseen: bool = True
    is_prefill_unseen: bool = True


class PeerFlights:
    """Requests of other routers by key and by engine. Repeated calls have no further effect.

    Args:
        columns: engine columns, which count these requests with the router's own.
    """

    def __init__(self, columns: EngineColumns) -> None:
        self._columns = columns
        self._by_key: dict[str, PeerFlight] = {}
        self._rows: defaultdict[int, dict[str, PeerFlight]] = defaultdict(dict)
        self._as_of_ns: dict[int, int] = {}  # time of the last report of request counts, by engine
        self._prefill_as_of_ns: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def num_on(self, engine: int) -> int:
        """Return the number of other routers' requests on one engine."""
        return len(self._rows[engine]) if engine in self._rows else 0

    def add(self, key: str, flight: PeerFlight) -> None:
        """Count a request. The engine's last report may include it, and then counted it as foreign until now."""
        columns, row = self._columns, flight.engine
        self._by_key[key] = self._rows[row][key] = flight
        flight.is_unseen = flight.submit_ns > self._as_of_ns.get(row, NEVER_NS)
        flight.is_prefill_unseen = flight.submit_ns > self._prefill_as_of_ns.get(row, NEVER_NS)
        counts = columns.counts
        counts.num_in_flight[row] += 1
        counts.num_prefilling[row] += 1
        counts.prefill_tokens[row] += flight.num_prefill_tokens
        counts.context_tokens[row] += flight.num_known_tokens
        if flight.is_unseen:
            counts.num_unseen[row] += 1
        elif columns.num_foreign[row] > 0:
            columns.num_foreign[row] -= 1
        if flight.is_prefill_unseen:
            columns.reported_prefill_tokens[row] += flight.num_prefill_tokens

    def first_token(self, key: str) -> None:
        """Record a computed prompt; unknown keys have no effect."""
        flight = self._by_key.get(key)
        if flight is None or not flight.is_prefilling:
            return
        flight.is_prefilling = False
        columns, row = self._columns, flight.engine
        columns.counts.num_prefilling[row] -= 1
        columns.counts.prefill_tokens[row] -= flight.num_prefill_tokens
        if flight.is_prefill_unseen:
            columns.reported_prefill_tokens[row] -= flight.num_prefill_tokens

    def ended(self, key: str) -> PeerFlight | None:
        """Remove a request and return its flight; None means that the key is unknown."""
        flight = self._by_key.get(key)
        if flight is None:
            return None
        self.first_token(key)
        del self._by_key[key]
        del self._rows[flight.engine][key]
        counts, row = self._columns.counts, flight.engine
        counts.num_in_flight[row] -= 1
        counts.context_tokens[row] -= flight.num_known_tokens
        if flight.is_unseen:
            counts.num_unseen[row] -= 1
        return flight

    def keys_on(self, engine: int) -> tuple[str, ...]:
        """Return the keys of the requests on one engine."""
        return tuple(self._rows[engine]) if engine in self._rows else ()

    def forget(self, engine: int) -> None:
        """Discard what a replaced engine process had reported; the caller resets the columns."""
        self._as_of_ns.pop(engine, None)
        self._prefill_as_of_ns.pop(engine, None)
        for flight in self._rows[engine].values() if engine in self._rows else ():
            flight.is_unseen = flight.is_prefill_unseen = False

    def recount_requests(self, engine: int, as_of_ns: int) -> tuple[int, int]:
        """Note a report of request counts, and return how many requests it includes and how many it does not."""
        self._as_of_ns[engine] = as_of_ns
        if engine not in self._rows:
            return 0, 0
        flights = self._rows[engine].values()
        for flight in flights:
            flight.is_unseen = flight.is_unseen and flight.submit_ns > as_of_ns
        num_unseen = sum(flight.is_unseen for flight in flights)
        return len(flights) - num_unseen, num_unseen

    def recount_prefill(self, engine: int, as_of_ns: int) -> int:
        """Note a report of prompt tokens to compute, and return the tokens of the requests sent since."""
        self._prefill_as_of_ns[engine] = as_of_ns
        if engine not in self._rows:
            return 0
        tokens = 0
        for flight in self._rows[engine].values():
            flight.is_prefill_unseen = flight.is_prefill_unseen and flight.submit_ns > as_of_ns
            tokens += flight.num_prefill_tokens if flight.is_prefill_unseen and flight.is_prefilling else 0
        return tokens
