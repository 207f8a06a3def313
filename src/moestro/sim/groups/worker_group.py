"""Ranks over priced stages on virtual time: a group in `async` mode, and a rank in `preemptive` mode.

Every item and every message is an event of its own; there are no jumps as in `Group`. A worker of a group waits only
for the tokens that it lacks. A preemptive rank accepts a request as soon as it arrives, as a worker's loop does between
two items. The current item ends first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.request import Request, Script
from moestro.core.stages import NUM_PLANS, HopMessage
from moestro.core.views import StepPolicy
from moestro.cost.gate import PopularityGate
from moestro.cost.links import HOP_HEADER_BYTES, Machines, hop_bytes
from moestro.cost.model import StageCostModel
from moestro.cost.networks import NetworkShape
from moestro.cost.priced_device import HostOverhead, PricedStages, Scripts, StageSetup, whole_setup, worker_shape
from moestro.engine.rank import Rank, build_preemptive_rank
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.engine.steps import StepOutput
from moestro.flow.dispatcher import SWITCH_GAP, PeerSettings
from moestro.flow.executor import FlowExecutor
from moestro.sim.groups.group import Seat


@dataclass(slots=True, eq=False)
class Transfer:
    """A message under way.

    Attributes:
        crosses: whether it goes from one machine to another.
        port_ns: time that its bytes take at the receiver's port.
        is_through: whether it has passed the receiver's port.
    """

    message: HopMessage
    crosses: bool
    port_ns: int
    is_through: bool = False


# (transfer, time at which it reaches the receiver's port) -> None
Arrive = Callable[[Transfer, int], None]


class VirtualLinks:
    """The links of all workers of a group.

    A worker has a port for the links of its machine and one for those to other machines. A sender's messages over one
    port follow one another. Two senders cannot fill a receiver's port at once: messages pass it in the order in which
    they reach it.

    Args:
        machines: machine of each worker, and the links between them.
        network: network whose hidden states are sent.
        arrive: called when a message is sent, with the time at which it would arrive at an idle port. The caller then
            asks `receive`.

    Attributes:
        num_messages, num_bytes: totals since the start.
    """

    def __init__(self, machines: Machines, network: NetworkShape, arrive: Arrive) -> None:
        self._machines, self._arrive = machines, arrive
        self._network = network
        num_workers = len(machines.machine_of)
        # By [crosses machines][worker]: when its port is free.
        self._sends_at = [[0] * num_workers, [0] * num_workers]
        self._receives_at = [[0] * num_workers, [0] * num_workers]
        self.num_messages = self.num_bytes = 0

    def send(self, message: HopMessage, now_ns: int) -> None:
        """Send a message."""
        hop, machine_of = message.hop, self._machines.machine_of
        source, crosses = hop.src, machine_of[hop.src] != machine_of[hop.dst]
        link = self._machines.across if crosses else self._machines.within
        num_bytes = HOP_HEADER_BYTES + hop_bytes(self._network, hop.num_rows, len(message.records))
        port_ns = link.port_ns(num_bytes)
        sends_at = self._sends_at[crosses]
        sends_at[source] = max(now_ns, sends_at[source]) + link.message_ns + port_ns
        self.num_messages += 1
        self.num_bytes += num_bytes
        self._arrive(Transfer(message, crosses, port_ns), sends_at[source] + link.latency_ns)

    def receive(self, transfer: Transfer, now_ns: int) -> int:
        """Let a message that has arrived pass the receiver's port. Returns the time at which it is through."""
        if transfer.is_through:
            return now_ns
        receives_at, worker = self._receives_at[transfer.crosses], transfer.message.hop.dst
        receives_at[worker] = max(now_ns, receives_at[worker] + transfer.port_ns)
        transfer.is_through = True
        return receives_at[worker]


Int64s = NDArray[np.int64]

NO_HOST = HostOverhead()

Event = tuple[int, int, int, Transfer | None]  # time, number, worker, message that arrives


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupLayout:
    """The workers of a group. The first `num_homes` have attention; those with slots in the table have experts.

    Attributes:
        num_homes: attention workers.
        table: where experts live.
        machines: machine of each worker, and the links between them.
        gate: draws the experts of each token.
        policy_of: makes the step policy of a worker, by its number.
        host: time of the engine's own code for each item.
        launch_ahead: items with a device at once; with 2 the host prepares an item while another one runs.
        num_credits: tokens of one home that may be among one expert worker's experts at once. None means no bound.
        switch_gap: as in `PeerSettings`.
        factor_of: makes the source of factors on the items' times of a worker, by its number; None from it means 1.
    """

    num_homes: int
    table: ExpertTable
    machines: Machines
    gate: PopularityGate
    policy_of: Callable[[int], StepPolicy]
    host: HostOverhead = NO_HOST
    launch_ahead: int = 1
    num_credits: int | None = None
    switch_gap: int = SWITCH_GAP
    factor_of: Callable[[int], Callable[[], float] | None] = lambda _: None


class WorkerGroup:
    """Homes and expert workers on virtual time; implements `sim.groups.group.Ranks`.

    Args:
        settings: scheduler settings of each home.
        layout: the workers.
        cost_of: prices of each worker's stages, by its number.

    Attributes:
        seats: the homes.
        devices, executors: of each worker.
        links: between the workers.
        tells_prefill, steps_together: False, because steps overlap and no time belongs to one plan.
        num_events: items that ended and messages that arrived.
    """

    tells_prefill = False
    steps_together = False

    def __init__(
        self, settings: SchedulerSettings, layout: GroupLayout, cost_of: Callable[[int], StageCostModel]
    ) -> None:
        self.began_ns = 0
        self.ends: Int64s | None = None
        self._layout, self._settings = layout, settings
        self._network = cost_of(0).network
        self.links = VirtualLinks(layout.machines, self._network, self._on_send)
        self._events: list[Event] = []
        self._num_pushed = self.num_events = 0
        self.seats: list[Seat] = []
        self.devices: list[PricedStages] = []
        self.executors: list[FlowExecutor] = []
        for worker in range(len(layout.table.logical_of)):
            self._add_worker(worker, cost_of(worker))
        self._wakes_ns = [FOREVER_NS] * len(self.executors)

    def _add_worker(self, worker: int, cost: StageCostModel) -> None:
        settings, layout, is_home = self._settings, self._layout, worker < self._layout.num_homes
        # A sequence has one unit in flight, and most units are decodes.
        num_rows = settings.num_slots + settings.max_num_batched_tokens
        num_credits = layout.num_credits or num_rows
        has_slots = layout.table.logical_of[worker] != EMPTY
        shape = worker_shape(
            self._network,
            num_rows=num_rows if is_home else 0,
            num_places=num_rows if is_home else 0,
            num_slots=layout.table.logical_of.shape[2] if has_slots.any() else 0,
            num_remote_places=num_credits * layout.num_homes if has_slots.any() else 0,
        )
        setup = StageSetup(
            shape=shape,
            block_size=settings.block_size,
            gate=layout.gate if is_home else None,
            host=layout.host,
            factor=layout.factor_of(worker),
        )
        scripts = Scripts(settings.block_size)
        device = PricedStages(cost, setup, lambda units, _: scripts.answer(units), scripts.request_keys)
        peers = PeerSettings(
            worker=worker,
            num_workers=len(layout.table.logical_of),
            table=layout.table,
            num_credits=num_credits,
            switch_gap=layout.switch_gap,
        )
        executor = FlowExecutor(device, layout.policy_of(worker), layout.launch_ahead, peers, self.links)
        self.devices.append(device)
        self.executors.append(executor)
        if is_home:
            self.seats.append(Seat(Rank(Scheduler(settings, executor.recall), executor), scripts))

    @property
    def busy_ns(self) -> Int64s:
        """int64[workers], time for which each worker has computed."""
        return np.array([device.busy_ns for device in self.devices], np.int64)

    # --- Ranks ------------------------------------------------------------------------------------------------------

    @property
    def next_ns(self) -> int | None:
        """Time of the next event. None means that the group is idle."""
        return self._events[0][0] if self._events else None

    def add(self, seat: int, request: Request, script: Script, now_ns: int) -> int:
        """Add a request to a home's waiting queue; the home plans at once.

        Returns:
            Serial number of the request on that home.

        Raises:
            RequestError: the home refuses the request; no state has changed.
        """
        serial = self.seats[seat].add(request, script, now_ns)
        self._push(now_ns, seat, None)
        return serial

    def catch_up(self, before_ns: int) -> None:
        """Return without effect, because there are no jumps."""

    def turn(self, now_ns: int, until_ns: int = FOREVER_NS) -> list[StepOutput]:
        """Handle the first event, then all events up to one at which a request may gain a token."""
        self.began_ns = now_ns
        outputs = [StepOutput() for _ in self.seats]
        output, worker = self._handle(now_ns)
        if output is not None:
            outputs[worker] = output
        while self._events and self._events[0][0] < until_ns and not self._may_emit(self._events[0]):
            self._handle(self._events[0][0])
        return outputs

    def _may_emit(self, event: Event) -> bool:
        """Whether requests may gain tokens: only a home has its sampler with the device."""
        return event[2] < len(self.seats) and self.executors[event[2]].may_emit

    def _handle(self, now_ns: int) -> tuple[StepOutput | None, int]:
        """Handle the first event. Returns what requests gained, if any, and the worker."""
        _, _, worker, transfer = heapq.heappop(self._events)
        if transfer is not None and (through_ns := self.links.receive(transfer, now_ns)) > now_ns:
            self._push(through_ns, worker, transfer)
            return None, worker
        self.num_events += 1
        executor = self.executors[worker]
        if transfer is not None:
            executor.receive(transfer.message, now_ns)
            if not executor.has_room:
                self._await_device(worker, now_ns)  # it may be ready earlier, if the message took back some work
                return None, worker
        return self._step(worker, now_ns), worker

    # --- events -----------------------------------------------------------------------------------------------------

    def _on_send(self, transfer: Transfer, arrives_ns: int) -> None:
        self._push(arrives_ns, transfer.message.hop.dst, transfer)

    def _push(self, at_ns: int, worker: int, transfer: Transfer | None) -> None:
        self._num_pushed += 1
        heapq.heappush(self._events, (at_ns, self._num_pushed, worker, transfer))

    def _step(self, worker: int, now_ns: int) -> StepOutput | None:
        """Take what a worker has done, and start what it can. Returns what requests of a home gained, if any."""
        executor, output = self.executors[worker], None
        if worker < len(self.seats):
            seat = self.seats[worker]
            output = seat.rank.collect(now_ns)
            seat.rank.begin(now_ns)
            if output.sequences:
                seat.forget_ended(output)
                seat.publish_step_ends((now_ns,))
            else:
                output = None
        else:
            executor.poll(now_ns)
            executor.start(now_ns)
        self._await_device(worker, now_ns)
        return output

    def _await_device(self, worker: int, now_ns: int) -> None:
        """Make an event of the time at which a worker's device or policy wants attention."""
        ready_ns = self.executors[worker].ready_at_ns()
        assert ready_ns is not None, "a priced device knows when it is ready"
        if ready_ns < FOREVER_NS and (ready_ns != self._wakes_ns[worker] or ready_ns <= now_ns):
            self._push(ready_ns, worker, None)
            self._wakes_ns[worker] = ready_ns


class StagedRank:
    """One rank in `preemptive` mode; implements `sim.groups.group.Ranks`.

    Args:
        settings: scheduler settings.
        cost: prices of the stages.
        policy: step policy.
        passes_decodes: whether latency-sensitive units pass best-effort ones after their first token too, as in
            `engine.rank.Rank`.
        gate: draws the experts of each token. None means the popularity of `cost` in all layers.

    Attributes:
        seats: the rank.
        device: device of the rank.
        tells_prefill: False, because steps overlap and no time belongs to one plan. A seat's `plan` stays None.
    """

    tells_prefill = False
    steps_together = False

    def __init__(
        self,
        settings: SchedulerSettings,
        cost: StageCostModel,
        policy: StepPolicy,
        *,
        passes_decodes: bool,
        gate: PopularityGate | None = None,
    ) -> None:
        scripts = Scripts(settings.block_size)
        setup = whole_setup(cost, NUM_PLANS * settings.max_num_batched_tokens, settings.block_size, gate)
        device = PricedStages(cost, setup, lambda units, _: scripts.answer(units), scripts.request_keys)
        self.device = device
        self._rank = build_preemptive_rank(settings, device, policy, passes_decodes=passes_decodes)
        self.seats = [Seat(self._rank, scripts)]
        self.next_ns: int | None = None
        self.began_ns = 0
        self.ends: NDArray[np.int64] | None = None

    def add(self, seat: int, request: Request, script: Script, now_ns: int) -> int:
        """Add a request to the waiting queue; the rank steps at once.

        Returns:
            Serial number of the request.

        Raises:
            RequestError: the rank refuses the request; no state has changed.
        """
        serial = self.seats[seat].add(request, script, now_ns)
        self.next_ns = now_ns
        return serial

    def catch_up(self, before_ns: int) -> None:
        """Return without effect, because there are no jumps."""

    def turn(self, now_ns: int, until_ns: int = FOREVER_NS) -> list[StepOutput]:
        """Collect finished items, start the next one, and return the step output."""
        self.began_ns = now_ns
        output = self._rank.collect(now_ns)
        self.seats[0].forget_ended(output)
        self._rank.begin(now_ns)
        ready_ns = self._rank.ready_at_ns()
        self.next_ns = None if ready_ns == FOREVER_NS else ready_ns
        self.seats[0].publish_step_ends((now_ns,))
        return [output]
