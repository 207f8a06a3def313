"""Agreement of a group in lock-step on when a layer's experts move, and on the step that commits them.

Each worker tells the others its numbers when a step opens. All of them draw the same conclusion from the same numbers,
so they move in the same steps and change to the new placement in the same step.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.layer_moves import LayerPlan
from moestro.errors import InvariantError

NUM_NUMBERS = 4
_VERSION, _KNOWN, _PREPARED, _CANCELLED = range(NUM_NUMBERS)


class MoveAction(Enum):
    """What a group does with a layer in an opened step."""

    REST = "no layer moves"
    WAIT = "some workers do not know the plan yet"
    MOVE = "experts move"
    COMMIT = "from this step on, all workers use the new placement"
    DROP = "the old placement stays, and what has moved is dropped"


class MoveAgreement:
    """One worker's part of the agreement. A group has one plan at a time.

    Args:
        version: number of the table that all workers use.

    Attributes:
        version: number of the table that all workers use.
        plan: the layer that moves, as far as this worker knows.
        is_prepared: whether this worker has all experts of the plan.
        over: number of the last plan that has ended.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.plan: LayerPlan | None = None
        self.is_prepared = False
        self.over = version
        self._cancelled = 0

    def take(self, plan: LayerPlan) -> None:
        """Take a plan from the API server. A plan that the group has dropped meanwhile is ignored."""
        if plan.version > self.over:
            self.plan, self.is_prepared = plan, False

    def cancel(self, version: int) -> None:
        """Ask for the end of a plan. A plan that has ended is ignored."""
        if version > self.over:
            self._cancelled = version

    def numbers(self) -> NDArray[np.int64]:
        """int64[NUM_NUMBERS], numbers of this worker for the opening of a step."""
        known = 0 if self.plan is None else self.plan.version
        return np.array([self.version, known, known if self.is_prepared else 0, self._cancelled], np.int64)

    def decide(self, gathered: NDArray[np.int64]) -> MoveAction:
        """Return what the group does in the opened step; the same for all workers.

        After COMMIT and DROP the plan is over; it stays readable until `settled`.

        Args:
            gathered: int64[workers, NUM_NUMBERS], numbers of all workers.

        Raises:
            InvariantError: the workers use different tables.
        """
        if (gathered[:, _VERSION] != self.version).any():
            raise InvariantError(
                f"the engines of a group have tables {gathered[:, _VERSION].tolist()} of their experts"
            )
        newest, cancelled = int(gathered[:, _KNOWN].max()), int(gathered[:, _CANCELLED].max())
        if newest and (gathered[:, _PREPARED] == newest).all():
            # Also when a worker asks for its end: it asks too late.
            self.version = self.over = newest
            return MoveAction.COMMIT
        if cancelled and newest <= cancelled:
            self.over = cancelled
            return MoveAction.DROP
        if not newest:
            return MoveAction.REST
        return MoveAction.MOVE if (gathered[:, _KNOWN] == newest).all() else MoveAction.WAIT

    def settled(self) -> None:
        """Forget the plan after COMMIT or DROP."""
        self.plan, self.is_prepared, self._cancelled = None, False, 0
