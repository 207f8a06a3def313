"""Retry budget: limits retries to a share of the traffic. Callers pass in the time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """Size of the retry budget.

    Attributes:
        share: retries earned per request.
        per_s: retries earned per second independent of traffic, so that low traffic can be retried too.
        burst: largest number of saved retries.
    """

    share: float = 0.2
    per_s: float = 3.0
    burst: float = 100.0


class RetryBudget:
    """Keeps retries from multiplying an overload.

    A retry after a response (the engine is busy, or failed the request) needs a grant. A request whose engine is gone
    is always sent again: the engine leaves rotation at once, which bounds the number of such requests. Such a retry is
    charged to the budget and leaves less for others.
    """

    def __init__(self, rules: RetryRules, now_ns: int) -> None:
        self._rules = rules
        self._saved = rules.burst
        self._then_ns = now_ns

    def request(self) -> None:
        """Earn the share of one new request."""
        self._saved = min(self._rules.burst, self._saved + self._rules.share)

    def grant(self, now_ns: int) -> bool:
        """Return whether a retry is granted, and deduct a granted retry from the budget."""
        self._refill(now_ns)
        if self._saved < 1:
            return False
        self._saved -= 1
        return True

    def charge(self, now_ns: int) -> None:
        """Deduct a retry that needed no grant. The budget never falls below 0."""
        self._refill(now_ns)
        self._saved = max(0.0, self._saved - 1)

    def _refill(self, now_ns: int) -> None:
        gained = (now_ns - self._then_ns) * 1e-9 * self._rules.per_s
        self._saved, self._then_ns = min(self._rules.burst, self._saved + gained), now_ns
