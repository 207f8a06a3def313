"""Whether a rank lives and gets on, judged from what was heard of it. No clock: the time is handed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long, in nanoseconds.

    Attributes:
        start_ns: from the launch of a process to its first `Ready`.
        silence_ns: without any message, although the communication thread sends one twice a second.
        stall_ns: with requests and without a step, until the operator is told.
        step_ns: with requests and without a step, until the rank is taken for hung: longer than any step may take.
    """

    start_ns: int
    silence_ns: int
    stall_ns: int
    step_ns: int


class Verdict(Enum):
    """What to think of a rank."""

    FINE = auto()
    STALLED = auto()  # it may come back: a step that takes long looks the same
    HUNG = auto()  # as good as dead


class Pulse:
    """The signs of life of one rank.

    Two threads give them. The communication thread speaks twice a second whatever the main loop does, so silence means
    that the whole process stands still. The main loop counts its steps, so a count that stands still while requests are
    there means that nothing is computed, or that one step takes very long; only time tells these two apart.

    Attributes:
        is_ready: the process that runs now takes requests.
        reason: of the last verdict that was not FINE.
    """

    def __init__(self, patience: Patience, now_ns: int) -> None:
        self._patience = patience
        self.reason = ""
        self.launched(now_ns)

    def launched(self, now_ns: int) -> None:
        """A new process was started."""
        self.is_ready = False
        self._launched_ns = self._heard_ns = self._stepped_ns = now_ns
        self._num_steps = 0

    def ready(self, now_ns: int) -> None:
        """It takes requests from now on."""
        self.is_ready = True
        self._stepped_ns = now_ns

    def heard(self, now_ns: int) -> None:
        """Any message came."""
        self._heard_ns = now_ns

    def counted(self, num_steps: int, now_ns: int) -> None:
        """The rank said how many steps it has begun."""
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._stepped_ns = now_ns

    def paused(self, pause_ns: int, now_ns: int) -> None:
        """The API server itself stood still for `pause_ns` until now: that time says nothing about the rank."""
        self._launched_ns = min(self._launched_ns + pause_ns, now_ns)
        self._heard_ns = min(self._heard_ns + pause_ns, now_ns)
        self._stepped_ns = min(self._stepped_ns + pause_ns, now_ns)

    def judge(self, num_in_flight: int, now_ns: int) -> Verdict:
        """The verdict for a rank with `num_in_flight` requests."""
        if not self.is_ready:
            return self._judge_start(now_ns)
        if num_in_flight == 0:
            self._stepped_ns = now_ns  # it has nothing to get on with
        silence_ns, idle_ns = now_ns - self._heard_ns, now_ns - self._stepped_ns
        if silence_ns >= self._patience.silence_ns:
            self.reason = f"no message for {silence_ns / 1e9:.0f} s (--engine-timeout)"
            return Verdict.HUNG
        if idle_ns >= self._patience.stall_ns:
            self.reason = f"no step for {idle_ns / 1e9:.0f} s with {num_in_flight} requests"
        if idle_ns >= self._patience.step_ns:
            self.reason += " (--step-timeout)"
            return Verdict.HUNG
        return Verdict.STALLED if idle_ns >= self._patience.stall_ns else Verdict.FINE

    def _judge_start(self, now_ns: int) -> Verdict:
        if now_ns - self._launched_ns < self._patience.start_ns:
            return Verdict.FINE
        self.reason = f"it was not ready within {self._patience.start_ns / 1e9:g} s (--startup-timeout)"
        return Verdict.HUNG
