"""Circuit breaker of one engine: when it opens and how the engine is probed again. Callers pass in the time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """States of a breaker, by the requests that it admits."""

    CLOSED = "closed"  # all requests
    OPEN = "open"  # no request
    PROBING = "probing"  # one request at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRules:
    """When a breaker opens, and for how long.

    Attributes:
        num_in_row: consecutive failures that open the breaker.
        window: number of remembered outcomes, at least twice `num_in_row`. A full window with at least half failures
            opens the breaker too.
        open_ns: duration of the first opening, ns. Each further opening lasts twice as long, up to `max_open_ns`.
    """

    num_in_row: int = 5
    window: int = 20
    open_ns: int = 1_000_000_000
    max_open_ns: int = 60_000_000_000


class Breaker:
    """The circuit breaker of one engine.

    Only evidence against the engine counts as a failure: a failed or broken connection, a 5xx, a time limit. A 4xx is
    evidence against the request and counts as a success. (Routers that counted 4xx as failures lost whole fleets to one
    client's bad requests.) Outcomes of requests sent before an opening say nothing about a probe, so `sent` returns a
    mark that the caller passes back with the outcome.
    """

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._row = (1 << rules.num_in_row) - 1
        self._window = max(rules.window, 2 * rules.num_in_row)  # half of it is never below `num_in_row` failures
        self._seen = (1 << self._window) - 1
        self._outcomes = 0  # one bit per outcome, the latest lowest; 1 is a failure
        self._num_outcomes = 0
        self._open_until_ns: int | None = None  # None means closed
        self._closed_ns: int | None = None
        self._num_opens = 0  # openings since the breaker last stayed closed for `max_open_ns`
        self._probe: int | None = None
        self._serial = 0

    def state(self, now_ns: int) -> BreakerState:
        """Return the breaker's state at `now_ns`."""
        if self._open_until_ns is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_ns < self._open_until_ns else BreakerState.PROBING

    def admits(self, now_ns: int) -> bool:
        """Return whether a request may be sent to the engine now."""
        if self._open_until_ns is None:
            return True
        return self._probe is None and now_ns >= self._open_until_ns

    def opens_in_ns(self, now_ns: int) -> int:
        """Nanoseconds until the breaker admits a probe; 0 if it admits requests now."""
        return 0 if self._open_until_ns is None else max(0, self._open_until_ns - now_ns)

    def sent(self) -> int:
        """Record that a request is sent to the engine.

        Returns:
            The mark to pass back with the request's outcome.
        """
        self._serial += 1
        if self._open_until_ns is not None and self._probe is None:
            self._probe = self._serial
        return self._serial

    def succeeded(self, mark: int, now_ns: int) -> None:
        """Record a success: the engine sent a response other than a 5xx."""
        if self._open_until_ns is None:
            self._note(0)
        elif mark == self._probe:
            self._open_until_ns = self._probe = None
            self._closed_ns = now_ns
            self._outcomes = self._num_outcomes = 0

    def failed(self, mark: int, now_ns: int, *, at_once: bool = False) -> None:
        """Record a failure. `at_once` opens the breaker immediately, for an engine that cannot be reached."""
        if self._open_until_ns is None:
            self._note(1)
            if at_once or self._is_enough():
                self._open(now_ns)
        elif mark == self._probe:
            self._open(now_ns)

    def abandoned(self, mark: int) -> None:
        """Record that a request ended without an outcome, because its client disconnected."""
        if mark == self._probe:
            self._probe = None

    def check_passed(self, now_ns: int) -> None:
        """Record a passed health check, after which an open breaker admits a probe at once."""
        if self._open_until_ns is not None:
            self._open_until_ns = min(self._open_until_ns, now_ns)

    def _note(self, failure: int) -> None:
        self._outcomes = (self._outcomes << 1 | failure) & self._seen
        self._num_outcomes += 1

    def _is_enough(self) -> bool:
        if self._outcomes & self._row == self._row:
            return True
        return self._num_outcomes >= self._window and 2 * self._outcomes.bit_count() >= self._window

    def _open(self, now_ns: int) -> None:
        rules = self._rules
        if self._closed_ns is not None and now_ns - self._closed_ns >= rules.max_open_ns:
            self._num_opens = 0  # a long closed period resets the back-off
        self._probe = None
        self._open_until_ns = now_ns + min(rules.max_open_ns, rules.open_ns << min(self._num_opens, 30))
        self._num_opens += 1
