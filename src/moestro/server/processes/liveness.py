"""Judges from a rank's messages whether it is alive and makes progress. Has no clock: callers pass the time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from moestro.core.clock import NS_PER_S

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
