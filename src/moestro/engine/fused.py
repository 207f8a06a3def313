"""Fused executor: one whole forward pass for each plan. Tests compare the other executors with it."""

from __future__ import annotations

from collections import deque

import numpy as np

from moestro.core.clock import FOREVER_NS
from moestro.core.load_figures import PassCounts
from moestro.core.work import Device, Forward, IsWanted, Plan, PlanWanted, Slots, StepResult, never_wanted
from moestro.errors import CopyError

_ANY_PLAN, _NEXT_PLAN = PlanWanted(), PlanWanted(follows=True)


class FusedExecutor:
    """Launches each plan on the device as one item.

    Args:
        device: computes the items.
        runs_ahead: whether a plan that follows the one in flight is launched behind it, so that the device need not
            wait for the host. The device then has to know `core.work.FROM_STEP_BEFORE`.

    Attributes:
        pass_counts: zeros, because no plan passes another.
        num_pieces: plans submitted.
    """

    pass_counts = PassCounts()

    def __init__(self, device: Device, *, runs_ahead: bool = False) -> None:
        self._device = device
        self._runs_ahead = runs_ahead
        self._results: deque[StepResult] = deque()
        self._num_in_flight = 0
        self._lost: StepResult | None = None  # of the plan submitted last, whose copies failed
        self.num_pieces = 0

    def wanted_plan(self) -> PlanWanted | None:
        """Want one plan at a time, and one that follows it."""
        if self._num_in_flight == 0:
            return _ANY_PLAN
        if self._lost is not None:
            return None
        return _NEXT_PLAN if self._runs_ahead and self._num_in_flight == 1 else None

    def submit(self, plan: Plan, now_ns: int) -> None:
        """Launch `plan`, after its KV copies. If these fail, its units return without having been computed."""
        self.num_pieces += 1
        self._num_in_flight += 1
        if plan.moves is not None:
            try:
                self._device.move_blocks(plan.moves, now_ns)
            except CopyError:
                self._lost = StepResult(plan.units.slot, failed=plan.moves)
                return
        self._device.launch(Forward(plan.units), now_ns)

    def start(self, now_ns: int) -> None:
        """Do nothing; a plan starts when it is submitted."""

    def recall(self, slots: Slots, now_ns: int) -> Slots:
        """Recall no unit; a forward pass that has begun runs to its end."""
        return np.empty(0, np.int64)

    def poll(self, now_ns: int, is_wanted: IsWanted = never_wanted) -> StepResult | None:
        """Take the oldest result that is ready, or None."""
        self._results.extend(self._device.poll(now_ns))
        if self._num_in_flight == 1 and self._lost is not None:  # plans return in the order in which they came
            self._results.append(self._lost)
            self._lost = None
        if not self._results:
            return None
        self._num_in_flight -= 1
        return self._results.popleft()

    def ready_at_ns(self) -> int | None:
        """Implement `Executor.ready_at_ns`."""
        if self._lost is not None and self._num_in_flight == 1:
            return 0
        return self._device.ready_at_ns() if self._num_in_flight else FOREVER_NS
