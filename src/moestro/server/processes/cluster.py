"""The engines of one server: their processes, and the objects that communicate with them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro.config.serve_settings import ServeSettings
from moestro.core.request import ModelInfo
from moestro.errors import EngineDiedError
from moestro.placement.live.control import PlacementControl
from moestro.placement.live.ep_migration import EpMigration
from moestro.placement.live.plan import PlaceableGroup
from moestro.routing.settings import RouterSettings
from moestro.server.api.request_builder import ServedModel
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
from moestro.server.figures.prometheus import GroupLines, Sources
from moestro.server.figures.recording import Recording
from moestro.server.figures.statistics import PaceLines, StatLines
from moestro.server.processes.launch_specs import LaunchSpecs, heartbeat_timeouts
from moestro.server.processes.launchers import Launcher, opened
from moestro.server.processes.start_checks import private_directory
from moestro.server.processes.supervisor import Launching, Supervisor
from moestro.web.banner import log_forever
from moestro.web.ports.faults import Faults
from moestro.web.ports.lifecycle import Lifecycle
from moestro.wire.messages import ToRank
from moestro.wire.sockets import ListenAddress


@dataclass(frozen=True, slots=True)
class ServerCluster:
    """The engines' processes, and the objects that communicate with them.

    Attributes:
        coordinator: of a group in `async` mode; else None.
        migration: moves of experts in `ep` mode; else None.
        signals: pressure of experts; None where no policy can read one.
    """

    settings: ServeSettings
    engines: EngineClient
    metrics: Metrics
    supervisor: Supervisor
    wire: RankSocket
    coordinator: Coordinator | None
    migration: EpMigration | None
    signals: ExpertSignals | None

    async def all_ready(self) -> list[ModelInfo]:
        """Wait until all engines serve, and return what each says of its model.

        Raises:
            EngineDiedError: An engine failed, or was not ready in time; the text is its cause.
        """
        startup_timeout = self.settings.processes.startup_timeout
        progress = asyncio.create_task(log_forever(lambda _: [self._describe_start()]))
        try:
            async with asyncio.timeout(startup_timeout):
                if self.coordinator is not None:
                    await self.coordinator.all_serve
                return await self.engines.all_ready()
        except TimeoutError:
            raise EngineDiedError(
                f"the engines were not ready within {startup_timeout:g} s ({self.engines.describe_unready()}): raise"
                " --startup-timeout"
            ) from None
        finally:
            progress.cancel()

    async def until_over(self, stop_requested: asyncio.Event) -> None:
        """Wait for a signal.

        Raises:
            EngineDiedError: No engine is left.
        """
        stop: asyncio.Future[Any] = asyncio.create_task(stop_requested.wait())
        try:
            await asyncio.wait((stop, self.supervisor.over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        if self.supervisor.over.done():
            self.supervisor.over.result()

    @property
    def placeable_group(self) -> PlaceableGroup | None:
        """The group whose experts can move; None where each engine has all, and for paced engines in `ep`."""
        if self.coordinator is not None:
            return async_group(self.coordinator, self.supervisor.machine_of)
        if self.migration is not None:
            return lock_step_group(self.migration, self.settings.num_engines, self.engines)
        return None

    @property
    def expert_workers(self) -> list[str]:
        """Names of the workers over which experts are spread; empty where each engine has all."""
        if self.coordinator is not None:
            return [str(self.coordinator.name(worker)) for worker in range(self.coordinator.num_places)]
        return [] if self.migration is None else [f"engine {rank}" for rank in range(self.settings.num_engines)]

    def table_reader(self, info: ModelInfo) -> ReadTable | None:
        """Return the function that reads the group's expert table; None where experts never move."""
        if not info.num_experts:
            return None
        coordinator = self.coordinator
        if coordinator is not None:
            group = coordinator.table
            return lambda: ServedTable(coordinator.migration.table, group.experts.layers, group.first)
        migration = self.migration
        return None if migration is None else lambda: ServedTable(migration.table, migration.layers)

    def sources(
        self, model: ServedModel, faults: Faults, recording: Recording, placement: PlacementControl | None
    ) -> Sources:
        """Return the objects of which `/metrics` tells."""
        return Sources(
            model_name=model.names[0],
            info=model.info,
            engines=self.engines,
            metrics=self.metrics,
            mode=self.settings.stepping.mode,
            groups=[self.supervisor.group_number(engine) for engine in range(self.settings.num_engines)],
            num_dropped=lambda: self.wire.num_dropped,
            num_refused=lambda: self.wire.num_refused,
            num_unrecorded=lambda: recording.num_lost,
            faults=faults,
            coordinator=self.coordinator,
            signals=self.signals,
            placement=placement,
        )

    def stat_lines(self) -> Callable[[float], list[str]]:
        """Return the function that makes the log lines about the last given seconds."""
        engines = StatLines(self.engines, self.metrics)
        pace = PaceLines(self.engines, self.coordinator)
        if self.coordinator is None:
            return lambda seconds: [*engines.lines(seconds), *pace.lines()]
        workers = GroupLines(self.coordinator)
        return lambda seconds: [*engines.lines(seconds), *workers.lines(seconds), *pace.lines()]

    def _describe_start(self) -> str:
        if self.coordinator is not None:
            return f"waiting: {self.coordinator.describe_start()}"
        return f"waiting for {self.engines.describe_unready()}"


@contextlib.asynccontextmanager
async def open_cluster(
    settings: ServeSettings,
    make_launcher: Callable[[Path, int], Launcher],
    recording: Recording,
    lifecycle: Lifecycle,
    begin: Callable[[], None],
) -> AsyncIterator[ServerCluster]:
    """Start the engines' processes, and end them with the block.

    Args:
        make_launcher: (private directory, ranks) -> launcher.
        begin: called before the first process starts.
    """
    is_one_group = settings.stepping.mode == "ep"
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(private_directory())
        num_ranks = settings.group.num_places if settings.stepping.mode == "async" else settings.num_engines
        launcher = make_launcher(directory, num_ranks)
        wire = stack.enter_context(contextlib.closing(RankSocket(launcher.server_address, num_ranks, launcher.keys)))
        coordinator, migration = _coordinator(settings, wire.send), _ep_migration(settings, wire.send)
        metrics = Metrics(settings.num_engines)
        router = recording.make_router(
            RouterSettings(block_size=settings.model.block_size, max_num_queued=settings.scheduler.max_num_queued_reqs)
        )
        for _ in range(settings.num_engines):
            router.add_engine()
        engines = EngineClient(router, wire.send, metrics, is_one_group=is_one_group)
        engines.log = recording.log
        specs = LaunchSpecs(
            settings=settings,
            endpoint=ListenAddress(wire.address, launcher.keys),
            coordinator=coordinator,
            migration=migration,
            records_events=recording.log is not None,
            reports_caches=engines.follows_caches,
        )
        timeouts, expert_timeouts = heartbeat_timeouts(settings)
        launching = Launching(
            spec=specs.spec,
            timeouts=timeouts,
            expert_timeouts=expert_timeouts,
            launcher=launcher,
            is_one_group=is_one_group,
        )
        supervisor = Supervisor(engines, wire, metrics, launching, coordinator)
        supervisor.migration = migration
        lifecycle.before_exit = [supervisor.kill_all, lambda: shutil.rmtree(directory, ignore_errors=True)]
        begin()
        async with opened(launcher), supervisor.running():
            places = places_of(settings, supervisor.machine_of, coordinator, migration)
            signals = None if places is None else ExpertSignals(engines.expert_loads, places, router)
            yield ServerCluster(settings, engines, metrics, supervisor, wire, coordinator, migration, signals)


def _coordinator(settings: ServeSettings, send: Callable[[int, ToRank], None]) -> Coordinator | None:
    if settings.stepping.mode != "async":
        return None
    processes = settings.processes
    return Coordinator(settings.group, processes.startup_timeout, send, processes.num_redundant_experts)


def _ep_migration(settings: ServeSettings, send: Callable[[int, ToRank], None]) -> EpMigration | None:
    """Return the moves of experts of a group in lock-step. A paced group has an even placement, which stays."""
    if settings.stepping.mode != "ep" or settings.paced is not None:
        return None
    return EpMigration(settings.num_engines, send)
