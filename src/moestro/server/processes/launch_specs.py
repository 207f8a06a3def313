"""How the processes of the engines are launched: their command, their launcher, and the launch spec of each."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moestro.config.cores import share_of_cores
from moestro.config.launch_spec import LaunchSpec, LockStepSpec
from moestro.config.linux_process import usable_cores
from moestro.config.serve_settings import ServeSettings
from moestro.core.clock import NS_PER_MS
from moestro.cost.networks import known_name
from moestro.placement.live.ep_migration import EpMigration
from moestro.server.experts.coordinator import Coordinator
from moestro.server.processes.launchers import PACED_WORKER, WORKER, Launcher, LocalLauncher, now_ns
from moestro.server.processes.watchdog import LivenessTimeouts
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


def command_of(settings: ServeSettings) -> Sequence[str]:
    """Return the command of a rank process."""
    return PACED_WORKER if settings.paced is not None and settings.paced.paced_arithmetic == "none" else WORKER


def launcher_maker(settings: ServeSettings, command: Sequence[str]) -> Callable[[Path, int], Launcher]:
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
    paced = settings.paced
    is_file = paced is not None and paced.table is None and known_name(paced.network) is None
    network = (paced.network,) if paced is not None and is_file else ()
    if paced is not None and paced.paced_arithmetic == "none":
        return network
    return (settings.model.model, *network)


def heartbeat_timeouts(settings: ServeSettings) -> tuple[LivenessTimeouts, LivenessTimeouts]:
    """Return the times after which an engine, and a worker with experts alone, counts as hung."""
    processes = settings.processes
    engines = LivenessTimeouts(
        start_ns=int(processes.startup_timeout * 1e9),
        doubt_ns=ENGINE_DOUBT_BEATS * ENGINE_BEAT_MS * NS_PER_MS,
        silence_ns=int(processes.engine_timeout * 1e9),
        stall_ns=int(processes.watchdog_timeout * 1e9),
        step_ns=int(processes.step_timeout * 1e9),
    )
    experts = replace(
        engines,
        doubt_ns=EXPERT_DOUBT_BEATS * _expert_beat_ms(settings) * NS_PER_MS,
        idle_doubt_ns=EXPERT_DOUBT_BEATS * _expert_idle_beat_ms(settings) * NS_PER_MS,
        silence_ns=int(settings.group.expert_timeout * 1e9),
        silence_flag="--expert-timeout",
    )
    return engines, experts


@dataclass(frozen=True, slots=True)
class LaunchSpecs:
    """Makes the launch spec of each process.

    Attributes:
        endpoint: where the API server listens to its ranks.
        records_events: whether schedulers record their decisions.
        reports_caches: whether engines report what their prefix caches hold.
    """

    settings: ServeSettings
    endpoint: ListenAddress
    coordinator: Coordinator | None
    migration: EpMigration | None
    records_events: bool
    reports_caches: bool

    def spec(self, rank: int, launch: int, listener: socket.socket | None) -> LaunchSpec:
        """Make the launch spec of a process.

        Args:
            launch: number of the launch of this rank.
            listener: socket at which the process's group meets.
        """
        settings = self.settings
        group = None if self.coordinator is None else self.coordinator.spec(rank)
        has_experts_alone = group is not None and not group.is_home
        return LaunchSpec(
            rank=rank,
            launch=launch,
            address=self.endpoint.address,
            keys=self.endpoint.keys,
            launched_ns=now_ns(),
            log_level=settings.server.log_level,
            model=settings.model,
            scheduler=settings.scheduler,
            paced=settings.paced,
            stepping=settings.stepping,
            expert_load=settings.expert_load,
            kv_events=settings.kv_events if rank < settings.num_engines else None,
            records_events=self.records_events,
            reports_cache=self.reports_caches and rank < settings.num_engines,
            group=group,
            lock_step=None if listener is None else self._lock_step_spec(rank, listener),
            num_local=_num_local(settings),
            cores=cores_of(settings, rank),
            beat_ms=_expert_beat_ms(settings) if has_experts_alone else ENGINE_BEAT_MS,
            idle_beat_ms=_expert_idle_beat_ms(settings) if has_experts_alone else ENGINE_BEAT_MS,
        )

    def _lock_step_spec(self, rank: int, listener: socket.socket) -> LockStepSpec:
        processes, migration = self.settings.processes, self.migration
        return LockStepSpec(
            num_ranks=processes.engines,
            port=listener.getsockname()[1],
            listen_fd=listener.fileno() if rank == 0 else None,
            join_by_ns=now_ns() + int(_MEETING_SHARE * processes.startup_timeout * 1e9),
            timeout_s=processes.step_timeout,
            num_redundant_experts=processes.num_redundant_experts,
            placed=None if migration is None else migration.placed,
        )


def _num_local(settings: ServeSettings) -> int:
    """Processes that take this machine's accelerators in turn. Ray gives each process accelerators of its own."""
    if settings.launching.launcher != "local":
        return 1
    has_experts_apart = settings.stepping.mode == "async"
    return settings.num_engines + (settings.group.num_expert_workers if has_experts_apart else 0)


def _expert_beat_ms(settings: ServeSettings) -> int:
    return COPIED_BEAT_MS if settings.group.expert_copies > 1 else EXPERT_BEAT_MS


def _expert_idle_beat_ms(settings: ServeSettings) -> int:
    """A worker that waits for tokens sends `IDLE_BEATS` heartbeats in the time after which it counts as hung."""
    return max(_expert_beat_ms(settings), int(settings.group.expert_timeout * 1e3 / IDLE_BEATS))


def cores_of(settings: ServeSettings, rank: int) -> tuple[int, ...]:
    """Return the cores of the process of a rank; () means that it may run on all.

    Processes on other machines, paced devices, which mostly sleep, and workers that are added later may run on all.
    """
    num_processes = settings.num_first_processes
    is_local = settings.launching.launcher == "local" and settings.paced is None
    if not settings.processes.bind_cores or not is_local or num_processes == 1 or rank >= num_processes:
        return ()
    return share_of_cores(usable_cores(), rank, num_processes)
