"""Ranks in lock-step: all ranks of a group begin each step together, because each computes experts for the others.

A step opens with a handshake, in which each rank tells the others how many tokens it has. A rank without tokens takes
part in the step. When no rank has any, the group sleeps: no rank waits for another one. A plan on any rank wakes it.
While experts move between the ranks, the group is awake too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.experts.expert_table import EMPTY, ExpertTable, spread_evenly
from moestro.core.experts.layer_moves import LayerPlan
from moestro.core.load_figures import LoadFigures, LockStepCounts, PassCounts
from moestro.core.work import Device, Forward, IsWanted, Plan, PlanWanted, Slots, StepResult, Units, never_wanted
from moestro.engine.rank import Rank
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.engine.steps import StepOutput
from moestro.errors import ConfigError, CopyError

# New figures cost a message to the API server. An engine without tokens has no other reason to send one at every step.
_IDLE_STEPS_A_REPORT = 32


class LockStepDevice(Device, Protocol):
    """A device that computes the experts of a step for all ranks of a group."""

    @property
    def is_moving(self) -> bool:
        """Whether experts move between the ranks as of the last opened step; the same on all ranks."""
        ...

    def open_step(self, units: Units | None) -> NDArray[np.int64]:
        """Open a step; the call returns when all ranks of the group have made it.

        Args:
            units: units of this rank in the step. None means that it has no plan.

        Returns:
            int64[ranks], tokens of each rank. If all are 0, there is nothing to compute.

        Raises:
            GroupLostError: another rank has ended.
        """
        ...

    def take_part(self, now_ns: int) -> None:
        """Compute the experts of the opened step for the other ranks, in place of `launch`.

        The call returns when that is done. The rank then takes the requests that came meanwhile into the next step.
        """
        ...

    def move_layer(self, plan: LayerPlan) -> None:
        """Move the experts of a layer, from the first step on that opens when all ranks know the plan."""
        ...

    def drop_layer(self, version: int) -> None:
        """End the moves of the plan of this version, unless they are committed before all ranks agree."""
        ...


class LockStepExecutor:
    """Launches each plan as one item, in a step of the whole group.

    The number of a step counts the handshakes of the group, so all ranks agree on it. A message to wake the group names
    the step that its sender waits for. A rank which has opened that step ignores the message: it came late.

    Args:
        device: computes the items.
        wake_others: function that is called with the number of a step when a plan ends the group's sleep. It must
            cause a call of `wake` on each other rank.

    Attributes:
        pass_counts: zeros, because no plan passes another.
        reported: steps of the group, at the last one with a plan, and once in `_IDLE_STEPS_A_REPORT` without.
        is_awake: whether the other ranks wait for this one.
    """

    pass_counts = PassCounts()

    def __init__(self, device: LockStepDevice, wake_others: Callable[[int], None]) -> None:
        self._device, self._wake_others = device, wake_others
        self._step = 0  # handshakes so far
        self._plan: Plan | None = None
        self._num_in_flight = 0
        self._results: deque[StepResult] = deque()
        self._lost: StepResult | None = None  # of the plan submitted last, whose copies failed
        self._counts = LockStepCounts()
        self._num_moving_steps = 0
        self.is_awake = False
        self.reported = self._counts

    @property
    def num_pieces(self) -> int:
        """Steps in which this rank took part, with those that had no tokens and moved experts."""
        return self._counts.num_group_steps + self._num_moving_steps

    @property
    def num_idle_steps(self) -> int:
        """Steps in which this rank had no plan."""
        return self._counts.num_idle_steps

    def wake(self, step: int) -> None:
        """Take part in `step` if it is the next one: another rank has a plan for it."""
        self.is_awake |= step == self._step

    def move_layer(self, plan: LayerPlan) -> None:
        """Move the experts of a layer. All ranks get the plan, so each of them ends its sleep by itself."""
        self._device.move_layer(plan)
        self.is_awake = True

    def drop_layer(self, version: int) -> None:
        """End the moves of a plan. A group with a plan is awake."""
        self._device.drop_layer(version)

    def wanted_plan(self) -> PlanWanted | None:
        """Want one plan at a time."""
        is_busy = self._plan is not None or self._num_in_flight or self._lost is not None
        return None if is_busy else PlanWanted()

    def submit(self, plan: Plan, now_ns: int) -> None:
        """Keep `plan` for the next step, and wake the group if it sleeps. Its KV copies begin now.

        If these fail, the units return without having been computed, and the group takes no step for them.
        """
        if plan.moves is not None:
            try:
                self._device.move_blocks(plan.moves, now_ns)
            except CopyError:
                self._lost = StepResult(plan.units.slot, failed=plan.moves)
                return
        self._plan = plan
        if not self.is_awake:
            self.is_awake = True
            self._wake_others(self._step)

    def start(self, now_ns: int) -> None:
        """Do nothing; a step opens in `poll`, after the outputs of the step before have been sent."""

    def recall(self, slots: Slots, now_ns: int) -> Slots:
        """Recall no unit, as `FusedExecutor`."""
        return np.empty(0, np.int64)

    def poll(self, now_ns: int, is_wanted: IsWanted = never_wanted) -> StepResult | None:
        """Open the next step if the group is awake, and take the oldest result that is ready, or None."""
        if self._lost is not None:
            lost, self._lost = self._lost, None
            return lost
        if self.is_awake and not self._num_in_flight:
            self._open_step(now_ns)
        if self._num_in_flight:
            self._results.extend(self._device.poll(now_ns))
        if not self._results:
            return None
        self._num_in_flight -= 1
        return self._results.popleft()

    def ready_at_ns(self) -> int | None:
        """Implement `Executor.ready_at_ns`. An idle rank of a group that is awake takes part in its next step now."""
        if self._num_in_flight:
            return self._device.ready_at_ns()
        return 0 if self.is_awake or self._lost is not None else FOREVER_NS

    def _open_step(self, now_ns: int) -> None:
        plan, self._plan = self._plan, None
        num_tokens = self._device.open_step(None if plan is None else plan.units)
        self._step += 1
        if not num_tokens.any():
            self.is_awake, self.reported = self._device.is_moving, self._counts
            self._num_moving_steps += self.is_awake
            return
        self._count(num_tokens, is_idle=plan is None)
        if plan is None:
            self._device.take_part(now_ns)
            return
        self._device.launch(Forward(plan.units), now_ns)
        self._num_in_flight += 1

    def _count(self, num_tokens: NDArray[np.int64], *, is_idle: bool) -> None:
        counts = self._counts
        self._counts = LockStepCounts(
            num_group_steps=counts.num_group_steps + 1,
            num_idle_steps=counts.num_idle_steps + is_idle,
            num_group_tokens=counts.num_group_tokens + int(num_tokens.sum()),
            num_largest_tokens=counts.num_largest_tokens + int(num_tokens.max()),
        )
        if not is_idle or self._counts.num_idle_steps % _IDLE_STEPS_A_REPORT == 0:
            self.reported = self._counts


class LockStepRank(Rank):
    """A rank of a group in lock-step.

    Args:
        scheduler: chooses the tokens of each plan.
        executor: computes plans together with the other ranks.
    """

    def __init__(self, scheduler: Scheduler, executor: LockStepExecutor) -> None:
        super().__init__(scheduler, executor)
        self._lock_step = executor

    def wake(self, step: int) -> None:
        """Take part in `step` of the group, if it has not begun."""
        self._lock_step.wake(step)

    def move_layer(self, plan: LayerPlan) -> None:
        """Move the experts of a layer between the ranks of the group."""
        self._lock_step.move_layer(plan)

    def drop_layer(self, version: int) -> None:
        """End the moves of a plan, unless they are committed."""
        self._lock_step.drop_layer(version)

    def collect(self, now_ns: int, is_wanted: IsWanted = never_wanted) -> StepOutput:
        """Take what is ready; an idle step is a step without tokens for the rank's experts."""
        num_idle_steps = self._lock_step.num_idle_steps
        output = super().collect(now_ns, is_wanted)
        if self.expert_observer is not None and self._lock_step.num_idle_steps > num_idle_steps:
            self.expert_observer.skip(self._lock_step.num_idle_steps - num_idle_steps)
        return output

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, for this rank or for another one."""
        return self._lock_step.is_awake or super().has_work

    def stats(self) -> LoadFigures:
        """Figures of `Rank.stats`, and the steps of the group."""
        return msgspec.structs.replace(super().stats(), lock_step=self._lock_step.reported)


def spread_over_ranks(num_layers: int, num_experts: int, num_ranks: int, num_redundant: int = 0) -> ExpertTable:
    """Give each rank consecutive experts, as many as the others or one more.

    Args:
        num_redundant: slots of a layer beyond one for each expert. They are empty at the start.

    Raises:
        ConfigError: a rank would have none, or the slots do not divide evenly.
    """
    if num_experts == 0:
        raise ConfigError("--mode ep spreads experts over engines, and this model has none: leave --mode out")
    if num_experts < num_ranks:
        raise ConfigError(
            f"--mode ep needs an expert for each engine: the model has {num_experts} experts a layer, so give"
            f" --engines {num_experts} or less"
        )
    table = spread_evenly(num_layers, num_experts, list(range(num_ranks)), num_ranks)
    if not num_redundant:
        return table
    num_slots, left = divmod(num_experts + num_redundant, num_ranks)
    if left:
        raise ConfigError(
            f"{num_experts} experts a layer and --num-redundant-experts {num_redundant} are"
            f" {num_experts + num_redundant} slots, which do not divide evenly over --engines {num_ranks}: give"
            f" --num-redundant-experts {num_redundant + num_ranks - left}"
        )
    logical_of = np.full((num_ranks, num_layers, num_slots), EMPTY, np.int32)
    logical_of[:, :, : table.logical_of.shape[2]] = table.logical_of
    return ExpertTable(table.version, logical_of, num_experts, table.is_alive)


def build_lock_step_rank(
    settings: SchedulerSettings,
    device: LockStepDevice,
    wake_others: Callable[[int], None],
    host_block_ns: int | None = None,
) -> LockStepRank:
    """Build a rank in `ep` mode on `device`.

    Args:
        wake_others: as in `LockStepExecutor`.
        host_block_ns: as in `Rank.measure_prices`.
    """
    rank = LockStepRank(Scheduler(settings), LockStepExecutor(device, wake_others))
    rank.measure_prices(host_block_ns)
    return rank
