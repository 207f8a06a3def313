"""Sends a home's tokens to the workers that hold their experts, and takes in the replies. Only here ids are translated.

A dispatch spends a credit for each token, which is a guest place of the receiver; a reply spends none, because its
place is reserved. So no worker waits for a worker that waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moestro.core.columns import true_rows
from moestro.core.expert_table import EMPTY, ExpertTable
from moestro.core.hops import DISPATCH, HOP_RECORD, Hop, HopMessage, HopRecords
from moestro.core.views import LS
from moestro.core.work import Int32s
from moestro.flow.events import Send
from moestro.flow.guests import Pairs
from moestro.flow.token_pool import TokenPool

Int16s = NDArray[np.int16]
Int64s = NDArray[np.int64]

_EPOCH_BITS = 32  # epochs of one life; a loss a millisecond fills them in 50 days
_NONE = np.empty(0, np.int32)
_FIRST = np.ones(1, np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """A worker's place in its group.

    Attributes:
        worker: number of this worker.
        num_workers: workers of the group.
        table: where experts live at first.
        num_credits: guest places that each expert worker keeps for each home.
        switch_gap: of two copies of an expert, the home changes to the one on the less loaded worker when the
            difference exceeds this number of waiting (token, expert) pairs. A change splits a batch, so small
            differences are not worth it.
        dtype: dtype of tensors, as in `Hop`.
        incarnation: how often the worker has started again. Its epochs are larger than those of its earlier lives, so
            expert workers that knew it listen to it again.
    """

    worker: int
    num_workers: int
    table: ExpertTable
    num_credits: int
    switch_gap: int = 64
    dtype: str = ""
    incarnation: int = 0


class Owed(NamedTuple):
    """Contributions that are to be sent for again, to tokens of one layer.

    Attributes:
        layer: layer of the experts.
        places: int32[n], distinct, of the tokens.
        is_owed: bool[n, chosen], which contributions. The others are there, or are under way from elsewhere.
    """

    layer: int
    places: Int32s
    is_owed: NDArray[np.bool_]


class _Parcel(NamedTuple):
    """Tokens for one worker.

    Attributes:
        layer: layer of the experts.
        records: HOP_RECORD[n], ordered by row; rows are numbered from 0.
        places: int32[rows], the token of each row.
    """

    layer: int
    records: HopRecords
    places: Int32s


class Dispatcher:
    """Knows where experts live, and what this home may send to whom.

    Args:
        settings: the worker's place in its group.
        pool: the home's tokens.

    Attributes:
        num_dropped: messages and records that were dropped, because they were repeated or their tokens were given up.
        num_switches: changes to another copy of an expert.
    """

    def __init__(self, settings: PeerSettings, pool: TokenPool) -> None:
        self._settings, self._pool, self._worker = settings, pool, settings.worker
        num_workers = settings.num_workers
        self._credits = [settings.num_credits] * num_workers
        self._backlog: Int64s = np.zeros(num_workers, np.int64)  # told by the last reply, and sent since
        self._epoch = [settings.incarnation << _EPOCH_BITS] * num_workers
        self._next_seq = [0] * num_workers
        self._expected_seq = [0] * num_workers
        self._outbox: list[deque[_Parcel]] = [deque() for _ in range(num_workers)]
        self.num_dropped = self.num_switches = 0
        self._use(settings.table)

    # --- where experts live -----------------------------------------------------------------------------------------

    def _use(self, table: ExpertTable) -> None:
        self._table = table
        num_workers, num_layers, _ = table.logical_of.shape
        shape = (num_workers, num_layers, table.num_experts)
        self._slot_on = np.full(shape, EMPTY, np.int16)
        worker, layer, slot = np.nonzero(table.logical_of != EMPTY)
        self._slot_on[worker, layer, table.logical_of[worker, layer, slot]] = slot
        self._may_use = (self._slot_on != EMPTY) & table.is_alive[:, None, None]
        self._has_copies = self._may_use.sum(axis=0).max(axis=1, initial=0) > 1  # by layer
        # The worker that gets an expert's tokens now: at first the home itself if it has a copy.
        own_first = self._may_use.copy()
        own_first[:, self._may_use[self._worker]] = False
        own_first[self._worker] = self._may_use[self._worker]
        self._worker_of = own_first.argmax(axis=0).astype(np.int16)
        # The slot of the expert on that worker.
        self._slot_of = np.take_along_axis(self._slot_on, self._worker_of[None], axis=0)[0]

    def change_table(self, table: ExpertTable) -> list[Owed]:
        """Use another table.

        Returns:
            What waits for credits, and what workers owe that compute no longer; the caller sends it again
            (`send_again`).
        """
        stopped = true_rows(self._table.is_alive & ~table.is_alive)
        self._use(table)
        waiting = [owed for worker in stopped if worker != self._worker for owed in self.lose(worker)]
        for outbox in self._outbox:
            waiting += [self._unsent(self._still_valid(parcel)) for parcel in outbox]
            outbox.clear()
        return waiting

    def _unsent(self, parcel: _Parcel) -> Owed:
        """Contributions that a parcel asks for. The same worker may owe its tokens others, which were sent before."""
        is_owed = np.zeros((len(parcel.places), self._pool.owner.shape[1]), np.bool_)
        is_owed[parcel.records["row"], parcel.records["choice"]] = True
        return Owed(parcel.layer, parcel.places, is_owed)

    def set_own_backlog(self, num_pairs: int) -> None:
        """Note how many pairs wait on this worker, which sends itself no replies that would say so."""
        self._backlog[self._worker] = num_pairs

    def _choose_copies(self, layer: int) -> None:
        """Choose, among the copies of each expert of a layer, the worker with the least backlog, with hysteresis."""
        may_use = self._may_use[:, layer]
        backlog = np.where(may_use, self._backlog[:, None], np.iinfo(np.int64).max)
        best = backlog.argmin(axis=0)
        now = self._worker_of[layer]
        changes = self._backlog[now] - self._backlog[best] > self._settings.switch_gap
        if changes.any():
            self.num_switches += int(np.count_nonzero(changes))
            now[changes] = best[changes]
            self._slot_of[layer, changes] = self._slot_on[best[changes], layer, changes.nonzero()[0]]

    # --- sending ----------------------------------------------------------------------------------------------------

    def dispatch(self, layer: int, ids: Int64s, places: Int32s, topk_ids: Int32s) -> tuple[Pairs, list[Send]]:
        """Send the tokens of units to their experts.

        Args:
            ids: int64[n], the units.
            places: int32[tokens], of their tokens.
            topk_ids: int32[tokens, chosen], logical experts.

        Returns:
            The pairs that this worker computes itself, and what is sent now; the rest waits for credits.
        """
        if self._has_copies[layer]:
            self._choose_copies(layer)
        owner = self._worker_of[layer].take(topk_ids)
        self._pool.expect(ids, places, layer, topk_ids, owner)
        return self._hand_over(layer, places, owner)

    def send_again(self, owed: Owed) -> tuple[Pairs, list[Send]]:
        """Send for what is owed by the present table; returns as `dispatch`."""
        layer, places, is_owed = owed
        if self._has_copies[layer]:
            self._choose_copies(layer)
        new_owner = self._worker_of[layer][self._pool.topk_ids[places]]
        self._pool.owner[places] = np.where(is_owed, new_owner, self._pool.owner[places])
        return self._hand_over(layer, places, np.where(is_owed, new_owner, EMPTY))

    def _hand_over(self, layer: int, places: Int32s, owner: Int16s) -> tuple[Pairs, list[Send]]:
        """Hand the pairs with an owner over to it."""
        num_chosen = self._pool.owner.shape[1]
        owner = owner.reshape(-1)
        order = owner.argsort(kind="stable")  # by worker, then by token, then by choice
        num_owned = np.bincount(owner + 1, minlength=len(self._credits) + 1)
        ends = num_owned.cumsum().tolist()
        order = order[ends[0] :]  # the first are pairs without an owner
        token, choice = np.divmod(order, num_chosen) if num_chosen > 1 else (order, np.zeros_like(order))
        at = places.take(token)
        logical = self._pool.topk_ids.reshape(-1).take(at * num_chosen + choice)
        slots = self._slot_of[layer].take(logical)
        own, sends = Pairs(_NONE, _NONE, _NONE), list[Send]()
        records = self._records(at, choice, slots)
        for worker in num_owned[1:].nonzero()[0].tolist():
            part = slice(ends[worker] - ends[0], ends[worker + 1] - ends[0])
            if worker == self._worker:
                own = Pairs(at[part], choice[part].astype(np.int32), slots[part].astype(np.int32))
            else:
                self._outbox[worker].append(_numbered(layer, records[part], at[part]))
                sends += self._flush(worker)
        return own, sends

    def _records(self, at: Int32s, choice: Int64s, slots: Int16s) -> HopRecords:
        records = np.empty(len(at), HOP_RECORD)
        records["place"], records["choice"], records["slot"] = at, choice, slots
        records["generation"] = self._pool.generation.take(at)
        records["service_class"] = self._pool.classes_at(at) if self._pool.num_best_effort else LS
        records["waited_us"] = 0
        if self._pool.num_passed:
            records["waited_us"] = np.minimum(self._pool.passed_ns_at(at) // 1000, np.iinfo(np.uint32).max)
        return records

    def _flush(self, worker: int) -> Iterator[Send]:
        """Send what the credits allow, in order."""
        outbox = self._outbox[worker]
        while outbox and self._credits[worker]:
            parcel = outbox.popleft()
            if outbox or len(parcel.places) > self._credits[worker]:
                parcel = self._still_valid(parcel)
            num_rows = min(len(parcel.places), self._credits[worker])
            if num_rows < len(parcel.places):
                cut = int(parcel.records["row"].searchsorted(num_rows))
                outbox.appendleft(_numbered(parcel.layer, parcel.records[cut:], parcel.records["place"][cut:]))
                parcel = _Parcel(parcel.layer, parcel.records[:cut], parcel.places[:num_rows])
            if num_rows:
                yield self._send(worker, parcel)

    def _still_valid(self, parcel: _Parcel) -> _Parcel:
        """Leave out tokens that were given up since."""
        records = parcel.records
        is_valid = self._pool.generation[records["place"]] == records["generation"]
        if is_valid.all():
            return parcel
        return _numbered(parcel.layer, records[is_valid], records["place"][is_valid])

    def _send(self, worker: int, parcel: _Parcel) -> Send:
        layer, records, places = parcel
        self._credits[worker] -= len(places)
        self._backlog[worker] += len(records)
        hop = Hop(
            kind=DISPATCH,
            src=self._worker,
            dst=worker,
            epoch=self._epoch[worker],
            seq=self._next_seq[worker],
            layer=layer,
            num_rows=len(places),
            dtype=self._settings.dtype,
            table_version=self._table.version,
        )
        self._next_seq[worker] += 1
        return Send(HopMessage(hop, records), places, None)

    # --- replies ----------------------------------------------------------------------------------------------------

    def accept(self, hop: Hop) -> tuple[bool, list[Send]]:
        """Take in the header of a reply.

        Returns:
            Whether its records count, and what the credits that came back allow to send.
        """
        worker = hop.src
        if hop.epoch != self._epoch[worker] or hop.seq < self._expected_seq[worker]:
            self.num_dropped += 1
            return False, []
        self._expected_seq[worker] = hop.seq + 1
        self._credits[worker] += hop.credits
        self._backlog[worker] = sum(hop.depths)
        return True, list(self._flush(worker)) if self._outbox[worker] else []

    def owed(self, records: HopRecords, workers: Int16s) -> Int64s:
        """Indices of the records of replies that are owed, int64[n]. `workers`: int16[records], who sent them."""
        places = records["place"]
        is_owed = self._pool.generation.take(places) == records["generation"]
        pairs = places * self._pool.owner.shape[1] + records["choice"]
        is_owed &= self._pool.owner.reshape(-1).take(pairs) == workers
        owed: Int64s = is_owed.nonzero()[0]
        self.num_dropped += len(records) - len(owed)
        return owed

    def lose(self, worker: int) -> list[Owed]:
        """Give up what is under way to and from a worker, and begin a new epoch with it.

        Returns:
            What it owes; the caller sends it again (`send_again`).
        """
        self._epoch[worker] += 1
        self._next_seq[worker] = self._expected_seq[worker] = 0
        self._credits[worker] = self._settings.num_credits
        self._backlog[worker] = 0
        self._outbox[worker].clear()
        places = np.flatnonzero((self._pool.owner == worker).any(axis=1)).astype(np.int32)
        layers, is_owed = self._pool.layer_at[places], self._pool.owner[places] == worker
        return [Owed(layer, places[layers == layer], is_owed[layers == layer]) for layer in np.unique(layers).tolist()]


def _numbered(layer: int, records: HopRecords, at: Int32s) -> _Parcel:
    """Make a parcel of records that are ordered by token. `at`: int32[n], place of each."""
    if len(at) < 2:
        records["row"] = 0
        return _Parcel(layer, records, at)
    is_new = at[1:] != at[:-1]
    num_rows = 1 + np.count_nonzero(is_new)
    if num_rows == len(at):
        records["row"] = np.arange(num_rows)
        return _Parcel(layer, records, at)
    is_new = np.concatenate([_FIRST, is_new])
    records["row"] = is_new.cumsum() - 1
    return _Parcel(layer, records, at[is_new])
