"""Several production routers before the same engines on virtual time, and the messages between them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from moestro.core.clock import FOREVER_NS
from moestro.core.load_figures import LoadFigures
from moestro.core.request import Request
from moestro.routing.replication.journal import Journal, Message, OperationBatch, Outlet, RouterRun, Snapshot, Want
from moestro.routing.replication.replica import Replica, ReplicaRules
from moestro.routing.router import RouteDecision, Router

_FLUSH_NS = 10_000_000  # time over which operations gather to one message, as in `moestro route`


class RouterLinks(NamedTuple):
    """Links between routers.

    Attributes:
        delay_ns: time that a message takes, ns. None means that the routers exchange nothing.
        loss: share of messages that are lost, 0 .. 1.
    """

    delay_ns: int | None
    loss: float = 0.0


class _Arrival(NamedTuple):
    """A message on its way, or with source and target alike the time to send what is due."""

    at_ns: int
    number: int
    source: int
    target: int
    message: Message | None


class RouterFleet:
    """Routers that decide in turn, each on what it knows.

    Requests are spread at random, as by a balancer before the routers. Every router gets the figures and events of
    engines; each request's first token and end reach the router that has it.

    Args:
        make: makes a router with all engines.
        seed: seed of the draws.
    """

    def __init__(self, make: Callable[[], Router], num_routers: int, links: RouterLinks, seed: int) -> None:
        self._routers = [make() for _ in range(num_routers)]
        self._links = links
        self._rng = np.random.default_rng(seed)
        self._at: dict[str, int] = {}  # router of each request in flight
        self._events: list[_Arrival] = []
        self._num_events = 0
        self._due_ns = [FOREVER_NS] * num_routers  # time at which each router sends next
        self._journals: list[Journal] = []
        self._replicas: list[Replica] = []
        rules = ReplicaRules()
        if links.delay_ns is None:
            return
        for number, router in enumerate(self._routers):
            run = RouterRun(f"router-{number}", 1)
            journal = Journal(run, str, has_prompts=router.needs.hits)
            router.journal = journal
            self._journals.append(journal)
            self._replicas.append(Replica(run, router, int, rules=rules))
        self._beat_ns = rules.beat_ns
        self._outlets = [[Outlet(journal, rules.beat_ns) for _ in self._routers] for journal in self._journals]

    # --- as a router

    def submit(self, request: Request, now_ns: int, exclude: Collection[int] = ()) -> RouteDecision:
        """Let one of the routers choose an engine."""
        self._advance(now_ns)
        number = int(self._rng.integers(len(self._routers)))
        decision = self._routers[number].submit(request, now_ns, exclude)
        self._at[request.request_id] = number
        self._changed(number, now_ns)
        return decision

    def first_token(self, request_id: str, now_ns: int) -> None:
        """Report a computed prompt to the request's router."""
        self._advance(now_ns)
        number = self._at[request_id]
        self._routers[number].first_token(request_id, now_ns)
        self._changed(number, now_ns)

    def ended(
        self,
        request_id: str,
        now_ns: int,
        num_output_tokens: int | None = None,
        cached_share: float | None = None,
        host_share: float | None = None,
    ) -> None:
        """Report the end of a request to its router."""
        self._advance(now_ns)
        number = self._at.pop(request_id)
        self._routers[number].ended(request_id, now_ns, num_output_tokens, cached_share, host_share)
        self._changed(number, now_ns)

    def report(self, engine: int, figures: LoadFigures, as_of_ns: int, now_ns: int) -> None:
        """Report figures to all routers."""
        self._advance(now_ns)
        for router in self._routers:
            router.report(engine, figures, as_of_ns, now_ns)

    def kv_cleared(self, engine: int, now_ns: int) -> None:
        """Report an empty cache to all routers."""
        for router in self._routers:
            router.kv_cleared(engine, now_ns)

    def kv_stored(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Report stored blocks to all routers."""
        for router in self._routers:
            router.kv_stored(engine, hashes, now_ns)

    def kv_hosted(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Report blocks in host memory alone to all routers."""
        for router in self._routers:
            router.kv_hosted(engine, hashes, now_ns)

    def kv_removed(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Report removed blocks to all routers."""
        for router in self._routers:
            router.kv_removed(engine, hashes, now_ns)

    # --- between routers

    def _changed(self, number: int, now_ns: int) -> None:
        """Send a router's operations soon."""
        if self._journals:
            self._send_at(now_ns + _FLUSH_NS, number)

    def _send_at(self, at_ns: int, number: int) -> None:
        if at_ns < self._due_ns[number]:
            self._due_ns[number] = at_ns
            self._push(at_ns, number, number, None)

    def _push(self, at_ns: int, source: int, target: int, message: Message | None) -> None:
        self._num_events += 1
        heappush(self._events, _Arrival(at_ns, self._num_events, source, target, message))

    def _send(self, source: int, target: int, message: Message, now_ns: int) -> None:
        assert self._links.delay_ns is not None, "without a delay there is no journal"
        if not self._links.loss or self._rng.random() >= self._links.loss:
            self._push(now_ns + self._links.delay_ns, source, target, message)

    def _advance(self, now_ns: int) -> None:
        """Deliver what has arrived by `now_ns`."""
        while self._events and self._events[0].at_ns <= now_ns:
            at_ns, _, source, target, message = heappop(self._events)
            match message:
                case None:
                    self._flush(source, at_ns)
                case Want():
                    self._outlets[target][source].wanted(message)
                    self._changed(target, at_ns)
                case OperationBatch() | Snapshot():
                    want = self._replicas[target].receive(message, at_ns)
                    if want is not None:
                        self._send(target, source, want, at_ns)

    def _flush(self, number: int, now_ns: int) -> None:
        """Send what each of the others lacks, and look again after a beat while any request is in flight."""
        if now_ns != self._due_ns[number]:
            return  # It was sent earlier.
        self._due_ns[number] = FOREVER_NS
        for other, outlet in enumerate(self._outlets[number]):
            if other != number:
                for message in outlet.due(now_ns):
                    self._send(number, other, message, now_ns)
        if self._at:
            self._send_at(now_ns + self._beat_ns, number)
