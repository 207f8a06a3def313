"""How far each worker of a router has started, in memory that its processes inherit."""

from __future__ import annotations

import mmap

import numpy as np

_COUNTERS = ("begun", "waiting", "updated", "serving")


class WorkerStarts:
    """Counts the starts of each worker, and notes the newest start that has reached each stage.

    A note names its start, so that one about a worker that died does not count for its successor. Each counter has
    one writer.

    Args:
        num_workers: workers of the router.
    """

    def __init__(self, num_workers: int) -> None:
        kind = np.dtype([(name, "u8") for name in _COUNTERS])
        self._rows = np.frombuffer(mmap.mmap(-1, kind.itemsize * num_workers), kind)

    def begin(self, worker: int) -> None:
        """Count a start. Called by the starting process."""
        self._rows["begun"][worker] += 1

    def wait(self, worker: int) -> None:
        """Note that the worker waits for the operators' changes. Called by the worker."""
        self._rows["waiting"][worker] = self._rows["begun"][worker]

    def serve(self, worker: int) -> None:
        """Note that the worker takes requests. Called by the worker."""
        self._rows["serving"][worker] = self._rows["begun"][worker]

    def update(self, worker: int, start: int) -> None:
        """Note that a start has the operators' changes. Called by the process of the admin plane."""
        self._rows["updated"][worker] = start

    def lacking(self, worker: int) -> int | None:
        """Return the start that waits for the operators' changes; None means that the worker does not wait."""
        row = self._rows[worker]
        start = int(row["begun"])
        return start if row["waiting"] == start != row["updated"] else None

    def is_updated(self, worker: int) -> bool:
        """Return whether the worker has the operators' changes."""
        row = self._rows[worker]
        return bool(row["updated"] == row["begun"])

    def are_serving(self) -> bool:
        """Return whether all workers take requests."""
        rows = self._rows
        return bool(((rows["serving"] == rows["begun"]) & (rows["begun"] > 0)).all())
