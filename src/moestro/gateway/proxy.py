"""Proxy: answers a client's request in the router, sends it to an engine, or refuses it, depending on its path."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable

from moestro.errors import RequestError
from moestro.gateway.admission import Admission
from moestro.gateway.clients.answering import Answering
from moestro.gateway.clients.downstream import ClientConnection, ClientConnections
from moestro.gateway.clients.http_headers import Incoming, RequestHead, own_head
from moestro.gateway.engines.fleet import RoutedEngine
from moestro.gateway.exchange import Exchange, ExchangeContext, RunningRequest
from moestro.gateway.resume.request import ResumableRequest
from moestro.routing.health.engine_health import Condition
from moestro.web.errors import InternalError
from moestro.web.ports.faults import LogLimit
from moestro.web.ports.lifecycle import PauseMeter

logger = logging.getLogger(__name__)


class Proxy:
    """Handles requests of the clients' port.

    Args:
        admission: Checks requests and answers those that need no engine.
    """

    def __init__(self, shared: ExchangeContext, admission: Admission) -> None:
        self._shared = shared
        self._admission = admission
        self._log = LogLimit(logger)
        self._work: set[asyncio.Task[None]] = set()

    # --- called by the connections

    @property
    def rechecks_heads(self) -> bool:
        """Whether a head that was admitted may be refused later, because keys change."""
        return self._shared.access.keys.may_change

    def refuses(self, head: RequestHead) -> RequestError | None:
        """Return an authentication error for a request without a valid key, otherwise None."""
        return self._admission.refuses(head)

    def client_of(self, head: RequestHead, address: str) -> Hashable:
        """Return the name under which a client's bodies count together."""
        return self._admission.client_of(head, address)

    def refused(self, error: RequestError, address: str) -> None:
        """Count a request that is refused before it is complete, and log the refusal at a bounded rate."""
        code = error.code or error.error_type
        self._shared.counts.refusals.add(error)
        self._log.info(code, f"a request from {address} is refused with {error.http_status}: {error.message}")

    def handle(self, client: ClientConnection, incoming: Incoming) -> Answering | None:
        """Answer the request now and return None, or return the exchange that will answer it."""
        incoming.request_id = self._admission.request_id(incoming.head)
        try:
            answer = self._admission.admit(incoming)
            if answer is None:
                return self._send_on(client, incoming)
            lines = _id_line(incoming) + answer.header_lines
            client.reply(own_head(answer.status, answer.content_type, len(answer.body), lines), answer.body)
        except RequestError as error:
            self._refuse(client, incoming, error)
        except Exception as error:
            self._shared.faults.bug("a request failed", error)
            self._refuse(client, incoming, InternalError(incoming.request_id))
        return None

    # --- to engines

    def _send_on(self, client: ClientConnection, incoming: Incoming) -> Exchange | None:
        self._admission.enter(incoming)
        exchange = Exchange(self._shared, client, incoming)
        try:
            if self._admission.is_read_inline(incoming):
                request, model = self._admission.read(incoming, time.monotonic_ns())
                exchange.start(request, model, self._resumable(incoming))
            else:
                reading = self._read_and_start(exchange, incoming, client.max_body_bytes)
                task = asyncio.get_running_loop().create_task(reading)
                self._work.add(task)
                task.add_done_callback(self._work.discard)
        except RequestError as error:
            exchange.refuse(error)
        except Exception:
            exchange.fail()
        return exchange

    def _resumable(self, incoming: Incoming) -> ResumableRequest | str | None:
        resumption = self._shared.resumption
        return None if resumption is None else resumption.request_for(incoming)

    async def _read_and_start(self, exchange: Exchange, incoming: Incoming, max_bytes: int) -> None:
        try:
            request, model = await self._admission.read_on_thread(incoming, max_bytes)
            resumable = None
            if self._shared.resumption is not None:
                client = self.client_of(incoming.head, incoming.client)
                threads = self._admission.prompt_reader.threads
                resumable = await threads.run(lambda: self._resumable(incoming), len(incoming.body), client)
            exchange.start(request, model, resumable)
        except RequestError as error:
            exchange.refuse(error)
        except Exception:
            exchange.fail()

    def _refuse(self, client: ClientConnection, incoming: Incoming, error: RequestError) -> None:
        self._shared.counts.refusals.add(error)
        client.refuse(error, _id_line(incoming))


def _id_line(incoming: Incoming) -> bytes:
    return b"X-Request-Id: %b\r\n" % incoming.request_id.encode()


async def sweep_forever(shared: ExchangeContext, clients: ClientConnections, interval_s: float) -> None:
    """Expire exchanges and connections whose deadline has passed, at every interval."""
    pauses = PauseMeter(time.monotonic_ns(), int(2 * interval_s * 1e9))
    while True:
        await asyncio.sleep(interval_s)
        try:
            if pause_ns := pauses.tick(time.monotonic_ns()):
                _forgive(shared, clients, pause_ns)
            _sweep(shared, clients)
        except Exception:
            logger.exception("the check of time limits failed; it continues")


def _forgive(shared: ExchangeContext, clients: ClientConnections, pause_ns: int) -> None:
    """Extend all deadlines by the time for which this process was stopped."""
    now_ns = time.monotonic_ns()
    for exchange in shared.active.values():
        exchange.deadline_s += pause_ns * 1e-9
    clients.paused(pause_ns * 1e-9)
    for engine in shared.fleet:
        engine.health.paused(pause_ns, now_ns)


def _sweep(shared: ExchangeContext, clients: ClientConnections) -> None:
    now_ns = time.monotonic_ns()
    now_s = now_ns * 1e-9
    if shared.queue is not None:
        shared.queue.tick(now_ns)
    for exchange in [exchange for exchange in shared.active.values() if exchange.deadline_s < now_s]:
        try:
            exchange.expire()
        except Exception:
            exchange.fail()
    clients.sweep(now_s)
    _sweep_engines(shared, now_ns)


def _sweep_engines(shared: ExchangeContext, now_ns: int) -> None:
    """Look at all engines, and let requests leave those that hang or drain."""
    for address in shared.fleet.addresses:
        address.pool.sweep(now_ns * 1e-9)
        for engine in address.engines:
            shared.fleet.look(engine, now_ns)
        if address.silence.is_hung:  # All its ranks are out of rotation now, so no request moves to one of them.
            for engine in address.engines:
                _leave(shared, engine, lambda request: request.engine_hangs())
    if shared.resumption is not None:
        for engine in shared.fleet:
            if engine.condition in (Condition.DRAINING, Condition.ABSENT):
                _leave(shared, engine, lambda request: request.engine_drains())


def _leave(shared: ExchangeContext, engine: RoutedEngine, leave: Callable[[RunningRequest], None]) -> None:
    """Let the requests on an engine that hangs or drains leave it, as far as another engine can take them."""
    for request_id in shared.fleet.router.in_flight_on(engine.row):
        if (exchange := shared.active.get(request_id)) is None:
            continue
        try:
            leave(exchange)
        except Exception:
            exchange.fail()
