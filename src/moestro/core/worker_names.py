"""Names of worker processes: what each one has, and its number."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class WorkerKind(StrEnum):
    """The part of the network that a worker has."""

    ATTENTION = "attention"
    EXPERTS = "experts"
    BOTH = "both"


class Worker(NamedTuple):
    """A worker process, as its command line and messages for the operator name it.

    Attributes:
        kind: the part of the network that it has.
        number: among the workers of its kind, from 0.
    """

    kind: WorkerKind
    number: int

    def __str__(self) -> str:
        match self.kind:
            case WorkerKind.EXPERTS:
                return f"expert worker {self.number}"
            case WorkerKind.ATTENTION | WorkerKind.BOTH:
                return f"engine {self.number}"
