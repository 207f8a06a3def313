"""Place of a worker among the processes of a router, and the memory that they share."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np

from moestro.gateway.discovery.operator_changes import OperatorChanges
from moestro.web.rate_limits import SharedLimits

_COUNTERS = ("begun", "serving")


class WorkerStarts:
    """Counts the starts of each worker, and notes the newest start that takes requests.

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

    def serve(self, worker: int) -> None:
        """Note that the worker takes requests. Called by the worker."""
        self._rows["serving"][worker] = self._rows["begun"][worker]

    def are_serving(self) -> bool:
        """Return whether all workers take requests."""
        rows = self._rows
        return bool(((rows["serving"] == rows["begun"]) & (rows["begun"] > 0)).all())


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Everything that a worker process of a router gets from the process that started it.

    Attributes:
        lifeline: end of a pipe, which is closed when the starting process is gone.
        limits: table of the limits that all workers share.
        starts: stage of each worker's start.
        changes: operators' changes of engines.
        number: number of the worker.
    """

    lifeline: int
    limits: SharedLimits
    starts: WorkerStarts
    changes: OperatorChanges
    number: int
