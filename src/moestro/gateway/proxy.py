"""Proxy: admits a client's request, answers it in the router, sends it to an engine, or refuses it.

Admission is what happens before an engine is chosen, at each of the router's ports for clients.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple

import msgspec

from moestro.core.request import Request
from moestro.errors import DrainingError, RequestError, shown
from moestro.gateway.clients.downstream import Answering, ClientConnection, ClientConnections
from moestro.gateway.clients.http_headers import (
    LOOP_HEADER,
    LOOP_STATUS,
    Incoming,
    RequestHead,
    has_passed,
    own_head,
    plain_id,
)
from moestro.gateway.clients.paths import MODELS, Routes
from moestro.gateway.clients.request_body import PromptReader, read
from moestro.gateway.engines.fleet import Fleet, RoutedEngine
from moestro.gateway.exchange import Exchange, ExchangeContext, RunningRequest
from moestro.gateway.resume.request import ResumableRequest
from moestro.routing.health import Condition
from moestro.web.access import UNLIMITED, Access
from moestro.web.bodies import coding_in, unpacked
from moestro.web.errors import AuthenticationError, HttpError, InternalError, UnknownModelError, base_url_hint
from moestro.web.figures import CONTENT_TYPE
from moestro.web.openapi import DOCS_HEADERS, docs_page
from moestro.web.page import PAGE_HEADERS, PAGE_PATHS, PROBES, PUBLIC, VERSION_BODY, page_file, probe_status
from moestro.web.ports.faults import LogLimit
from moestro.web.ports.lifecycle import PauseMeter

logger = logging.getLogger(__name__)


_JSON = "application/json"


class OwnAnswer(NamedTuple):
    """Body of a complete answer, with further header lines."""

    body: bytes
    content_type: str
    header_lines: bytes = b""
    status: int = 200


OwnAnswers = Mapping[str, Callable[[], OwnAnswer]]


def own_answers(metrics: Callable[[], bytes], statistics: Callable[[], bytes], openapi: bytes) -> OwnAnswers:
    """Return the function that answers each path.

    Args:
        metrics: Returns the text of `/metrics`.
        statistics: Returns the JSON of `/statistics`.
        openapi: Document of `/openapi.json`.
    """
    return {
        "/version": lambda: OwnAnswer(VERSION_BODY, _JSON),
        "/metrics": lambda: OwnAnswer(metrics(), CONTENT_TYPE),
        "/statistics": lambda: OwnAnswer(statistics(), _JSON),
        "/openapi.json": lambda: OwnAnswer(openapi, _JSON),
        "/docs": lambda: OwnAnswer(docs_page(), "text/html; charset=utf-8", _lines(DOCS_HEADERS)),
        **{path: partial(_file, path) for path in PAGE_PATHS},
    }


def _file(path: str) -> OwnAnswer:
    file = page_file(path, "route", "clients")
    return OwnAnswer(file.body, file.content_type, _lines(PAGE_HEADERS))


def _lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()


class Admission:
    """Checks requests, answers those that need no engine, and reads the others' prompts.

    Args:
        active: Running requests by id, of all ports.
        access: Keys, limits and CORS. Probes and the files of the page need no key.
        routes: Paths that clients can reach.
        answers: Answers the paths that need no engine.

    Attributes:
        is_draining: Whether new requests for engines are refused. Callers may set it at any time.
    """

    def __init__(
        self,
        fleet: Fleet,
        active: Mapping[str, object],
        prompt_reader: PromptReader,
        access: Access,
        routes: Routes,
        answers: OwnAnswers,
    ) -> None:
        self._fleet = fleet
        self._active = active
        self.prompt_reader = prompt_reader
        self._access = access
        self._has_rules = access.cors is not None or access.limits.is_on
        self._routes = routes
        self._answers = answers
        self._prefix = f"req-{secrets.token_hex(4)}-"
        self._serial = count(1)
        self.is_draining = False

    # --- the head

    def refuses(self, head: RequestHead) -> RequestError | None:
        """Return an authentication error for a request without a valid key, otherwise None."""
        if head.path in PUBLIC or (self._access.cors is not None and _is_preflight(head)):
            return None
        if self._has_come_back(head):
            return None  # `admit` refuses it: a check for loops has no client's key.
        try:
            self._key_of(head)
        except AuthenticationError as error:
            return error
        return None

    def client_of(self, head: RequestHead, address: str) -> Hashable:
        """Return the name under which a client's bodies and failures count together."""
        named = head.named
        return self._access.client_of(named.get(b"authorization", b""), named.get(b"x-api-key", b""), address)

    def request_id(self, head: RequestHead) -> str:
        """Return the client's request id if it is short, plain and unused, otherwise a new one.

        A client can name ids that would come next, as each answer shows one.
        """
        given, active = head.named.get(b"x-request-id"), self._active
        plain = None if given is None else plain_id(given)
        if plain is not None and plain not in active:
            return plain
        base = self._prefix if plain is None else f"{plain[:100]}~"
        while (made := f"{base}{next(self._serial):x}") in active:
            pass
        return made

    def admit(self, incoming: Incoming) -> OwnAnswer | None:
        """Return the router's own answer; None sends the request to an engine.

        Raises:
            RequestError: The request may not be answered.
        """
        head = incoming.head
        path, method = head.path, head.method
        if self._has_come_back(head):
            raise self._loop()
        if self._has_rules and (preflight := self._judge_rules(incoming)) is not None:
            return preflight
        route = self._routes.find(path)
        if route is None:
            raise _not_found(path, self._routes)
        if method not in route.methods:
            allowed = b", ".join(sorted(route.methods)).decode()
            error = HttpError(405, f"{shown(path)} answers {allowed}.", "method_not_allowed")
            error.headers = {"Allow": allowed}
            raise error
        return self._own_answer(path) if route.is_own else None

    def enter(self, incoming: Incoming) -> None:
        """Count a request for an engine against its key's limit, until `incoming.on_over` is called.

        Raises:
            DrainingError: The router is about to stop.
            RateLimitError: The key has reached its limit.
        """
        if self.is_draining:
            raise DrainingError
        limits = self._access.limits
        if limits.has_slots:
            key = self._key_of(incoming.head)
            limits.enter(key)
            incoming.on_over = partial(limits.leave, key)

    # --- the body

    def is_read_inline(self, incoming: Incoming) -> bool:
        """Return whether reading the body takes so little time that the event loop can do it."""
        is_packed = b"content-encoding" in incoming.head.named and bool(incoming.body)
        return len(incoming.body) <= self.prompt_reader.max_inline_bytes and not is_packed

    def read(self, incoming: Incoming, now_ns: int) -> tuple[Request, str | None]:
        """Return the request by which the router decides, and the model that the body names."""
        fields = read(incoming.body, incoming.head.path)
        request = self.prompt_reader.prepare(fields, incoming, now_ns)
        named = incoming.head.named
        tenant = self._access.tenant_of(named.get(b"authorization", b""), named.get(b"x-api-key", b""))
        return (msgspec.structs.replace(request, tenant=tenant) if tenant else request), fields.model

    async def read_on_thread(self, incoming: Incoming, max_bytes: int) -> tuple[Request, str | None]:
        """Do the same on a thread, for a large or packed body.

        Args:
            max_bytes: Most bytes of the body, packed and unpacked.

        Raises:
            RequestError: The body cannot be unpacked, or too many bodies wait.
        """
        now_ns = time.monotonic_ns()
        # A packed body may have any size that is allowed, so it never delays small ones.
        size = max_bytes if b"content-encoding" in incoming.head.named else len(incoming.body)
        client = self.client_of(incoming.head, incoming.client)
        return await self.prompt_reader.threads.run(
            lambda: self.read(unpacked_for_reading(incoming, max_bytes), now_ns), size, client
        )

    # --- inside

    def _key_of(self, head: RequestHead) -> Hashable | None:
        named = head.named
        return self._access.key_of(named.get(b"authorization", b""), named.get(b"x-api-key", b""))

    def _judge_rules(self, incoming: Incoming) -> OwnAnswer | None:
        """Return the answer to a preflight, or count another request against its limit.

        Raises:
            RequestError: The page's origin is not allowed, or the client has exceeded its request limit.
        """
        head, cors, limits = incoming.head, self._access.cors, self._access.limits
        if cors is not None and _is_preflight(head):
            named = head.named
            wanted = named[b"origin"], named[b"access-control-request-method"]
            lines = cors.preflight_lines(*wanted, named.get(b"access-control-request-headers", b""))
            return OwnAnswer(b"", "", lines)
        if limits.is_on and head.path not in UNLIMITED:
            limits.take(self._key_of(head), incoming.client, time.monotonic())
        return None

    def _own_answer(self, path: str) -> OwnAnswer:
        if path in PROBES:
            is_healthy = self._fleet.num_up > 0
            return OwnAnswer(b"", _JSON, status=probe_status(path, is_healthy=is_healthy, is_draining=self.is_draining))
        if (answer := self._answers.get(path)) is not None:
            return answer()
        if path == "/v1/models":
            return OwnAnswer(self._fleet.models.listed(), _JSON)
        name = path.removeprefix(MODELS)
        card = self._fleet.models.card(name)
        if card is None:
            raise UnknownModelError(name)
        return OwnAnswer(card, _JSON)

    def _has_come_back(self, head: RequestHead) -> bool:
        return b"via" in head.named and has_passed(head, self._fleet.pseudonym)

    def _loop(self) -> HttpError:
        name = self._fleet.pseudonym.decode()
        text = (
            f"The request has come back to this router ({name}): one of its engines is the router itself, or"
            " leads to it. Remove that engine."
        )
        error = HttpError(LOOP_STATUS, text, "loop_detected")
        error.headers = {LOOP_HEADER.decode(): name}
        return error


def unpacked_for_reading(incoming: Incoming, max_bytes: int) -> Incoming:
    """Return the request with the text of its body, for the router alone: the engine gets the body as it came.

    Raises:
        RequestError: The body cannot be unpacked within `max_bytes`.
    """
    coding = coding_in(incoming.head.named.get(b"content-encoding", b"").decode("latin-1"))
    return incoming if coding is None else replace(incoming, body=unpacked(incoming.body, coding, max_bytes))


def _is_preflight(head: RequestHead) -> bool:
    """Return whether the request is a CORS preflight."""
    return head.method == b"OPTIONS" and b"origin" in head.named and b"access-control-request-method" in head.named


def _not_found(path: str, routes: Routes) -> HttpError:
    hint = base_url_hint(path, lambda known: routes.find(known) is not None)
    hint = hint or " Paths are compared exactly; --open-path adds paths of engines."
    text = f"The path {shown(path)} is unknown.{hint}"
    return HttpError(404, text, "not_found")


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

    def refused(self, incoming: Incoming, error: RequestError, address: str) -> bytes:
        """Count a request that is refused before it is complete, and log the refusal at a bounded rate."""
        incoming.request_id = self._admission.request_id(incoming.head)
        code = error.code or error.error_type
        self._shared.counts.refusals.add(error)
        self._log.info(code, f"a request from {address} is refused with {error.http_status}: {error.message}")
        return _id_line(incoming)

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
    for address in shared.fleet.sweep(now_ns):
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
