"""The router's own books of its requests: exact, and of age zero."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

from moestro.core.prefix_tree import BlockRun
from moestro.errors import InvariantError
from moestro.routing.columns import EngineColumns

_NUM_DEPARTED = 256  # remembered of an engine, until its next report


@dataclass(slots=True)
class Flight:
    """One request between `submit` and `ended`.

    Attributes:
        num_known_tokens: of the prompt, and of an answer that is resumed.
        num_prefill_tokens: those of them to compute, as it seemed when it was sent.
        pending: what the prefix index wants back when it is over; None: nothing.
        serial: its place among all flights.
    """

    engine: int
    submit_ns: int
    num_known_tokens: int
    num_prefill_tokens: int
    pending: BlockRun | None = None
    is_prefilling: bool = True
    serial: int = 0


@dataclass(slots=True)
class _Row:
    """One engine's flights.

    Attributes:
        flights: by request id, in the order of `submit`.
        departed: (ended_ns, submit_ns) of some that ended since the last report.
        seen: the serial up to which the engine had seen them when it last said how many requests it has.
        seen_prefill: the same, when it last said how many prompt tokens it has to compute.
    """

    flights: dict[str, Flight] = field(default_factory=dict)
    departed: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_NUM_DEPARTED))
    seen: int = -1
    seen_prefill: int = -1

    def serial_at(self, as_of_ns: int, otherwise: int) -> int:
        """The serial of the newest flight that was sent by `as_of_ns`."""
        for flight in reversed(self.flights.values()):
            if flight.submit_ns <= as_of_ns:
                return max(flight.serial, otherwise)
        return otherwise


class InFlight:
    """Requests in flight, by id and by engine; keeps the engines' own-count columns.

    Args:
        columns: whose counts are written.
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
            InvariantError: one of that id is in flight.
        """
        if request_id in self._by_id:
            raise InvariantError(f"request id {request_id!r} is in flight already")
        columns, row = self._columns, flight.engine
        flight.serial = self._num_added
        self._num_added += 1
        self._by_id[request_id] = flight
        self._rows[row].flights[request_id] = flight
        columns.num_in_flight[row] += 1
        columns.num_prefilling[row] += 1
        columns.num_unseen[row] += 1
        columns.prefill_tokens[row] += flight.num_prefill_tokens
        columns.said_prefill_tokens[row] += flight.num_prefill_tokens
        columns.context_tokens[row] += flight.num_known_tokens

    def first_token(self, request_id: str) -> Flight | None:
        """Its prompt is computed. Returns it, or None if that was known or nothing of that id is in flight."""
        flight = self._by_id.get(request_id)
        if flight is None or not flight.is_prefilling:
            return None
        flight.is_prefilling = False
        columns, row = self._columns, flight.engine
        columns.num_prefilling[row] -= 1
        columns.prefill_tokens[row] -= flight.num_prefill_tokens
        if flight.serial > self._rows[row].seen_prefill:
            columns.said_prefill_tokens[row] -= flight.num_prefill_tokens
        return flight

    def ended(self, request_id: str, now_ns: int) -> Flight:
        """It is over.

        Raises:
            InvariantError: nothing of that id is in flight.
        """
        self.first_token(request_id)
        flight = self._by_id.pop(request_id, None)
        if flight is None:
            raise InvariantError(f"request {request_id!r} ended and was not in flight")
        columns, row = self._columns, self._rows[flight.engine]
        del row.flights[request_id]
        row.departed.append((now_ns, flight.submit_ns))
        columns.num_in_flight[flight.engine] -= 1
        columns.context_tokens[flight.engine] -= flight.num_known_tokens
        if flight.serial > row.seen:
            columns.num_unseen[flight.engine] -= 1
        return flight

    def of_engine(self, engine: int) -> tuple[str, ...]:
        """Ids of the requests on one engine, in the order in which they were sent."""
        return tuple(self._rows[engine].flights)

    def forget(self, engine: int) -> None:
        """What the engine has seen means nothing any more: another is in its place."""
        row = self._rows[engine]
        row.seen = row.seen_prefill = self._num_added - 1
        row.departed.clear()
        self._columns.num_unseen[engine] = self._columns.num_foreign[engine] = 0
        self._columns.said_prefill_tokens[engine] = math.inf

    def recount_requests(self, engine: int, num_reported: int, as_of_ns: int) -> None:
        """The engine said that it had `num_reported` requests: which of mine could it not have seen, and how many were
        not mine? A request of mine that was on its way counts as seen, so that none is ever taken for another's.
        """
        row = self._rows[engine]
        row.seen = row.serial_at(as_of_ns, row.seen)
        unseen = 0
        for flight in reversed(row.flights.values()):
            if flight.serial <= row.seen:
                break
            unseen += 1
        gone_since = sum(submit_ns <= as_of_ns < ended_ns for ended_ns, submit_ns in row.departed)
        mine = len(row.flights) - unseen + gone_since
        self._columns.num_unseen[engine] = unseen
        self._columns.num_foreign[engine] = max(0, num_reported - mine)
        while row.departed and row.departed[0][0] <= as_of_ns:
            row.departed.popleft()

    def recount_prefill(self, engine: int, num_reported: int, as_of_ns: int) -> None:
        """The engine said that it had `num_reported` prompt tokens to compute; what of mine could it not have seen?"""
        row = self._rows[engine]
        row.seen_prefill = row.serial_at(as_of_ns, row.seen_prefill)
        tokens = num_reported
        for flight in reversed(row.flights.values()):
            if flight.serial <= row.seen_prefill:
                break
            tokens += flight.num_prefill_tokens if flight.is_prefilling else 0
        self._columns.said_prefill_tokens[engine] = tokens
