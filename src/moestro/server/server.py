"""The process of `moestro serve`: starts the engines and the API server, serves until a signal, drains, stops."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from moestro import __version__
from moestro.config.cores import cores_of
from moestro.config.idle_flags import SERVE_NEEDS, warn_of_idle_flags
from moestro.config.launch_spec import LaunchSpec, LockStepSpec
from moestro.config.serve_settings import ProcessSettings, ServeSettings
from moestro.core.clock import NS_PER_MS
from moestro.core.request import ModelInfo
from moestro.errors import DrainingError, EngineDiedError
from moestro.placement.live.ep_migration import EpMigration
from moestro.placement.live.plan import PlaceableGroup
from moestro.routing.settings import RouterSettings
from moestro.server.admin import ADMIN_HOST, ExpertAdmin, ExplainAdmin, OperatorsPort, WorkerAdmin, admin_runner
from moestro.server.api.request_builder import ServedModel
from moestro.server.api.routes import ROOT_PATH, ApiServer, server_info
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.rank_socket import RankSocket
from moestro.server.engines.request_state import Metrics
from moestro.server.experts.coordinator import Coordinator
from moestro.server.experts.expert_signals import (
    ExpertSignals,
    ReadTable,
    ServedTable,
    async_group,
    lock_step_group,
    places_of,
)
from moestro.server.experts.live_placement import LivePlacement, open_placement
from moestro.server.figures.prometheus import GroupLines, ServerCollector, Sources
from moestro.server.figures.recording import Recording
from moestro.server.figures.statistics import PaceLines, ServerStatistics, StatLines, serve_banner
from moestro.server.processes.launchers import PACED_WORKER, WORKER, Launcher, LocalLauncher, now_ns, opened
from moestro.server.processes.start_checks import StartClock, check_start, private_directory
from moestro.server.processes.supervisor import Launching, Supervisor
from moestro.server.processes.watchdog import LivenessTimeouts
from moestro.text.chats.chat_format import chat_format
from moestro.text.tokenizer import Tokenizer
from moestro.web.access.control import Access
from moestro.web.banner import log_forever, print_banner
from moestro.web.bodies import MAX_BODY_BYTES
from moestro.web.middleware import HttpMiddleware
from moestro.web.ports.connections import (
    MAX_OPERATOR_CONNECTIONS,
    Front,
    FrontLimits,
    allow_open_files,
    bound_socket,
    files_of_port,
    http_front,
    url_of,
    warn_if_open,
)
from moestro.web.ports.faults import Port
from moestro.web.ports.lifecycle import RESPONSE_FLUSH_S, Lifecycle, run_server
from moestro.web.ports.tls import ServerTls
from moestro.web.prometheus import Exposition
from moestro.web.statistics import page_routes
from moestro.web.tracing import open_sink
from moestro.wire.messages import ToRank
from moestro.wire.sockets import ListenAddress

# Between heartbeats. Each costs the API server 0.1 ms, so only workers with copies, which can take over at once, send
# many: a copy has the tokens of a stopped worker after 0.09 to 0.18 s (two missed beats at two looks of the watchdog).
# A doubt without need costs tokens that are computed twice; a worker whose beats were late gets more time (PATIENCE).
ENGINE_BEAT_MS, EXPERT_BEAT_MS, COPIED_BEAT_MS = 250, 100, 40
ENGINE_DOUBT_BEATS, EXPERT_DOUBT_BEATS = 3, 2  # missed, until others get the work of a silent rank
IDLE_BEATS = 3  # of a worker without tokens, in the time after which it counts as hung
# Share of --startup-timeout in which the engines of a group must meet. Those that wait then say which one is missing,
# before the server ends the start without knowing it.
_MEETING_SHARE = 0.9


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
    make_launcher = _launcher_maker(settings, command or _command(settings))
    run_server(
        lambda lifecycle: _ServeProcess(settings, make_launcher, lifecycle, on_ready).run(),
        log_level=settings.server.log_level,
        shutdown_timeout_s=settings.server.shutdown_timeout,
    )


def _command(settings: ServeSettings) -> Sequence[str]:
    return PACED_WORKER if settings.paced is not None and settings.paced.paced_arithmetic == "none" else WORKER


def _launcher_maker(settings: ServeSettings, command: Sequence[str]) -> Callable[[Path, int], Launcher]:
    """Return the function (private directory, ranks) -> launcher. A process joins a Ray cluster once, before all else.

    Raises:
        ConfigError: There is no such cluster.
    """
    has_standby = settings.stepping.mode in ("async", "ep") and settings.group.standby
    if settings.launching.launcher == "local":
        return lambda directory, num_ranks: LocalLauncher(directory, num_ranks, command, has_standby=has_standby)
    from moestro.server.processes.ray_launcher import RayLauncher, RayNeeds, join_cluster  # noqa: PLC0415 - Ray is optional

    cluster = join_cluster(settings.launching.ray_address)
    num_processes, group = settings.num_engines, settings.group
    if settings.stepping.mode == "async":
        num_processes += group.num_expert_workers + has_standby
    needs = RayNeeds(
        num_processes=num_processes, device=settings.model.device, paths=_paths(settings), options=settings.launching,
        has_standby=has_standby,
    )  # fmt: skip
    return lambda _directory, _num_ranks: RayLauncher(cluster, needs, command)


def _paths(settings: ServeSettings) -> tuple[str, ...]:
    """Files and directories that each worker reads."""
    if settings.paced is not None and settings.paced.paced_arithmetic == "none":
        return ()
    return (settings.model.model,)


@dataclass(frozen=True, slots=True)
class _Cluster:
    """The engines' processes, and the objects that communicate with them."""

    engines: EngineClient
    metrics: Metrics
    supervisor: Supervisor
    wire: RankSocket
    coordinator: Coordinator | None
    signals: ExpertSignals | None


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
        self._migration: EpMigration | None = None
        self._admin_listener: socket.socket | None = None
        self._tls = ServerTls.of(settings.tls)

    async def run(self) -> None:
        warn_of_idle_flags(self._settings, SERVE_NEEDS)
        self._allow_open_files()
        async with contextlib.AsyncExitStack() as stack:
            listener, self._admin_listener = stack.enter_context(self._bound_ports())
            sink = await stack.enter_async_context(open_sink(self._settings.tracing, "moestro-serve"))
            self._recording = Recording(self._settings, sink)
            cluster = await stack.enter_async_context(self._cluster())
            try:
                model, infos = await self._load(cluster)
            except BaseException:
                self._lifecycle.begin_exit()
                raise
            table = self._read_table(cluster, infos[0])
            workers = self._expert_workers(cluster)
            await stack.enter_async_context(self._recording.running(cluster.engines, infos[0], workers, table))
            await self._serve(cluster, model, listener, infos)

    @contextlib.contextmanager
    def _bound_ports(self) -> Iterator[tuple[socket.socket, socket.socket | None]]:
        """Bind the ports of clients and of operators before anything is loaded, and close them with the block."""
        settings = self._settings.server
        with contextlib.ExitStack() as ports:
            clients = ports.enter_context(bound_socket(settings.host, settings.port))
            operators = None
            if settings.admin_port is not None:
                operators = ports.enter_context(bound_socket(ADMIN_HOST, settings.admin_port, "--admin-port"))
            yield clients, operators

    def _allow_open_files(self) -> None:
        settings = self._settings
        num_processes = settings.num_engines
        if settings.stepping.mode == "async":
            num_processes = settings.group.num_places
        num_operators = 0 if settings.server.admin_port is None else files_of_port(MAX_OPERATOR_CONNECTIONS)
        allow_open_files(files_of_port(settings.server.max_connections) + num_operators, num_processes)

    def _front(self, port: Port, runner: web.AppRunner, listener: socket.socket, max_connections: int) -> Front:
        """Return the front of one of the two ports."""
        settings = self._settings
        per_address = settings.access.max_connections_per_address
        limits = FrontLimits(max_connections, per_address, settings.server.write_timeout)
        tls = self._tls if port is Port.CLIENTS else None
        return http_front(port, runner, listener, limits, self._lifecycle.faults, tls)

    @contextlib.asynccontextmanager
    async def _cluster(self) -> AsyncIterator[_Cluster]:
        """Start the engines' processes, and end them with the block."""
        processes, scheduler = self._settings.processes, self._settings.scheduler
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(private_directory())
            num_engines = self._settings.num_engines
            num_ranks = num_engines if self._settings.stepping.mode != "async" else self._settings.group.num_places
            launcher = self._make_launcher(directory, num_ranks)
            wire = stack.enter_context(
                contextlib.closing(RankSocket(launcher.server_address, num_ranks, launcher.keys))
            )
            coordinator = self._coordinator(wire.send)
            self._migration = self._ep_migration(wire.send)
            metrics = Metrics(num_engines)
            settings = RouterSettings(
                block_size=self._settings.model.block_size, max_num_queued=scheduler.max_num_queued_reqs
            )
            router = self._recording.make_router(settings)
            for _ in range(num_engines):
                router.add_engine()
            is_one_group = self._settings.stepping.mode == "ep"
            engines = EngineClient(router, wire.send, metrics, is_one_group=is_one_group)
            engines.log = self._recording.log
            self._follows_caches = engines.follows_caches
            timeouts = _timeouts(processes)
            launching = Launching(
                spec=lambda rank, launch, listener: self._spec((rank, launch), endpoint, coordinator, listener),
                timeouts=timeouts,
                expert_timeouts=replace(
                    timeouts,
                    doubt_ns=EXPERT_DOUBT_BEATS * self._expert_beat_ms * NS_PER_MS,
                    idle_doubt_ns=EXPERT_DOUBT_BEATS * self._expert_idle_beat_ms * NS_PER_MS,
                    silence_ns=int(self._settings.group.expert_timeout * 1e9),
                    silence_flag="--expert-timeout",
                ),
                launcher=launcher,
                is_one_group=is_one_group,
            )
            supervisor = Supervisor(engines, wire, metrics, launching, coordinator)
            supervisor.migration = self._migration
            endpoint = ListenAddress(wire.address, launcher.keys)
            self._lifecycle.before_exit = [supervisor.kill_all, lambda: shutil.rmtree(directory, ignore_errors=True)]
            self._clock.mark("start the API server")
            async with opened(launcher), supervisor.running():
                places = places_of(self._settings, supervisor.machine_of, coordinator, self._migration)
                signals = None if places is None else ExpertSignals(engines.expert_loads, places, router)
                yield _Cluster(engines, metrics, supervisor, wire, coordinator, signals)

    def _coordinator(self, send: Callable[[int, ToRank], None]) -> Coordinator | None:
        if self._settings.stepping.mode != "async":
            return None
        processes = self._settings.processes
        return Coordinator(self._settings.group, processes.startup_timeout, send, processes.num_redundant_experts)

    def _ep_migration(self, send: Callable[[int, ToRank], None]) -> EpMigration | None:
        """Return the moves of experts of a group in lock-step. A paced group has an even placement, which stays."""
        if self._settings.stepping.mode != "ep" or self._settings.paced is not None:
            return None
        return EpMigration(self._settings.num_engines, send)

    def _placeable_group(self, cluster: _Cluster) -> PlaceableGroup | None:
        """Return the group whose experts can move; None where each engine has all, and for paced engines in `ep`."""
        if cluster.coordinator is not None:
            return async_group(cluster.coordinator, cluster.supervisor.machine_of)
        if self._migration is not None:
            return lock_step_group(self._migration, self._settings.num_engines, cluster.engines)
        return None

    def _spec(
        self,
        process: tuple[int, int],
        endpoint: ListenAddress,
        coordinator: Coordinator | None,
        listener: socket.socket | None,
    ) -> LaunchSpec:
        """Make the launch spec of a process, which is (rank, launch).

        Args:
            endpoint: where the API server listens to its ranks.
            listener: socket at which the process's group meets.
        """
        rank, launch = process
        group = None if coordinator is None else coordinator.spec(rank)
        has_experts_alone = group is not None and not group.is_home
        return LaunchSpec(
            rank=rank,
            launch=launch,
            address=endpoint.address,
            keys=endpoint.keys,
            launched_ns=now_ns(),
            log_level=self._settings.server.log_level,
            model=self._settings.model,
            scheduler=self._settings.scheduler,
            paced=self._settings.paced,
            stepping=self._settings.stepping,
            expert_load=self._settings.expert_load,
            kv_events=self._settings.kv_events if rank < self._settings.num_engines else None,
            records_events=self._recording.log is not None,
            reports_cache=self._follows_caches and rank < self._settings.num_engines,
            group=group,
            lock_step=None if listener is None else self._lock_step_spec(rank, listener),
            num_local=self._num_local,
            cores=cores_of(self._settings, rank),
            beat_ms=self._expert_beat_ms if has_experts_alone else ENGINE_BEAT_MS,
            idle_beat_ms=self._expert_idle_beat_ms if has_experts_alone else ENGINE_BEAT_MS,
        )

    @property
    def _num_local(self) -> int:
        """Processes that take this machine's accelerators in turn. Ray gives each process accelerators of its own."""
        if self._settings.launching.launcher != "local":
            return 1
        has_experts_apart = self._settings.stepping.mode == "async"
        return self._settings.num_engines + (self._settings.group.num_expert_workers if has_experts_apart else 0)

    def _lock_step_spec(self, rank: int, listener: socket.socket) -> LockStepSpec:
        processes, migration = self._settings.processes, self._migration
        return LockStepSpec(
            num_ranks=processes.engines,
            port=listener.getsockname()[1],
            listen_fd=listener.fileno() if rank == 0 else None,
            join_by_ns=now_ns() + int(_MEETING_SHARE * processes.startup_timeout * 1e9),
            timeout_s=processes.step_timeout,
            num_redundant_experts=processes.num_redundant_experts,
            placed=None if migration is None else migration.placed,
        )

    @property
    def _expert_beat_ms(self) -> int:
        return COPIED_BEAT_MS if self._settings.group.expert_copies > 1 else EXPERT_BEAT_MS

    @property
    def _expert_idle_beat_ms(self) -> int:
        """A worker that waits for tokens sends `IDLE_BEATS` heartbeats in the time after which it counts as hung."""
        return max(self._expert_beat_ms, int(self._settings.group.expert_timeout * 1e3 / IDLE_BEATS))

    async def _load(self, cluster: _Cluster) -> tuple[ServedModel, list[ModelInfo]]:
        """Load the tokenizer while the engines load, and return the served model with each engine's information."""
        server, model = self._settings.server, self._settings.model
        startup_timeout = self._settings.processes.startup_timeout
        chat = self._settings.chat
        # The library holds the interpreter while it reads a vocabulary, which takes seconds for a large one.
        with self._lifecycle.ended_by_kernel():
            tokenizer = await asyncio.to_thread(Tokenizer, model.tokenizer_directory, chat.chat_template)
        tokenizer.warm_chats()
        progress = asyncio.create_task(log_forever(lambda _: [_describe_start(cluster)]))
        try:
            async with asyncio.timeout(startup_timeout):
                if cluster.coordinator is not None:
                    await cluster.coordinator.all_serve
                infos = await cluster.engines.all_ready()
        except TimeoutError:
            raise EngineDiedError(
                f"the engines were not ready within {startup_timeout:g} s ({cluster.engines.describe_unready()}): raise"
                " --startup-timeout"
            ) from None
        finally:
            progress.cancel()
        self._clock.mark_engines(cluster.engines.phases)
        served = ServedModel(
            names=server.served_model_name,
            created=int(time.time()),
            fingerprint=_fingerprint(self._settings, infos[0]),
            info=infos[0],
            tokenizer=tokenizer,
            has_priorities=self._settings.scheduler.scheduling_policy == "priority",
            resumes_streams=self._settings.processes.resume_streams,
            has_strict_fields=server.strict_fields,
            forces_usage=server.enable_force_include_usage,
            users_are_clients=server.users_are_clients,
            is_traced=self._settings.tracing.url is not None,
            shows_tokenizer=server.enable_tokenizer_info_endpoint,
            max_choices_at_once=_choices_at_once(self._settings),
            chat=chat_format(chat, tokenizer.chat_template, tokenizer.special_texts),
        )
        return served, infos

    async def _serve(
        self,
        cluster: _Cluster,
        model: ServedModel,
        listener: socket.socket,
        infos: Sequence[ModelInfo],
    ) -> None:
        settings, engines = self._settings.server, cluster.engines
        api = ApiServer(engines, model, settings.write_timeout)
        placement = open_placement(self._settings, model.info, engines.expert_loads, self._placeable_group(cluster))
        sources = Sources(
            model_name=model.names[0],
            info=model.info,
            engines=engines,
            metrics=cluster.metrics,
            mode=self._settings.stepping.mode,
            groups=[cluster.supervisor.group_number(engine) for engine in range(len(infos))],
            num_dropped=lambda: cluster.wire.num_dropped,
            num_refused=lambda: cluster.wire.num_refused,
            num_unrecorded=lambda: self._recording.num_lost,
            faults=self._lifecycle.faults,
            coordinator=cluster.coordinator,
            signals=cluster.signals,
            placement=placement.control,
        )
        middleware = HttpMiddleware(self._access, cluster.metrics.refusals, MAX_BODY_BYTES, self._lifecycle.faults)
        statistics = ServerStatistics(self._settings, engines, cluster.metrics, api.traffic, model.info, listener)
        info = server_info(self._settings, infos, self._clock.phases)
        app = api.app(Exposition(ServerCollector(sources)), info, statistics.read)
        app[ROOT_PATH] = settings.root_path
        runner = await middleware.runner(app, shutdown_timeout=RESPONSE_FLUSH_S, root_path=settings.root_path)
        tasks = [asyncio.create_task(log_forever(_stat_lines(cluster)))]
        if cluster.signals is not None:
            tasks.append(asyncio.create_task(cluster.signals.follow(cluster.metrics)))
        admin = await self._open_admin(cluster, model.info, placement, statistics)
        try:
            server = self._front(Port.CLIENTS, runner, listener, settings.max_connections).open()
            self._lifecycle.is_serving = True
            cluster.supervisor.watch()
            self._announce(listener, model, infos)
            async with placement.running():
                await self._until_stopped(cluster.supervisor)
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
        self, cluster: _Cluster, info: ModelInfo, placement: LivePlacement, statistics: ServerStatistics
    ) -> OperatorsPort | None:
        """Serve the plane of operators, if a port is given."""
        settings = self._settings.server
        if self._admin_listener is None:
            return None
        half_life = self._settings.expert_load.expert_load_half_life
        routes = ExpertAdmin(cluster.engines.expert_loads, info, half_life, cluster.signals).routes()
        if cluster.coordinator is not None:
            routes += WorkerAdmin(cluster.coordinator, cluster.supervisor).routes()
        routes += [*placement.routes(), *page_routes("serve", "operators", statistics.read)]
        if self._recording.log is not None:
            routes += ExplainAdmin(self._recording.log).routes()
        runner = await admin_runner(routes, settings.admin_api_key, self._lifecycle.faults)
        front = self._front(Port.OPERATORS, runner, self._admin_listener, MAX_OPERATOR_CONNECTIONS)
        return OperatorsPort(runner, self._admin_listener, front.open())

    def _expert_workers(self, cluster: _Cluster) -> list[str]:
        """Return the names of the workers over which experts are spread; empty where each engine has all."""
        if cluster.coordinator is not None:
            return [str(cluster.coordinator.name(worker)) for worker in range(cluster.coordinator.num_places)]
        return [] if self._migration is None else [f"engine {rank}" for rank in range(self._settings.num_engines)]

    def _read_table(self, cluster: _Cluster, info: ModelInfo) -> ReadTable | None:
        """Return the function that reads the group's expert table; None where experts never move."""
        if not info.num_experts:
            return None
        coordinator = cluster.coordinator
        if coordinator is not None:
            group = coordinator.table
            return lambda: ServedTable(coordinator.migration.table, group.experts.layers, group.first)
        migration = self._migration
        return None if migration is None else lambda: ServedTable(migration.table, migration.layers)

    async def _until_stopped(self, supervisor: Supervisor) -> None:
        """Serve until a signal.

        Raises:
            EngineDiedError: No engine is left.
        """
        stop: asyncio.Future[Any] = asyncio.create_task(self._lifecycle.stop_requested.wait())
        try:
            await asyncio.wait((stop, supervisor.over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        if supervisor.over.done():
            supervisor.over.result()

    def _announce(self, listener: socket.socket, model: ServedModel, infos: Sequence[ModelInfo]) -> None:
        warn_if_open(listener, self._tls, needs_key=bool(self._access.keys))
        self._clock.mark("listen")
        url = url_of(listener, is_tls=self._tls is not None)
        if self._on_ready is not None:
            self._on_ready(url)
            return
        print_banner(serve_banner(model, infos, self._clock.phases, url, needs_key=bool(self._access.keys)))


def _describe_start(cluster: _Cluster) -> str:
    if cluster.coordinator is not None:
        return f"waiting: {cluster.coordinator.describe_start()}"
    return f"waiting for {cluster.engines.describe_unready()}"


def _stat_lines(cluster: _Cluster) -> Callable[[float], list[str]]:
    """Return the function that makes the log lines about the last given seconds."""
    engines = StatLines(cluster.engines, cluster.metrics)
    pace = PaceLines(cluster.engines, cluster.coordinator)
    if cluster.coordinator is None:
        return lambda seconds: [*engines.lines(seconds), *pace.lines()]
    workers = GroupLines(cluster.coordinator)
    return lambda seconds: [*engines.lines(seconds), *workers.lines(seconds), *pace.lines()]


def _timeouts(processes: ProcessSettings) -> LivenessTimeouts:
    return LivenessTimeouts(
        start_ns=int(processes.startup_timeout * 1e9),
        doubt_ns=ENGINE_DOUBT_BEATS * ENGINE_BEAT_MS * NS_PER_MS,
        silence_ns=int(processes.engine_timeout * 1e9),
        stall_ns=int(processes.watchdog_timeout * 1e9),
        step_ns=int(processes.step_timeout * 1e9),
    )


def _choices_at_once(settings: ServeSettings) -> int:
    """Return the choices of one request that engines have at once: half of the sequences that they run."""
    return max(1, settings.num_engines * settings.scheduler.max_num_seqs // 2)


def _fingerprint(settings: ServeSettings, info: ModelInfo) -> str:
    """Return a name that differs where answers may differ. The name of a paced server contains `paced`."""
    parts = (__version__, str(settings.model), str(settings.paced), str(settings.chat), info.dtype, info.device)
    kind = "fp_" if settings.paced is None else "fp_paced_"
    return kind + hashlib.blake2b("\0".join(parts).encode(), digest_size=5).hexdigest()
