"""Proxy: answers a client's request in the router, sends it to an engine, or refuses it, depending on its path."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from itertools import count

from moestro.core.request import Request
from moestro.errors import DrainingError, RequestError, shown
from moestro.gateway.clients.answering import Answering
from moestro.gateway.clients.downstream import ClientConnection, ClientConnections
from moestro.gateway.clients.http_headers import (
    LOOP_HEADER,
    LOOP_STATUS,
    Incoming,
    RequestHead,
    has_passed,
    own_head,
    plain_id,
)
from moestro.gateway.clients.own_answers import OwnAnswer, OwnAnswers
from moestro.gateway.clients.paths import MODELS, Routes
from moestro.gateway.clients.request_body import read
from moestro.gateway.engines.fleet import RoutedEngine
from moestro.gateway.exchange import Exchange, ExchangeContext
from moestro.gateway.kv.prompt_blocks import PromptReader
from moestro.web.access.control import UNLIMITED, Access
from moestro.web.bodies.packed_bodies import coding_in, unpacked
from moestro.web.errors import AuthenticationError, HttpError, InternalError, UnknownModelError, base_url_hint
from moestro.web.ports.log_limit import LogLimit
from moestro.web.ports.pauses import PauseMeter
from moestro.web.probes import PROBES, PUBLIC, probe_status

logger = logging.getLogger(__name__)


class Proxy:
    """Handles clients' requests.

    Args:
        access: Keys, limits and CORS. Probes and the files of the page need no key.
        routes: Paths that clients can reach.
        answers: Answers the paths that need no engine.

    Attributes:
        is_draining: Whether new requests for engines are refused. Callers may set it at any time.
    """

    def __init__(
        self,
        shared: ExchangeContext,
        prompt_reader: PromptReader,
        access: Access,
        routes: Routes,
        answers: OwnAnswers,
    ) -> None:
        self._shared = shared
        self._prompt_reader = prompt_reader
        self._access = access
        self._has_rules = access.cors is not None or access.limits.is_on
        self._routes = routes
        self._answers = answers
        self._prefix = f"req-{secrets.token_hex(4)}-"
        self._serial = count(1)
        self._log = LogLimit(logger)
        self._work: set[asyncio.Task[None]] = set()
        self.is_draining = False

    # --- called by the connections

    def refuses(self, head: RequestHead) -> RequestError | None:
        """Return an authentication error for a request without a valid key, otherwise None."""
        if head.path in PUBLIC or (self._access.cors is not None and _is_preflight(head)):
            return None
        if self._has_come_back(head):
            return None  # `handle` refuses it: a check for loops has no client's key.
        try:
            self._key_of(head)
        except AuthenticationError as error:
            return error
        return None

    def client_of(self, head: RequestHead, address: str) -> Hashable:
        """Return the name under which a client's bodies count together."""
        named = head.named
        return self._access.client_of(named.get(b"authorization", b""), named.get(b"x-api-key", b""), address)

    def refused(self, error: RequestError, address: str) -> None:
        """Count a request that is refused before it is complete, and log the refusal at a bounded rate."""
        code = error.code or error.error_type
        self._shared.counts.refusals.add(error)
        self._log.info(code, f"a request from {address} is refused with {error.http_status}: {error.message}")

    def handle(self, client: ClientConnection, incoming: Incoming) -> Answering | None:
        """Answer the request now and return None, or return the exchange that will answer it."""
        incoming.request_id = self._request_id(incoming)
        path, method = incoming.head.path, incoming.head.method
        try:
            if self._has_come_back(incoming.head):
                self._refuse_loop(client, incoming)
                return None
            if self._has_rules and self._is_preflight_answered(client, incoming):
                return None
            route = self._routes.find(path)
            if route is None:
                raise _not_found(path, self._routes)
            if method not in route.methods:
                allowed = b", ".join(sorted(route.methods))
                error = HttpError(405, f"{shown(path)} answers {allowed.decode()}.", "method_not_allowed")
                self._refuse(client, incoming, error, b"Allow: %b\r\n" % allowed)
            elif route.is_own:
                self._answer_here(client, incoming, path)
            else:
                return self._send_on(client, incoming)
        except RequestError as error:
            self._refuse(client, incoming, error)
        except Exception as error:
            self._shared.faults.bug("a request failed", error)
            self._refuse(client, incoming, InternalError(incoming.request_id))
        return None

    def _key_of(self, head: RequestHead) -> int | None:
        named = head.named
        return self._access.key_of(named.get(b"authorization", b""), named.get(b"x-api-key", b""))

    def _is_preflight_answered(self, client: ClientConnection, incoming: Incoming) -> bool:
        """Answer a preflight, or count another request against its limit.

        Raises:
            RequestError: The page's origin is not allowed, or the client has exceeded its request limit.
        """
        head, cors, limits = incoming.head, self._access.cors, self._access.limits
        if cors is not None and _is_preflight(head):
            named = head.named
            asked = named[b"origin"], named[b"access-control-request-method"]
            lines = cors.preflight_lines(*asked, named.get(b"access-control-request-headers", b""))
            client.reply(own_head(200, "", 0, _id_line(incoming) + lines))
            return True
        if limits.is_on and head.path not in UNLIMITED:
            limits.take(self._key_of(head), incoming.client, time.monotonic())
        return False

    # --- to engines

    def _send_on(self, client: ClientConnection, incoming: Incoming) -> Exchange:
        if self.is_draining:
            raise DrainingError
        limits = self._access.limits
        if limits.has_slots:
            key = self._key_of(incoming.head)
            limits.enter(key)
            incoming.on_over = partial(limits.leave, key)
        exchange = Exchange(self._shared, client, incoming)
        try:
            is_packed = b"content-encoding" in incoming.head.named and bool(incoming.body)
            if len(incoming.body) <= self._prompt_reader.max_inline_bytes and not is_packed:
                exchange.start(*self._read(incoming, time.monotonic_ns()))
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

    def _read(self, incoming: Incoming, now_ns: int) -> tuple[Request, str | None]:
        """Return the request by which the router decides, and the model that the body names."""
        asked = read(incoming.body, incoming.head.path)
        return self._prompt_reader.prepare(asked, incoming, now_ns), asked.model

    async def _read_and_start(self, exchange: Exchange, incoming: Incoming, max_bytes: int) -> None:
        now_ns = time.monotonic_ns()

        def work() -> tuple[Request, str | None]:
            return self._read(_unpacked(incoming, max_bytes), now_ns)

        # A packed body may have any size that is allowed, so it never delays small ones.
        size = max_bytes if b"content-encoding" in incoming.head.named else len(incoming.body)

        try:
            exchange.start(
                *await self._prompt_reader.threads.run(work, size, self.client_of(incoming.head, incoming.client))
            )
        except RequestError as error:
            exchange.refuse(error)
        except Exception:
            exchange.fail()

    # --- answered by the router

    def _answer_here(self, client: ClientConnection, incoming: Incoming, path: str) -> None:
        if path in PROBES:
            is_healthy = self._shared.fleet.num_up > 0
            self._say(client, incoming, probe_status(path, is_healthy=is_healthy, is_draining=self.is_draining))
        elif (answer := self._answers.get(path)) is not None:
            self._answer(client, incoming, answer())
        elif path == "/v1/models":
            self._say(client, incoming, 200, self._shared.fleet.models.listed())
        else:
            name = path.removeprefix(MODELS)
            card = self._shared.fleet.models.card(name)
            if card is None:
                raise UnknownModelError(name)
            self._say(client, incoming, 200, card)

    def _say(self, client: ClientConnection, incoming: Incoming, status: int, body: bytes = b"") -> None:
        client.reply(own_head(status, "application/json", len(body), _id_line(incoming)), body)

    def _answer(self, client: ClientConnection, incoming: Incoming, answer: OwnAnswer) -> None:
        lines = _id_line(incoming) + answer.header_lines
        client.reply(own_head(200, answer.content_type, len(answer.body), lines), answer.body)

    def _refuse(self, client: ClientConnection, incoming: Incoming, error: RequestError, added: bytes = b"") -> None:
        self._shared.counts.refusals.add(error)
        client.refuse(error, _id_line(incoming) + added)

    def _has_come_back(self, head: RequestHead) -> bool:
        return b"via" in head.named and has_passed(head, self._shared.fleet.pseudonym)

    def _refuse_loop(self, client: ClientConnection, incoming: Incoming) -> None:
        name = self._shared.fleet.pseudonym
        text = (
            f"The request has come back to this router ({name.decode()}): one of its engines is the router itself, or"
            " leads to it. Remove that engine."
        )
        self._refuse(
            client, incoming, HttpError(LOOP_STATUS, text, "loop_detected"), b"%b: %b\r\n" % (LOOP_HEADER, name)
        )

    def _request_id(self, incoming: Incoming) -> str:
        """Return the client's request id if it is short, plain and unused, otherwise a new one.

        A client can name ids that would come next, as each answer shows one.
        """
        given, active = incoming.head.named.get(b"x-request-id"), self._shared.active
        plain = None if given is None else plain_id(given)
        if plain is not None and plain not in active:
            return plain
        base = self._prefix if plain is None else f"{plain[:100]}~"
        return next(made for serial in self._serial if (made := f"{base}{serial:x}") not in active)


def _unpacked(incoming: Incoming, max_bytes: int) -> Incoming:
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
    for exchange in [exchange for exchange in shared.active.values() if exchange.deadline_s < now_s]:
        try:
            exchange.expire()
        except Exception:
            exchange.fail()
    clients.sweep(now_s)
    for engine in shared.fleet:
        engine.pool.sweep(now_s)
        shared.fleet.look(engine, now_ns)
        if engine.silence.is_hung:
            _leave(shared, engine)


def _leave(shared: ExchangeContext, engine: RoutedEngine) -> None:
    """Move the requests on an engine that has stopped answering, as far as their answers have not begun."""
    for request_id in shared.fleet.router.in_flight_on(engine.row):
        if (exchange := shared.active.get(request_id)) is None:
            continue
        try:
            exchange.engine_hangs()
        except Exception:
            exchange.fail()
