"""Decisions of a scheduler, noted for the API server's record, and made again from a record.

A scheduler without a recorder pays for one comparison with None at each of these places.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from moestro.core.processes import ending_on_error
from moestro.core.scheduling_events import (
    BatchPassed,
    EvictDecision,
    ExpertVisits,
    OrderDecision,
    PoliciesStarted,
    SchedulingEvent,
    SequenceAdmitted,
    SequenceLeft,
    SequencePreempted,
    SequenceQueued,
)
from moestro.core.views import Admitted, EvictView, Left, OrderPolicy, Victim, WaitingView
from moestro.core.work import StepVisits
from moestro.engine.registry import EVICT_POLICIES, ORDER_POLICIES, EvictPolicy
from moestro.engine.sequences import Sequence
from moestro.engine.waiting import WaitingQueue, view_of_one
from moestro.errors import ConfigError

logger = logging.getLogger(__name__)

MOST_ROWS = 8  # waiting requests in an `OrderDecision`, and requests of each list of a `BatchPassed`
MOST_VERSIONS = 4  # versions of the expert table that one request tells apart
_guarded = ending_on_error(logger, "the scheduler's decisions are no longer recorded; requests are served as before")


class EventRecorder:
    """Collects the events of one rank until they are taken.

    Args:
        order: order policy of the rank, which explains its order.
        order_name, evict_name: policies in text form, from which a replay makes them again.

    Attributes:
        has_failed: whether notes have ended because of an error.
    """

    def __init__(self, order: OrderPolicy, order_name: str, evict_name: str) -> None:
        self._order = order
        self._events: list[SchedulingEvent] = [PoliciesStarted(order_name, evict_name, order.observes)]
        self._ids: dict[int, str] = {}  # by serial, of all requests of the rank
        self._new: dict[int, bool] = {}  # serials that the queue got since the last look: whether by a preemption
        self._queued: dict[int, tuple[int, int]] = {}  # time, and number of admissions before, by serial
        self._num_admitted = self._num_passes = 0
        self._passing: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._visits: dict[int, dict[int, tuple[tuple[int, ...], NDArray[np.int64]]]] = {}
        self.has_failed = False

    def take(self) -> tuple[SchedulingEvent, ...]:
        """Return the events since the last call."""
        events = tuple(self._events)
        self._events.clear()
        return events

    # --- the queue --------------------------------------------------------------------------------------------------

    @_guarded
    def added(self, sequence: Sequence) -> None:
        """Note that the queue got a sequence, which came or was preempted."""
        self._ids[sequence.serial] = sequence.request.request_id
        self._new[sequence.serial] = sequence.num_preemptions > 0

    @_guarded
    def look(self, waiting: WaitingQueue, now_ns: int) -> None:
        """Note the place of each request that the queue got since the last look."""
        if not self._new:
            return
        view, order, sorted_ns = waiting.last_order(now_ns)
        serials = view.serial[order].tolist()
        keys = self._order.keys(view, sorted_ns)
        place_of = {serial: place for place, serial in enumerate(serials) if serial in self._new}
        for serial, place in place_of.items():
            ahead = place - 1
            self._events.append(
                SequenceQueued(
                    self._ids[serial],
                    now_ns,
                    place,
                    len(serials),
                    key=_key(keys, int(order[place])),
                    ahead="" if ahead < 0 else self._ids[serials[ahead]],
                    ahead_key={} if ahead < 0 else _key(keys, int(order[ahead])),
                    was_preempted=self._new[serial],
                )
            )
            self._queued[serial] = (now_ns, self._num_admitted)
        self._new.clear()
        if len(serials) > 1:
            first = order[:MOST_ROWS]
            self._events.append(
                OrderDecision(
                    sorted_ns,
                    len(serials),
                    request_ids=tuple(self._ids[serial] for serial in serials[:MOST_ROWS]),
                    arrival_ns=_column(view.arrival_ns, first),
                    num_prompt_tokens=_column(view.num_prompt_tokens, first),
                    priority=_column(view.priority, first),
                    serial=_column(view.serial, first),
                    service_class=_column(view.service_class, first),
                    user=_column(view.user, first),
                    num_uncached=None if view.num_uncached is None else _column(view.num_uncached, first),
                )
            )

    @_guarded
    def admitted(self, sequence: Sequence, num_cached: int, now_ns: int) -> None:
        """Note an admission, before the order policy learns of it."""
        serial, request = sequence.serial, sequence.request
        queued_ns, num_before = self._queued.pop(serial, (now_ns, self._num_admitted))
        key: dict[str, float] = {}
        if queued_ns != now_ns:  # else the key stands in the event before
            view = view_of_one(sequence, sequence.num_tokens - num_cached if self._order.reads_cache else None)
            key = _key(self._order.keys(view, now_ns), 0)
        self._events.append(
            SequenceAdmitted(
                request.request_id,
                now_ns,
                num_cached,
                key=key,
                num_before=self._num_admitted - num_before,
                is_first=sequence.num_cached_tokens is None,
                user=sequence.user,
                num_prompt_tokens=request.num_prompt_tokens,
            )
        )
        self._num_admitted += 1

    # --- preemption -------------------------------------------------------------------------------------------------

    @_guarded
    def chose(self, victim: Sequence, view: EvictView, choice: Victim, now_ns: int) -> None:
        """Note an answer of the evict policy."""
        self._events.append(
            EvictDecision(
                victim.request.request_id,
                now_ns,
                int(choice.row),
                bool(choice.keeps),
                tuple(view.order_rank.tolist()),
                tuple(view.num_computed_tokens.tolist()),
                tuple(view.service_class.tolist()),
                view.num_free_host_tokens,
            )
        )

    @_guarded
    def preempted(self, event: SequencePreempted) -> None:
        """Note that a sequence frees its KV."""
        self._events.append(event)

    @_guarded
    def may_pass(self, by: Iterable[Sequence], passed: Iterable[Sequence]) -> None:
        """Note that a plan may run ahead of units in flight, if the step policy wants it."""
        first, last = (tuple(each.request.request_id for each in some)[:MOST_ROWS] for some in (by, passed))
        if last:
            self._passing = (first, last)

    @_guarded
    def look_for_pass(self, num_passes: int, now_ns: int) -> None:
        """Note that the last such plan has run ahead, if the executor's number of passes has grown."""
        if num_passes > self._num_passes and self._passing is not None:
            self._events.append(BatchPassed(now_ns, *self._passing))
            self._passing = None
        self._num_passes = num_passes

    # --- experts and the end ----------------------------------------------------------------------------------------

    @_guarded
    def visited(self, sequences: Iterable[Sequence], visits: StepVisits) -> None:
        """Add the devices of a step's experts to its sequences."""
        for sequence, pairs in zip(sequences, visits.num_pairs, strict=True):
            by_version = self._visits.setdefault(sequence.serial, {})
            version = visits.version
            if version not in by_version and len(by_version) == MOST_VERSIONS:
                version = next(reversed(by_version))
            if version in by_version:
                by_version[version][1].__iadd__(pairs)
            else:
                by_version[version] = (visits.ends, pairs.copy())

    @_guarded
    def left(self, sequence: Sequence, num_generated_tokens: int) -> None:
        """Note the end of a sequence."""
        serial = sequence.serial
        visits = self._visits.pop(serial, {})
        self._new.pop(serial, None)
        self._queued.pop(serial, None)
        self._events.append(
            SequenceLeft(
                self._ids.pop(serial, sequence.request.request_id),
                sequence.user,
                num_generated_tokens,
                tuple(
                    ExpertVisits(version, ends, tuple(map(tuple, pairs.tolist())))
                    for version, (ends, pairs) in visits.items()
                ),
            )
        )


def _column(column: NDArray[np.generic], rows: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(column[rows].tolist())


def _key(keys: dict[str, NDArray[np.generic]], row: int) -> dict[str, float]:
    return {name: float(column[row].item()) for name, column in keys.items()}


_P = TypeVar("_P")


class ReplayedDecision(NamedTuple):
    """A decision as recorded and as made again, in words."""

    request_id: str
    recorded: str
    replayed: str


class DecisionReplay:
    """The policies of one engine, fed with its events in order."""

    def __init__(self) -> None:
        self._order: OrderPolicy | None = None
        self._evict: EvictPolicy | None = None

    def take(self, event: SchedulingEvent) -> ReplayedDecision | None:
        """Take in an event, and return the decision that it holds; None means none.

        Raises:
            ConfigError: the event comes before `PoliciesStarted`, or names a policy that cannot be made.
        """
        match event:
            case PoliciesStarted():
                self._order, self._evict = ORDER_POLICIES.make(event.order), EVICT_POLICIES.make(event.evict)
            case SequenceAdmitted() if event.is_first:
                self._observe(Admitted(event.user, event.num_prompt_tokens))
            case SequenceLeft():
                self._observe(Left(event.user, event.num_generated_tokens))
            case OrderDecision():
                return self._ordered(event)
            case EvictDecision():
                return self._evicted(event)
        return None

    def _observe(self, event: Admitted | Left) -> None:
        order = self._started(self._order)
        if order.observes:
            order.observe(event)

    def _ordered(self, event: OrderDecision) -> ReplayedDecision:
        view = WaitingView(
            arrival_ns=np.array(event.arrival_ns, np.int64),
            num_prompt_tokens=np.array(event.num_prompt_tokens, np.int32),
            priority=np.array(event.priority, np.int32),
            serial=np.array(event.serial, np.int64),
            service_class=np.array(event.service_class, np.uint8),
            user=np.array(event.user, np.int64),
            num_uncached=None if event.num_uncached is None else np.array(event.num_uncached, np.int32),
        )
        order = self._started(self._order).order(view, event.now_ns)
        again = [event.request_ids[row] for row in order.tolist()]
        return ReplayedDecision(
            event.request_ids[0], f"order {', '.join(event.request_ids)}", f"order {', '.join(again)}"
        )

    def _evicted(self, event: EvictDecision) -> ReplayedDecision:
        view = EvictView(
            np.array(event.order_rank, np.int64),
            np.array(event.num_computed_tokens, np.int32),
            np.array(event.service_class, np.uint8),
            event.num_free_host_tokens,
        )
        again = self._started(self._evict)(view)
        recorded = Victim(event.row, event.keeps)
        return ReplayedDecision(event.request_id, _victim(recorded), _victim(again))

    @staticmethod
    def _started(policy: _P | None) -> _P:
        if policy is None:
            raise ConfigError(
                "the record has decisions of an engine before its policies: give it from its first line on"
            )
        return policy


def _victim(victim: Victim) -> str:
    return f"preempt row {int(victim.row)}" + (", keep its KV in host memory" if victim.keeps else "")
