"""Judges ranks several times a second: which are silent, stalled or hung, and which start again after their end.

Liveness and restarts have no clock: callers pass the time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from moestro.config.launch_spec import STACK_DUMP
from moestro.core.clock import NS_PER_S
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.request_state import Metrics
from moestro.server.experts.coordinator import Coordinator
from moestro.web.ports.lifecycle import PauseMeter

logger = logging.getLogger(__name__)


# A rank is doubted only after a silence this many times as long as the longest between its last heartbeats. So an
# overloaded machine causes one false alarm, and not one after the other.
PATIENCE = 2
FORGETTING = 0.99  # by which each heartbeat shortens the longest silence that is remembered: by half in 69 of them


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessTimeouts:
    """Limits of a rank's liveness, in nanoseconds.

    Attributes:
        start_ns: Time from the launch of a process to its first `Ready`.
        doubt_ns: Time without a message after which others get the rank's work, if they can do it; longer while
            heartbeats come late (`PATIENCE`).
        idle_doubt_ns: The same for a rank that has nothing to do, whose heartbeats are seldom.
        silence_ns: Time without a message after which the rank counts as hung.
        stall_ns: Time with requests and without a step, after which a rank counts as stalled.
        step_ns: Time with requests and without a step, after which a rank counts as hung; longer than any step.
        silence_flag: Flag that sets `silence_ns`, for the reason.
    """

    start_ns: int
    doubt_ns: int
    silence_ns: int
    stall_ns: int
    step_ns: int
    silence_flag: str = "--engine-timeout"
    idle_doubt_ns: int = 0


class RankStatus(Enum):
    """Liveness of a rank."""

    FINE = auto()
    SILENT = auto()  # The rank may be stopped: it gets no new work that another one can do.
    STALLED = auto()  # The rank may recover: a long step looks the same.
    HUNG = auto()  # The supervisor kills the rank.


class Liveness:
    """Tracks the signs of life of one rank.

    Two threads of the rank send them. The communication thread sends heartbeats, independent of the main loop, so
    silence means that the whole process is stopped, or that the machine is overloaded. The main loop counts its steps.
    An unchanged count while there are requests means that nothing is computed, or that one step takes very long.

    Attributes:
        is_ready: Whether the current process accepts requests.
        reason: Reason for the last status that was not FINE.
    """

    def __init__(self, timeouts: LivenessTimeouts, now_ns: int) -> None:
        self._timeouts = timeouts
        self.reason = ""
        self.launched(now_ns)

    def launched(self, now_ns: int) -> None:
        """Reset the state for a new process."""
        self.is_ready = False
        self._launched_ns = self._message_ns = self._stepped_ns = self._beat_ns = now_ns
        self._num_steps = self._usual_silence_ns = 0
        self._is_idle = False

    def ready(self, now_ns: int) -> None:
        """Record that the rank accepts requests."""
        self.is_ready = True
        self._stepped_ns = self._beat_ns = now_ns
        self._usual_silence_ns = 0

    def on_message(self, now_ns: int) -> None:
        """Record that a message arrived."""
        self._message_ns = now_ns

    def counted(self, num_steps: int, now_ns: int, *, is_idle: bool = False) -> None:
        """Record a heartbeat, with the number of steps that the rank has begun.

        Args:
            is_idle: Whether the rank has nothing to do, so that its next heartbeat comes later.
        """
        remembered_ns = int(FORGETTING * self._usual_silence_ns)
        silence_ns = 0 if self._is_idle else now_ns - self._beat_ns  # an idle rank is silent on purpose
        self._usual_silence_ns, self._beat_ns, self._is_idle = max(silence_ns, remembered_ns), now_ns, is_idle
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._stepped_ns = now_ns

    def paused(self, pause_ns: int, now_ns: int) -> None:
        """Exclude the last `pause_ns`, in which the API server itself was stopped."""
        self._launched_ns = min(self._launched_ns + pause_ns, now_ns)
        self._beat_ns = min(self._beat_ns + pause_ns, now_ns)
        self._message_ns = min(self._message_ns + pause_ns, now_ns)
        self._stepped_ns = min(self._stepped_ns + pause_ns, now_ns)

    def silence_ns(self, now_ns: int) -> int:
        """Return the time since the last message, in nanoseconds."""
        return now_ns - self._message_ns

    def judge(self, num_in_flight: int, now_ns: int) -> RankStatus:
        """Return the status of a rank with `num_in_flight` requests."""
        if not self.is_ready:
            return self._judge_start(now_ns)
        if num_in_flight == 0:
            self._stepped_ns = now_ns  # There is nothing to compute.
        silence_ns, idle_ns = self.silence_ns(now_ns), now_ns - self._stepped_ns
        if silence_ns >= self._timeouts.silence_ns:
            digits = 0 if silence_ns >= NS_PER_S else 1
            self.reason = f"no message for {silence_ns / 1e9:.{digits}f} s ({self._timeouts.silence_flag})"
            return RankStatus.HUNG
        if idle_ns >= self._timeouts.stall_ns:
            self.reason = f"no step for {idle_ns / 1e9:.0f} s with {num_in_flight} requests"
        if idle_ns >= self._timeouts.step_ns:
            self.reason += " (--step-timeout)"
            return RankStatus.HUNG
        if idle_ns >= self._timeouts.stall_ns:
            return RankStatus.STALLED
        doubt_ns = max(self._timeouts.doubt_ns, PATIENCE * self._usual_silence_ns)
        if self._is_idle:
            doubt_ns = max(doubt_ns, self._timeouts.idle_doubt_ns)
        return RankStatus.SILENT if silence_ns >= doubt_ns else RankStatus.FINE

    def _judge_start(self, now_ns: int) -> RankStatus:
        if now_ns - self._launched_ns < self._timeouts.start_ns:
            return RankStatus.FINE
        self.reason = f"it was not ready within {self._timeouts.start_ns / 1e9:g} s (--startup-timeout)"
        return RankStatus.HUNG


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


FIRST_DELAY_S = 1.0
STATELESS_FIRST_DELAY_S = 0.25  # The same for workers without state: a quarter of the time that their start takes.
LAST_DELAY_S = 60.0
STEADY_S = 120.0  # Time of service after which the restart delay begins at its first value again.
STATELESS_STEADY_S = 2.0  # The same for workers without state, whose start takes about as long.
MAX_FAILED_STARTS = 5


class RestartRule:
    """Decides about the restarts of one rank.

    A rank that was ready always restarts. The delay doubles with every end, so that a rank which crashes at once cannot
    keep the machine busy. A rank that ends `MAX_FAILED_STARTS` times in a row before it is ready is not restarted,
    because the next start would end the same way.

    Args:
        keeps_state: whether the rank holds what cannot be sent again. A worker without state restarts at once, because
            requests wait for it: only if it ends soon after it was ready, the next start is delayed.
    """

    def __init__(self, *, keeps_state: bool = True) -> None:
        self._keeps_state = keeps_state
        self._ready_ns: int | None = None
        self._num_ends = 0  # Ends since the rank last served for `STEADY_S`.
        self._num_failed_starts = 0  # Failed starts in a row.

    def ready(self, now_ns: int) -> None:
        """Record that the rank accepts requests."""
        self._ready_ns = now_ns
        self._num_failed_starts = 0

    def ended(self, now_ns: int) -> float | None:
        """Return the delay before the next start, in seconds; None means no restart."""
        if self._ready_ns is None:
            self._num_failed_starts += 1
        elif now_ns - self._ready_ns >= self._steady_s * 1e9:
            self._num_ends = 0
        self._ready_ns = None
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            return None
        self._num_ends += 1
        if self._keeps_state:
            return min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._num_ends - 1))
        if self._num_ends == 1:
            return 0.0
        return min(LAST_DELAY_S, STATELESS_FIRST_DELAY_S * 2.0 ** (self._num_ends - 2))

    @property
    def _steady_s(self) -> float:
        return STEADY_S if self._keeps_state else STATELESS_STEADY_S
