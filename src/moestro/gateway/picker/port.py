"""Port of the endpoint picker: gRPC with Envoy's external processing and the health service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as grpc_health

from moestro.core.processes import in_address
from moestro.errors import ConfigError, RequestError
from moestro.gateway.app import RouterApp
from moestro.gateway.clients.http_headers import KEY_HEADERS
from moestro.gateway.engines.fleet import RoutedEngine
from moestro.gateway.picker.exchange import MessageOrderError, PickedExchange, PickerContext, Responses, peer_address
from moestro.gateway.picker.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from moestro.gateway.picker.messages import SERVICE
from moestro.gateway.settings import RouteSettings, is_loopback
from moestro.web.ports.lifecycle import RESPONSE_FLUSH_S
from moestro.web.ports.tls import WatchedFiles, renewal
from moestro.web.settings import CertificateFiles

logger = logging.getLogger(__name__)

LIVENESS, READINESS = "liveness", "readiness"
_HEALTH_S = 0.1  # Interval at which the health service learns of changes.
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # A second router on the port must fail, not share it.
    ("grpc.keepalive_time_ms", 20_000),  # A proxy's machine may vanish; its requests must not stay in flight.
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_receive_message_length", 8 << 20),  # One piece of a body, or a head.
)


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
        self._server = grpc.aio.server(options=_OPTIONS)
        self._health = grpc_health.HealthServicer()
        self._is_ready: bool | None = None
        self.url = ""

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: The address is in use or not of this machine, or a certificate cannot be read.
        """
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
        settings, credentials = self._settings, _credentials(self._settings.files)
        address = f"{in_address(settings.ext_proc_host)}:{settings.ext_proc}"
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            text = f"--ext-proc: cannot listen on {address}; choose another port or --ext-proc-host ({error})"
            raise ConfigError(text) from None
        if not is_loopback(settings.ext_proc_host) and settings.ext_proc_ssl_ca_certs is None:
            logger.warning(
                "the endpoint picker on %s answers every proxy: open its port to proxies alone, or give"
                " --ext-proc-ssl-ca-certs",
                address,
            )
        scheme = "grpc" if credentials is None else "grpcs"
        self.url = f"{scheme}://{in_address(settings.ext_proc_host)}:{port}"
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.look()
        await self._server.start()

    async def look(self) -> None:
        """Report to the health service whether new requests are taken now."""
        admission, fleet = self._app.admission, self._app.shared.fleet
        is_ready = fleet.num_up > 0 and not admission.is_draining
        if is_ready is not self._is_ready:
            self._is_ready = is_ready
            status = health_pb2.HealthCheckResponse
            for name in (READINESS, SERVICE):
                await self._health.set(name, status.SERVING if is_ready else status.NOT_SERVING)

    async def look_forever(self) -> None:
        """Report at every interval, until cancelled."""
        while True:
            await asyncio.sleep(_HEALTH_S)
            await self.look()

    async def close(self) -> None:
        """End running streams within a second, and stop listening."""
        await self._server.stop(RESPONSE_FLUSH_S)
        for task in list(self._checks.values()):
            task.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)

    async def _process(self, requests: AsyncIterator[Any], call: Any) -> None:
        """Answer the messages of one HTTP request."""
        writes: set[asyncio.Task[None]] = set()

        def push(response: ProcessingResponse) -> None:
            task = asyncio.get_running_loop().create_task(call.write(response))
            writes.add(task)
            task.add_done_callback(writes.discard)

        exchange = PickedExchange(self._context, peer_address(call.peer()), push)
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                for response in await self._responses(exchange, message):
                    await call.write(response)
                if exchange.is_over:
                    await asyncio.gather(*writes, return_exceptions=True)
                    return
        except MessageOrderError as error:
            await call.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            exchange.closed()

    async def _responses(self, exchange: PickedExchange, message: Any) -> Responses:
        try:
            responses = exchange.receive(message, time.monotonic_ns())
            if exchange.is_complete:
                return await self._pick(exchange)
            return responses
        except MessageOrderError:
            raise
        except Exception:
            return exchange.fails()

    async def _pick(self, exchange: PickedExchange) -> Responses:
        admission, incoming = self._context.admission, exchange.incoming
        assert incoming is not None
        try:
            if admission.is_read_inline(incoming):
                request, model = admission.read(incoming, time.monotonic_ns())
            else:
                request, model = await admission.read_on_thread(incoming, self._context.max_body_bytes)
        except RequestError as error:
            return exchange.refused(error)
        return exchange.pick(request, model, time.monotonic_ns())

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


@contextlib.asynccontextmanager
async def picker_port(app: RouterApp, settings: RouteSettings) -> AsyncIterator[PickerPort]:
    """Serve the endpoint picker inside the block.

    Raises:
        ConfigError: The port cannot be opened.
    """
    port = PickerPort(app, settings)
    await port.open()
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
        memory=app.clients.memory,
        max_body_bytes=settings.front.max_body_bytes,
        max_endpoints=1 + settings.reliability.max_retries,
        added=added,
        removed=[name.decode() for name in sorted(withheld)],
        doubt=doubt,
    )


def _credentials(files: CertificateFiles) -> Any:
    """Return the credentials of the port, None without TLS. Renewed files count for new connections within two seconds.

    Raises:
        ConfigError: A file cannot be read.
    """
    if files.certfile is None:
        return None
    pems = [files.keyfile or files.certfile, files.certfile, files.ca_certs]
    watched = WatchedFiles(files.paths)

    def configuration() -> Any:
        key, chain, authorities = (None if file is None else _pem(file) for file in pems)
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authorities)

    def renewed() -> Any:
        return renewal(watched, files.certfile, configuration)

    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, files.ca_certs is not None)


def _pem(file: Path) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    if b"-----BEGIN" not in data:
        raise ConfigError(f"{file} is not in PEM format: it has no line -----BEGIN …-----")
    return data
