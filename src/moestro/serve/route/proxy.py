"""What each path is: answered here, sent on to an engine, or unknown."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from itertools import count

import msgspec

from moestro import __version__
from moestro.errors import RequestError
from moestro.serve.exposition import CONTENT_TYPE
from moestro.serve.keys import ApiKeys
from moestro.serve.log_limit import LogLimit
from moestro.serve.refusals import (
    AuthenticationError,
    DrainingError,
    HttpError,
    InternalError,
    UnknownModelError,
    shown,
)
from moestro.serve.route.asked import Asked, read
from moestro.serve.route.client import Answering, Client
from moestro.serve.route.exchange import Exchange, Shared
from moestro.serve.route.heads import Incoming, RequestHead, own_head, plain_id
from moestro.serve.route.paths import MODELS, Routes
from moestro.serve.route.reading import Reading

logger = logging.getLogger(__name__)

_PROBES = frozenset({"/health", "/ping", "/ready", "/readyz"})  # need no key


class Proxy:
    """Answers clients.

    Args:
        keys: one of which every request but a probe must carry; none: the door is open.
        routes: which paths exist.
        metrics: the text of `/metrics`.

    Attributes:
        is_draining: nothing new is taken.
    """

    def __init__(
        self, shared: Shared, reading: Reading, keys: ApiKeys, routes: Routes, metrics: Callable[[], bytes]
    ) -> None:
        self._shared = shared
        self._reading = reading
        self._keys = keys
        self._routes = routes
        self._metrics = metrics
        self._prefix = f"req-{secrets.token_hex(4)}-"
        self._serial = count(1)
        self._log = LogLimit(logger)
        self._work: set[asyncio.Task[None]] = set()
        self.is_draining = False

    # --- the connections' calls

    def refuses(self, head: RequestHead) -> RequestError | None:
        """Return the error for a request that lacks its key."""
        if not self._keys or head.path in _PROBES or self._keys.admit(head.named.get(b"authorization", b"")):
            return None
        return AuthenticationError()

    def refused(self, error: RequestError, address: str) -> None:
        """Count a request that is refused before it is read to its end, and log it at a bounded rate."""
        code = error.code or error.error_type
        self._shared.counts.refusals[code] += 1
        self._log.info(code, f"a request from {address} is refused with {error.http_status}: {error.message}")

    def handle(self, client: Client, incoming: Incoming) -> Answering | None:
        """Answer now, or return who will."""
        incoming.request_id = self._request_id(incoming)
        path, method = incoming.head.path, incoming.head.method
        try:
            route = self._routes.find(path)
            if route is None:
                raise _not_found(path)
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
        except Exception:
            logger.exception("%s: %s failed", incoming.request_id, shown(path))
            self._refuse(client, incoming, InternalError(incoming.request_id))
        return None

    # --- to engines

    def _send_on(self, client: Client, incoming: Incoming) -> Exchange:
        if self.is_draining:
            raise DrainingError
        exchange = Exchange(self._shared, client, incoming)
        try:
            asked = read(incoming.body)
            if self._reading.threads is None:
                exchange.start(self._reading.prepare(asked, incoming, time.monotonic_ns()), asked.model)
            else:
                task = asyncio.get_running_loop().create_task(self._prepare_and_start(exchange, asked, incoming))
                self._work.add(task)
                task.add_done_callback(self._work.discard)
        except RequestError as error:
            exchange.refuse(error)
        except Exception:
            exchange.fail()
        return exchange

    async def _prepare_and_start(self, exchange: Exchange, asked: Asked, incoming: Incoming) -> None:
        threads, prepare, now_ns = self._reading.threads, self._reading.prepare, time.monotonic_ns()
        assert threads is not None
        try:
            exchange.start(await threads.run(lambda: prepare(asked, incoming, now_ns)), asked.model)
        except RequestError as error:
            exchange.refuse(error)
        except Exception:
            exchange.fail()

    # --- here

    def _answer_here(self, client: Client, incoming: Incoming, path: str) -> None:
        if path in ("/health", "/ping"):
            self._say(client, incoming, 200 if self._shared.fleet.num_up else 503)
        elif path in ("/ready", "/readyz"):
            self._say(client, incoming, 200 if self._shared.fleet.num_up and not self.is_draining else 503)
        elif path == "/version":
            self._say(client, incoming, 200, msgspec.json.encode({"version": __version__}))
        elif path == "/metrics":
            self._say(client, incoming, 200, self._metrics(), CONTENT_TYPE)
        elif path == "/v1/models":
            self._say(client, incoming, 200, self._shared.fleet.models.listed())
        else:
            name = path.removeprefix(MODELS)
            card = self._shared.fleet.models.card(name)
            if card is None:
                raise UnknownModelError(name)
            self._say(client, incoming, 200, card)

    def _say(
        self,
        client: Client,
        incoming: Incoming,
        status: int,
        body: bytes = b"",
        content_type: str = "application/json",
    ) -> None:
        client.reply(own_head(status, content_type, len(body), _id_line(incoming)), body)

    def _refuse(self, client: Client, incoming: Incoming, error: RequestError, added: bytes = b"") -> None:
        self._shared.counts.refusals[error.code or error.error_type] += 1
        client.refuse(error, _id_line(incoming) + added)

    def _request_id(self, incoming: Incoming) -> str:
        """The client's own, if it is short, plain and not in use; otherwise a new one."""
        given = incoming.head.named.get(b"x-request-id")
        if given is None or (plain := plain_id(given)) is None:
            return f"{self._prefix}{next(self._serial):x}"
        return plain if plain not in self._shared.active else f"{plain[:100]}~{next(self._serial):x}"


def _not_found(path: str) -> HttpError:
    text = f"There is no {shown(path)} here. Paths are compared letter by letter; --open-path opens others of engines."
    return HttpError(404, text, "not_found")


def _id_line(incoming: Incoming) -> bytes:
    return b"X-Request-Id: %b\r\n" % incoming.request_id.encode()


async def sweep_forever(shared: Shared, sweep_clients: Callable[[float], None], interval_s: float) -> None:
    """Look at everything that has a deadline, again and again."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            _sweep(shared, sweep_clients)
        except Exception:
            logger.exception("the sweep failed; it goes on")


def _sweep(shared: Shared, sweep_clients: Callable[[float], None]) -> None:
    now_ns = time.monotonic_ns()
    now_s = now_ns * 1e-9
    for exchange in [exchange for exchange in shared.active.values() if exchange.deadline_s < now_s]:
        try:
            exchange.expire()
        except Exception:
            exchange.fail()
    sweep_clients(now_s)
    for engine in shared.fleet:
        engine.pool.sweep(now_s)
        shared.fleet.look(engine, now_ns)
