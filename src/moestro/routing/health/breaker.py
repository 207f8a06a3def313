"""Circuit breaker of one engine: when it opens and how the engine is probed again. Callers pass in the time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moestro.routing.health.evidence import Evidence, Origin

_NEVER_NS = 1 << 62
_MAX_DOUBLINGS = 30  # Keeps the shifted number small; `max_open_ns` is reached long before.


class BreakerState(StrEnum):
    """States of a breaker, by the requests that it admits."""

    CLOSED = "closed"  # all requests
    OPEN = "open"  # no request
    PROBING = "probing"  # requests again, but few where other engines can take them; the first success closes it


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRules:
    """When a breaker opens, and for how long.

    Attributes:
        num_witnesses: failed requests, pairwise of different clients and with different bodies, that open the breaker
            if none succeeds between them. At least 2, so that no client opens it alone.
        num_in_probe: the same while the breaker is probing: fewer, because the failure is known.
        silence_ns: time without a success that must have passed since the first of these failures, ns. So the requests
            of other clients have time to succeed, whatever the number and speed of those that fail.
        open_ns: duration of the first opening, ns. Each further opening lasts twice as long, up to `max_open_ns`.
    """

    num_witnesses: int = 3
    num_in_probe: int = 2
    silence_ns: int = 1_000_000_000
    open_ns: int = 1_000_000_000
    max_open_ns: int = 60_000_000_000


class BackOff:
    """Durations that double from one failure to the next, until none has happened for the longest of them.

    Args:
        first_ns, longest_ns: bounds of the durations, ns.
    """

    def __init__(self, first_ns: int, longest_ns: int) -> None:
        self._first_ns = first_ns
        self._longest_ns = longest_ns
        self._num_failures = 0
        self._ended_ns: int | None = None  # None means that no failure has ended.

    def next_ns(self, now_ns: int) -> int:
        """Return the duration after a failure at `now_ns`."""
        if self._ended_ns is not None and now_ns - self._ended_ns >= self._longest_ns:
            self._num_failures = 0
        self._num_failures += 1
        return min(self._longest_ns, self._first_ns << min(self._num_failures - 1, _MAX_DOUBLINGS))

    def end(self, now_ns: int) -> None:
        """Record that the failure is over."""
        self._ended_ns = now_ns


class Breaker:
    """The circuit breaker of one engine.

    An engine that cannot be reached is out at once, until a health check passes: no request causes a refused
    connection. Every other failure (a 5xx, a cut answer, a time limit) may be the request's own, so it counts only as
    `Evidence`, and health checks, which pass meanwhile, do not end such an opening. A 4xx is the request's own.
    """

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._evidence = Evidence(rules.num_witnesses)
        self._open_until_ns: int | None = None  # None means closed; `_NEVER_NS` waits for a passed health check.
        self._back_off = BackOff(rules.open_ns, rules.max_open_ns)

    def state(self, now_ns: int) -> BreakerState:
        """Return the breaker's state at `now_ns`."""
        if self._open_until_ns is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_ns < self._open_until_ns else BreakerState.PROBING

    def opens_in_ns(self, now_ns: int) -> int:
        """Nanoseconds until the breaker admits requests, as far as known; 0 if it admits requests now."""
        if self._open_until_ns is None:
            return 0
        return self._rules.open_ns if self._open_until_ns == _NEVER_NS else max(0, self._open_until_ns - now_ns)

    def is_in_doubt(self, now_ns: int) -> bool:
        """Return whether other engines are better: it is probing, or requests fail and none has succeeded for long."""
        if self._open_until_ns is not None:
            return True
        is_failing = self._evidence.num_failures >= self._rules.num_witnesses
        return is_failing and self._evidence.age_ns(now_ns) >= self._rules.silence_ns

    def succeeded(self, sent_ns: int, now_ns: int) -> None:
        """Record that the engine has answered a request of `sent_ns` with a success."""
        if self._open_until_ns is None:
            self._evidence.clear()
        elif self._is_probe(sent_ns, now_ns):
            self._evidence.clear()
            self._open_until_ns = None
            self._back_off.end(now_ns)

    def streamed(self) -> None:
        """Record output of an answer that began earlier. It speaks for a closed breaker, but does not close one."""
        if self._open_until_ns is None:
            self._evidence.clear()

    def failed(self, origin: Origin, sent_ns: int, now_ns: int) -> None:
        """Record the failure of a request of `sent_ns`, which may be the request's own."""
        is_probe = self._is_probe(sent_ns, now_ns)
        if self._open_until_ns is not None and not is_probe:
            return  # A request from before the opening says nothing new.
        rules, evidence = self._rules, self._evidence
        evidence.failed(origin, now_ns)
        num_needed, silence_ns = (rules.num_in_probe, 0) if is_probe else (rules.num_witnesses, rules.silence_ns)
        if evidence.num_witnesses >= num_needed and evidence.age_ns(now_ns) >= silence_ns:
            self._open(now_ns)

    def unreachable(self, now_ns: int) -> None:
        """Record that no connection to the engine can be made: the breaker is open until a health check passes."""
        self._evidence.clear()  # What answered before is gone.
        self._open_until_ns = _NEVER_NS

    def check_passed(self, now_ns: int) -> None:
        """Record a passed health check, after which an engine that could not be reached gets requests."""
        if self._open_until_ns == _NEVER_NS:
            self._open_until_ns = now_ns

    def _is_probe(self, sent_ns: int, now_ns: int) -> bool:
        """Return whether a request was sent while the breaker was probing."""
        return self._open_until_ns is not None and self._open_until_ns <= sent_ns <= now_ns

    def _open(self, now_ns: int) -> None:
        self._evidence.clear()
        self._open_until_ns = now_ns + self._back_off.next_ns(now_ns)
