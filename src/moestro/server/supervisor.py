"""Supervises the engines: starts their processes, finds those that hang, and restarts those that end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from moestro.config.launch_spec import STACK_DUMP, LaunchSpec
from moestro.core.clock import NS_PER_S
from moestro.errors import EngineDiedError, MoestroError, NoEngineError
from moestro.server.engine_client import EngineClient
from moestro.server.engine_group import EngineGroup
from moestro.server.liveness import Liveness, LivenessTimeouts, RankStatus
from moestro.server.metrics import Metrics
from moestro.server.rank_socket import RankSocket
from moestro.server.restarts import MAX_FAILED_STARTS
from moestro.server.worker_processes import WORKER, WorkerProcesses, now_ns
from moestro.web.pauses import PauseMeter
from moestro.wire.messages import FromRank, Heartbeat, Ready, Shutdown, WakeGroup

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_LATE_TICK_S = 2 * _TICK_S  # A longer interval means that this process was stopped.


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching:
    """Command and limits for the processes of ranks.

    Attributes:
        spec: Callable that returns the launch spec of a rank's `launch`-th process, from (rank, launch, the socket at
            which the ranks of its group meet, or None).
        timeouts: Liveness timeouts of a rank.
        command: Command of a worker process.
        is_one_group: Whether the ranks start, end and restart together.
    """

    spec: Callable[[int, int, socket.socket | None], LaunchSpec]
    timeouts: LivenessTimeouts
    command: Sequence[str] = WORKER
    is_one_group: bool = False


class _Rank:
    """State of one rank."""

    def __init__(self, timeouts: LivenessTimeouts) -> None:
        self.liveness = Liveness(timeouts, now_ns())
        self.is_running = False  # Whether its process runs.
        self.is_stalled = False
        self.hung = ""  # Reason for which the supervisor killed it.


class Supervisor:
    """Starts and monitors all ranks, and passes their messages to `engines`.

    A rank that ends before it was ever ready fails the start of the server: `engines.all_ready` raises its cause, and
    no rank is restarted. When a rank of a group ends, the supervisor kills the others before any request looks for
    another engine, and starts the group again when all of them have ended.

    Args:
        engines: Client with the requests in flight and the ranks' load figures.
        wire: Socket to the ranks; accepts messages only from a rank's latest process.
        metrics: Counters of restarts and stalls.

    Attributes:
        over: Future that fails with an EngineDiedError once no engine is left and none will be restarted.
    """

    def __init__(self, engines: EngineClient, wire: RankSocket, metrics: Metrics, launching: Launching) -> None:
        num_ranks = len(metrics.engines)
        self._engines = engines
        self._wire = wire
        self._metrics = metrics
        self._launching = launching
        self._processes = WorkerProcesses(num_ranks, self._on_exit, launching.command)
        self._ranks = [_Rank(launching.timeouts) for _ in range(num_ranks)]
        parts = [tuple(range(num_ranks))] if launching.is_one_group else [(rank,) for rank in range(num_ranks)]
        self._groups = [EngineGroup(members=members) for members in parts]
        self._group_of = {rank: group for group in self._groups for rank in group.members}
        self._tasks: set[asyncio.Task[None]] = set()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start every rank's process, and end the processes with the block."""
        self._wire.listen(self._on_message, self._on_broken)
        try:
            for group in self._groups:
                await self._launch(group)
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

    def kill_all(self) -> None:
        """Kill every process now. Any thread may call this method."""
        self._processes.kill_all()

    def watch(self) -> None:
        """Begin to monitor the ranks' liveness."""
        self._begin(self._tick_forever())

    # --- life of a group

    async def _launch(self, group: EngineGroup) -> None:
        """Start the processes of a group. A process that cannot be started ends the group."""
        with group.launch() as (number, listener):
            for rank in group.members:
                state = self._ranks[rank]
                self._wire.expect(rank, number)
                state.liveness.launched(now_ns())
                state.is_running = True
                try:
                    await self._processes.start(self._launching.spec(rank, number, listener))
                except OSError as error:
                    if not group.was_ready:
                        raise
                    self._on_exit(rank, f"its process could not be started: {error}")
                if group.end is not None:  # Another engine has ended meanwhile, when this process did not yet exist.
                    self._processes.signal(rank, signal.SIGKILL)
                    return

    def _on_message(self, rank: int, message: FromRank) -> None:
        try:
            self._take_in(rank, message)
        except Exception:  # An error of this process says nothing about the engine.
            self._metrics.num_delivery_errors += 1
            logger.exception("cannot process a %s of engine %d", type(message).__name__, rank)

    def _take_in(self, rank: int, message: FromRank) -> None:
        state, group, now = self._ranks[rank], self._group_of[rank], now_ns()
        if isinstance(message, Ready) and not self._processes.is_running(rank):
            return  # The last message of a process that has ended.
        state.liveness.heard(now)
        match message:
            case Heartbeat(num_steps):
                state.liveness.counted(num_steps, now)
            case Ready():
                state.liveness.ready(now)
                group.ready[rank] = message
                if len(group.ready) == len(group.members):
                    group.was_ready = True
                    group.rule.ready(now)
                    self._engines.on_ready({each: ready.info for each, ready in group.ready.items()})
            case WakeGroup():
                for other in group.members:
                    with contextlib.suppress(NoEngineError):  # Its end will restart the group.
                        if other != rank:
                            self._wire.send(other, message)
            case _:
                self._engines.on_message(rank, message)

    def _on_broken(self, rank: int) -> None:
        if self._ranks[rank].is_running:  # Otherwise `_on_exit` has handled its end.
            self._engines.set_trusted(rank, trusted=False)
            self._kill(rank, "one of its messages could not be read")

    def _kill(self, rank: int, why: str) -> None:
        self._ranks[rank].hung = f"killed: {why}"
        self._processes.signal(rank, signal.SIGKILL)

    def _on_exit(self, rank: int, how: str) -> None:
        state, group = self._ranks[rank], self._group_of[rank]
        state.is_running = state.is_stalled = False
        how, state.hung = state.hung or how, ""
        for other in group.members:
            self._end_with(other, rank)
        cause = self._engines.on_exit(rank, how)
        group.end = group.end or (rank, cause)
        if not group.was_ready or any(self._ranks[each].is_running for each in group.members):
            return
        delay_s = group.rule.ended(now_ns())
        if delay_s is None:
            self._give_up(group, group.end[1])
            return
        logger.error("%s in %g s", group.describe_end(), delay_s)
        self._begin(self._restart(group, delay_s))

    def _end_with(self, other: int, rank: int) -> None:
        """Kill another rank of the group of `rank`, which has ended, and route no request to it."""
        state = self._ranks[other]
        if state.is_running and not state.hung:
            self._engines.set_trusted(other, trusted=False)
            self._kill(other, f"engine {rank} of its group ended")

    async def _restart(self, group: EngineGroup, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        for rank in group.members:
            self._metrics.engines[rank].num_restarts += 1
        await self._launch(group)

    def _give_up(self, group: EngineGroup, cause: MoestroError) -> None:
        logger.error(
            "%s not restarted: it ended %d times in a row before it was ready, the last time because: %s",
            f"{group} is" if group.is_single else f"the group of {group} is", MAX_FAILED_STARTS, cause,
        )  # fmt: skip
        group.is_given_up = True
        if all(each.is_given_up for each in self._groups) and not self.over.done():
            self._engines.fail_unassigned()
            self.over.set_exception(EngineDiedError(f"no engine is left; the last one ended because: {cause}"))

    def _dismiss(self, rank: int) -> None:
        """Ask a rank to end. A rank that is not ready does not read messages and is killed."""
        try:
            if self._ranks[rank].liveness.is_ready:
                self._wire.send(rank, Shutdown())
                return
        except NoEngineError:
            pass
        self._processes.signal(rank, signal.SIGKILL)

    # --- liveness

    async def _tick_forever(self) -> None:
        pauses = PauseMeter(now_ns(), int(_LATE_TICK_S * 1e9))
        while True:
            await asyncio.sleep(_TICK_S)
            if pause_ns := pauses.tick(now_ns()):
                self._forgive(pause_ns)
            for rank, state in enumerate(self._ranks):
                if state.is_running:
                    self._look_at(rank, state)
            self._engines.settle_unassigned()
            self._engines.retry_aborts()

    def _forgive(self, pause_ns: int) -> None:
        """Exclude a time in which this process was stopped from the timeouts of engines and unassigned requests."""
        if pause_ns >= NS_PER_S:
            logger.warning(
                "this process was stopped for %.0f s; the engines' timeouts exclude that time", pause_ns / 1e9
            )
        for state in self._ranks:
            state.liveness.paused(pause_ns, now_ns())
        self._engines.extend_unassigned(pause_ns)

    def _look_at(self, rank: int, state: _Rank) -> None:
        status = state.liveness.judge(self._engines.num_in_flight_on(rank), now_ns())
        self._engines.set_trusted(rank, trusted=status is RankStatus.FINE and not state.hung)
        if status is RankStatus.HUNG and not state.hung:
            self._kill(rank, state.liveness.reason)
        if status is RankStatus.STALLED and not state.is_stalled:
            self._metrics.engines[rank].num_stalls += 1
            logger.error(
                "engine %d is out of rotation: %s; the stacks of its threads follow", rank, state.liveness.reason
            )
            self._processes.signal(rank, STACK_DUMP)
        if status is RankStatus.FINE and state.is_stalled:
            logger.warning("engine %d makes progress again", rank)
        state.is_stalled = status is not RankStatus.FINE

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background. A failure of `work` is a bug and ends the server."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.over.done():
            self.over.set_exception(error)
