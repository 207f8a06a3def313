"""The flow executor: the flow core over a device that works in stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moestro.core.load_figures import PassCounts
from moestro.core.stages import StagedDevice
from moestro.core.views import StepPolicy
from moestro.core.work import Plan, Slots, StepResult
from moestro.flow.core import Done, Emit, Event, FlowCore, Launch, PlanSubmitted, Tick, Withdraw


class FlowExecutor:
    """Computes plans micro-queue by micro-queue; any number of plans may be inside.

    Args:
        device: does the work.
        policy: chooses what runs next.
        launch_ahead: items with the device at once; see `FlowCore`.

    Attributes:
        overlaps_plans: True.
        num_pieces: pieces of work done since the start; stands still when nothing can be computed.
    """

    overlaps_plans = True

    def __init__(self, device: StagedDevice, policy: StepPolicy, launch_ahead: int = 1) -> None:
        self._device = device
        self._core = FlowCore(device.shape, policy, launch_ahead)
        self._results: deque[StepResult] = deque()
        self.num_pieces = 0

    @property
    def pass_counts(self) -> PassCounts:
        """See `Executor.pass_counts`."""
        return self._core.pass_counts

    def submit(self, plan: Plan, now_ns: int) -> None:
        """Let a plan in. What has not begun of other plans goes back to its queues."""
        if plan.moves is not None:
            self._device.move_blocks(plan.moves, now_ns)
        self._tell(PlanSubmitted(plan), now_ns)

    def start(self, now_ns: int) -> None:
        """Give the device what it has room for, unless it works only when it is polled."""
        if self._core.wants_tick(now_ns) and not self._device.works_when_polled:
            self._tell(Tick(), now_ns)

    def poll(self, now_ns: int, is_wanted: Callable[[], bool] = lambda: False) -> StepResult | None:
        """The oldest result that was not taken yet, if any is ready.

        A device that works when it is polled, or whose end nobody can tell, is polled on: piece by piece (at most one
        expert batch each) until there is a result, or `is_wanted` says that the caller has something else to do. With
        several plans inside this returns after every piece, so that the policy is asked at a time that is true.
        """
        while not self._results:
            if self._core.wants_tick(now_ns):
                self._tell(Tick(), now_ns)
            if self._core.num_launched == 0 or not self._work(now_ns, is_wanted):
                break
        return self._results.popleft() if self._results else None

    def _work(self, now_ns: int, is_wanted: Callable[[], bool]) -> bool:
        """Poll the device until it has results, and take them in. Returns whether to go on."""
        poll, is_alone = self._device.poll, self._core.num_plans == 1
        while not (done := poll(now_ns)):
            if self._device.ready_at_ns() is not None:
                return False
            self.num_pieces += 1
            if not is_alone or is_wanted():
                return False
        for result in done:
            self._tell(Done(result), now_ns)
        self.num_pieces += 1
        return self._core.num_plans <= 1 and not is_wanted()

    def ready_at_ns(self) -> int | None:
        """When the device will have a result or the policy wants to be asked; None: neither, or the hardware knows."""
        ready_ns = self._device.ready_at_ns()
        if ready_ns is None and self._core.num_launched:
            return None
        times = [at for at in (ready_ns, self._core.wake_ns) if at is not None]
        return min(times, default=None)

    def recall(self, slots: Slots, now_ns: int) -> Slots:
        """Forget parked units, as if they had never been submitted.

        Returns:
            Those of `slots` of which that is so: they will have no result. Of the others, the device has something.
        """
        if self._device.works_when_polled and self._core.num_launched:
            # What the device has not begun comes back at once, and units that only wait are free to go.
            self._device.withdraw(now_ns)
            for result in self._device.poll(now_ns):
                self._tell(Done(result), now_ns)
        return self._core.recall(slots)

    def _tell(self, event: Event, now_ns: int) -> None:
        for command in self._core.on_event(now_ns, event):
            match command:
                case Launch(item):
                    self._device.launch(item, now_ns)
                case Withdraw():
                    self._device.withdraw(now_ns)
                case Emit(result):
                    self._results.append(result)
