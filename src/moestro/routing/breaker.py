"""When an engine that fails gets no more requests, and how it is tried again. No clock: the time is handed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing
    PROBING = "probing"  # one request at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRules:
    """When to open, and for how long.

    Attributes:
        num_in_row: failures in a row that open it.
        window: outcomes that are remembered, at least twice `num_in_row`; half of them failures open it too, once there
            are as many.
        open_ns: of the first opening; each one after it lasts twice as long, up to `max_open_ns`.
    """

    num_in_row: int = 5
    window: int = 20
    open_ns: int = 1_000_000_000
    max_open_ns: int = 60_000_000_000


class Breaker:
    """The breaker of one engine.

    Only what speaks against the engine is a failure: a connection that cannot be made or breaks, a 5xx, a time limit.
    A 4xx speaks against the request: it is a success. (Routers that counted it were opened, and whole fleets with
    them, by one client's bad requests.) Outcomes of requests that were sent before an opening say nothing about a
    probe, so `sent` hands out a mark that comes back with the outcome.
    """

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._row = (1 << rules.num_in_row) - 1
        self._window = max(rules.window, 2 * rules.num_in_row)  # fewer failures than `num_in_row` are never half
        self._seen = (1 << self._window) - 1
        self._outcomes = 0  # bits, the last outcome lowest; 1: failure
        self._num_outcomes = 0
        self._open_until_ns: int | None = None  # None: closed
        self._closed_ns: int | None = None
        self._num_opens = 0  # since it was last closed for long
        self._probe: int | None = None
        self._serial = 0

    def state(self, now_ns: int) -> BreakerState:
        """The state at `now_ns`."""
        if self._open_until_ns is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_ns < self._open_until_ns else BreakerState.PROBING

    def admits(self, now_ns: int) -> bool:
        """Whether a request may be sent now."""
        if self._open_until_ns is None:
            return True
        return self._probe is None and now_ns >= self._open_until_ns

    def opens_in_ns(self, now_ns: int) -> int:
        """Nanoseconds until it lets a probe through; 0 where it lets anything through."""
        return 0 if self._open_until_ns is None else max(0, self._open_until_ns - now_ns)

    def sent(self) -> int:
        """A request goes to the engine.

        Returns:
            The mark to give back with its outcome.
        """
        self._serial += 1
        if self._open_until_ns is not None and self._probe is None:
            self._probe = self._serial
        return self._serial

    def succeeded(self, mark: int, now_ns: int) -> None:
        """The engine answered, whatever the answer was, as long as it was no 5xx."""
        if self._open_until_ns is None:
            self._note(0)
        elif mark == self._probe:
            self._open_until_ns = self._probe = None
            self._closed_ns = now_ns
            self._outcomes = self._num_outcomes = 0

    def failed(self, mark: int, now_ns: int, *, at_once: bool = False) -> None:
        """The engine failed a request; `at_once`: there is nothing to wait for, it cannot be reached."""
        if self._open_until_ns is None:
            self._note(1)
            if at_once or self._is_enough():
                self._open(now_ns)
        elif mark == self._probe:
            self._open(now_ns)

    def abandoned(self, mark: int) -> None:
        """The request ended without an outcome: its client left."""
        if mark == self._probe:
            self._probe = None

    def check_passed(self, now_ns: int) -> None:
        """The engine answered a health check: an open breaker need not wait longer for its probe."""
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
            self._num_opens = 0  # it has earned a fresh start
        self._probe = None
        self._open_until_ns = now_ns + min(rules.max_open_ns, rules.open_ns << min(self._num_opens, 30))
        self._num_opens += 1
