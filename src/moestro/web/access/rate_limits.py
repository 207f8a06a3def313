"""Limits the requests of each key and address. Has no sockets and no clock: callers pass the time."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Hashable, Iterator

from moestro.core.client_table import ClientTable
from moestro.core.hosts import network_of
from moestro.errors import RequestError
from moestro.web.access.access_settings import AccessSettings
from moestro.web.access.shared_limits import MINUTE_S, ProcessLimits, SharedRate, SharedSlots

MAX_SUBJECTS = 1 << 16  # Most remembered addresses, about 10 MB; the least recently seen ones are forgotten.


class RateLimitError(RequestError):
    """A key or an address has reached a rate limit."""

    http_status = 429
    error_type = "rate_limit_error"

    def __init__(self, text: str, wait_s: float) -> None:
        self.retry_after_s = max(1, math.ceil(wait_s))
        super().__init__(f"{text} Retry in {self.retry_after_s} s.", code="rate_limit_exceeded")


class RequestRate:
    """Token bucket for each subject, which holds the requests of one minute and refills evenly.

    Args:
        per_minute: Requests that a subject may send per minute, or at once after a minute of silence.
        max_subjects: Most remembered subjects. A forgotten one has a full bucket.
    """

    def __init__(self, per_minute: int, max_subjects: int = MAX_SUBJECTS) -> None:
        self._interval_s = MINUTE_S / per_minute
        self._full_at_s = ClientTable(float, max_subjects)  # Time at which each bucket is full again.

    def __len__(self) -> int:
        return len(self._full_at_s)

    def take(self, subject: Hashable, now_s: float) -> float:
        """Take one request from the bucket of `subject`.

        Returns:
            Seconds until a request is available; 0 means that one was taken.
        """
        full_at_s = max(self._full_at_s[subject], now_s) + self._interval_s
        wait_s = full_at_s - now_s - MINUTE_S
        if wait_s > 1e-6:  # More than the rounding error of added intervals.
            return wait_s
        self._full_at_s[subject] = full_at_s
        return 0.0


class AtATime:
    """Counts what each subject has at a time, and remembers only subjects that have something."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._counts)

    def enter(self, subject: Hashable) -> bool:
        """Count one more for `subject`. False means that the subject is at its limit, and nothing is counted."""
        if self._counts[subject] >= self._most:
            return False
        self._counts[subject] += 1
        return True

    def leave(self, subject: Hashable) -> None:
        """Count one less for `subject`."""
        self._counts[subject] -= 1
        if not self._counts[subject]:
            del self._counts[subject]


class RequestLimits:
    """Request limits of one server.

    Args:
        shared: table of the processes that share the limits; None means that there is one process.

    Attributes:
        is_on: Whether there are any limits.
        has_slots: Whether `enter` can refuse.
    """

    def __init__(self, settings: AccessSettings, shared: ProcessLimits | None = None) -> None:
        by_key, by_address = settings.max_requests_per_minute_per_key, settings.max_requests_per_minute_per_address
        slots = settings.max_concurrent_requests_per_key
        self._settings = settings

        def rate(kind: str, per_minute: int | None) -> RequestRate | SharedRate | None:
            if per_minute is None:
                return None
            return RequestRate(per_minute) if shared is None else SharedRate(shared, kind, per_minute)

        self._by_key, self._by_address = rate("key", by_key), rate("address", by_address)
        self._running: AtATime | SharedSlots | None = None
        if slots is not None:
            self._running = AtATime(slots) if shared is None else SharedSlots(shared, slots)
        self.has_slots = slots is not None
        self.is_on = bool(by_key or by_address or slots)

    def take(self, key: Hashable | None, address: str, now_s: float) -> None:
        """Count one request.

        Args:
            key: Name of the request's API key, or of its tenant; None means that the server has no keys.
            address: Address of the client.

        Raises:
            RateLimitError: The key or the address has reached its limit.
        """
        if self._by_address is not None and (wait_s := self._by_address.take(network_of(address), now_s)):
            text = f"This address may send {self._settings.max_requests_per_minute_per_address} requests a minute."
            raise RateLimitError(text, wait_s)
        if self._by_key is not None and key is not None and (wait_s := self._by_key.take(key, now_s)):
            text = f"This key may send {self._settings.max_requests_per_minute_per_key} requests a minute."
            raise RateLimitError(text, wait_s)

    def enter(self, key: Hashable | None) -> None:
        """Count a request that is being answered; `leave` must follow.

        Raises:
            RateLimitError: The key has reached its limit; nothing is counted.
        """
        if self._running is not None and key is not None and not self._running.enter(key):
            most = self._settings.max_concurrent_requests_per_key
            raise RateLimitError(f"This key may have {most} requests at a time.", 1.0)

    def leave(self, key: Hashable | None) -> None:
        """Count a request that has been answered."""
        if self._running is not None and key is not None:
            self._running.leave(key)

    @contextlib.contextmanager
    def answering(self, key: Hashable | None) -> Iterator[None]:
        """Count a request while the block lasts; RateLimitError as for `enter`."""
        self.enter(key)
        try:
            yield
        finally:
            self.leave(key)
