"""The flow executor: the flow core over a device that works in stages."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS, earliest
from moestro.core.experts.expert_table import ExpertTable
from moestro.core.load_figures import PassCounts
from moestro.core.stages import HopMessage, StagedDevice
from moestro.core.views import StepPolicy
from moestro.core.work import IsWanted, Plan, PlanWanted, Slots, StepResult, never_wanted
from moestro.errors import CopyError
from moestro.flow.core import FlowCore
from moestro.flow.dispatcher import PeerSettings
from moestro.flow.events import (
    Arrived,
    Done,
    Emit,
    Event,
    Launch,
    PeerLost,
    PlanSubmitted,
    Send,
    Store,
    TableChanged,
    Tick,
    Withdraw,
)


class Links(Protocol):
    """Carries messages to the other workers of a group, in order on each channel."""

    def send(self, message: HopMessage, now_ns: int) -> None:
        """Send a message to `message.hop.dst`; the call does not wait."""
        ...


class FlowExecutor:
    """Computes plans micro-queue by micro-queue; any number of plans may be inside.

    In a group it also computes experts for other workers. An expert worker is an executor without plans.

    Args:
        device: does the work.
        policy: chooses what runs next.
        launch_ahead: items with the device at once; see `FlowCore`.
        peers: the device's place in a group. None means that it is alone.
        links: to the other workers of the group.

    Attributes:
        num_pieces: pieces of work done since the start; constant while nothing can be computed.
    """

    def __init__(
        self,
        device: StagedDevice,
        policy: StepPolicy,
        launch_ahead: int = 1,
        peers: PeerSettings | None = None,
        links: Links | None = None,
    ) -> None:
        self._device, self._links = device, links
        self._core = FlowCore(device.shape, policy, launch_ahead, peers)
        self._results: deque[StepResult] = deque()
        self._emitted_ns = 0  # time of the last of them
        self.num_pieces = 0

    @property
    def pass_counts(self) -> PassCounts:
        """Implement `Executor.pass_counts`."""
        return self._core.pass_counts

    @property
    def num_dropped(self) -> int:
        """Messages and records that were dropped, because they were repeated or no token waits for them any more."""
        return self._core.num_dropped

    def waiting_by_layer(self, now_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Implement `FlowCore.waiting_by_layer`."""
        return self._core.waiting_by_layer(now_ns)

    @property
    def has_room(self) -> bool:
        """Whether the device could take another item."""
        return self._core.has_room

    @property
    def may_emit(self) -> bool:
        """Whether a result waits, or the device has an item that ends with one."""
        return bool(self._results) or self._core.may_emit

    def wanted_plan(self) -> PlanWanted | None:
        """Implement `Executor.wanted_plan`. No plan may share the blocks of one whose copies failed."""
        if self._results and any(result.failed is not None for result in self._results):
            return None
        return self._core.wanted_plan()

    def receive(self, message: HopMessage, now_ns: int) -> None:
        """Take in a message of another worker. What has not begun of less urgent work may go back to its queues."""
        self._apply(Arrived(message), now_ns)

    def change_table(self, table: ExpertTable, now_ns: int, is_near: tuple[bool, ...] | None = None) -> None:
        """Send tokens by another table from now on. `is_near`: as in `PeerSettings`."""
        self._apply(TableChanged(table, is_near), now_ns)

    @property
    def is_settled(self) -> bool:
        """Whether all contributions that are waited for come from slots of the present table; 20 us."""
        return self._core.is_settled

    def is_slot_idle(self, layer: int, slot: int) -> bool:
        """Whether nothing that is here uses an expert's slot, so that another expert can be written to it."""
        return self._core.is_slot_idle(layer, slot)

    def lose(self, worker: int, now_ns: int) -> None:
        """Send again what a worker has not answered."""
        self._apply(PeerLost(worker), now_ns)

    def submit(self, plan: Plan, now_ns: int) -> None:
        """Let a plan in, after its KV copies. If these fail, its units return without having been computed.

        What has not begun of less urgent work goes back to its queues.
        """
        if plan.moves is not None:
            try:
                self._device.move_blocks(plan.moves, now_ns)
            except CopyError:
                self.num_pieces += 1
                self._results.append(StepResult(plan.units.slot, failed=plan.moves))
                self._emitted_ns = now_ns
                return
        self._apply(PlanSubmitted(plan), now_ns)

    def start(self, now_ns: int) -> None:
        """Give the device what it has room for, unless it works only when it is polled."""
        if self._core.wants_tick(now_ns) and not self._device.works_when_polled:
            self._apply(Tick(), now_ns)

    def poll(self, now_ns: int, is_wanted: IsWanted = never_wanted) -> StepResult | None:
        """The oldest result that was not taken yet, if any is ready.

        A device that works when it is polled, or that cannot tell when it is ready, is polled piece by piece until
        there is a result or `is_wanted` is true. With several plans or remote tokens, this returns after every item,
        so that the policy chooses with the current time.
        """
        while not self._results:
            if self._core.wants_tick(now_ns):
                self._apply(Tick(), now_ns)
            if self._core.num_launched == 0 or not self._work(now_ns, is_wanted):
                break
        return self._results.popleft() if self._results else None

    def _work(self, now_ns: int, is_wanted: IsWanted) -> bool:
        """Poll the device until it has results, and take them in. Returns whether to go on."""
        poll, until_ns = self._device.poll, self._core.wake_ns
        while not (done := poll(now_ns)):
            if self._device.ready_at_ns() is not None:
                return False
            self.num_pieces += 1
            if is_wanted(until_ns):
                return False
        for result in done:
            self._apply(Done(result), now_ns)
        self.num_pieces += 1
        return not self._core.is_shared and not is_wanted(self._core.wake_ns)

    def ready_at_ns(self) -> int | None:
        """Implement `Executor.ready_at_ns`."""
        if self._results:
            return self._emitted_ns  # a late poll can find several, and returns one
        ready_ns = self._device.ready_at_ns()
        if ready_ns is None and (self._core.num_launched or (self._core.has_room and self._core.wake_ns is None)):
            return None  # only the hardware knows, or the device works when it is polled
        next_ns = earliest(ready_ns, self._core.wake_ns)
        return FOREVER_NS if next_ns is None else next_ns

    def recall(self, slots: Slots, now_ns: int) -> Slots:
        """Forget parked units, as if they had never been submitted.

        Returns:
            Those of `slots` of which that is so: they will have no result. Of the others, the device has something.
        """
        if self._device.works_when_polled and self._core.num_launched:
            # What the device has not begun comes back at once, and units that only wait are free to go.
            self._device.withdraw(now_ns)
            for result in self._device.poll(now_ns):
                self._apply(Done(result), now_ns)
        return self._core.recall(slots)

    def _apply(self, event: Event, now_ns: int) -> None:
        for command in self._core.on_event(now_ns, event):
            match command:  # the most frequent first; none is positional: msgspec makes a tuple for each of these
                case Send():
                    message, places, choices = command.message, command.places, command.choices
                    assert self._links is not None, "a device that is alone sends nothing"
                    if choices is None:
                        tensor = self._device.read_inputs(places)
                    else:
                        tensor = self._device.read_contributions(places, choices)
                    self._links.send(HopMessage(message.hop, message.records, tensor), now_ns)
                case Store():
                    tensor, rows, places, choices = command.tensor, command.rows, command.places, command.choices
                    vectors = tensor if tensor is None or rows is None else tensor[rows]
                    if choices is None:
                        self._device.store_inputs(places, vectors)
                    else:
                        self._device.store_contributions(places, choices, vectors)
                case Launch():
                    self._device.launch(command.item, now_ns)
                case Withdraw():
                    self._device.withdraw(now_ns)
                case Emit():
                    self._results.append(command.result)
                    self._emitted_ns = now_ns
