"""Ranks in lock-step over drawn experts, on virtual time: the production scheduler under a baseline's prices.

`sim.group.Group` prices expected loads and jumps over like steps. Here every step draws the experts of its tokens, so
no two steps are alike, and there are no jumps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.request import Request
from moestro.core.script import Script
from moestro.cost.drawn_step import Deployment, KeyedBatch, StepPricer
from moestro.cost.model import Batch
from moestro.engine.settings import SchedulerSettings
from moestro.engine.step_output import StepOutput
from moestro.sim.groups.baselines import LOCK_STEP, StepPricing
from moestro.sim.groups.group import FusedSeat
from moestro.sim.groups.live_placement import SimPlacement

Int64s = NDArray[np.int64]


class LockStepGroup:
    """Ranks that begin and end each step together; implements `sim.engine.Ranks`.

    Args:
        settings: scheduler settings of each rank.
        deployment: workers of the group and the prices of their stages.
        pricing: baseline.
        placement: live placement, which begins with the deployment's table. None means that experts stay.

    Attributes:
        placement: as above.
        seats: ranks, which are the first workers.
        tells_prefill, steps_together: True.
        next_ns: end of the current step. None means that the group is idle.
        began_ns: its start.
        ends: None, because there are no jumps.
        busy_ns: int64[workers], time for which each worker has computed, in all steps begun so far.
        stepping_ns: time that these steps take; the group idles for the rest.
        num_tokens: tokens that they compute.
        num_steps: number of these steps.
        expert_counts: int64[layers, experts], tokens that have visited each logical expert.
    """

    tells_prefill = True
    steps_together = True

    def __init__(
        self,
        settings: SchedulerSettings,
        deployment: Deployment,
        pricing: StepPricing = LOCK_STEP,
        placement: SimPlacement | None = None,
    ) -> None:
        self.seats = [FusedSeat(settings) for _ in range(deployment.num_ranks)]
        self.next_ns: int | None = None
        self.began_ns = 0
        self.ends: Int64s | None = None
        self._cost, self._price = deployment.cost, pricing.price
        self._pricer = StepPricer(deployment, pricing.num_segments)
        self.placement, self._table = placement, deployment.table
        self._is_idle = True  # whether `next_ns`, if there is one, is a time at which the placement alone has to act
        if placement is not None:
            assert placement.table is deployment.table, "the control begins with the placement of the first step"
            self._pricer.joins_sources = False
        self.busy_ns: Int64s = np.zeros(deployment.num_workers, np.int64)
        self.stepping_ns = self.num_tokens = self.num_steps = 0
        table = deployment.table
        self.expert_counts: Int64s = np.zeros((table.logical_of.shape[1], table.num_experts), np.int64)

    @property
    def stall_shares(self) -> NDArray[np.float64]:
        """float64[workers], share of the steps' time for which each worker waits; zeros before the first step."""
        if not self.stepping_ns:
            return np.zeros(len(self.busy_ns))
        shares: NDArray[np.float64] = 1 - self.busy_ns / self.stepping_ns
        return shares

    def add(self, seat: int, request: Request, script: Script, now_ns: int) -> int:
        """Add a request to a rank's waiting queue; the next step admits it.

        Returns:
            Serial number of the request on that rank.

        Raises:
            RequestError: the rank refuses the request; no state has changed.
        """
        serial = self.seats[seat].add(request, script, now_ns)
        if self._is_idle:
            self.next_ns, self._is_idle = now_ns, False
        return serial

    def catch_up(self, before_ns: int) -> None:
        """Return without effect, because there are no jumps."""

    def turn(self, now_ns: int, until_ns: int = FOREVER_NS) -> list[StepOutput]:
        """End the current step, start the next one, and return the step output of each rank."""
        outputs = [self._collect(seat, now_ns) for seat in self.seats]
        self.began_ns, self.next_ns = now_ns, None
        for seat in self.seats:
            seat.plan = seat.rank.begin(now_ns)
        batches = [_keyed_batch(seat) for seat in self.seats]
        self._is_idle = not any(batch is not None for batch in batches)
        if self._is_idle:
            self._turn_idle(now_ns)
        else:
            num_moved = max(sum(seat.device.take_num_moved()) for seat in self.seats)
            moving_ns = self._cost.move_ns(num_moved) if num_moved else 0
            self.next_ns = now_ns + moving_ns + self._migration_ns(now_ns) + self._step_ns(batches)
            for seat in self.seats:
                if seat.plan is not None:
                    seat.device.finish_at(self.next_ns)
            self.stepping_ns += self.next_ns - now_ns
        return outputs

    def _turn_idle(self, now_ns: int) -> None:
        """Let experts move without tokens, and wake up when the control of placement has to look at the load."""
        if self.placement is None:
            return
        waits_ns = self._migration_ns(now_ns)
        self.next_ns = now_ns + waits_ns if waits_ns else self.placement.wake_ns(now_ns)
        self._is_idle = not waits_ns

    def _migration_ns(self, now_ns: int) -> int:
        """Let live placement plan and move, and return the time for which the step waits."""
        if self.placement is None:
            return 0
        waits_ns = self.placement.turn(now_ns)
        if self.placement.table is not self._table:
            self._table = self.placement.table
            self._pricer.place(self._table)
        return waits_ns

    def _step_ns(self, batches: list[KeyedBatch | None]) -> int:
        step = self._pricer.draw(batches)
        duration_ns, busy_ns = self._price(step)
        self.busy_ns += busy_ns
        self.num_steps += 1
        self.num_tokens += sum(len(batch.keys) for batch in batches if batch is not None)
        if step.expert_counts is not None:
            self.expert_counts += step.expert_counts
        if self.placement is not None and step.counts_by_source is not None:
            self.placement.observe(step.counts_by_source)
            for seat, pressure in zip(self.seats, self.placement.expert_pressure.tolist(), strict=True):
                seat.expert_pressure = pressure
        return duration_ns

    def _collect(self, seat: FusedSeat, now_ns: int) -> StepOutput:
        output = seat.rank.collect(now_ns)
        seat.publish_step_ends((now_ns,))
        seat.forget_ended(output)
        return output


def _keyed_batch(seat: FusedSeat) -> KeyedBatch | None:
    if seat.plan is None:
        return None
    units = seat.plan.units
    return KeyedBatch(Batch(units.start, units.num_tokens), seat.device.token_keys(units))
