"""Memory that the processes of a router share: the stage of each worker's start, and operators' changes of engines."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from moestro.gateway.admin import OperatorChange, in_effect
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


_HALF_BYTES = 1 << 20  # tens of thousands of changes; memory that is not written takes no room
_HEAD_BYTES = 8
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[OperatorChange]).decode


class OperatorChanges:
    """The changes of engines that operators have made, in memory that all processes of a router inherit.

    The list outlives the process of the admin plane, its only writer, and workers read it without that process. One
    half of the memory has the list while the other half is written, so that a writer may die at any time.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD_BYTES + 2 * _HALF_BYTES)
        self._version = np.frombuffer(self._memory, "u8", 1)
        self._known: tuple[int, list[OperatorChange]] = (0, [])  # the version that was read last

    def read(self) -> list[OperatorChange]:
        """Return the changes, oldest first; callers must not change the list."""
        while True:
            version = int(self._version[0])
            if version == self._known[0]:
                return self._known[1]
            at = _HEAD_BYTES + version % 2 * _HALF_BYTES
            num_bytes = int.from_bytes(self._memory[at : at + _HEAD_BYTES], "little")
            begin = at + _HEAD_BYTES
            packed = self._memory[begin : begin + min(num_bytes, _HALF_BYTES)]
            if int(self._version[0]) == version:
                self._known = (version, _decode(packed) if packed else [])

    def write(self, changes: Sequence[OperatorChange]) -> None:
        """Replace the changes. Those without effect are left out, and so are the oldest ones beyond a megabyte."""
        kept = in_effect(changes)
        while len(packed := _encode(kept)) > _HALF_BYTES - _HEAD_BYTES:
            del kept[: len(kept) // 8 + 1]
        version = int(self._version[0]) + 1
        at = _HEAD_BYTES + version % 2 * _HALF_BYTES
        self._memory[at : at + _HEAD_BYTES + len(packed)] = len(packed).to_bytes(_HEAD_BYTES, "little") + packed
        self._version[0] = version


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
