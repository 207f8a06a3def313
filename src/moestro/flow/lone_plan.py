"""A plan that is alone in the network is one item, whose units enter the token pool only if something interrupts it.

Most steps are such plans, and keeping track of their units takes as long as a layer of a small model.
"""

from __future__ import annotations

import numpy as np

from moestro.core.stages import Passage, StageShape
from moestro.core.views import Run, StepPolicy, Wait
from moestro.errors import InvariantError
from moestro.flow.door import Door
from moestro.flow.items import ItemMaker, LaunchedItem
from moestro.flow.micro_queues import MicroQueues
from moestro.flow.token_pool import NO_MERGES, TokenPool


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
