"""Server process of `moestro route`: starts the router, serves until a signal, drains and stops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from moestro.config.idle_flags import warn_of_idle_flags
from moestro.errors import DrainingError
from moestro.gateway.admin import Admin
from moestro.gateway.app import RouterApp, assemble
from moestro.gateway.clients.request_body import PromptReader
from moestro.gateway.figures import RouteLines, RouteSummary, route_banner
from moestro.gateway.proxy import sweep_forever
from moestro.gateway.settings import ROUTE_NEEDS, EngineUrl, RouteSettings
from moestro.gateway.worker_place import WorkerPlace
from moestro.web.banner import log_forever, print_banner
from moestro.web.ports.connections import (
    MAX_OPERATOR_CONNECTIONS,
    MAX_PEER_CONNECTIONS,
    MAX_PICKER_CONNECTIONS,
    Front,
    FrontLimits,
    allow_open_files,
    bound_socket,
    files_of_port,
    http_front,
    url_of,
    warn_if_open,
)
from moestro.web.ports.faults import Faults, Port
from moestro.web.ports.lifecycle import (
    RESPONSE_FLUSH_S,
    Lifecycle,
    keep_freed_memory,
    process_age_s,
    run_server,
    stop_with,
    wait_until,
)
from moestro.web.ports.tls import ServerTls
from moestro.web.rate_limits import ProcessLimits
from moestro.web.tracing import open_sink

logger = logging.getLogger(__name__)


_SWEEP_S = 0.25
_MANY_ENGINES = 64  # For which there are open files where lists name the engines.
_FIRST_LOOK_S = 5.0  # Longest wait of the banner for the first health check of every engine.
_PEERS_S = 2.0  # Longest wait for the state of other routers, some of which may not connect.
_GC_THRESHOLD = 50_000  # Requests leave no cycles, so frequent collections would waste time.


class OpenPort(Protocol):
    """A further port of the router that is open."""

    url: str


PortOpener = Callable[[RouterApp, RouteSettings], contextlib.AbstractAsyncContextManager[OpenPort]]


def route(
    settings: RouteSettings,
    prompt_reader: PromptReader,
    open_picker: PortOpener | None = None,
    worker: WorkerPlace | None = None,
) -> None:
    """Run the router until SIGTERM or SIGINT. A second signal does not wait for running requests.

    Args:
        prompt_reader: Makes the hashes of a prompt's blocks.
        open_picker: Opens the endpoint picker's port, whose libraries are an extra; None means no picker.
        worker: Place of this process among several that share their ports; None means that it is the only one.

    Raises:
        ConfigError: The settings contradict each other or name unusable resources; the message says what to do.
    """
    keep_freed_memory()
    run_server(
        lambda lifecycle: _RouteServer(settings, prompt_reader, lifecycle, open_picker, worker).run(),
        log_level=settings.front.log_level,
        shutdown_timeout_s=settings.front.shutdown_timeout,
    )


class _RouteServer:
    """One run of the router process."""

    def __init__(
        self,
        settings: RouteSettings,
        prompt_reader: PromptReader,
        lifecycle: Lifecycle,
        open_picker: PortOpener | None,
        worker: WorkerPlace | None,
    ) -> None:
        self._settings = settings
        self._prompt_reader = prompt_reader
        self._lifecycle = lifecycle
        self._open_picker = open_picker
        self._worker = worker
        self._tls = ServerTls.of(settings.tls)

    async def run(self) -> None:
        if self._worker is None:
            warn_of_idle_flags(self._settings, ROUTE_NEEDS)
        else:
            stop_with(self._worker.lifeline)
        self._settings.check_has_engines()
        is_shared = self._worker is not None
        urls, front, admin = self._settings.engines.urls, self._settings.front, self._settings.admin
        # Each client may need a connection to an engine.
        num_engines = max(len(urls), _MANY_ENGINES if self._settings.discovery.is_on else 0)
        num_files = 2 * files_of_port(front.max_connections) + files_of_port(MAX_OPERATOR_CONNECTIONS)
        if self._open_picker is not None:
            num_files += files_of_port(MAX_PICKER_CONNECTIONS)
        if self._settings.peers.has_peers:
            num_files += files_of_port(MAX_PEER_CONNECTIONS)
        allow_open_files(num_files, num_engines)
        async with contextlib.AsyncExitStack() as stack:
            listener = stack.enter_context(bound_socket(front.host, front.port, is_shared=is_shared))
            admin_listener = stack.enter_context(
                bound_socket(admin.admin_host, admin.admin_port, "--admin-host or --admin-port", is_shared=is_shared)
            )
            peer_listener = stack.enter_context(self._peer_socket())
            sink = await stack.enter_async_context(open_sink(self._settings.tracing, "moestro-route"))
            faults, peer_name = self._lifecycle.faults, _peer_name(peer_listener)
            place = self._worker
            limits = None if place is None else ProcessLimits(place.limits, place.number)
            app = assemble(self._settings, self._prompt_reader, faults, sink, peer_name, limits)
            if place is not None:
                app.engine_admin.follow(place.changes)
            app.statistics.clients_port = listener.getsockname()[1]
            app.statistics.operators_port = admin_listener.getsockname()[1]
            async with (
                _running(app, urls),
                _admin_plane(app, admin_listener, self._settings, self._lifecycle.faults),
                _peers(app, peer_listener, faults),
            ):
                await _first_look(app)
                await self._catch_up(app)
                async with self._picker(app) as picker_url:
                    await self._serve(app, listener, admin_listener, picker_url)

    async def _catch_up(self, app: RouterApp) -> None:
        """Take over the operators' changes and the state of other routers, so that the first decision has them."""
        if self._worker is not None and (changes := self._worker.changes.read()):
            # Changes that are made from now on arrive at this worker's admin plane, which is open.
            app.engine_admin.repeat(changes)
            await _first_look(app)
        if app.peers is not None:
            await app.peers.catch_up(_PEERS_S)

    def _peer_socket(self) -> contextlib.AbstractContextManager[socket.socket | None]:
        """Return the bound socket for other routers; None if there are none."""
        peers = self._settings.peers
        if not peers.has_peers:
            return contextlib.nullcontext()
        is_shared = self._worker is not None
        return bound_socket(peers.peer_host, peers.peer_port, "--peer-host or --peer-port", is_shared=is_shared)

    @contextlib.asynccontextmanager
    async def _picker(self, app: RouterApp) -> AsyncIterator[str]:
        """Serve the endpoint picker inside the block, and yield its address; empty without one."""
        if self._open_picker is None:
            yield ""
            return
        async with self._open_picker(app, self._settings) as port:
            yield port.url

    async def _serve(
        self, app: RouterApp, listener: socket.socket, admin_listener: socket.socket, picker_url: str
    ) -> None:
        server = Front(Port.CLIENTS, listener, app.clients, app.front_limits, self._lifecycle.faults, self._tls).open()
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        self._lifecycle.is_serving = True
        if self._worker is None or self._worker.number == 0:  # Workers share the port.
            warn_if_open(listener, self._tls, needs_key=bool(app.shared.access.keys))
        if self._worker is None:
            self._announce(app, listener, admin_listener, picker_url)
        else:
            self._worker.starts.serve(self._worker.number)
        try:
            await self._lifecycle.stop_requested.wait()
            app.admission.is_draining = app.clients.is_closing = True
            await self._lifecycle.drain(lambda: len(app.shared.active))
        finally:
            self._lifecycle.begin_exit()
            try:
                await _end_requests(app)  # Also when a second signal cuts the drain short.
            finally:
                server.close()
                app.clients.close()

    def _announce(
        self, app: RouterApp, listener: socket.socket, admin_listener: socket.socket, picker_url: str
    ) -> None:
        settings = self._settings
        summary = RouteSummary(
            engines=app.engine_admin.views(),
            policy=settings.policy.route_policy,
            prompts=self._prompt_reader.words,
            url=url_of(listener, is_tls=self._tls is not None),
            admin_url=url_of(admin_listener),
            needs_key=bool(app.shared.access.keys),
            seconds=process_age_s(),
            picker_url=picker_url,
            peers=self._settings.peers.peer,
            followed=str(settings.shadow.access_log or ""),
        )
        print_banner(route_banner(summary))


@contextlib.asynccontextmanager
async def _running(app: RouterApp, urls: tuple[EngineUrl, ...]) -> AsyncIterator[None]:
    """Run the router's background tasks inside the block."""
    for url in urls:
        app.engine_admin.add(url)
    tasks = [
        asyncio.create_task(sweep_forever(app.shared, app.clients, _SWEEP_S)),
        asyncio.create_task(log_forever(RouteLines(app.shared.fleet, app.shared.counts).lines)),
    ]
    try:
        async with (
            app.record.writing() if app.record is not None else contextlib.nullcontext(),
            app.discovery.running(_FIRST_LOOK_S),
            app.shadow.running() if app.shadow is not None else contextlib.nullcontext(),
        ):
            yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await app.engine_admin.watch.close()
        for address in app.shared.fleet.addresses:
            address.pool.close()
        app.threads.close()


@contextlib.asynccontextmanager
async def _admin_plane(
    app: RouterApp, listener: socket.socket, settings: RouteSettings, faults: Faults
) -> AsyncIterator[None]:
    admin = Admin(app.engine_admin, app.shared.decision_log, app.exposition.text, app.statistics.read)
    runner = await admin.runner(settings.admin, faults)
    limits = FrontLimits(MAX_OPERATOR_CONNECTIONS, settings.access.max_connections_per_address)
    server = http_front(Port.OPERATORS, runner, listener, limits, faults).open()
    try:
        yield
    finally:
        server.close()
        await runner.cleanup()


def _peer_name(listener: socket.socket | None) -> str | None:
    """Return the name of this router among others: its host and the port for them."""
    return None if listener is None else f"{socket.gethostname()}:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def _peers(app: RouterApp, listener: socket.socket | None, faults: Faults) -> AsyncIterator[None]:
    """Exchange requests with other routers inside the block."""
    if app.peers is None or listener is None:
        yield
        return
    async with app.peers.running(listener, faults):
        yield


async def _end_requests(app: RouterApp) -> None:
    """End the running requests with an error, and let their clients read it."""
    app.admission.is_draining = app.clients.is_closing = True
    for exchange in list(app.shared.active.values()):
        exchange.refuse(DrainingError())
    app.clients.close_idle()
    await wait_until(lambda: not app.clients.open, RESPONSE_FLUSH_S)


async def _first_look(app: RouterApp) -> None:
    """Wait until every engine has passed or failed its first health check."""
    await wait_until(
        lambda: all(engine.condition != "unchecked" or engine.unreachable for engine in app.shared.fleet),
        min(_FIRST_LOOK_S, app.engine_admin.settings.probe_timeout),
    )
