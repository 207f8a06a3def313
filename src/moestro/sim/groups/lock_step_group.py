"""Ranks in lock-step over drawn experts, on virtual time, and the baselines with which `async` is compared.

The production scheduler runs under a baseline's prices. `docs/simulator.md` has the formula of each. `lock_step` is
ideal expert parallelism; with an `AllReduce` and one rank it is a plain replica. `MicroBatches` is two-batch overlap or
ping-pong, by the workers that hold experts.

`Group` prices expected loads and jumps over like steps. Here every step draws the experts of its tokens, so no two
steps are alike, and there are no jumps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.experts.expert_table import spread_evenly
from moestro.core.request import Request, Script
from moestro.cost.drawn_step import Deployment, DrawnStep, ExpertGate, KeyedBatch, MicroBatchTimes, StepPricer
from moestro.cost.links import FREE, Collective
from moestro.cost.model import Batch, StageCostModel
from moestro.engine.settings import SchedulerSettings
from moestro.engine.steps import StepOutput
from moestro.errors import ConfigError
from moestro.sim.groups.group import FusedSeat
from moestro.sim.groups.live_placement import SimPlacement

Int64s = NDArray[np.int64]


class StepPrice(NamedTuple):
    """Price of a step.

    Attributes:
        duration_ns: time from its start to its end.
        busy_ns: int64[workers], time for which each worker computes; it waits for the rest.
    """

    duration_ns: int
    busy_ns: Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPricing:
    """A baseline: the function that prices its steps.

    Attributes:
        price: function from a step with drawn experts to its price.
        num_segments: pieces into which the step must be cut, a multiple of every number of micro-batches.
    """

    price: Callable[[DrawnStep], StepPrice]
    num_segments: int = 1


# --- pricing functions ------------------------------------------------------------------------------------------------


def lock_step(step: DrawnStep) -> StepPrice:
    """Price a step in which all workers meet before and after the experts of every layer."""
    times = step.micro_batches(1)
    return StepPrice(times.lock_step_ns, times.busy_ns)


LOCK_STEP = StepPricing(price=lock_step)


def micro_batched(*numbers: int) -> StepPricing:
    """Price each step by the best of several numbers of micro-batches, which overlap compute and communication.

    The choice has no error, so this is the most that an engine could gain by choosing; vLLM and SGLang have thresholds.
    With experts on the ranks, (1, 2) is two-batch overlap. With experts on other workers, (1, 2, 3) is ping-pong.

    Args:
        numbers: numbers of micro-batches to choose from.
    """

    def price(step: DrawnStep) -> StepPrice:
        return min((pipelined(step, number) for number in numbers), key=lambda found: found.duration_ns)

    return StepPricing(price=price, num_segments=math.lcm(*numbers))


TWO_BATCH_OVERLAP = micro_batched(1, 2)
PING_PONG = micro_batched(1, 2, 3)


def pipelined(step: DrawnStep, num_parts: int) -> StepPrice:
    """Price a step of `num_parts` micro-batches that follow each other through the layers."""
    if num_parts == 1:
        return lock_step(step)
    times = step.micro_batches(num_parts)
    first_expert_worker = int(step.holds_experts.argmax())
    return StepPrice(times.overhead_ns + _pipeline_ns(times, first_expert_worker), times.busy_ns)


def _pipeline_ns(times: MicroBatchTimes, first_expert_worker: int) -> int:
    """Time of the layers of a pipeline.

    Each worker and each link runs one thing at a time, micro-batch after micro-batch and layer after layer. All ranks
    meet for each micro-batch before its experts, and all workers with experts after them. For micro-batch i and layer
    l, with the attention (a), experts (e) and exchange (x) of `times`, and `free` as the time at which a worker or a
    link has finished its work:

        gated[i, l] = max over ranks r of (max(free[r], back[i, l - 1]) + a[i, r, l])
        arrived[i, l] = max(free link, gated[i, l]) + x[i, l]
        computed[i, l] = max over workers w of (max(free[w], arrived[i, l]) + e[i, w, l])
        back[i, l] = max(free link, computed[i, l]) + x[i, l]
    """
    num_parts, num_ranks, _ = times.attention_ns.shape
    num_sparse = times.exchange_ns.shape[1]
    free_ns = np.zeros(times.experts_ns.shape[1], np.int64)
    ranks, holders = free_ns[:num_ranks], free_ns[first_expert_worker:]  # views; the same workers in `ep`
    attention_ns = times.attention_ns.transpose(0, 2, 1).copy()
    experts_ns = times.experts_ns[:, first_expert_worker:].transpose(0, 2, 1).copy()
    exchange_ns = times.exchange_ns.tolist()
    out, back = 0, (0 if first_expert_worker < num_ranks else 1)  # disaggregated workers use both directions
    link_ns = [0, 0]
    parts = range(num_parts)
    at_ns = [0] * num_parts  # where each micro-batch has everything that its next stage needs
    for layer in range(num_sparse):
        for part in parts:
            np.maximum(ranks, at_ns[part], out=ranks)
            ranks += attention_ns[part, layer]
            at_ns[part] = int(ranks.max())
        for part in parts:
            at_ns[part] = link_ns[out] = max(link_ns[out], at_ns[part]) + exchange_ns[part][layer]
        for part in parts:
            np.maximum(holders, at_ns[part], out=holders)
            holders += experts_ns[part, layer]
            at_ns[part] = int(holders.max())
        for part in parts:
            at_ns[part] = link_ns[back] = max(link_ns[back], at_ns[part]) + exchange_ns[part][layer]
    for part in parts:
        np.maximum(ranks, at_ns[part], out=ranks)
        ranks += attention_ns[part, num_sparse]
    return max(int(ranks.max()), *at_ns)


# AMoE (figure 4 and section 2.1): "sometimes accounting up to 70% of GPU time", Mixtral 8x7B on 8 A100 40 GB under
# SGLang with expert parallelism, databricks-dolly-15k at 100 requests per second.
AMOE_STALL_SHARE = 0.7


def with_stalls(stall_share: float = AMOE_STALL_SHARE, pricing: StepPricing = LOCK_STEP) -> StepPricing:
    """Lengthen each step until the workers stall for a published share of it, where they stall for less.

    Args:
        stall_share: mean over workers of 1 - busy / duration, at least 0 and below 1.
        pricing: baseline without these stalls.

    Raises:
        ConfigError: the share is out of range.
    """
    if not 0 <= stall_share < 1:
        raise ConfigError(f"the stall share must be at least 0 and below 1, got {stall_share}")

    def price(step: DrawnStep) -> StepPrice:
        duration_ns, busy_ns = pricing.price(step)
        return StepPrice(max(duration_ns, round(float(busy_ns.mean()) / (1 - stall_share))), busy_ns)

    return StepPricing(price=price, num_segments=pricing.num_segments)


def slowed(factor: float, pricing: StepPricing = LOCK_STEP) -> StepPricing:
    """Lengthen each step by a factor, as on an engine that is slower in all of its parts.

    Raises:
        ConfigError: the factor is not above 0.
    """
    if not factor > 0:
        raise ConfigError(f"the factor on steps must be above 0, got {factor}")

    def price(step: DrawnStep) -> StepPrice:
        duration_ns, busy_ns = pricing.price(step)
        return StepPrice(round(factor * duration_ns), np.rint(factor * busy_ns).astype(np.int64))

    return StepPricing(price=price, num_segments=pricing.num_segments)


# --- deployments ------------------------------------------------------------------------------------------------------


def expert_parallel(cost: StageCostModel, gate: ExpertGate, num_ranks: int, exchange: Collective = FREE) -> Deployment:
    """Describe ranks that share the experts evenly, each with attention over its own requests."""
    ranks = list(range(num_ranks))
    table = spread_evenly(cost.network.num_layers, _num_experts(cost), ranks, num_ranks)
    return Deployment(cost=cost, gate=gate, table=table, num_ranks=num_ranks, exchange=exchange)


def disaggregated(
    cost: StageCostModel, gate: ExpertGate, num_ranks: int, num_expert_workers: int, exchange: Collective = FREE
) -> Deployment:
    """Describe attention ranks, followed by workers that share the experts evenly."""
    num_workers = num_ranks + num_expert_workers
    holders = list(range(num_ranks, num_workers))
    table = spread_evenly(cost.network.num_layers, _num_experts(cost), holders, num_workers)
    return Deployment(cost=cost, gate=gate, table=table, num_ranks=num_ranks, exchange=exchange)


def plain_replica(cost: StageCostModel, gate: ExpertGate, exchange: Collective = FREE) -> Deployment:
    """Describe a replica that holds all experts. Its GPUs share every product, so they count as one worker.

    Args:
        cost: prices of one GPU's share (`cost.networks`); of the whole network for a replica of one GPU.
        gate: draws the experts of each token.
        exchange: an `AllReduce` over the replica's GPUs; free for a replica of one GPU.
    """
    return expert_parallel(cost, gate, 1, exchange)


def _num_experts(cost: StageCostModel) -> int:
    experts = cost.network.experts
    if experts is None:
        raise ConfigError(f"{cost.network.name} has no experts to spread over workers")
    return experts.num_experts


class LockStepGroup:
    """Ranks that begin and end each step together; implements `sim.groups.group.Ranks`.

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
