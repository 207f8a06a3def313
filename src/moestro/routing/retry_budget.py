"""Retry budget: limits retries to a share of the traffic, of all clients and of each. Callers pass in the time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from moestro.core.client_table import ClientTable

_CLIENT_PART = 0.25  # Part of the rate and of the burst that each client has for itself.
_OPEN_PART = 0.5  # Part of the burst above which any client gets retries.


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
    """Keeps retries from multiplying an overload, and one client from using up the retries of the others.

    A retry after a response (the engine is busy, or failed the request) needs a grant. A request whose engine is gone
    is always sent again: the engine leaves rotation at once, which bounds the number of such requests. Such a retry is
    charged to the budget and leaves less for others.

    While more than half of the burst is saved, any client gets retries. The other half is divided: each client has a
    budget of its own too, which earns the share of the client's own requests and a quarter of the rate and burst. One
    client alone therefore never uses up what is left, which earns the same share and all of the rate.
    """

    def __init__(self, rules: RetryRules, now_ns: int) -> None:
        self._rules = rules
        self._all = _Bucket(rules.burst, now_ns)
        self._client_rules = replace(rules, per_s=rules.per_s * _CLIENT_PART, burst=rules.burst * _CLIENT_PART)
        self._of_client = ClientTable(lambda: _Bucket(self._client_rules.burst, 0))

    def request(self, client: Hashable) -> None:
        """Earn the share of one new request of `client`."""
        self._all.earn(self._rules)
        self._of_client[client].earn(self._client_rules)

    def grant(self, client: Hashable, now_ns: int) -> bool:
        """Return whether `client` is granted a retry, and deduct a granted retry from the budget."""
        common, own = self._all, self._of_client[client]
        common.refill(self._rules, now_ns)
        own.refill(self._client_rules, now_ns)
        is_open = common.saved - 1 >= self._rules.burst * _OPEN_PART
        if common.saved < 1 or (own.saved < 1 and not is_open):
            return False
        common.saved -= 1
        if not is_open:
            own.saved -= 1
        return True

    def charge(self, client: Hashable, now_ns: int) -> None:
        """Deduct a retry of `client` that needed no grant, but never more than it could have been granted."""
        self.grant(client, now_ns)


class _Bucket:
    """Saved retries."""

    __slots__ = ("saved", "then_ns")

    def __init__(self, saved: float, now_ns: int) -> None:
        self.saved = saved
        self.then_ns = now_ns

    def earn(self, rules: RetryRules) -> None:
        self.saved = min(rules.burst, self.saved + rules.share)

    def refill(self, rules: RetryRules, now_ns: int) -> None:
        gained = (now_ns - self.then_ns) * 1e-9 * rules.per_s
        self.saved, self.then_ns = min(rules.burst, self.saved + gained), now_ns
