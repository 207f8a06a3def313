"""Requests in flight that other routers have reported; their counts are part of the engine columns."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from moestro.core.prefix_tree import BlockRun
from moestro.core.views import NEVER_NS
from moestro.routing.columns import EngineColumns


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
