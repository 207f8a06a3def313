"""Counts of refused requests: by error code, and by who has to act."""

from __future__ import annotations

from collections import Counter

from moestro.errors import RequestError

_OVERLOAD = frozenset({429, 503})
_OWN_LIMIT = "rate_limit_exceeded"  # 429 that concerns one client, however much room there is
_CLIENT_LEFT = 499


class Refusals(Counter[str]):
    """Number of refused requests by error code.

    Attributes:
        num_client_errors: Refusals that the client must change its request for, statuses 400 to 499 but 429.
        num_overload: Refusals for want of room, statuses 429 and 503, without rate limits of single clients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_client_errors = 0
        self.num_overload = 0

    def add(self, error: RequestError) -> None:
        """Count a request that is refused with `error`."""
        code = error.code or error.error_type
        self[code] += 1
        if code == _OWN_LIMIT:
            self.num_client_errors += 1
        else:
            self.num_client_errors += is_client_error(error.http_status)
            self.num_overload += is_overload(error.http_status)


def is_client_error(status: int) -> bool:
    """Return whether a status says that the client must change its request."""
    return 400 <= status < 500 and status not in _OVERLOAD and status != _CLIENT_LEFT


def is_overload(status: int) -> bool:
    """Return whether a status says that there is no room now."""
    return status in _OVERLOAD
