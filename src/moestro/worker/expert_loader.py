"""Brings experts into free slots of a worker that serves: a thread reads them, the main loop writes them in parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from moestro.core.clock import NS_PER_MS
from moestro.errors import MoestroError
from moestro.wire.messages import ExpertsPrepared, PrepareExperts

LOOK_NS = NS_PER_MS  # between looks whether the thread has read, or a slot is idle; far less than reading takes


class SlotMemory(Protocol):
    """Memory of a worker's experts.

    Attributes:
        expert_bytes: Bytes of one expert's weights.
    """

    expert_bytes: int

    def read(self, layer: int, experts: Sequence[int]) -> Sequence[Any]:
        """Read the weights of experts, on a thread beside the main loop. `layer`: of the network.

        Raises:
            MoestroError: They cannot be read.
        """
        ...

    def write(self, layer: int, slot: int, expert: int, weights: Any) -> None:
        """Write weights into a slot that nothing uses, between two pieces of work."""
        ...


class _Job:
    """One message, and the thread that reads for it."""

    def __init__(self, message: PrepareExperts, memory: SlotMemory) -> None:
        self.message = message
        self.num_written = 0
        self.weights: Sequence[Any] | None = None
        self.error = ""
        self._memory = memory
        threading.Thread(target=self._read, name="expert-loader", daemon=True).start()

    def _read(self) -> None:
        try:
            self.weights = self._memory.read(self.message.layer, self.message.experts)
        except MoestroError as error:
            self.error = str(error)
        except Exception as error:  # whatever it is, the coordinator has to hear of it
            self.error = f"{type(error).__name__}: {error}"


class ExpertLoader:
    """Follows the coordinator's messages about experts, one at a time.

    Args:
        memory: Of the worker's experts.
        is_idle: Says whether nothing uses (layer, slot).
        send: Sends the answers.
    """

    def __init__(
        self,
        memory: SlotMemory,
        is_idle: Callable[[int, int], bool],
        send: Callable[[ExpertsPrepared], None],
    ) -> None:
        self._memory, self._is_idle, self._send = memory, is_idle, send
        self._job: _Job | None = None

    @property
    def is_busy(self) -> bool:
        """Whether `step` has something to do, or will have."""
        return self._job is not None

    def begin(self, message: PrepareExperts) -> None:
        """Follow a message instead of the one before."""
        self._job = _Job(message, self._memory)

    def step(self) -> None:
        """Write as much as a step may, and answer when all is written. The caller is between two pieces of work."""
        job = self._job
        if job is None:
            return
        ticket, size = job.message.ticket, self._memory.expert_bytes
        if job.error:
            self._end(ExpertsPrepared(ticket, error=" ".join(job.error.split())))
            return
        if job.weights is None:
            return
        slots, experts, layer = job.message.slots, job.message.experts, job.message.layer
        for _ in range(max(job.message.max_bytes // max(size, 1), 1)):
            at = job.num_written
            if at == len(slots):
                break
            if not self._is_idle(layer, slots[at]):
                return  # Tokens that their home has given up wait there; they are computed soon, in vain.
            self._memory.write(layer, slots[at], experts[at], job.weights[at])
            job.num_written += 1
        if job.num_written == len(slots):
            self._end(ExpertsPrepared(ticket, num_bytes=len(slots) * size))

    def _end(self, answer: ExpertsPrepared) -> None:
        self._job = None
        self._send(answer)
