"""Request queue: holds requests while all engines that could take them are saturated, and sends them in order."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.core.clock import NS_PER_S
from moestro.core.load_figures import LoadFigures
from moestro.core.request import Request, ServiceClass
from moestro.errors import QueueBoundError, QueueTimeoutError, RequestError
from moestro.gateway.engines.fleet import Fleet, RouteBounds
from moestro.routing.route_queue import EngineSaturation, Group, QueuedRequest, RouteQueue
from moestro.web.figures import Histogram, buckets

_WAIT_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_UNAVAILABLE = 503
_MOST_RETURNS = 1  # times that best effort is given up for urgent work, so that it is delayed once at most

QueueErrorT = TypeVar("QueueErrorT", bound=RequestError)


class QueueGroup(NamedTuple):
    """Model and client of a request: they decide which engines may get it.

    Attributes:
        model: model that some engines lack; None means that none does.
        client: client, which engines may have refused.
    """

    model: str | None
    client: Hashable


class QueuedExchange(Protocol):
    """An exchange that may wait in the queue."""

    def go(self, full: Collection[int], wait_ns: int) -> None:
        """Send the request to an engine that is not among `full`, after a wait."""

    def refuse(self, error: RequestError) -> None:
        """End the exchange with an error."""

    def give_up_engine(self) -> bool:
        """Take the request from its engine if no byte of its answer has left; return whether it was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestQueueRules:
    """Settings of the queue beside its bounds.

    Attributes:
        ttl_s: longest wait, seconds, for messages.
        refusal_status: status of a refusal, 429 or 503.
        evicts: whether best effort without a first byte is given up for a latency-sensitive request that waits.
    """

    ttl_s: float = 60.0
    refusal_status: int = 429
    evicts: bool = False


class RequestQueue(Collector):
    """The queue of one router, with its metrics.

    Args:
        fleet: engines, and the router that chooses among those with room.
        queue: waiting requests.
        saturation: judgement of the engines.
    """

    def __init__(self, fleet: Fleet, queue: RouteQueue, saturation: EngineSaturation, rules: RequestQueueRules) -> None:
        self._fleet = fleet
        self._queue = queue
        self._saturation = saturation
        self._rules = rules
        self._exchanges: dict[str, QueuedExchange] = {}  # of waiting requests
        self._sent: dict[str, tuple[QueuedRequest, QueuedExchange]] = {}  # requests on engines, the newest last
        self._made_way: set[str] = set()  # waiting requests for which best effort was given up, each at most once
        self._is_due = False
        self._wait_s = {service_class: Histogram(_WAIT_S) for service_class in ServiceClass}
        self._ends: Counter[str] = Counter()

    @property
    def needs_figures(self) -> bool:
        """Whether a request waits, so that newer figures of engines may find room for it."""
        return bool(self._exchanges)

    def enter(self, exchange: QueuedExchange, request: Request, model: str | None, client: Hashable) -> None:
        """Send a request on at once if an engine has room, and let it wait otherwise.

        Raises:
            QueueBoundError: the client has as much in the queue as it may have.
        """
        now_ns = time.monotonic_ns()
        best_hit = self._fleet.router.best_hit_tokens(request) if self._queue.policy.reads_cache else 0
        num_uncached = max(1, request.num_prompt_tokens - best_hit)
        # Clients name models that no engine has.
        group = QueueGroup(model if self._fleet.models.excluded(model) else None, client)
        try:
            self._queue.enter(request, now_ns, group=group, client=client, num_uncached=num_uncached)
        except QueueBoundError as error:
            self._ends["bound"] += 1
            raise self._as_refusal(error) from None
        self._exchanges[request.request_id] = exchange
        self._pump()

    def began(self, request_id: str) -> None:
        """Record the first byte of an answer: its request waits in no engine, and is not given up any more."""
        now_ns = time.monotonic_ns()
        self._saturation.first_token(request_id, now_ns)
        self._poke()

    def left_engine(self, request_id: str) -> None:
        """Record that a request is on its engine no more; another engine may get it."""
        self._saturation.ended(request_id)
        self._poke()

    def ended(self, request_id: str, num_generated_tokens: int) -> None:
        """Record the end of a request, with the tokens of all its engines. One that was not sent is ignored."""
        if (sent := self._sent.pop(request_id, None)) is not None:
            self._queue.ended(sent[0].request, num_generated_tokens)

    def leave(self, request_id: str) -> None:
        """Remove a request whose exchange is over. A request that does not wait is ignored."""
        if self._exchanges.pop(request_id, None) is not None:
            self._made_way.discard(request_id)
            self._queue.leave(request_id)
            self._ends["left"] += 1

    def reported(self, row: int, figures: LoadFigures) -> None:
        """Take in the figures that an engine reported."""
        self._saturation.reported(row, figures)
        self._poke()

    def tick(self, now_ns: int) -> None:
        """Refuse the requests that have waited too long, and look for room; called periodically."""
        for queued in self._queue.expire(now_ns):
            exchange = self._exchanges.pop(queued.request.request_id)
            self._made_way.discard(queued.request.request_id)
            self._ends["expired"] += 1
            exchange.refuse(self._as_refusal(QueueTimeoutError(self._rules.ttl_s)))
        self._pump()

    # --- inside

    def _as_refusal(self, error: QueueErrorT) -> QueueErrorT:
        error.retry_after_s = self._queue.retry_after_s()
        if self._rules.refusal_status == _UNAVAILABLE:
            error.http_status, error.error_type = _UNAVAILABLE, "service_unavailable"
        return error

    def _poke(self) -> None:
        """Look for room soon, once for all events of this turn of the loop."""
        if self._exchanges and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Send requests on as long as an engine has room for the next one."""
        self._is_due = False
        while self._exchanges:
            now_ns = time.monotonic_ns()
            full = self._full(now_ns)
            queued = self._queue.next(partial(self._has_room, full, {}), now_ns)
            if queued is not None:
                self._send(queued, full, now_ns)
            elif not self._rules.evicts or not self._evict(now_ns):
                return

    def _send(self, queued: QueuedRequest, full: frozenset[int], now_ns: int) -> None:
        request = queued.request
        exchange = self._exchanges.pop(request.request_id)
        self._made_way.discard(request.request_id)
        wait_ns = now_ns - queued.entered_ns
        self._wait_s[request.service_class].observe(wait_ns / NS_PER_S)
        self._sent[request.request_id] = (queued, exchange)
        exchange.go(full, wait_ns)
        row = self._fleet.router.engine_of(request.request_id)
        if row is None:  # refused, because no engine is ready
            self._sent.pop(request.request_id, None)
        else:
            self._saturation.sent(request, row, self._fleet.router.table, now_ns)

    def _full(self, now_ns: int) -> frozenset[int]:
        """Return the rows of saturated engines."""
        return frozenset(np.flatnonzero(self._saturation.full(self._fleet.router.table, now_ns)).tolist())

    def _has_room(self, full: frozenset[int], known: dict[Group, bool], group: Group) -> bool:
        """Return whether an engine for a group takes a request, or none is ready, which the request then learns.

        Args:
            known: answers for the same engines, which are added to it.
        """
        assert isinstance(group, QueueGroup), "see enter"
        if not self._fleet.has_pauses:
            group = QueueGroup(group.model, None)  # All clients may go to the same engines.
        if group not in known:
            rows = self._fleet.open_to(RouteBounds(group.model, client=group.client), time.monotonic_ns())
            known[group] = not rows or any(row not in full for row in rows)
        return known[group]

    def _evict(self, now_ns: int) -> bool:
        """Let the newest best effort without a first byte wait again, for a latency-sensitive request that waits."""
        head = self._queue.head(now_ns)
        if head is None or head.is_best_effort or head.request.request_id in self._made_way:
            return False
        promoted_ns = now_ns - self._queue.policy.promotes_after_ns
        for request_id, (queued, exchange) in reversed(self._sent.items()):
            is_spared = queued.num_returns >= _MOST_RETURNS or queued.request.arrival_ns <= promoted_ns
            if not queued.is_best_effort or is_spared or _model_of(queued) != _model_of(head):
                continue
            if exchange.give_up_engine():
                self._sent.pop(request_id, None)
                self._queue.give_back(queued, now_ns)
                self._exchanges[request_id] = exchange
                self._made_way.add(head.request.request_id)
                self._ends["evicted"] += 1
                return True
        return False

    # --- metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the queue."""
        yield GaugeMetricFamily("moestro:route_queue_requests", "Requests in the router's queue.", len(self._queue))
        text = "Prompt tokens of the requests in the router's queue."
        yield GaugeMetricFamily("moestro:route_queue_tokens", text, self._queue.num_tokens)
        wait = HistogramMetricFamily(
            "moestro:route_queue_wait_seconds", "Wait in the router's queue.", labels=("service_class",)
        )
        for service_class, histogram in self._wait_s.items():
            wait.add_metric((service_class.value,), buckets(histogram), histogram.total)
        yield wait
        text = "Requests that were not sent on, by cause: bound, expired, left; or taken back from an engine: evicted."
        ends = CounterMetricFamily("moestro:route_queue_ends", text, labels=("cause",))
        for cause in ("bound", "expired", "left", "evicted"):
            ends.add_metric((cause,), self._ends[cause])
        yield ends
        is_full = GaugeMetricFamily(
            "moestro:route_engine_saturated", "1 while the engine is saturated.", labels=("engine",)
        )
        full = self._full(time.monotonic_ns())
        for engine in self._fleet:
            is_full.add_metric((engine.name,), engine.row in full)
        yield is_full


def _model_of(queued: QueuedRequest) -> str | None:
    return queued.group.model if isinstance(queued.group, QueueGroup) else None
