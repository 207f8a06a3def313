"""The plans that wait until the network has rows for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.unit_sets import select_units
from moestro.core.views import LS
from moestro.core.work import Plan, Slots
from moestro.flow.token_pool import TokenPool

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
