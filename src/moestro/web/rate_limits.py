"""Limits the requests of each key and address. Has no sockets and no clock: callers pass the time."""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Hashable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np

from moestro.core.clients import ClientTable
from moestro.core.processes import network_of
from moestro.errors import RequestError
from moestro.web.settings import AccessSettings

# Limits of requests that several processes of one server share, in memory that they inherit.
#
# The table is made before the processes are forked. Each call takes a lock of the file behind the memory, for the
# microseconds of a look; the kernel releases the lock of a process that dies.

_WAYS = 8  # rows in which one subject may be
_NUM_SETS = 1 << 13  # 65,536 subjects, as many as one process remembers
_SECRET_BYTES = 32
MINUTE_S = 60.0


class SharedLimits:
    """What each key, tenant and address has used, in all processes of a server.

    A subject has one of a few rows. If all of them are taken, the least recently used one without a running request
    gives way, which then counts as unused, as where one process forgets a subject.

    Args:
        num_processes: processes that share the table.

    Attributes:
        secret: secret under which all processes name keys alike.
    """

    def __init__(self, num_processes: int) -> None:
        kind = np.dtype([("name", "u8"), ("full_at_s", "f8"), ("used_s", "f8"), ("running", "u4", (num_processes,))])
        num_rows = _NUM_SETS * _WAYS
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._file = _open_memory()
        os.ftruncate(self._file, kind.itemsize * num_rows)
        self._rows = np.frombuffer(mmap.mmap(self._file, kind.itemsize * num_rows), kind).reshape(_NUM_SETS, _WAYS)

    def begin(self, process: int) -> None:
        """Forget the running requests of a process that starts: those of its predecessor have ended with it."""
        with self._locked():
            self._rows["running"][:, :, process] = 0

    def take(self, subject: Hashable, now_s: float, interval_s: float, most_s: float) -> float:
        """Take one request from a subject's bucket.

        Args:
            interval_s: time in which a request is refilled, seconds.
            most_s: time in which an empty bucket fills, seconds.

        Returns:
            Seconds until a request is available; 0 means that one was taken.
        """
        with self._locked():
            row = self._row(subject, now_s)
            full_at_s = max(float(row["full_at_s"]), now_s) + interval_s
            wait_s = full_at_s - now_s - most_s
            if wait_s > 1e-6:  # More than the rounding error of added intervals.
                return wait_s
            row["full_at_s"] = full_at_s
            return 0.0

    def enter(self, subject: Hashable, process: int, most: int) -> bool:
        """Count one more request of a subject. False means that it has `most`, and nothing is counted."""
        with self._locked():
            running = self._row(subject)["running"]
            if int(running.sum()) >= most:
                return False
            running[process] += 1
            return True

    def leave(self, subject: Hashable, process: int) -> None:
        """Count one request of a subject less."""
        with self._locked():
            running = self._row(subject)["running"]
            running[process] = max(int(running[process]) - 1, 0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _row(self, subject: Hashable, now_s: float | None = None) -> Any:
        """Return the row of a subject, a record that can be written to.

        Args:
            now_s: time of its use; None leaves that of the last request.
        """
        digest = blake2b(repr(subject).encode(), digest_size=16, key=self.secret).digest()
        rows = self._rows[int.from_bytes(digest[:8]) % _NUM_SETS]
        name = int.from_bytes(digest[8:]) or 1  # 0 is that of an empty row
        (found,) = np.nonzero(rows["name"] == np.uint64(name))
        if len(found):
            at = int(found[0])
        else:
            last_use_s = np.where(rows["running"].any(axis=1), np.inf, rows["used_s"])
            at = int(last_use_s.argmin())
            rows[at] = (name, 0.0, 0.0, 0)
        if now_s is not None:
            rows["used_s"][at] = now_s
        return rows[at]


def _open_memory() -> int:
    """Return the descriptor of an empty file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("moestro-limits", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class ProcessLimits:
    """The shared table as one of the processes sees it.

    Args:
        table: table of all processes.
        process: number of this process.
    """

    def __init__(self, table: SharedLimits, process: int) -> None:
        self.table = table
        self.process = process
        table.begin(process)


class SharedRate:
    """Token bucket for each subject of one kind, as `RequestRate`, in all processes together.

    Args:
        kind: what the subjects are, so that a key and an address of one name are two.
        per_minute: requests that a subject may send per minute, or at once after a minute of silence.
    """

    def __init__(self, limits: ProcessLimits, kind: str, per_minute: int) -> None:
        self._limits = limits
        self._kind = kind
        self._interval_s = MINUTE_S / per_minute

    def take(self, subject: Hashable, now_s: float) -> float:
        """Take one request of `subject`; return the seconds until one is available, 0 if it was taken."""
        return self._limits.table.take((self._kind, subject), now_s, self._interval_s, MINUTE_S)


class SharedSlots:
    """Counts what each key has at a time, as `AtATime`, in all processes together.

    Args:
        most: most of one key.
    """

    def __init__(self, limits: ProcessLimits, most: int) -> None:
        self._limits = limits
        self._most = most

    def enter(self, subject: Hashable) -> bool:
        """Count one more for `subject`. False means that it is at its limit, and nothing is counted."""
        return self._limits.table.enter(("running", subject), self._limits.process, self._most)

    def leave(self, subject: Hashable) -> None:
        """Count one less for `subject`."""
        self._limits.table.leave(("running", subject), self._limits.process)


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
