"""The fused executor: one whole forward pass a plan. The fastest plain path, and the oracle of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from moestro.core.load_figures import PassCounts
from moestro.core.work import Device, Forward, Plan, Slots, StepResult


class FusedExecutor:
    """Hands each plan to the device in one piece.

    Args:
        device: where the work is done.

    Attributes:
        overlaps_plans: False: plans end in the order in which they came.
        pass_counts: all zero.
        num_pieces: plans submitted.
    """

    overlaps_plans = False
    pass_counts = PassCounts()

    def __init__(self, device: Device) -> None:
        self._device = device
        self._results: deque[StepResult] = deque()
        self.num_pieces = 0

    def submit(self, plan: Plan, now_ns: int) -> None:
        """Start `plan`."""
        self.num_pieces += 1
        if plan.moves is not None:
            self._device.move_blocks(plan.moves, now_ns)
        self._device.launch(Forward(plan.units), now_ns)

    def start(self, now_ns: int) -> None:
        """Nothing: a plan starts when it is submitted."""

    def recall(self, slots: Slots, now_ns: int) -> Slots:
        """No unit: a forward pass that has begun ends."""
        return np.empty(0, np.int64)

    def poll(self, now_ns: int, is_wanted: Callable[[], bool] = lambda: False) -> StepResult | None:
        """The oldest result that was not taken yet, if any is ready."""
        self._results.extend(self._device.poll(now_ns))
        return self._results.popleft() if self._results else None

    def ready_at_ns(self) -> int | None:
        """When the device will have the next result; None: nothing runs, or only the hardware knows."""
        return self._device.ready_at_ns()
