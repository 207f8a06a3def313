"""Whether an engine should get requests: checks, answers, silence and the operator, in one verdict. No clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from moestro.routing.breaker import Breaker, BreakerRules, BreakerState

_RECENT_NS = 500_000_000


class Condition(StrEnum):
    """Why an engine gets requests, or does not; the first that holds, in this order."""

    DRAINING = "draining"  # the operator's wish
    UNCHECKED = "unchecked"  # no health check has passed yet
    DOWN = "down"  # health checks fail
    OPEN = "open"  # the breaker is open
    BUSY = "busy"  # it asked to be left alone for a while
    PROBING = "probing"  # the breaker lets one request through
    STALLED = "stalled"  # its queue grows and nothing comes out
    UP = "up"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRules:
    """How an engine is judged.

    Attributes:
        num_failed_checks: in a row, that take it out of rotation.
        stall_ns: without a sign of progress while its queue grows.
        slow_start_ns: in which an engine that comes back is brought up to its share.
        default_busy_ns: for an engine that says it is busy and not for how long.
        max_busy_ns: the longest that it is believed.
    """

    num_failed_checks: int = 2
    stall_ns: int = 30_000_000_000
    slow_start_ns: int = 30_000_000_000
    default_busy_ns: int = 500_000_000
    max_busy_ns: int = 60_000_000_000
    breaker: BreakerRules = field(default_factory=BreakerRules)


class Health:
    """One engine's.

    Attributes:
        breaker: what its answers say.
        is_draining: the operator wants no new requests on it; set freely.
    """

    def __init__(self, rules: HealthRules, now_ns: int) -> None:
        self._rules = rules
        self.breaker = Breaker(rules.breaker)
        self.is_draining = False
        self._num_failed_checks: int | None = None  # in a row; None: never checked
        self._busy_until_ns = now_ns
        self._heard_ns: int | None = None  # when anything came out of it
        self._progress_ns = now_ns  # the same, or when it last had nothing to do
        self._num_at_progress = 0
        self._counter: float | None = None  # of tokens, as the engine reported it last
        self._counter_ns = now_ns
        self._was_up = False
        self._returned_ns: int | None = None

    def checked(self, now_ns: int, *, passed: bool) -> None:
        """A health check was answered, well or not, or was not.

        A check that fails while answers flow says only that the engine is too busy for checks.
        """
        if passed:
            self._num_failed_checks = 0
            self.breaker.check_passed(now_ns)
        elif self._num_failed_checks is not None and (self._heard_ns is None or now_ns - self._heard_ns >= _RECENT_NS):
            self._num_failed_checks += 1

    def busy(self, for_ns: int | None, now_ns: int) -> None:
        """It refused a request and asked for `for_ns` of peace; None: it did not say."""
        wanted = self._rules.default_busy_ns if for_ns is None else min(for_ns, self._rules.max_busy_ns)
        self._busy_until_ns = max(self._busy_until_ns, now_ns + wanted)

    def progressed(self, num_in_flight: int, now_ns: int) -> None:
        """Something came out of it, while it had `num_in_flight` requests of ours."""
        self._heard_ns = self._progress_ns = now_ns
        self._num_at_progress = num_in_flight

    def counted(self, num_tokens: float, num_in_flight: int, now_ns: int) -> None:
        """It reported how many tokens it has computed since its start."""
        if num_tokens != self._counter:
            self.progressed(num_in_flight, now_ns)
        self._counter, self._counter_ns = num_tokens, now_ns

    def paused(self, pause_ns: int, now_ns: int) -> None:
        """The router itself stood still for `pause_ns` until now: that time says nothing about the engine."""
        self._progress_ns = min(self._progress_ns + pause_ns, now_ns)
        self._counter_ns = min(self._counter_ns + pause_ns, now_ns)

    def condition(self, num_in_flight: int, num_streaming: int, now_ns: int) -> Condition:
        """The verdict on an engine with `num_in_flight` requests, `num_streaming` of which have begun to answer."""
        found = self._condition(num_in_flight, num_streaming, now_ns)
        if found is Condition.UP:
            if not self._was_up and self._returned_ns is None:
                self._returned_ns = now_ns - self._rules.slow_start_ns  # the first start of all is not slow
            elif not self._was_up:
                self._returned_ns = now_ns
            self._was_up = True
        elif found is not Condition.BUSY:  # its cache and its processes are as they were
            self._was_up = False
        return found

    def share(self, now_ns: int) -> float:
        """How much of its share an engine that is up should get: grows from 0 to 1 after it came back."""
        if self._returned_ns is None or not self._rules.slow_start_ns:
            return 1.0
        return min(1.0, (now_ns - self._returned_ns) / self._rules.slow_start_ns)

    def wait_ns(self, now_ns: int) -> int | None:
        """Nanoseconds until it may take requests again by the passing of time alone; None: that is not foreseeable."""
        if self.is_draining or self._num_failed_checks is None or self._is_down:
            return None
        return max(self.breaker.opens_in_ns(now_ns), self._busy_until_ns - now_ns, 0)

    @property
    def _is_down(self) -> bool:
        return (self._num_failed_checks or 0) >= self._rules.num_failed_checks

    def _condition(self, num_in_flight: int, num_streaming: int, now_ns: int) -> Condition:
        if self.is_draining:
            return Condition.DRAINING
        if self._num_failed_checks is None:
            return Condition.UNCHECKED
        if self._is_down:
            return Condition.DOWN
        return self._condition_by_answers(num_in_flight, num_streaming, now_ns)

    def _condition_by_answers(self, num_in_flight: int, num_streaming: int, now_ns: int) -> Condition:
        state = self.breaker.state(now_ns)
        if state is BreakerState.OPEN:
            return Condition.OPEN
        if now_ns < self._busy_until_ns:
            return Condition.BUSY
        if state is BreakerState.PROBING:
            return Condition.PROBING
        return Condition.STALLED if self._is_stalled(num_in_flight, num_streaming, now_ns) else Condition.UP

    def _is_stalled(self, num_in_flight: int, num_streaming: int, now_ns: int) -> bool:
        """Whole answers say nothing until they are complete: silence counts only where something should be heard."""
        if num_in_flight == 0:
            self._progress_ns, self._num_at_progress = now_ns, 0
            return False
        stall_ns = self._rules.stall_ns
        is_audible = num_streaming > 0 or (self._counter is not None and now_ns - self._counter_ns < stall_ns)
        return is_audible and num_in_flight > self._num_at_progress and now_ns - self._progress_ns >= stall_ns
