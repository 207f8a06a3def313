"""Which tokens are passed over, and for how long: the measure of preemption, and what starvation bounds are about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.load_figures import PassCounts
from moestro.core.views import BE, LS
from moestro.core.work import Int32s
from moestro.flow.micro_queues import MicroQueues
from moestro.flow.remote_tokens import RemoteTokens
from moestro.flow.token_pool import TokenPool

Int64s = NDArray[np.int64]

_NO_UNITS = np.empty(0, np.int64)
_NO_REMOTE = np.empty(0, np.int32)


class Tokens(NamedTuple):
    """Units of this home, and tokens of other homes.

    Attributes:
        ids: int64[n], units.
        remote: int32[m], remote places.
    """

    ids: Int64s = _NO_UNITS
    remote: Int32s = _NO_REMOTE

    @property
    def is_empty(self) -> bool:
        """Whether there are no tokens."""
        return not (len(self.ids) or len(self.remote))

    def without(self, others: Tokens) -> Tokens:
        """Return those that are not among `others`."""
        if self.is_empty:
            return self
        return Tokens(np.setdiff1d(self.ids, others.ids), np.setdiff1d(self.remote, others.remote))


def join_tokens(parts: Sequence[Tokens]) -> Tokens:
    """Join sets of tokens."""
    if len(parts) == 1:
        return parts[0]
    ids, remote = [part.ids for part in parts], [part.remote for part in parts]
    return Tokens(np.concatenate([_NO_UNITS, *ids]), np.concatenate([_NO_REMOTE, *remote]))


class PassedOver:
    """Charges the device's time to the tokens that it passes over.

    A token is passed over while it could run and the device runs a token of a higher class that entered later. Tokens
    in the same batch are not passed over, and neither are units that wait for free places or for other workers.

    Args:
        pool, remote: keep each token's total.
        queues: know which units lack places.
        worker: number of this worker in its group. None means that it is alone.

    Attributes:
        counts: totals since the start.
    """

    def __init__(self, pool: TokenPool, remote: RemoteTokens, queues: MicroQueues, worker: int | None = None) -> None:
        self._pool, self._remote, self._queues, self._worker = pool, remote, queues, worker
        self.counts = PassCounts()
        self._passed = Tokens()  # passed over now
        self._is_any = False  # whether there are any
        self._since_ns = 0
        self._stretch_ns = 0  # for how long tokens have been passed over without a break
        self._latest_entry = -1  # the last entry that was counted as passing

    @property
    def may_happen(self) -> bool:
        """Whether there are tokens that others could pass."""
        return bool(self._pool.num_best_effort or self._remote.num_best_effort)

    def elapse(self, now_ns: int) -> None:
        """Charge the time since the last call to the tokens that were passed over in it."""
        passed_ns = now_ns - self._since_ns
        if self._is_any and passed_ns > 0:
            if len(self._passed.ids):
                self._pool.pass_over(self._passed.ids, passed_ns)
            if len(self._passed.remote):
                self._remote.pass_over(self._passed.remote, passed_ns)
            self._stretch_ns += passed_ns
        self._since_ns = now_ns

    def observe(self, launched: Sequence[Tokens]) -> None:
        """Find out which tokens are passed over from now on.

        Args:
            launched: tokens of each item that is with the device, first of the one that runs.
        """
        if launched or self._is_any:
            self._set(self._waiting_behind(launched) if launched else Tokens())

    def forget(self, tokens: Tokens) -> None:
        """Leave out tokens that leave without a result."""
        if self._is_any:
            self._set(self._passed.without(tokens))

    def count_withdrawal(self) -> None:
        """Count that launched work is taken back."""
        self._replace(num_withdrawals=self.counts.num_withdrawals + 1)

    def _waiting_behind(self, launched: Sequence[Tokens]) -> Tokens:
        latest_entry = self._latest_urgent(launched[0])
        if latest_entry < 0:
            return Tokens()
        ids = self._pool.find_earlier(BE, latest_entry)
        if len(ids):
            ids = np.setdiff1d(ids, self._queues.attention.short_of_places(BE))
        if len(ids) and self._worker is not None:
            ids = ids[self._pool.could_run_on(self._worker, ids)]
        remote = self._remote.find_earlier(BE, latest_entry)
        earlier = Tokens(ids, remote).without(join_tokens(launched))
        if latest_entry > self._latest_entry and not earlier.is_empty:
            self._latest_entry = latest_entry
            self._replace(num_passes=self.counts.num_passes + 1)
        return earlier

    def _latest_urgent(self, running: Tokens) -> int:
        """Number of the last entry of the urgent tokens that run; -1 if there are none."""
        latest = -1
        if len(running.ids):
            urgent = running.ids[self._pool.service_class[running.ids] == LS]
            latest = int(self._pool.entry_of[urgent].max(initial=-1))
        if len(running.remote):
            urgent_remote = running.remote[self._remote.classes_at(running.remote) == LS]
            latest = max(latest, int(self._remote.entries_at(urgent_remote).max(initial=-1)))
        return latest

    def _set(self, passed: Tokens) -> None:
        is_any = not passed.is_empty
        if not (is_any or self._is_any):
            return
        self._passed, self._is_any = passed, is_any
        num_tokens = int(self._pool.num_tokens[passed.ids].sum()) + len(passed.remote)
        self._replace(num_parked_tokens=num_tokens, max_parked_tokens=max(num_tokens, self.counts.max_parked_tokens))
        if not is_any:
            self._replace(passed_over_ns=self.counts.passed_over_ns + self._stretch_ns)
            self._stretch_ns = 0

    def _replace(self, **changes: int) -> None:
        self.counts = msgspec.structs.replace(self.counts, **changes)
