"""Which units are passed over, and for how long: the measure of preemption, and what starvation bounds are about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.load_figures import PassCounts
from moestro.core.views import BE, LS
from moestro.flow.micro_queues import MicroQueues
from moestro.flow.token_pool import TokenPool

Int64s = NDArray[np.int64]

_NOBODY = np.empty(0, np.int64)


class PassedOver:
    """Charges the device's time to the units that it passes over.

    A unit is passed over while it could run and the device runs a unit of a higher class that entered the network
    later. Units in the same batch are not passed over, and neither are units that wait for free places.

    Args:
        pool: keeps each unit's total, `TokenPool.passed_ns`.
        queues: know which units could run.

    Attributes:
        counts: totals since the start.
    """

    def __init__(self, pool: TokenPool, queues: MicroQueues) -> None:
        self._pool, self._queues = pool, queues
        self.counts = PassCounts()
        self._ids = _NOBODY  # units that are passed over now
        self._since_ns = 0
        self._stretch_ns = 0  # for how long units have been passed over without a break
        self._latest_plan = -1  # the last plan that was counted as passing

    def elapse(self, now_ns: int) -> None:
        """Charge the time since the last call to the units that were passed over in it."""
        if len(self._ids) and now_ns > self._since_ns:
            self._pool.pass_over(self._ids, now_ns - self._since_ns)
            self._stretch_ns += now_ns - self._since_ns
        self._since_ns = now_ns

    def observe(self, launched: Iterable[Int64s]) -> None:
        """Find out which units are passed over from now on.

        Args:
            launched: units of each item that is with the device, first of the one that runs. Read only where plans
                overlap, so that a plan alone pays nothing.
        """
        if len(self._pool) > 1:
            self._set(self._waiting_behind([*launched]))
        elif len(self._ids):
            self._set(_NOBODY)

    def forget(self, ids: Int64s) -> None:
        """The units `ids` leave without a result."""
        if len(self._ids):
            self._set(np.setdiff1d(self._ids, ids))

    def count_withdrawal(self) -> None:
        """Launched work is taken back."""
        self._replace(num_withdrawals=self.counts.num_withdrawals + 1)

    def _waiting_behind(self, launched: Sequence[Int64s]) -> Int64s:
        running = launched[0] if launched else _NOBODY
        urgent = running[self._pool.service_class[running] == LS]
        if not len(urgent):
            return _NOBODY
        latest_plan = int(self._pool.plan_of[urgent].max())
        earlier = self._pool.find_earlier(BE, latest_plan)
        if len(earlier):
            earlier = np.setdiff1d(earlier, np.concatenate([*launched, self._queues.short_of_places(BE)]))
        if len(earlier) and latest_plan > self._latest_plan:
            self._latest_plan = latest_plan
            self._replace(num_passes=self.counts.num_passes + 1)
        return earlier

    def _set(self, ids: Int64s) -> None:
        if len(self._ids) == 0 and len(ids) == 0:
            return
        self._ids = ids
        num_tokens = int(self._pool.num_tokens[ids].sum())
        self._replace(num_parked_tokens=num_tokens, max_parked_tokens=max(num_tokens, self.counts.max_parked_tokens))
        if len(ids) == 0:
            self._replace(passed_over_ns=self.counts.passed_over_ns + self._stretch_ns)
            self._stretch_ns = 0

    def _replace(self, **changes: int) -> None:
        self.counts = msgspec.structs.replace(self.counts, **changes)
