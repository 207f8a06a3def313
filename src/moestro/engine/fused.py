"""The fused executor: one whole forward pass a plan. The fastest plain path, and the oracle of the others."""

from __future__ import annotations

from collections import deque

from moestro.core.work import Device, Forward, Plan, StepResult


class FusedExecutor:
    """Hands each plan to the device in one piece.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._results: deque[StepResult] = deque()

    def submit(self, plan: Plan, now_ns: int) -> None:
        """Start `plan`."""
        self._device.launch(Forward(plan.units), now_ns)

    def poll(self, now_ns: int) -> StepResult | None:
        """The oldest result that was not taken yet, if any is ready."""
        self._results.extend(self._device.poll(now_ns))
        return self._results.popleft() if self._results else None

    def ready_at_ns(self) -> int | None:
        """When the device will have the next result; None: nothing runs, or only the hardware knows."""
        return self._device.ready_at_ns()
