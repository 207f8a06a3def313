"""Limits of requests that several processes of one server share, in memory that they inherit.

The table is made before the processes are forked. Each call takes a lock of the file behind the memory, for the
microseconds of a look; the kernel releases the lock of a process that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import tempfile
from collections.abc import Hashable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np

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
