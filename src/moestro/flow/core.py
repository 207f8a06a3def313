"""The flow core: events in, commands out. Which tokens wait where, what runs next, who is done. No clock, no device.

    PlanSubmitted   a plan's units go to the attention of layer 0, or wait at the door until there are rows for them
    attention   answers each token's experts: its units wait for all of these
    experts     answer contributions: a unit that lacks none goes to the attention of the next layer
    sampler     behind the last layer: the units' result leaves the core

Only a `Tick` launches anything: whoever brings several events lets the policy choose once, when it has seen them all.

What is not with the device is in a queue, and what runs next is the step policy's choice alone. So to preempt is not
to choose, and whatever was not chosen is exactly where it was.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.load_figures import PassCounts
from moestro.core.stages import (
    Attention,
    AttentionDone,
    Experts,
    ExpertsDone,
    Passage,
    Sample,
    StageItem,
    StageResult,
    StageShape,
    Stopped,
)
from moestro.core.unit_sets import select_units
from moestro.core.views import ATTENTION, EVERY_EXPERT, LS, Run, StepPolicy, Wait
from moestro.core.work import Plan, Slots, StepResult
from moestro.errors import InvariantError
from moestro.flow.micro_queues import Batches, MicroQueues, merge_batches
from moestro.flow.passed_over import PassedOver
from moestro.flow.token_pool import TokenPool

Int64s = NDArray[np.int64]

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class PlanSubmitted:
    """Event: a plan is to be computed."""

    plan: Plan


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """Event: the oldest launched item has a result."""

    result: StageResult


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: the device may have room for more."""


Event = PlanSubmitted | Done | Tick


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Command: start this item."""

    item: StageItem


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Command: give up what has not begun of expert batches and passages."""


@dataclass(frozen=True, slots=True, eq=False)
class Emit:
    """Command: these units are done."""

    result: StepResult


Command = Launch | Withdraw | Emit


@dataclass(slots=True, eq=False)
class _Launched:
    """An item that is with the device.

    Attributes:
        item: it.
        ids: int64[n], its units; of an `Experts`, those that it completes.
    """

    item: StageItem
    ids: Int64s


class FlowCore:
    """Runs any number of plans at once, token batch by token batch.

    Args:
        shape: of the device.
        policy: chooses what runs next.
        launch_ahead: items with the device at once. 1: each choice sees all results; 2: an accelerator has its next
            item while the host takes in the last one's result.
    """

    def __init__(self, shape: StageShape, policy: StepPolicy, launch_ahead: int = 1) -> None:
        self.shape = shape
        self._policy = policy
        self._launch_ahead = launch_ahead
        self._pool = TokenPool(shape)
        self._queues = MicroQueues(shape, self._pool)
        self._passed_over = PassedOver(self._pool, self._queues)
        self._launched: deque[_Launched] = deque()
        self._door: list[Plan] = []
        self._num_withdrawn = 0  # launched items of which it is not known how far they came
        self._wait_until_ns: int | None = None  # what the policy said last: `Wait.until_ns`
        self._ask_again_ns: int | None = None  # the earliest `Run.ask_again_ns` of what is launched
        self._counts: NDArray[np.int64] | None = None
        if shape.num_experts:
            self._counts = np.zeros((shape.num_layers, shape.num_experts), np.int64)

    @property
    def num_plans(self) -> int:
        """Plans submitted some of whose units are not done."""
        return len(self._pool) + len(self._door)

    @property
    def wake_ns(self) -> int | None:
        """When the policy wants to be asked again even if no event comes; None means no such time."""
        return min((at for at in (self._wait_until_ns, self._ask_again_ns) if at is not None), default=None)

    def wants_tick(self, now_ns: int) -> bool:
        """Whether a `Tick` asks the policy: the device has room, or the policy set a time that has come."""
        wake_ns = self.wake_ns
        return self._has_room or (wake_ns is not None and now_ns >= wake_ns)

    @property
    def _has_room(self) -> bool:
        # What a withdrawn item did not do must be known first: the next one might complete a unit that lacks it.
        if self._num_withdrawn or len(self._launched) >= self._launch_ahead:
            return False
        return bool(self._queues.num_waiting or self._door)

    @property
    def num_launched(self) -> int:
        """Items with the device."""
        return len(self._launched)

    @property
    def pass_counts(self) -> PassCounts:
        """Totals since the start."""
        return self._passed_over.counts

    def on_event(self, now_ns: int, event: Event) -> list[Command]:
        """Take note of `event`, and say what is to be done about it, in order."""
        self._passed_over.elapse(now_ns)
        commands: list[Command] = []
        match event:
            case Done(result):
                self._take(now_ns, result, commands)
            case PlanSubmitted(plan):
                self._submit(plan, now_ns, commands)
            case Tick():
                self._choose(now_ns, commands)
        # A device that works when it is polled hands out a result with the time at which it began the last piece. So
        # the time after a result belongs to that result's item, until the next event says what runs.
        if self._launched or not isinstance(event, Done):
            self._passed_over.observe(self._units_of(launched) for launched in self._launched)
        return commands

    def recall(self, slots: Slots) -> Slots:
        """Forget the units of `slots`, as if they had never been submitted.

        Returns:
            The slots of which that is so; the units of the others are with the device, or are not known.
        """
        recalled = [self._turn_away(slots)]
        ids = self._pool.find(slots)
        for launched in self._launched:
            ids = np.setdiff1d(ids, self._units_of(launched))
        if len(ids):
            self._passed_over.forget(ids)
            recalled.append(self._pool.slot[ids])
            self._queues.drop(ids)
            inside = ids[self._pool.lacking[ids] > 0]  # between attention and the end of experts
            if len(inside):
                self._pool.give_back_places(self._pool.places_of(self._pool.wave(inside).rows))
            self._pool.leave(ids)
        return np.concatenate(recalled)

    def _units_of(self, launched: _Launched) -> Int64s:
        """Units with which an item has anything to do."""
        if isinstance(launched.item, Experts):
            return np.concatenate([launched.ids, self._pool.units_at(launched.item.places)])
        return launched.ids

    def _turn_away(self, slots: Slots) -> Slots:
        """Forget the units of `slots` that wait at the door, and answer their slots."""
        turned = [np.empty(0, np.int64)]
        for at, plan in enumerate(self._door):
            gone = np.isin(plan.units.slot, slots)
            if gone.any():
                turned.append(plan.units.slot[gone])
                self._door[at] = Plan(plan.step, select_units(plan.units, np.flatnonzero(~gone)))
        self._door = [plan for plan in self._door if len(plan.units)]
        return np.concatenate(turned)

    # --- events -----------------------------------------------------------------------------------------------------

    def _submit(self, plan: Plan, now_ns: int, commands: list[Command]) -> None:
        if plan.num_tokens > self.shape.num_rows:
            raise InvariantError(f"a plan of {plan.num_tokens} tokens on a device of {self.shape.num_rows} rows")
        if plan.units.num_tokens.max() > self.shape.num_places:
            raise InvariantError(f"a unit longer than the {self.shape.num_places} tokens that fit in a layer")
        self._door.append(plan)
        self._admit(now_ns)
        # Whoever came may be more urgent than the rest of what runs: let the policy choose again.
        self._withdraw(commands)

    def _withdraw(self, commands: list[Command]) -> None:
        self._ask_again_ns = None
        if any(isinstance(launched.item, Experts | Passage) for launched in self._launched):
            self._num_withdrawn = len(self._launched)
            self._passed_over.count_withdrawal()
            commands.append(Withdraw())

    def _admit(self, now_ns: int) -> None:
        """Let plans in while there are rows: those with a latency-sensitive unit first, then in order."""
        for plan in sorted(self._door, key=lambda plan: LS not in plan.units.service_class):
            if plan.num_tokens > self._pool.num_free_rows:
                return
            self._door.remove(plan)
            self._queues.add_units(0, self._pool.enter(plan), now_ns)

    def _take(self, now_ns: int, result: StageResult, commands: list[Command]) -> None:
        if not self._launched:
            raise InvariantError("a result of nothing")
        launched = self._launched.popleft()
        self._ask_again_ns = None  # the policy chooses again after each result
        self._num_withdrawn = max(self._num_withdrawn - 1, 0)
        match launched.item, result:
            case Attention() as item, AttentionDone(topk_ids):
                if topk_ids is None:
                    self._queues.add_units(item.layer + 1, launched.ids, now_ns)
                else:
                    self._queues.add_pairs(item.layer, item.places, topk_ids, now_ns)
            case Experts() as item, ExpertsDone(num_batches):
                self._take_experts(now_ns, launched, item, num_batches, commands)
            case Passage() as item, Stopped():
                self._take_stopped(now_ns, launched.ids, item, result, commands)
            case (Sample() | Passage()) as item, StepResult(expert_counts=counts):
                self._count(counts)
                commands.append(Emit(msgspec.structs.replace(result, expert_counts=self._counts)))
                self._counts = None if self._counts is None else np.zeros_like(self._counts)
                if isinstance(item, Passage):
                    self._pool.give_back_places(item.places)
                self._pool.leave(launched.ids)
            case _:
                raise InvariantError(f"{type(result).__name__} for {type(launched.item).__name__}")

    def _count(self, counts: NDArray[np.int64] | None) -> None:
        if counts is not None and self._counts is not None:
            self._counts += counts

    def _take_stopped(self, now_ns: int, ids: Int64s, item: Passage, stopped: Stopped, commands: list[Command]) -> None:
        self._count(stopped.expert_counts)
        if stopped.topk_ids is None:
            self._pool.complete(ids)
            self._pool.give_back_places(item.places)
            self._queues.add_units(stopped.layer, ids, now_ns)
            return
        done = stopped.topk_ids < stopped.first_open
        self._queues.add_pairs(stopped.layer, item.places, stopped.topk_ids, now_ns, ~done)
        self._complete(stopped.layer, self._pool.contribute(np.repeat(item.places, done.sum(axis=1))), commands)

    def _complete(self, layer: int, ids: Int64s, commands: list[Command]) -> None:
        """Units that have all contributions and are not complete: an item without batches ends their layer."""
        if len(ids):
            self._launch(self._experts_item(layer, merge_batches([]), ids), ids, commands)

    def _take_experts(
        self, now_ns: int, launched: _Launched, item: Experts, num_batches: int, commands: list[Command]
    ) -> None:
        assert self._counts is not None, "experts of a dense network"
        self._counts[item.layer, item.experts[:num_batches]] += item.counts[:num_batches]
        ids = launched.ids
        if num_batches == len(item.experts):
            if len(ids):
                self._pool.give_back_places(item.complete_places)
                self._queues.add_units(item.layer + 1, ids, now_ns)
            return
        done = int(item.counts[:num_batches].sum())
        rest = Batches(item.experts[num_batches:], item.counts[num_batches:], item.places[done:], item.choices[done:])
        self._pool.take_back(rest.places)
        self._queues.give_back(item.layer, rest)
        self._complete(item.layer, ids[self._pool.lacking[ids] == 0], commands)

    # --- choices ----------------------------------------------------------------------------------------------------

    def _choose(self, now_ns: int, commands: list[Command]) -> None:
        """Launch what the policy wants, as long as the device has room."""
        if self._ask_again_ns is not None and now_ns >= self._ask_again_ns:
            self._withdraw(commands)
        self._wait_until_ns = None
        if self._door:
            self._admit(now_ns)
        while self._has_room and self._queues.num_waiting:
            table = self._queues.table()
            if not np.count_nonzero(table.runnable):
                return  # a result will free places
            match self._policy(table, now_ns):
                case Wait(until_ns):
                    self._wait_until_ns = until_ns
                    return
                case Run() as run:
                    self._run(run, commands)
                    times = [at for at in (self._ask_again_ns, run.ask_again_ns) if at is not None]
                    self._ask_again_ns = min(times, default=None)

    def _run(self, run: Run, commands: list[Command]) -> None:
        if run.group == ATTENTION:
            self._run_attention(run, commands)
        else:
            self._run_experts(run, commands)

    def _run_attention(self, run: Run, commands: list[Command]) -> None:
        ids = self._queues.take_units(run.layer, run.max_rows, run.classes)
        if len(ids) == 0:
            raise InvariantError(f"the step policy chose {run}, where nothing can run")
        wave = self._pool.wave(ids)
        item: Attention | Passage | Sample
        if run.until > run.layer and self._pool.num_free_places >= len(wave.rows) * (self.shape.num_chosen > 0):
            places = self._pool.take_places(wave) if self.shape.num_chosen else _NONE
            item = Passage(run.layer, run.until, wave.units, wave.rows, places)
        elif run.layer == self.shape.num_layers:
            item = Sample(wave.units, wave.rows)
        elif self.shape.is_sparse[run.layer]:
            item = Attention(run.layer, wave.units, wave.rows, self._pool.take_places(wave))
        else:
            item = Attention(run.layer, wave.units, wave.rows, _NONE)
        self._launch(item, ids, commands)

    def _run_experts(self, run: Run, commands: list[Command]) -> None:
        if run.group == EVERY_EXPERT:
            batches = self._queues.take_every_expert(run.layer, run.max_rows, run.classes)
        else:
            batches = self._queues.take_expert(run.layer, run.group - 1, run.max_rows, run.classes)
        if len(batches.experts) == 0:
            raise InvariantError(f"the step policy chose {run}, where nothing can run")
        ids = self._pool.contribute(batches.places)
        self._launch(self._experts_item(run.layer, batches, ids), ids, commands)

    def _experts_item(self, layer: int, batches: Batches, complete: Int64s) -> Experts:
        rows = self._pool.wave(complete).rows if len(complete) else _NONE
        return Experts(layer, *batches, rows, self._pool.places_of(rows))

    def _launch(self, item: StageItem, ids: Int64s, commands: list[Command]) -> None:
        self._launched.append(_Launched(item, ids))
        commands.append(Launch(item))
