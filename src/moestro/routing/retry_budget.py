"""How many requests may be sent a second time: a share of the traffic. No clock: the time is handed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """The budget.

    Attributes:
        share: retries for each request, in the long run.
        per_s: retries a second that are free of it, so that little traffic can be retried too.
        burst: retries that can be saved up.
    """

    share: float = 0.2
    per_s: float = 3.0
    burst: float = 100.0


class RetryBudget:
    """Keeps retries from multiplying an overload.

    A retry of an answer (the engine is busy, or failed at it) must be granted. A request whose engine is gone is
    always sent on, for the engine is taken out of rotation at once and what was on it is bounded; it is `charged`, so
    that less is left for the others.
    """

    def __init__(self, rules: RetryRules, now_ns: int) -> None:
        self._rules = rules
        self._saved = rules.burst
        self._then_ns = now_ns

    def request(self) -> None:
        """A request came."""
        self._saved = min(self._rules.burst, self._saved + self._rules.share)

    def grant(self, now_ns: int) -> bool:
        """Whether one retry is granted; it is paid for by that."""
        self._refill(now_ns)
        if self._saved < 1:
            return False
        self._saved -= 1
        return True

    def charge(self, now_ns: int) -> None:
        """One retry that nobody asked about; the budget never falls below nothing."""
        self._refill(now_ns)
        self._saved = max(0.0, self._saved - 1)

    def _refill(self, now_ns: int) -> None:
        gained = (now_ns - self._then_ns) * 1e-9 * self._rules.per_s
        self._saved, self._then_ns = min(self._rules.burst, self._saved + gained), now_ns
