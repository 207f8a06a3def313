"""Retry budget: limits retries to a share of the traffic, of all clients and of each. Callers pass in the time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

_MAX_CLIENTS = 1024  # Clients whose used retries are counted; of more, the one that used least is forgotten.


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
    """Keeps retries from multiplying an overload, and clients from using up the retries of the others.

    A retry after a response (the engine is busy, or failed the request) needs a grant. A request whose engine is gone
    is always sent again: the engine leaves rotation at once, which bounds the number of such requests. Such a retry is
    charged to the budget and leaves less for others.

    A client may have used at most as many retries as are left: one client uses half of them, two a third each. What
    clients have used is forgotten as the budget gains: an equal part of its rate for each of them, and the share of
    each client's own requests.
    """

    def __init__(self, rules: RetryRules, now_ns: int) -> None:
        self._rules = rules
        self._num_left, self._then_ns = rules.burst, now_ns
        self._used: dict[Hashable, float] = {}  # Above 0, by client.

    def request(self, client: Hashable) -> None:
        """Earn the share of one new request of `client`."""
        self._num_left = min(self._rules.burst, self._num_left + self._rules.share)
        if client in self._used:
            self._forget(client, self._rules.share)

    def grant(self, client: Hashable, now_ns: int) -> bool:
        """Return whether `client` is granted a retry, and deduct a granted retry from the budget."""
        self._refill(now_ns)
        used = self._used.get(client, 0.0) + 1
        if used > self._num_left:
            return False
        self._num_left -= 1
        self._used[client] = used
        if len(self._used) > _MAX_CLIENTS:
            del self._used[min(self._used, key=self._used.__getitem__)]
        return True

    def charge(self, client: Hashable, now_ns: int) -> None:
        """Deduct a retry of `client` that needed no grant, but never more than it could have been granted."""
        self.grant(client, now_ns)

    def _refill(self, now_ns: int) -> None:
        gained = (now_ns - self._then_ns) * 1e-9 * self._rules.per_s
        self._num_left, self._then_ns = min(self._rules.burst, self._num_left + gained), now_ns
        if self._used and gained:
            part = gained / len(self._used)
            for client in list(self._used):
                self._forget(client, part)

    def _forget(self, client: Hashable, num: float) -> None:
        self._used[client] -= num
        if self._used[client] <= 0:
            del self._used[client]
