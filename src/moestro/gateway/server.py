"""`moestro route`: brought up, run until a signal, and taken down in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable

from rich.console import Console

from moestro.errors import DrainingError
from moestro.gateway.admin import Admin
from moestro.gateway.app import Parts, assemble
from moestro.gateway.banner import Started, print_banner
from moestro.gateway.prompt_blocks import Reading
from moestro.gateway.proxy import sweep_forever
from moestro.gateway.settings import EngineUrl, RouteSettings, is_loopback
from moestro.gateway.statline import RouteLines, log_forever
from moestro.web.connections import accept, allow_open_files, bound_socket, listen
from moestro.web.ending import Ending
from moestro.web.startup import process_age_s

logger = logging.getLogger(__name__)

_SWEEP_S = 0.25
_STEP_S = 0.01
_MAX_ADMIN_CONNECTIONS = 256
_FAREWELL_S = 1.0  # for answers that are complete to reach their clients
_FIRST_LOOK_S = 5.0  # the banner waits for the first word of every engine, so long at most
_GC_THRESHOLD = 50_000  # requests leave no cycles; looking for them at every few hundred objects is wasted


def route(settings: RouteSettings, reading: Reading) -> None:
    """Route until SIGTERM or SIGINT; a second one does not wait for requests to finish.

    Args:
        reading: how prompts become the names of their blocks.

    Raises:
        ConfigError: the settings cannot be honoured; the text says what to do.
    """
    level = settings.front.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    ending = Ending(settings.front.shutdown_timeout)
    ending.run(_Server(settings, reading, ending).run())


class _Server:
    """One run."""

    def __init__(self, settings: RouteSettings, reading: Reading, ending: Ending) -> None:
        self._settings = settings
        self._reading = reading
        self._ending = ending

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
        door = await accept(parts.accept_client, listener, self._settings.access.max_connections_per_address)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        self._ending.is_serving = True
        self._greet(parts, _url(listener), _url(admin_listener))
        try:
            await self._ending.wanted.wait()
            await self._drain(parts)
        finally:
            self._ending.farewell()
            door.close()
            parts.clients.close()

    async def _drain(self, parts: Parts) -> None:
        """What comes from now on hears that we stop; what runs has time to finish."""
        active, patience_s = parts.shared.active, self._settings.front.shutdown_timeout
        parts.proxy.is_draining = parts.clients.is_closing = True
        if active:
            logger.info("stopping: %d requests have %g s to finish", len(active), patience_s)
        await _until(lambda: not active, patience_s)
        for exchange in list(active.values()):
            exchange.refuse(DrainingError())  # the rest hear why
        parts.clients.close_idle()
        await _until(lambda: not parts.clients.open, _FAREWELL_S)

    def _greet(self, parts: Parts, url: str, admin_url: str) -> None:
        settings = self._settings
        if not settings.front.api_key and not is_loopback(settings.front.host):
            logger.warning("listening on %s without --api-key: every host that reaches this machine can use it", url)
        started = Started(
            engines=parts.operator.views(),
            choice=settings.routing.route_policy,
            prompts=self._reading.words,
            url=url,
            admin_url=admin_url,
            needs_key=bool(settings.front.api_key),
            seconds=process_age_s(),
        )
        print_banner(Console(stderr=True), started)


@contextlib.asynccontextmanager
async def _running(parts: Parts, urls: tuple[EngineUrl, ...]) -> AsyncIterator[None]:
    """Everything that goes on by itself."""
    for url in urls:
        parts.operator.add(url)
    tasks = [
        asyncio.create_task(sweep_forever(parts.shared, parts.clients, _SWEEP_S)),
        asyncio.create_task(log_forever(RouteLines(parts.shared.fleet, parts.shared.counts))),
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
    door = await listen(runner, listener, Counter(), _MAX_ADMIN_CONNECTIONS)
    try:
        yield
    finally:
        door.close()
        await runner.cleanup()


async def _first_look(parts: Parts) -> None:
    """Until every engine has answered its first check, or not."""
    await _until(
        lambda: all(engine.condition != "unchecked" or engine.unreachable for engine in parts.shared.fleet),
        min(_FIRST_LOOK_S, parts.operator.settings.probe_timeout),
    )


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    """Return once it holds, or after `seconds`."""
    for _ in range(int(seconds / _STEP_S) + 1):
        if condition():
            return
        await asyncio.sleep(_STEP_S)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
