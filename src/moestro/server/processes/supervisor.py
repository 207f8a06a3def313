"""Supervises the engines: starts their processes, finds those that hang, and restarts those that end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moestro.config.launch_spec import LaunchSpec
from moestro.core.clock import NS_PER_S
from moestro.errors import EngineDiedError, MoestroError, NoEngineError
from moestro.placement.live.ep_migration import EpMigration
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.rank_socket import RankSocket
from moestro.server.engines.request_state import Metrics
from moestro.server.experts.coordinator import Coordinator
from moestro.server.processes.launchers import Launcher, WorkerProcesses, now_ns
from moestro.server.processes.watchdog import (
    MAX_FAILED_STARTS,
    TICK_S,
    LivenessTimeouts,
    RankControl,
    RankState,
    RestartRule,
    Watchdog,
)
from moestro.wire.messages import ClockReading, FromRank, Heartbeat, ReadClock, Ready, Shutdown, WakeGroup


@dataclass(slots=True, kw_only=True, eq=False)
class EngineGroup:
    """State of one group.

    Attributes:
        members: Engines of the group, ascending.
        rule: Rule for the restarts of the group.
        num_launches: Starts of the group so far.
        was_ready: Whether all engines were ready after one of these starts.
        is_given_up: Whether the group is not restarted.
        ready: Ready messages of the present start, by engine.
        end: First engine that ended in the present start, and the cause; None while all engines run.
    """

    members: tuple[int, ...]
    rule: RestartRule = field(default_factory=RestartRule)
    num_launches: int = 0
    was_ready: bool = False
    is_given_up: bool = False
    ready: dict[int, Ready] = field(default_factory=dict)
    end: tuple[int, MoestroError] | None = None

    @property
    def is_single(self) -> bool:
        """Whether the group is a single engine."""
        return len(self.members) == 1

    def __str__(self) -> str:
        return f"engine{'' if self.is_single else 's'} {', '.join(map(str, self.members))}"

    def describe_end(self, name: str) -> str:
        """Return which engine ended first, by its `name`, and why, and which engines restart."""
        assert self.end is not None, "an engine of the group has ended"
        cause = str(self.end[1])
        culprit = cause if cause.startswith(f"{name}:") else f"{name}: {cause}"
        return f"{culprit}; {'it restarts' if self.is_single else f'{self} restart together'}"

    @contextlib.contextmanager
    def launch(self) -> Iterator[tuple[int, socket.socket | None]]:
        """Reset the state for a new start, and yield its number and its listening socket.

        The processes of a group meet at the socket; the first engine's process inherits it. It is bound here to a free
        port, so no other program can take the port between its choice and its use. A single engine has no socket.
        """
        number, self.num_launches = self.num_launches, self.num_launches + 1
        self.ready, self.end = {}, None
        with contextlib.ExitStack() as stack:
            listener = None
            if not self.is_single:
                listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            yield number, listener


logger = logging.getLogger(__name__)

QUIET_NS = NS_PER_S // 2  # For homes to read that they send a removed worker no more tokens.
DRAIN_NS = 30 * NS_PER_S  # For which a worker that is removed may compute what it has.
# Wait before the restart of a worker whose tokens go to copies: its load would take cores from them while they take
# over. On two cores the P99 gap after a kill fell from 0.42 to 0.31 s (docs/failures.md). Not swept.
COVERED_DELAY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching:
    """Command and limits for the processes of ranks.

    Attributes:
        spec: Callable that returns the launch spec of a rank's `launch`-th process, from (rank, launch, the socket at
            which the ranks of its group meet, or None).
        timeouts: Liveness timeouts of a rank.
        expert_timeouts: Liveness timeouts of a worker without attention.
        launcher: Starts processes of workers.
        is_one_group: Whether the ranks start, end and restart together.
    """

    spec: Callable[[int, int, socket.socket | None], LaunchSpec]
    timeouts: LivenessTimeouts
    expert_timeouts: LivenessTimeouts
    launcher: Launcher
    is_one_group: bool = False


class Supervisor:
    """Starts and monitors all ranks, and passes their messages to `engines`.

    A rank that ends before it was ever ready fails the start of the server: `engines.all_ready` raises its cause, and
    no rank is restarted. When a rank of a group ends, the supervisor kills the others before any request looks for
    another engine, and starts the group again when all of them have ended.

    Args:
        engines: Client with the requests in flight and the ranks' load figures.
        wire: Socket to the ranks; accepts messages only from a rank's latest process.
        metrics: Counters of restarts and stalls.
        coordinator: The group of workers in `async` mode, whose members restart one by one; None in other modes.

    Attributes:
        over: Future that fails with an EngineDiedError once no engine is left and none will be restarted.
        migration: Moves of experts in mode `ep`, which hear of messages and ends of ranks; None in other modes.
    """

    def __init__(
        self,
        engines: EngineClient,
        wire: RankSocket,
        metrics: Metrics,
        launching: Launching,
        coordinator: Coordinator | None = None,
    ) -> None:
        num_engines = len(metrics.engines)
        num_ranks = num_engines if coordinator is None else coordinator.num_places
        self._engines = engines
        self._coordinator = coordinator
        self._wire = wire
        self._metrics = metrics
        self._launching = launching
        self._processes = WorkerProcesses(launching.launcher, self._on_exit)
        self._ranks = [
            RankState(launching.timeouts if is_engine else launching.expert_timeouts, now_ns(), is_engine=is_engine)
            for is_engine in (rank < num_engines for rank in range(num_ranks))
        ]
        control = RankControl(self._name, self._kill, self._processes.signal, self._is_stopped)
        self._watchdog = Watchdog(self._ranks, engines, coordinator, metrics, control)
        parts = [tuple(range(num_ranks))] if launching.is_one_group else [(rank,) for rank in range(num_ranks)]
        self._groups = [
            EngineGroup(members=members, rule=RestartRule(keeps_state=self._ranks[members[0]].is_engine))
            for members in parts
        ]
        self._group_of = {rank: group for group in self._groups for rank in group.members}
        self._leaving: dict[int, int] = {}  # Time of the removal of each worker that may still have tokens.
        self._tasks: set[asyncio.Task[None]] = set()
        self.migration: EpMigration | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start every rank's process, and end the processes with the block."""
        self._wire.listen(self._on_message, self._on_broken, self._name)
        try:
            self._begin(self._launch_all(self._initial))
            if self._coordinator is not None:
                self._begin(self._watch_start(self._coordinator))
            yield
        except BaseException:
            self._processes.kill_all()
            raise
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # One of them may be starting a process.
            await self._processes.stop(self._dismiss)

    def group_number(self, rank: int) -> int:
        """Return the number of the group that a rank belongs to."""
        return self._groups.index(self._group_of[rank])

    def machine_of(self, rank: int) -> str:
        """Return the name of the machine of a rank's process; "" means this machine."""
        return self._processes.place(rank)

    def kill_all(self) -> None:
        """Kill every process now. Any thread may call this method."""
        self._processes.kill_all()

    def watch(self) -> None:
        """Begin to monitor the ranks' liveness."""
        self._begin(self._tick_forever())

    @property
    def _initial(self) -> Sequence[EngineGroup]:
        if self._coordinator is None:
            return self._groups
        return [self._group_of[rank] for rank in self._coordinator.present]

    def _name(self, rank: int) -> str:
        return f"engine {rank}" if self._coordinator is None else str(self._coordinator.name(rank))

    async def _watch_start(self, coordinator: Coordinator) -> None:
        while not coordinator.all_serve.done():
            coordinator.check_start(now_ns())
            await asyncio.sleep(TICK_S)

    # --- life of a group

    async def _launch_all(self, groups: Sequence[EngineGroup]) -> None:
        """Start groups. The first process of all may have to wait until the libraries are loaded."""
        for group in groups:
            await self._launch(group)

    async def _launch(self, group: EngineGroup) -> None:
        """Start the processes of a group. A process that cannot be started ends the group."""
        with group.launch() as (number, listener):
            for rank in group.members:
                self._wire.expect(rank, number)
                self._ranks[rank].launched(now_ns())
                if self._coordinator is not None:
                    self._coordinator.launched(rank, number, now_ns())
                try:
                    await self._processes.start(self._launching.spec(rank, number, listener))
                except OSError as error:
                    self._on_exit(rank, f"its process could not be started: {error}")
                if group.end is not None:  # Another engine has ended meanwhile, when this process did not yet exist.
                    self._processes.signal(rank, signal.SIGKILL)
                    return

    def _on_message(self, rank: int, message: FromRank) -> None:
        try:
            self._take_in(rank, message)
        except Exception:  # An error of this process says nothing about the engine.
            self._metrics.num_delivery_errors += 1
            logger.exception("cannot process a %s of %s", type(message).__name__, self._name(rank))

    def _take_in(self, rank: int, message: FromRank) -> None:
        state, group, now = self._ranks[rank], self._group_of[rank], now_ns()
        if isinstance(message, Ready) and not self._processes.is_running(rank):
            return  # The last message of a process that has ended.
        state.liveness.on_message(now)
        if self._coordinator is not None:
            self._coordinator.on_message(rank, message, now)
        if self.migration is not None:
            self.migration.on_message(rank, message)
        match message:
            case Heartbeat(num_steps, owes, is_idle):
                state.liveness.counted(num_steps, now, is_idle=is_idle)
                state.owes = owes
            case ReadClock(requested_ns):
                self._wire.send(rank, ClockReading(requested_ns, now_ns()))
            case Ready():
                state.liveness.ready(now)
                group.ready[rank] = message
                if len(group.ready) == len(group.members):
                    group.was_ready = True
                    group.rule.ready(now)
                    self._on_ready(group)
            case WakeGroup():
                self._wake_others(rank, message)
            case _ if state.is_engine:
                self._engines.on_message(rank, message)

    def _wake_others(self, rank: int, message: WakeGroup) -> None:
        for other in self._group_of[rank].members:
            with contextlib.suppress(NoEngineError):  # Its end will restart the group.
                if other != rank:
                    self._wire.send(other, message)

    def _on_ready(self, group: EngineGroup) -> None:
        """Let engines take requests, and have another process on standby."""
        infos = {rank: ready.info for rank, ready in group.ready.items() if ready.info is not None}
        if infos:
            self._engines.on_ready(infos)
        if self._coordinator is not None and self._coordinator.all_serve.done():
            self._begin(self._launching.launcher.prepare_standby())  # Now, because two that load would both be late.

    def _on_broken(self, rank: int) -> None:
        if self._ranks[rank].is_running:  # Otherwise `_on_exit` has handled its end.
            if self._ranks[rank].is_engine:
                self._engines.set_trusted(rank, trusted=False)
            self._kill(rank, "one of its messages could not be read")

    def _kill(self, rank: int, why: str) -> None:
        self._ranks[rank].why_killed = f"killed: {why}"
        self._processes.signal(rank, signal.SIGKILL)

    def _is_stopped(self, rank: int) -> bool:
        """Whether a signal has stopped an engine whose end would end no other one."""
        return self._group_of[rank].is_single and self._processes.is_stopped(rank)

    def _on_exit(self, rank: int, how: str) -> None:
        state, group = self._ranks[rank], self._group_of[rank]
        state.ended()
        if self.migration is not None:
            self.migration.ended(rank)
        how = state.why_killed or how
        for other in group.members:
            self._end_with(other, rank)
        cause = self._cause_of_exit(rank, how)
        if self._coordinator is not None and self._coordinator.is_given_up(rank):
            self._leaving.pop(rank, None)  # Another worker may take the place.
            logger.info("%s has ended, as requested", self._name(rank))
            return
        group.end = group.end or (rank, cause)
        if not group.was_ready or any(self._ranks[each].is_running for each in group.members):
            return
        delay_s = group.rule.ended(now_ns())
        if delay_s is None:
            self._give_up(group, group.end[1])
            return
        if self._coordinator is not None and not state.is_engine and self._coordinator.is_covered(rank):
            delay_s = max(delay_s, COVERED_DELAY_S)
        when = f"in {delay_s:g} s" if delay_s else "at once"
        logger.error("%s %s", group.describe_end(self._name(group.end[0])), when)
        self._begin(self._restart(group, delay_s))

    def _cause_of_exit(self, rank: int, how: str) -> MoestroError:
        """Tell the engines' client and the coordinator that a process has ended, and return the cause."""
        cause = None
        if self._coordinator is not None:
            cause = self._coordinator.ended(rank, how, now_ns())
        return self._engines.on_exit(rank, how) if self._ranks[rank].is_engine or cause is None else cause

    def _end_with(self, other: int, rank: int) -> None:
        """Kill another rank of the group of `rank`, which has ended, and route no request to it."""
        state = self._ranks[other]
        if state.is_running and not state.why_killed:
            self._engines.set_trusted(other, trusted=False)
            self._kill(other, f"engine {rank} of its group ended")

    async def _restart(self, group: EngineGroup, delay_s: float) -> None:
        number = group.num_launches
        await asyncio.sleep(delay_s)
        if group.num_launches != number or (self._coordinator and self._coordinator.is_given_up(group.members[0])):
            return  # An operator has removed the worker meanwhile, and may have added another one in its place.
        for rank in group.members:
            if self._ranks[rank].is_engine:
                self._metrics.engines[rank].num_restarts += 1
            if self._coordinator is not None:
                self._coordinator.restarted(rank)
        await self._launch(group)

    def _give_up(self, group: EngineGroup, cause: MoestroError) -> None:
        first = group.members[0]
        logger.error(
            "%s not restarted: it ended %d times in a row before it was ready, the last time because: %s",
            f"{self._name(first)} is" if group.is_single else f"the group of {group} is", MAX_FAILED_STARTS, cause,
        )  # fmt: skip
        group.is_given_up = True
        if self.over.done():
            return
        if all(each.is_given_up for each in self._groups if self._ranks[each.members[0]].is_engine):
            self._engines.fail_unassigned()
            self.over.set_exception(EngineDiedError(f"no engine is left; the last one ended because: {cause}"))
        elif (
            self._coordinator is not None and not self._ranks[first].is_engine and not self._coordinator.give_up(first)
        ):
            self.over.set_exception(EngineDiedError(f"no worker is left that has the experts of {cause}"))

    def _dismiss(self, rank: int) -> None:
        """Ask a rank to end. A rank that is not ready does not read messages and is killed."""
        try:
            if self._ranks[rank].liveness.is_ready:
                self._wire.send(rank, Shutdown())
                return
        except NoEngineError:
            pass
        self._processes.signal(rank, signal.SIGKILL)

    # --- workers that operators add and remove

    async def add_worker(self) -> int:
        """Start another worker with experts, and return its place.

        Raises:
            HttpError: The group has no place for it.
        """
        assert self._coordinator is not None, "engines that compute alone have no group"
        worker = self._coordinator.add()
        # What cannot start is restarted and given up like all workers; `was_ready` says that the server serves.
        group = self._group_of[worker]
        group.rule, group.was_ready, group.is_given_up = RestartRule(keeps_state=False), True, False
        await self._launch(group)
        return worker

    def remove_worker(self, worker: int) -> None:
        """Drain a worker with experts, and end its process when its tokens have left.

        Raises:
            HttpError: No other worker holds its experts.
        """
        assert self._coordinator is not None, "engines that compute alone have no group"
        self._coordinator.drain(worker, is_draining=True)
        self._coordinator.remove(worker)
        if self._ranks[worker].is_running:
            self._leaving[worker] = now_ns()

    def _dismiss_drained(self) -> None:
        """End removed workers that have no tokens left. What one owes after all, the homes send to others."""
        for worker, since_ns in list(self._leaving.items()):
            now = now_ns()
            if (now - since_ns > QUIET_NS and not self._ranks[worker].owes) or now - since_ns > DRAIN_NS:
                del self._leaving[worker]
                self._dismiss(worker)
                if self._coordinator is not None:
                    self._coordinator.dismissed(worker, now)

    # --- liveness

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._watchdog.tick_s)
            self._watchdog.tick(now_ns())
            self._dismiss_drained()
            self._engines.settle_unassigned()
            self._engines.retry_aborts()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background. A failure of `work` is a bug and ends the server."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.over.done():
            self.over.set_exception(error)
