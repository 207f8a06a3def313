"""`moestro route` as a process: start, serve until a signal, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections import Counter
from collections.abc import AsyncIterator

from moestro.errors import DrainingError
from moestro.gateway.admin import Admin
from moestro.gateway.app import Parts, assemble
from moestro.gateway.banner import RouteSummary, route_banner
from moestro.gateway.prompt_blocks import Reading
from moestro.gateway.proxy import sweep_forever
from moestro.gateway.settings import EngineUrl, RouteSettings
from moestro.gateway.statline import RouteLines
from moestro.web.banner import print_banner
from moestro.web.connections import accept, allow_open_files, bound_socket, listen, url_of, warn_if_open
from moestro.web.lifecycle import RESPONSE_FLUSH_S, Lifecycle, run_server, wait_until
from moestro.web.startup import process_age_s
from moestro.web.statline import log_forever

_SWEEP_S = 0.25
_MAX_ADMIN_CONNECTIONS = 256
_FIRST_LOOK_S = 5.0  # the banner waits for the first word of every engine, so long at most
_GC_THRESHOLD = 50_000  # requests leave no cycles; looking for them at every few hundred objects is wasted


def route(settings: RouteSettings, reading: Reading) -> None:
    """Route until SIGTERM or SIGINT; a second one does not wait for requests to finish.

    Args:
        reading: how prompts become the names of their blocks.

    Raises:
        ConfigError: the settings cannot be honoured; the text says what to do.
    """
    run_server(
        lambda lifecycle: _RouteServer(settings, reading, lifecycle).run(),
        log_level=settings.front.log_level,
        shutdown_timeout_s=settings.front.shutdown_timeout,
    )


class _RouteServer:
    """One run of the router."""

    def __init__(self, settings: RouteSettings, reading: Reading, lifecycle: Lifecycle) -> None:
        self._settings = settings
        self._reading = reading
        self._lifecycle = lifecycle

    async def run(self) -> None:
        urls, front, admin = self._settings.engines.urls, self._settings.front, self._settings.admin
        allow_open_files(2 * front.max_connections)  # each client may need an engine's connection
        with (
            bound_socket(front.host, front.port) as listener,
            bound_socket(admin.admin_host, admin.admin_port) as admin_listener,
        ):
            parts = assemble(self._settings, self._reading)
            async with _running(parts, urls), _admin_plane(parts, admin_listener, self._settings):
                await self._serve(parts, listener, admin_listener)

    async def _serve(self, parts: Parts, listener: socket.socket, admin_listener: socket.socket) -> None:
        await _first_look(parts)
        server = await accept(parts.accept_client, listener, self._settings.access.max_connections_per_address)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        self._lifecycle.is_serving = True
        self._announce(parts, listener, admin_listener)
        try:
            await self._lifecycle.stop_requested.wait()
            await self._drain(parts)
        finally:
            self._lifecycle.begin_exit()
            server.close()
            parts.clients.close()

    async def _drain(self, parts: Parts) -> None:
        """Refuse new requests, give running ones time to finish, and end the rest with an error."""
        active = parts.shared.active
        parts.proxy.is_draining = parts.clients.is_closing = True
        await self._lifecycle.drain(lambda: len(active))
        for exchange in list(active.values()):
            exchange.refuse(DrainingError())
        parts.clients.close_idle()
        await wait_until(lambda: not parts.clients.open, RESPONSE_FLUSH_S)

    def _announce(self, parts: Parts, listener: socket.socket, admin_listener: socket.socket) -> None:
        settings = self._settings
        warn_if_open(listener, settings.front.api_key)
        summary = RouteSummary(
            engines=parts.operator.views(),
            policy=settings.policy.route_policy,
            prompts=self._reading.words,
            url=url_of(listener),
            admin_url=url_of(admin_listener),
            needs_key=bool(settings.front.api_key),
            seconds=process_age_s(),
        )
        print_banner(route_banner(summary))


@contextlib.asynccontextmanager
async def _running(parts: Parts, urls: tuple[EngineUrl, ...]) -> AsyncIterator[None]:
    """Run the router's background tasks inside the block."""
    for url in urls:
        parts.operator.add(url)
    tasks = [
        asyncio.create_task(sweep_forever(parts.shared, parts.clients, _SWEEP_S)),
        asyncio.create_task(log_forever(RouteLines(parts.shared.fleet, parts.shared.counts).lines)),
    ]
    try:
        async with parts.record.writing() if parts.record is not None else contextlib.nullcontext():
            yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await parts.operator.watch.close()
        if parts.kv_events is not None:
            parts.kv_events.close()
        for engine in parts.shared.fleet:
            engine.pool.close()
        parts.threads.close()


@contextlib.asynccontextmanager
async def _admin_plane(parts: Parts, listener: socket.socket, settings: RouteSettings) -> AsyncIterator[None]:
    admin = Admin(parts.operator, parts.shared.journal, parts.exposition.text)
    runner = await admin.runner(settings.admin)
    server = await listen(runner, listener, Counter(), _MAX_ADMIN_CONNECTIONS)
    try:
        yield
    finally:
        server.close()
        await runner.cleanup()


async def _first_look(parts: Parts) -> None:
    """Wait until every engine has passed or failed its first health check."""
    await wait_until(
        lambda: all(engine.condition != "unchecked" or engine.unreachable for engine in parts.shared.fleet),
        min(_FIRST_LOOK_S, parts.operator.settings.probe_timeout),
    )
