"""The plans that wait until the network has rows for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.stages import Passage, StageShape
from moestro.core.views import LS, Run, StepPolicy, Wait
from moestro.core.work import Plan, Slots, select_units
from moestro.errors import InvariantError
from moestro.flow.items import ItemMaker, LaunchedItem
from moestro.flow.micro_queues import MicroQueues
from moestro.flow.token_pool import NO_MERGES, TokenPool

Int64s = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A plan at the door, and its tokens. `passes`: whether it was submitted while others were inside."""

    plan: Plan
    num_tokens: int
    passes: bool


class Door:
    """Lets plans into a home's token pool, and numbers everything that enters its device.

    Args:
        pool: the home's tokens.

    Attributes:
        num_tokens: tokens of the plans that wait.
    """

    def __init__(self, pool: TokenPool) -> None:
        self._pool = pool
        self._waiting: list[_Waiting] = []
        self._passing_entry = -1
        self._num_entries = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_passing(self) -> bool:
        """Whether a plan that was submitted while others were inside is not done."""
        return self._pool.has_entry(self._passing_entry) or any(each.passes for each in self._waiting)

    @property
    def first(self) -> Plan:
        """The plan that has waited for longest."""
        return self._waiting[0].plan

    def drop_first(self) -> None:
        """Take out the plan that has waited for longest."""
        self.num_tokens -= self._waiting.pop(0).num_tokens

    def take_entries(self, count: int = 1) -> int:
        """Number what enters the device now, plans or guests. Returns the first number."""
        self._num_entries += count
        return self._num_entries - count

    def arrive(self, plan: Plan) -> None:
        """Let a plan wait."""
        num_tokens = plan.num_tokens
        self._waiting.append(_Waiting(plan, num_tokens, bool(self._pool.num_entries or self._waiting)))
        self.num_tokens += num_tokens

    def admit(self) -> list[Int64s]:
        """Let plans in while there are rows: those with a latency-sensitive unit first, then in order.

        Returns:
            The names of each plan's units.
        """
        admitted = []
        waiting = self._waiting
        if len(waiting) > 1:
            waiting = sorted(waiting, key=lambda each: LS not in each.plan.units.service_class)
        for each in tuple(waiting):
            if each.num_tokens > self._pool.num_free_rows:
                break
            self._waiting.remove(each)
            self.num_tokens -= each.num_tokens
            number = self.take_entries()
            if each.passes:
                self._passing_entry = number
            admitted.append(self._pool.enter(number, each.plan.units))
        return admitted

    def turn_away(self, slots: Slots) -> Slots:
        """Forget the units of `slots` that wait, and return their slots."""
        turned = [np.empty(0, np.int64)]
        for each in self._waiting:
            gone = np.isin(each.plan.units.slot, slots)
            if gone.any():
                turned.append(each.plan.units.slot[gone])
                each.plan = Plan(each.plan.step, select_units(each.plan.units, np.flatnonzero(~gone)))
                each.num_tokens = each.plan.num_tokens
        self._waiting = [each for each in self._waiting if len(each.plan.units)]
        self.num_tokens = sum(each.num_tokens for each in self._waiting)
        return np.concatenate(turned)


# A plan that is alone in the network is one item, whose units enter the token pool only if something interrupts it.
#
# Most steps are such plans, and keeping track of their units takes as long as a layer of a small model.


class LonePlan:
    """Lets the policy choose for a plan that waits at the door of an empty network.

    Args:
        shape, policy: of the device. A policy that overlaps prompts and decodes has several plans inside.
        pool, door: of the home.
        queues, items: of the device. There are no lone plans where it is not alone.

    Attributes:
        came_ns: when the last plan came to the door.
    """

    def __init__(
        self,
        shape: StageShape,
        policy: StepPolicy,
        pool: TokenPool,
        door: Door,
        queues: MicroQueues,
        items: ItemMaker,
    ) -> None:
        self._shape, self._policy, self._pool, self._door = shape, policy, pool, door
        self._queues, self._items = queues, items
        self._is_possible = items.is_alone and not policy.overlaps_prefill
        self._launched: LaunchedItem | None = None
        self.came_ns = 0

    @property
    def is_running(self) -> bool:
        """Whether such a plan is with the device."""
        return self._launched is not None

    @property
    def waits(self) -> bool:
        """Whether all that is here is one plan at the door."""
        return self._is_possible and not self.is_running and len(self._door) == 1 and not self._pool.num_entries

    def choose(self, now_ns: int) -> tuple[Run | Wait, LaunchedItem | None]:
        """Ask the policy about the plan that waits, and take it from the door if it passes the network in one go.

        Returns:
            What the policy chose, and the item; None means that the plan has to enter.
        """
        plan = self._door.first
        choice = self._policy(self._queues.table_alone(plan.units, self.came_ns), now_ns)
        self._launched = None if isinstance(choice, Wait) else self._items.make_alone(choice, plan)
        if self._launched is not None:
            self._door.drop_first()
        return choice, self._launched

    def end(self) -> bool:
        """Note that the result of an item is there. Returns whether it was that of a lone plan."""
        was_running, self._launched = self.is_running, None
        return was_running

    def settle(self) -> None:
        """Give the units the rows and places that their item names, because they may stop on their way."""
        launched = self._launched
        if launched is None:
            return
        assert isinstance(launched.item, Passage)
        wave = self._pool.wave(self._pool.enter(self._door.take_entries(), launched.item.units))
        if self._shape.num_chosen:
            self._pool.take_places(wave, NO_MERGES)
        if not np.array_equal(wave.rows, launched.item.rows):
            raise InvariantError("a lone plan's units have other rows than its item")
        launched.ids = wave.ids
        self.end()
