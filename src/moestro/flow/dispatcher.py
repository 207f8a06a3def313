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
from moestro.core.work import Int32s
from moestro.flow.events import Send
from moestro.flow.guests import Pairs
from moestro.flow.token_pool import TokenPool

Int16s = NDArray[np.int16]
Int64s = NDArray[np.int64]


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
    """

    worker: int
    num_workers: int
    table: ExpertTable
    num_credits: int
    switch_gap: int = 64
    dtype: str = ""


class Owed(NamedTuple):
    """Contributions that a worker owes to tokens of one layer. `places`: int32[n]."""

    worker: int
    layer: int
    places: Int32s


class _Parcel(NamedTuple):
    """Tokens that wait for credits. `places`, `generations`: [n]."""

    layer: int
    places: Int32s
    generations: NDArray[np.uint32]


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
        self._credits: Int64s = np.full(num_workers, settings.num_credits, np.int64)
        self._backlog: Int64s = np.zeros(num_workers, np.int64)  # told by the last reply, and sent since
        self._epoch = [0] * num_workers
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
        self._has_copies = self._may_use.sum(axis=0).max(axis=1) > 1  # by layer
        # The worker that gets an expert's tokens now: at first the home itself if it has a copy.
        own_first = self._may_use.copy()
        own_first[:, self._may_use[self._worker]] = False
        own_first[self._worker] = self._may_use[self._worker]
        self._worker_of = own_first.argmax(axis=0).astype(np.int16)

    def change_table(self, table: ExpertTable) -> list[Owed]:
        """Use another table. Returns what waits for credits; the caller sends it again (`send_again`)."""
        self._use(table)
        waiting = []
        for worker, outbox in enumerate(self._outbox):
            waiting += [Owed(worker, parcel.layer, self._still_valid(parcel)) for parcel in outbox]
            outbox.clear()
        return waiting

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
        owner = self._worker_of[layer][topk_ids]
        self._pool.expect(ids, places, layer, topk_ids, owner)
        return self._hand_over(layer, places, owner)

    def send_again(self, owed: Owed) -> tuple[Pairs, list[Send]]:
        """Send what a worker owes by the present table; returns as `dispatch`."""
        _, layer, places = owed
        if self._has_copies[layer]:
            self._choose_copies(layer)
        owner = self._pool.owner[places]
        is_owed = owner == owed.worker
        new_owner = np.where(is_owed, self._worker_of[layer][self._pool.topk_ids[places]], owner)
        self._pool.owner[places] = new_owner
        return self._hand_over(layer, places, np.where(is_owed, new_owner, EMPTY))

    def _hand_over(self, layer: int, places: Int32s, owner: Int16s) -> tuple[Pairs, list[Send]]:
        """Hand the pairs with an owner over to it."""
        token, choice = np.nonzero(owner == self._worker)
        at = places[token]
        slots = self._slot_on[self._worker, layer, self._pool.topk_ids[at, choice]]
        sends: list[Send] = []
        num_owned = np.bincount(owner.reshape(-1) + 1)[1:]  # the first number counts pairs without an owner
        num_owned[self._worker : self._worker + 1] = 0
        for worker in true_rows(num_owned > 0):
            some = places[(owner == worker).any(axis=1)]
            self._outbox[worker].append(_Parcel(layer, some, self._pool.generation[some]))
            sends += self._flush(worker)
        return Pairs(at, choice.astype(np.int32), slots.astype(np.int32)), sends

    def _flush(self, worker: int) -> Iterator[Send]:
        """Send what the credits allow, in order."""
        outbox = self._outbox[worker]
        while outbox and self._credits[worker]:
            parcel = outbox.popleft()
            places = self._still_valid(parcel)
            now, later = places[: self._credits[worker]], places[self._credits[worker] :]
            if len(later):
                outbox.appendleft(_Parcel(parcel.layer, later, self._pool.generation[later]))
            if len(now):
                yield self._send(worker, parcel.layer, now)

    def _still_valid(self, parcel: _Parcel) -> Int32s:
        """Places of tokens that were not given up since."""
        valid: Int32s = parcel.places[self._pool.generation[parcel.places] == parcel.generations]
        return valid

    def _send(self, worker: int, layer: int, places: Int32s) -> Send:
        row, choice = np.nonzero(self._pool.owner[places] == worker)
        at = places[row]
        records = np.zeros(len(row), HOP_RECORD)
        records["row"], records["place"], records["choice"] = row, at, choice
        records["generation"] = self._pool.generation[at]
        records["service_class"] = self._pool.classes_at(at)
        records["slot"] = self._slot_on[worker, layer, self._pool.topk_ids[at, choice]]
        if self._pool.num_passed:
            records["waited_us"] = np.minimum(self._pool.passed_ns_at(at) // 1000, np.iinfo(np.uint32).max)
        self._credits[worker] -= len(places)
        self._backlog[worker] += len(row)
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

    def accept(self, hop: Hop, records: HopRecords) -> tuple[Int64s, list[Send]]:
        """Take in a reply.

        Returns:
            Indices of the records that are owed, int64[n], and what the credits that came back allow to send.
        """
        worker = hop.src
        if hop.epoch != self._epoch[worker] or hop.seq < self._expected_seq[worker]:
            self.num_dropped += 1
            return np.empty(0, np.int64), []
        self._expected_seq[worker] = hop.seq + 1
        self._credits[worker] += hop.credits
        self._backlog[worker] = sum(hop.depths)
        places, choices = records["place"], records["choice"]
        is_owed = self._pool.generation[places] == records["generation"]
        is_owed &= self._pool.owner[places, choices] == worker
        owed = np.flatnonzero(is_owed)
        self.num_dropped += len(records) - len(owed)
        return owed, list(self._flush(worker))

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
        layers = self._pool.layer_at[places]
        return [Owed(worker, layer, places[layers == layer]) for layer in np.unique(layers).tolist()]
