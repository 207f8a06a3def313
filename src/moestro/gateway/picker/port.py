"""Port of the endpoint picker: gRPC with Envoy's external processing and the health service.

The transport is the router's own, because grpc.aio alone takes more CPU a request than the whole budget of the picker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from google.protobuf.message import DecodeError

from moestro.core.processes import in_address
from moestro.errors import ConfigError, RequestError
from moestro.gateway.app import RouterApp
from moestro.gateway.clients.http_headers import KEY_HEADERS
from moestro.gateway.engines.fleet import RoutedEngine
from moestro.gateway.picker.exchange import AfterSending, MessageOrderError, PickedExchange, PickerContext, Responses
from moestro.gateway.picker.ext_proc_pb2 import ProcessingRequest
from moestro.gateway.picker.grpc_calls import GrpcCall, GrpcStatus, Methods
from moestro.gateway.picker.grpc_connection import GrpcConnection
from moestro.gateway.picker.health_service import HealthService
from moestro.gateway.picker.messages import SERVICE, body_piece
from moestro.gateway.settings import RouteSettings, is_loopback
from moestro.web.ports.connections import MAX_PICKER_CONNECTIONS, Front, FrontLimits, bound_socket
from moestro.web.ports.faults import Port, PortFaults
from moestro.web.ports.http_connection import ConnectionSlot
from moestro.web.ports.lifecycle import RESPONSE_FLUSH_S, wait_until
from moestro.web.ports.tls import ServerTls
from moestro.web.settings import CertificateFiles

logger = logging.getLogger(__name__)

LIVENESS, READINESS = "liveness", "readiness"
_HEALTH_S = 0.1  # Interval at which the health service learns of changes.
_CLOSE_S = 0.5  # Time for the last bytes of connections.


class PickerPort:
    """Serves the endpoint picker protocol until it is closed.

    Attributes:
        url: Address at which it listens.
    """

    def __init__(self, app: RouterApp, settings: RouteSettings) -> None:
        self._app = app
        self._settings = settings.picker
        self._context = _context(app, settings, self._doubt)
        self._checks: dict[int, asyncio.Task[None]] = {}
        self._health = HealthService()
        self._methods: Methods = {f"/{SERVICE}/Process".encode(): self._process, **self._health.methods}
        self._faults = PortFaults(app.shared.faults, Port.PICKER)
        self._connections: set[GrpcConnection] = set()
        self._front: Front | None = None
        self._is_ready: bool | None = None
        self.url = ""

    def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: The address is in use or not of this machine, or a certificate cannot be read.
        """
        settings, tls = self._settings, _tls(self._settings.files)
        assert settings.ext_proc is not None, "the picker is on"
        try:
            listener = bound_socket(settings.ext_proc_host, settings.ext_proc, "--ext-proc or --ext-proc-host")
        except ConfigError as error:
            raise ConfigError(f"--ext-proc: {error}") from None
        host, port = listener.getsockname()[:2]
        address = f"{in_address(host)}:{port}"
        if not is_loopback(settings.ext_proc_host) and settings.ext_proc_ssl_ca_certs is None:
            logger.warning(
                "the endpoint picker on %s answers every proxy: open its port to proxies alone, or give"
                " --ext-proc-ssl-ca-certs",
                address,
            )
        self.url = f"{'grpc' if tls is None else 'grpcs'}://{address}"
        self._health.set(LIVENESS, is_serving=True)
        self.look()
        limits = FrontLimits(MAX_PICKER_CONNECTIONS)
        front = Front(Port.PICKER, listener, self._connect, limits, self._faults.of_all, tls)
        try:
            self._front = front.open()
        except OSError as error:  # Another process has begun to listen meanwhile.
            listener.close()
            raise ConfigError(f"--ext-proc: cannot listen on {address} ({error.strerror})") from None

    def look(self) -> None:
        """Report to the health service whether new requests are taken now."""
        admission, fleet = self._app.admission, self._app.shared.fleet
        is_ready = fleet.num_up > 0 and not admission.is_draining
        if is_ready is not self._is_ready:
            self._is_ready = is_ready
            for name in (READINESS, SERVICE):
                self._health.set(name, is_serving=is_ready)

    async def look_forever(self) -> None:
        """Report at every interval, until cancelled."""
        while True:
            await asyncio.sleep(_HEALTH_S)
            self.look()

    async def close(self) -> None:
        """End running streams within a second, and stop listening."""
        if self._front is not None:
            self._front.close()
        self._health.close()
        for connection in list(self._connections):
            connection.drain()
        await wait_until(lambda: not any(each.num_calls for each in self._connections), RESPONSE_FLUSH_S)
        for connection in list(self._connections):
            connection.close()
        await wait_until(lambda: not self._connections, _CLOSE_S)
        for task in list(self._checks.values()):
            task.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)

    def _connect(self, slot: ConnectionSlot) -> GrpcConnection:
        return GrpcConnection(self._methods, self._connections, self._faults, slot)

    def _process(self, call: GrpcCall) -> ProcessCall:
        return ProcessCall(self._context, call)

    def _doubt(self, engine: RoutedEngine) -> None:
        """Connect to an engine that a proxy passed over: a refused connection takes it out, as on the other port."""
        if engine.row not in self._checks:
            task = self._checks[engine.row] = asyncio.get_running_loop().create_task(self._check(engine))
            task.add_done_callback(lambda _: self._checks.pop(engine.row, None))

    async def _check(self, engine: RoutedEngine) -> None:
        try:
            engine.pool.give_back(await engine.pool.connect())
        except OSError as error:
            now_ns = time.monotonic_ns()
            engine.counts.num_unreachable += 1
            self._app.shared.fleet.unreachable(engine.address, f"cannot connect: {error or 'timed out'}", now_ns)


class ProcessCall:
    """Answers the messages of one HTTP request, in their order."""

    __slots__ = ("_call", "_context", "_exchange", "_reading", "_waiting")

    def __init__(self, context: PickerContext, call: GrpcCall) -> None:
        self._context = context
        self._call = call
        self._exchange = PickedExchange(context, call.peer, partial(_push, call))
        self._reading: asyncio.Task[None] | None = None  # Reads the prompt on a thread.
        self._waiting: deque[bytes | memoryview | None] = deque()  # What has come meanwhile; None is the end.

    # --- called by the call

    def message(self, data: bytes | memoryview) -> None:
        """Answer a message, or keep it until the ones before it are answered."""
        if self._reading is None:
            self._receive(data)
        else:
            self._waiting.append(data)

    def half_closed(self) -> None:
        """End the call, because the proxy sends nothing more."""
        if self._reading is None:
            self._leave()
            self._call.end()
        else:
            self._waiting.append(None)

    def closed(self) -> None:
        """End the exchange, because its call is gone."""
        if self._reading is not None:
            self._reading.cancel()
        self._leave()

    # --- inside

    def _receive(self, data: bytes | memoryview) -> None:
        exchange = self._exchange
        try:
            if (piece := body_piece(data)) is not None:
                responses = exchange.receive_piece(piece, time.monotonic_ns())
            else:
                responses = exchange.receive(ProcessingRequest.FromString(data), time.monotonic_ns())
            if exchange.is_complete:
                assert exchange.incoming is not None
                if not self._context.admission.is_read_inline(exchange.incoming):
                    self._call.hold()
                    self._reading = asyncio.get_running_loop().create_task(self._read_on_thread())
                    return
                responses = self._pick()
        except DecodeError:
            self._fail(GrpcStatus.INTERNAL, "the message cannot be read")
            return
        except MessageOrderError as error:
            self._fail(GrpcStatus.INVALID_ARGUMENT, str(error))
            return
        except Exception:
            responses = exchange.fails()
        self._answer(responses)

    def _pick(self) -> Responses:
        exchange = self._exchange
        assert exchange.incoming is not None
        try:
            request, model = self._context.admission.read(exchange.incoming, time.monotonic_ns())
        except RequestError as error:
            return exchange.refused(error)
        return exchange.pick(request, model, time.monotonic_ns())

    async def _read_on_thread(self) -> None:
        exchange, context = self._exchange, self._context
        assert exchange.incoming is not None
        try:
            request, model = await context.admission.read_on_thread(exchange.incoming, context.max_body_bytes)
            responses = exchange.pick(request, model, time.monotonic_ns())
        except RequestError as error:
            responses = exchange.refused(error)
        except Exception:
            responses = exchange.fails()
        self._reading = None
        self._answer(responses)
        while self._waiting and self._reading is None:
            data = self._waiting.popleft()
            if data is None:
                self.half_closed()
            else:
                self._receive(data)
        if self._reading is None:
            self._call.release()
        self._call.flush()

    def _answer(self, responses: Responses) -> None:
        for response in responses:
            self._call.send(response)
        if self._exchange.is_over:
            self._waiting.clear()
            self._call.end()

    def _fail(self, status: GrpcStatus, text: str) -> None:
        self._leave()
        self._call.end(status, text)

    def _leave(self) -> None:
        """End the exchange, whatever is left of it."""
        self._waiting.clear()
        self._exchange.closed()


def _push(call: GrpcCall, response: bytes) -> None:
    """Send a response that answers no message, the last one of its exchange."""
    call.send(response)
    call.end()
    call.flush()


@contextlib.asynccontextmanager
async def picker_port(app: RouterApp, settings: RouteSettings) -> AsyncIterator[PickerPort]:
    """Serve the endpoint picker inside the block.

    Raises:
        ConfigError: The port cannot be opened.
    """
    port = PickerPort(app, settings)
    port.open()
    looking = asyncio.create_task(port.look_forever())
    try:
        yield port
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await port.close()


def _context(app: RouterApp, settings: RouteSettings, doubt: Callable[[RoutedEngine], None]) -> PickerContext:
    """Return what the exchanges share: the router's objects, and the headers by its rules for keys."""
    key = settings.engines.engine_api_key
    added = [] if key is None else [("authorization", f"Bearer {key}".encode("utf-8", "surrogateescape"))]
    withheld = KEY_HEADERS if app.shared.access.keys or key is not None else frozenset[bytes]()
    return PickerContext(
        shared=app.shared,
        admission=app.admission,
        after=AfterSending(asyncio.get_running_loop().call_soon),
        memory=app.clients.memory,
        max_body_bytes=settings.front.max_body_bytes,
        max_endpoints=1 + settings.reliability.max_retries,
        added=added,
        removed=[name.decode() for name in sorted(withheld)],
        doubt=doubt,
    )


def _tls(files: CertificateFiles) -> ServerTls | None:
    """Return the TLS of the port, None without it. Renewed files count for new connections within two seconds.

    Raises:
        ConfigError: A file cannot be read.
    """
    if files.certfile is None:
        return None
    for file in (files.keyfile, files.certfile, files.ca_certs):
        if file is not None:
            _check_pem(file)
    return ServerTls.for_http2(files)


def _check_pem(file: Path) -> None:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    if b"-----BEGIN" not in data:
        raise ConfigError(f"{file} is not in PEM format: it has no line -----BEGIN …-----")
