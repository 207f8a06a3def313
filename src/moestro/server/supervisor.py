"""Keeps the engines going: starts their processes, finds those that hang, restarts those that end, gives up on some."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from moestro.config.launch_spec import STACK_DUMP, LaunchSpec
from moestro.core.clock import NS_PER_S
from moestro.errors import EngineDiedError, MoestroError, NoEngineError
from moestro.server.engine_client import Engines
from moestro.server.liveness import Patience, Pulse, Verdict
from moestro.server.metrics import Metrics
from moestro.server.rank_socket import RankSocket
from moestro.server.restarts import MAX_FAILED_STARTS, RestartRule
from moestro.server.worker_processes import WORKER, Ranks, now_ns
from moestro.web.pauses import PauseMeter
from moestro.wire.messages import FromRank, Heartbeat, Ready, Shutdown

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_LATE_TICK_S = 2 * _TICK_S  # a tick that comes later means that this process stood still


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching:
    """How a rank's process comes to be.

    Attributes:
        spec: what the `launch`-th process of a rank is told, from (rank, launch).
        patience: how long it may be silent, or stand still.
        command: what to run.
    """

    spec: Callable[[int, int], LaunchSpec]
    patience: Patience
    command: Sequence[str] = WORKER


class _Rank:
    """What is known of one rank."""

    def __init__(self, patience: Patience) -> None:
        self.pulse = Pulse(patience, now_ns())
        self.rule = RestartRule()
        self.num_launches = 0
        self.is_running = False  # its process is there
        self.was_ready = False  # once, in any of its lives
        self.is_stalled = False
        self.is_given_up = False
        self.hung = ""  # why it was killed from here


class Supervisor:
    """One for all ranks. What a rank says passes here on its way to `engines`.

    A rank that ends before it was ever ready is a failed start of the server: the caller hears of it from
    `engines.all_ready`, and nothing is restarted.

    Args:
        engines: the books of the requests.
        wire: told which process speaks for a rank.
        metrics: restarts and stalls are counted there.

    Attributes:
        over: fails with an EngineDiedError once no engine is left and none will be started again.
    """

    def __init__(self, engines: Engines, wire: RankSocket, metrics: Metrics, launching: Launching) -> None:
        num_ranks = len(metrics.engines)
        self._engines = engines
        self._wire = wire
        self._metrics = metrics
        self._launching = launching
        self._processes = Ranks(num_ranks, self._on_exit, launching.command)
        self._ranks = [_Rank(launching.patience) for _ in range(num_ranks)]
        self._tasks: set[asyncio.Task[None]] = set()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Every rank's process is started; none of them outlives the block."""
        self._wire.listen(self._on_message, self._on_broken)
        try:
            for rank in range(len(self._ranks)):
                await self._launch(rank)
            yield
        except BaseException:
            self._processes.kill_all()
            raise
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # one of them may be starting a process
            await self._processes.stop(self._dismiss)

    def kill_all(self) -> None:
        """End every process now; may be called on any thread."""
        self._processes.kill_all()

    def watch(self) -> None:
        """From now on look for ranks that hang."""
        self._begin(self._tick_forever())

    # --- what happens to a rank

    async def _launch(self, rank: int) -> None:
        state = self._ranks[rank]
        self._wire.expect(rank, state.num_launches)
        state.pulse.launched(now_ns())
        state.is_running = True
        await self._processes.start(self._launching.spec(rank, state.num_launches))
        state.num_launches += 1

    def _on_message(self, rank: int, message: FromRank) -> None:
        try:
            self._take_in(rank, message)
        except Exception:  # an error of ours says nothing about the engine
            self._metrics.num_delivery_errors += 1
            logger.exception("cannot process a %s of engine %d", type(message).__name__, rank)

    def _take_in(self, rank: int, message: FromRank) -> None:
        state, now = self._ranks[rank], now_ns()
        if isinstance(message, Ready) and not self._processes.is_running(rank):
            return  # the last words of a process that has ended
        state.pulse.heard(now)
        match message:
            case Heartbeat(num_steps):
                state.pulse.counted(num_steps, now)
            case Ready():
                state.was_ready = True
                state.pulse.ready(now)
                state.rule.ready(now)
        self._engines.on_message(rank, message)

    def _on_broken(self, rank: int) -> None:
        if self._ranks[rank].is_running:  # else its end is known already, and all that was to be done for it is done
            self._engines.set_trusted(rank, trusted=False)
            self._kill(rank, "one of its messages could not be read")

    def _kill(self, rank: int, why: str) -> None:
        self._ranks[rank].hung = f"killed: {why}"
        self._processes.signal(rank, signal.SIGKILL)

    def _on_exit(self, rank: int, how: str) -> None:
        state = self._ranks[rank]
        state.is_running = state.is_stalled = False
        how, state.hung = state.hung or how, ""
        cause = self._engines.on_exit(rank, how)
        if not state.was_ready:
            return
        delay_s = state.rule.ended(now_ns())
        if delay_s is None:
            self._give_up(rank, cause)
            return
        logger.error("engine %d ended: %s; it restarts in %g s", rank, cause, delay_s)
        self._begin(self._restart(rank, delay_s))

    async def _restart(self, rank: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self._metrics.engines[rank].num_restarts += 1
        try:
            await self._launch(rank)
        except OSError as error:
            self._on_exit(rank, f"its process could not be started: {error}")

    def _give_up(self, rank: int, cause: MoestroError) -> None:
        logger.error(
            "engine %d is not restarted: it ended %d times in a row before it was ready, the last time because: %s",
            rank, MAX_FAILED_STARTS, cause,
        )  # fmt: skip
        self._ranks[rank].is_given_up = True
        if all(state.is_given_up for state in self._ranks) and not self.over.done():
            self._engines.fail_homeless()
            self.over.set_exception(EngineDiedError(f"no engine is left; the last one ended because: {cause}"))

    def _dismiss(self, rank: int) -> None:
        """Ask a rank to leave; one that is not ready yet would not hear it, and has nothing to finish."""
        try:
            if self._ranks[rank].pulse.is_ready:
                self._wire.send(rank, Shutdown())
                return
        except NoEngineError:
            pass
        self._processes.signal(rank, signal.SIGKILL)

    # --- looking after them

    async def _tick_forever(self) -> None:
        pauses = PauseMeter(now_ns(), int(_LATE_TICK_S * 1e9))
        while True:
            await asyncio.sleep(_TICK_S)
            if pause_ns := pauses.tick(now_ns()):
                self._forgive(pause_ns)
            for rank, state in enumerate(self._ranks):
                if state.is_running:
                    self._look_at(rank, state)
            self._engines.settle_homeless()
            self._engines.retry_aborts()

    def _forgive(self, pause_ns: int) -> None:
        """This process stood still: engines and requests have as much time left as they had before."""
        if pause_ns >= NS_PER_S:
            logger.warning(
                "this process stood still for %.0f s; this time counts for no time limit of engines", pause_ns / 1e9
            )
        for state in self._ranks:
            state.pulse.paused(pause_ns, now_ns())
        self._engines.extend_homeless(pause_ns)

    def _look_at(self, rank: int, state: _Rank) -> None:
        verdict = state.pulse.judge(self._engines.num_in_flight_on(rank), now_ns())
        self._engines.set_trusted(rank, trusted=verdict is Verdict.FINE and not state.hung)
        if verdict is Verdict.HUNG and not state.hung:
            self._kill(rank, state.pulse.reason)
        if verdict is Verdict.STALLED and not state.is_stalled:
            self._metrics.engines[rank].num_stalls += 1
            logger.error("engine %d is out of rotation: %s; the stacks of its threads follow", rank, state.pulse.reason)
            self._processes.signal(rank, STACK_DUMP)
        if verdict is Verdict.FINE and state.is_stalled:
            logger.warning("engine %d makes steps again", rank)
        state.is_stalled = verdict is not Verdict.FINE

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the rest; its failure is a bug, and the server's end."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.over.done():
            self.over.set_exception(error)
