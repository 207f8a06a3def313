"""Looks at all ranks several times a second: which are silent, stalled or hung, and what follows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moestro.config.launch_spec import STACK_DUMP
from moestro.core.clock import NS_PER_S
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.metrics import Metrics
from moestro.server.experts.coordinator import Coordinator
from moestro.server.processes.liveness import Liveness, LivenessTimeouts, RankStatus
from moestro.web.ports.lifecycle import PauseMeter

logger = logging.getLogger(__name__)

# Between looks at the ranks. Each wakes the API server, which takes 0.05 to 0.2 ms; so where no worker has to replace
# another at once, there are two looks between heartbeats of an engine.
TICK_S, ENGINE_TICK_S = 0.05, 0.125
_LATE_S = 0.15  # A tick that comes later by more than this means that this process was stopped.
_LOGGED_PAUSE_NS = NS_PER_S
# Silence after which an engine that a signal has stopped is killed, if others can take its requests. Between a Ctrl-Z
# and its end, the API server is stopped too, and that time does not count.
STOPPED_NS = NS_PER_S
_SILENT = (RankStatus.SILENT, RankStatus.HUNG)


class RankState:
    """Supervised state of one rank: an engine, or a worker without attention, which comes after all engines.

    Attributes:
        owes: Whether it has something to do, and waits for no other.
        is_running: Whether its process runs.
        is_stalled: Whether the log has named it stalled.
        status: Status at the last look.
        why_killed: Reason for which the supervisor killed its process; "" means that it did not.
    """

    def __init__(self, timeouts: LivenessTimeouts, now_ns: int, *, is_engine: bool) -> None:
        self.is_engine = is_engine
        self.liveness = Liveness(timeouts, now_ns)
        self.owes = True
        self.is_running = self.is_stalled = False
        self.status = RankStatus.FINE
        self.why_killed = ""

    def launched(self, now_ns: int) -> None:
        """Reset the state for a new process."""
        self.liveness.launched(now_ns)
        self.is_running, self.status, self.why_killed = True, RankStatus.FINE, ""

    def ended(self) -> None:
        """Note that the process has ended."""
        self.is_running = self.is_stalled = False


@dataclass(frozen=True, slots=True)
class RankControl:
    """What the watchdog can do with ranks.

    Attributes:
        name: Returns a rank's name for the log.
        kill: Kills a rank's process, for a reason.
        signal: Sends a signal to a rank's process.
        is_stopped: Whether a signal has stopped an engine's process for certain, and its end would end no other one.
    """

    name: Callable[[int], str]
    kill: Callable[[int, str], None]
    signal: Callable[[int, int], None]
    is_stopped: Callable[[int], bool]


class Watchdog:
    """Takes silent and stalled ranks out of use, and kills hung ones.

    Every verdict of silence needs two looks: at the first, messages of the rank may be unread.

    Args:
        ranks: State of each rank.
        engines: Client, which routes requests around an engine that is not fine.
        coordinator: Group of workers, which sends the tokens of a silent worker to copies; None means no group.
        metrics: Counters of stalls.
        control: Names, kills and signals ranks.

    Attributes:
        tick_s: Seconds between calls of `tick`.
    """

    def __init__(
        self,
        ranks: Sequence[RankState],
        engines: EngineClient,
        coordinator: Coordinator | None,
        metrics: Metrics,
        control: RankControl,
    ) -> None:
        self._ranks, self._engines, self._coordinator = ranks, engines, coordinator
        self._metrics, self._control = metrics, control
        self._pauses: PauseMeter | None = None
        self.tick_s = ENGINE_TICK_S if coordinator is None else TICK_S

    def tick(self, now_ns: int) -> None:
        """Look at all ranks, about every `tick_s`."""
        if self._pauses is None:
            self._pauses = PauseMeter(now_ns, int((self.tick_s + _LATE_S) * NS_PER_S))
        if pause_ns := self._pauses.tick(now_ns):
            self._forgive(pause_ns, now_ns)
        for rank, state in enumerate(self._ranks):
            if state.is_running:
                self.look_at(rank, state, now_ns)

    def _forgive(self, pause_ns: int, now_ns: int) -> None:
        """Exclude a time in which this process was stopped from the timeouts of ranks and unassigned requests."""
        if pause_ns >= _LOGGED_PAUSE_NS:
            logger.warning(
                "this process was stopped for %.0f s; the engines' timeouts exclude that time", pause_ns / NS_PER_S
            )
        for state in self._ranks:
            state.liveness.paused(pause_ns, now_ns)
        self._engines.extend_unassigned(pause_ns)

    def look_at(self, rank: int, state: RankState, now_ns: int) -> None:
        """Judge one rank that runs, and act on it."""
        # A worker that waits for others owes nothing; those that it waits for do.
        num_owed = (self._engines.num_in_flight_on(rank) if state.is_engine else 1) if state.owes else 0
        before, state.status = state.status, state.liveness.judge(num_owed, now_ns)
        is_silent = state.status in _SILENT and before in _SILENT
        if state.is_engine:
            self._engines.set_trusted(rank, trusted=self._may_get_requests(rank, state, is_silent=is_silent))
        if self._coordinator is not None:
            self._coordinator.doubt(rank, is_silent=is_silent)
        if state.status is before is RankStatus.HUNG and not state.why_killed:
            self._control.kill(rank, state.liveness.reason)
        elif is_silent and self._stands_still(rank, state, now_ns):
            self._control.kill(rank, "stopped by a signal, while other engines can take its requests")
        self._log_stall(rank, state)

    def _may_get_requests(self, rank: int, state: RankState, *, is_silent: bool) -> bool:
        """Whether to route requests to an engine. One that is merely silent keeps them if it is the last one."""
        if state.why_killed or state.status is RankStatus.STALLED:
            return False
        return not is_silent or not self._has_others(rank)

    def _has_others(self, rank: int) -> bool:
        """Whether another engine takes requests."""
        others = (other for other, each in enumerate(self._ranks) if each.is_engine and other != rank)
        return any(self._engines.is_routable(other) for other in others)

    def _stands_still(self, rank: int, state: RankState, now_ns: int) -> bool:
        """Whether a signal has stopped an engine, whose requests need not wait for it.

        A step of any length, a device that does not answer and a busy machine are no signal. The last engine is left to
        `--engine-timeout`: nothing is gained by its end.
        """
        if not state.is_engine or state.why_killed or state.liveness.silence_ns(now_ns) < STOPPED_NS:
            return False
        return self._has_others(rank) and self._control.is_stopped(rank)

    def _log_stall(self, rank: int, state: RankState) -> None:
        if state.status is RankStatus.STALLED and not state.is_stalled:
            if state.is_engine:
                self._metrics.engines[rank].num_stalls += 1
            logger.error(
                "%s is out of rotation: %s; the stacks of its threads follow",
                self._control.name(rank), state.liveness.reason,
            )  # fmt: skip
            self._control.signal(rank, STACK_DUMP)
        if state.status is RankStatus.FINE and state.is_stalled:
            logger.warning("%s makes progress again", self._control.name(rank))
        # One late message is no stall, and the log has not named it one.
        state.is_stalled = state.status is RankStatus.STALLED or (state.is_stalled and state.status in _SILENT)
