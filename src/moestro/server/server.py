"""The process of `moestro serve`: starts the engines and the API server, serves until a signal, drains, stops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp import web

from moestro.config.idle_flags import SERVE_NEEDS, warn_of_idle_flags
from moestro.config.serve_settings import ServeSettings
from moestro.core.request import ModelInfo
from moestro.errors import DrainingError
from moestro.server.admin import OperatorsPort, admin_runner, operators_routes
from moestro.server.api.request_builder import ServedModel
from moestro.server.api.routes import ROOT_PATH, ApiServer, server_info
from moestro.server.api.served_model import served_model
from moestro.server.experts.live_placement import LivePlacement, open_placement
from moestro.server.figures.prometheus import ServerCollector
from moestro.server.figures.recording import Recording
from moestro.server.figures.statistics import ServerStatistics, serve_banner
from moestro.server.processes.cluster import ServerCluster, open_cluster
from moestro.server.processes.launch_specs import command_of, launcher_maker
from moestro.server.processes.launchers import Launcher
from moestro.server.processes.start_checks import StartClock, allow_files, bound_ports, check_start
from moestro.text.tokenizer import Tokenizer
from moestro.web.access import Access
from moestro.web.banner import log_forever, print_banner
from moestro.web.bodies import MAX_BODY_BYTES
from moestro.web.figures import Exposition
from moestro.web.middleware import HttpMiddleware
from moestro.web.ports.connections import (
    MAX_OPERATOR_CONNECTIONS,
    Front,
    FrontLimits,
    http_front,
    url_of,
    warn_if_open,
)
from moestro.web.ports.faults import Port
from moestro.web.ports.lifecycle import RESPONSE_FLUSH_S, Lifecycle, run_server
from moestro.web.ports.tls import ServerTls
from moestro.web.tracing import open_sink


def serve(
    settings: ServeSettings,
    command: Sequence[str] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the wait for running requests.

    Args:
        command: Command of a rank process; None means the one that the settings need.
        on_ready: Function that receives the URL once the server takes requests; None means that a banner shows it.

    Raises:
        ConfigError: The settings cannot be honoured; the text says what to do.
        EngineDiedError: An engine failed before it was ready; the text is its cause.
    """
    if command is None:
        check_start(settings)
    make_launcher = launcher_maker(settings, command or command_of(settings))
    run_server(
        lambda lifecycle: _ServeProcess(settings, make_launcher, lifecycle, on_ready).run(),
        log_level=settings.server.log_level,
        shutdown_timeout_s=settings.server.shutdown_timeout,
    )


class _ServeProcess:
    """One run of the server."""

    def __init__(
        self,
        settings: ServeSettings,
        make_launcher: Callable[[Path, int], Launcher],
        lifecycle: Lifecycle,
        on_ready: Callable[[str], None] | None,
    ) -> None:
        self._settings = settings
        self._on_ready = on_ready
        server = settings.server
        self._access = Access.of(server.api_key, settings.access, server.router_api_key)
        self._make_launcher = make_launcher
        self._lifecycle = lifecycle
        self._clock = StartClock()
        self._admin_listener: socket.socket | None = None
        self._tls = ServerTls.of(settings.tls)

    async def run(self) -> None:
        settings = self._settings
        warn_of_idle_flags(settings, SERVE_NEEDS)
        allow_files(settings)
        async with contextlib.AsyncExitStack() as stack:
            listener, self._admin_listener = stack.enter_context(bound_ports(settings.server))
            sink = await stack.enter_async_context(open_sink(settings.tracing, "moestro-serve"))
            self._recording = Recording(settings, sink)
            opening = open_cluster(
                settings, self._make_launcher, self._recording, self._lifecycle,
                lambda: self._clock.mark("start the API server"),
            )  # fmt: skip
            cluster = await stack.enter_async_context(opening)
            try:
                model, infos = await self._load(cluster)
            except BaseException:
                self._lifecycle.begin_exit()
                raise
            table, workers = cluster.table_reader(infos[0]), cluster.expert_workers
            await stack.enter_async_context(self._recording.running(cluster.engines, infos[0], workers, table))
            await self._serve(cluster, model, listener, infos)

    def _front(self, port: Port, runner: web.AppRunner, listener: socket.socket, max_connections: int) -> Front:
        """Return the front of one of the two ports."""
        settings = self._settings
        per_address = settings.access.max_connections_per_address
        limits = FrontLimits(max_connections, per_address, settings.server.write_timeout)
        tls = self._tls if port is Port.CLIENTS else None
        return http_front(port, runner, listener, limits, self._lifecycle.faults, tls)

    async def _load(self, cluster: ServerCluster) -> tuple[ServedModel, list[ModelInfo]]:
        """Load the tokenizer while the engines load, and return the served model with each engine's information."""
        # The library holds the interpreter while it reads a vocabulary, which takes seconds for a large one.
        with self._lifecycle.ended_by_kernel():
            directory, template = self._settings.model.tokenizer_directory, self._settings.chat.chat_template
            tokenizer = await asyncio.to_thread(Tokenizer, directory, template)
        tokenizer.warm_chats()
        infos = await cluster.all_ready()
        self._clock.mark_engines(cluster.engines.phases)
        return served_model(self._settings, tokenizer, infos[0]), infos

    async def _serve(
        self,
        cluster: ServerCluster,
        model: ServedModel,
        listener: socket.socket,
        infos: Sequence[ModelInfo],
    ) -> None:
        settings, engines = self._settings.server, cluster.engines
        api = ApiServer(engines, model, settings.write_timeout)
        placement = open_placement(self._settings, model.info, engines.expert_loads, cluster.placeable_group)
        sources = cluster.sources(model, self._lifecycle.faults, self._recording, placement.control)
        middleware = HttpMiddleware(self._access, cluster.metrics.refusals, MAX_BODY_BYTES, self._lifecycle.faults)
        statistics = ServerStatistics(self._settings, engines, cluster.metrics, api.traffic, model.info, listener)
        info = server_info(self._settings, infos, self._clock.phases)
        app = api.app(Exposition(ServerCollector(sources)), info, statistics.read)
        app[ROOT_PATH] = settings.root_path
        runner = await middleware.runner(app, shutdown_timeout=RESPONSE_FLUSH_S, root_path=settings.root_path)
        tasks = [asyncio.create_task(log_forever(cluster.stat_lines()))]
        if cluster.signals is not None:
            tasks.append(asyncio.create_task(cluster.signals.follow(cluster.metrics)))
        admin = await self._open_admin(cluster, model.info, placement, statistics)
        try:
            server = self._front(Port.CLIENTS, runner, listener, settings.max_connections).open()
            self._lifecycle.is_serving = True
            cluster.supervisor.watch()
            self._announce(listener, model, infos)
            async with placement.running():
                await cluster.until_over(self._lifecycle.stop_requested)
            server.close()
            api.traffic.is_draining = True
            await self._lifecycle.drain(lambda: api.traffic.num_answering)
        finally:
            self._lifecycle.begin_exit()
            for task in tasks:
                task.cancel()
            engines.fail_all(DrainingError())  # Also when a second signal cuts the drain short.
            await runner.cleanup()
            if admin is not None:
                await admin.close()
            api.close()

    async def _open_admin(
        self, cluster: ServerCluster, info: ModelInfo, placement: LivePlacement, statistics: ServerStatistics
    ) -> OperatorsPort | None:
        """Serve the plane of operators, if a port is given."""
        settings = self._settings.server
        if self._admin_listener is None:
            return None
        half_life = self._settings.expert_load.expert_load_half_life
        routes = operators_routes(cluster, info, half_life, placement, statistics, self._recording.log)
        runner = await admin_runner(routes, settings.admin_api_key, self._lifecycle.faults)
        front = self._front(Port.OPERATORS, runner, self._admin_listener, MAX_OPERATOR_CONNECTIONS)
        return OperatorsPort(runner, self._admin_listener, front.open())

    def _announce(self, listener: socket.socket, model: ServedModel, infos: Sequence[ModelInfo]) -> None:
        warn_if_open(listener, self._tls, needs_key=bool(self._access.keys))
        self._clock.mark("listen")
        url = url_of(listener, is_tls=self._tls is not None)
        if self._on_ready is not None:
            self._on_ready(url)
            return
        print_banner(serve_banner(model, infos, self._clock.phases, url, needs_key=bool(self._access.keys)))
