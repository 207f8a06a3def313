"""Sends a home's tokens to the workers that hold their experts, and takes in the replies. Only here ids are translated.

A dispatch spends a credit for each token, which is a remote place of the receiver; a reply spends none, because its
place is reserved. So no worker waits for a worker that waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.stages import DISPATCH, HOP_RECORD, Hop, HopMessage, HopRecords
from moestro.core.views import LS, NUM_CLASSES, true_rows
from moestro.core.work import Int32s
from moestro.flow.events import Send
from moestro.flow.remote_tokens import Pairs
from moestro.flow.token_pool import THERE, TokenPool

_FIRST = np.ones(1, np.bool_)


class Parcel(NamedTuple):
    """Tokens for one worker.

    Attributes:
        layer: layer of the experts.
        records: HOP_RECORD[n], ordered by row; rows are numbered from 0.
        places: int32[rows], the token of each row.
    """

    layer: int
    records: HopRecords
    places: Int32s


class Outbox:
    """Keeps parcels until there are credits: latency-sensitive tokens leave first, those of a class in order.

    Args:
        pool: the home's tokens, which may be given up while they wait.
    """

    def __init__(self, pool: TokenPool) -> None:
        self._pool = pool
        self._waiting: list[deque[Parcel]] = [deque() for _ in range(NUM_CLASSES)]

    def __bool__(self) -> bool:
        return any(self._waiting)

    def add(self, parcel: Parcel) -> None:
        """Let a parcel wait. One of several classes becomes one parcel for each."""
        layer, records, _ = parcel
        classes = records["service_class"]
        lowest, highest = int(classes.min()), int(classes.max())
        if lowest == highest:
            self._waiting[lowest].append(parcel)
            return
        for service_class in range(lowest, highest + 1):
            own = records[classes == service_class]
            self._waiting[service_class].append(make_parcel(layer, own, own["place"]))

    def take(self, num_rows: int) -> Parcel | None:
        """Take the next parcel without the tokens that were given up since.

        Args:
            num_rows: most tokens; of a larger parcel the others wait on.

        Returns:
            A parcel with tokens. None means that nothing waits.
        """
        for waiting in self._waiting:
            while waiting:
                layer, records, places = parcel = self._still_valid(waiting.popleft())
                if len(places) > num_rows:
                    cut = int(records["row"].searchsorted(num_rows))
                    waiting.appendleft(make_parcel(layer, records[cut:], records["place"][cut:]))
                    return Parcel(layer, records[:cut], places[:num_rows])
                if len(places):
                    return parcel
        return None

    def empty(self) -> list[Parcel]:
        """Take all parcels, without the tokens that were given up since."""
        parcels = [self._still_valid(parcel) for waiting in self._waiting for parcel in waiting]
        for waiting in self._waiting:
            waiting.clear()
        return [parcel for parcel in parcels if len(parcel.places)]

    def _still_valid(self, parcel: Parcel) -> Parcel:
        """Leave out tokens that were given up since."""
        records = parcel.records
        is_valid = self._pool.generation[records["place"]] == records["generation"]
        if is_valid.all():
            return parcel
        return make_parcel(parcel.layer, records[is_valid], records["place"][is_valid])


def make_parcel(layer: int, records: HopRecords, at: Int32s) -> Parcel:
    """Make a parcel of records that are ordered by token, and number their rows.

    Args:
        at: int32[n], place of each record.
    """
    if len(at) < 2:
        records["row"] = 0
        return Parcel(layer, records, at)
    is_new = at[1:] != at[:-1]
    num_rows = 1 + np.count_nonzero(is_new)
    if num_rows == len(at):
        records["row"] = np.arange(num_rows)
        return Parcel(layer, records, at)
    is_new = np.concatenate([_FIRST, is_new])
    records["row"] = is_new.cumsum() - 1
    return Parcel(layer, records, at[is_new])


Int16s = NDArray[np.int16]
Int64s = NDArray[np.int64]

_EPOCH_BITS = 32  # epochs of one life; a loss a millisecond fills them in 50 days
SWITCH_GAP = 64  # (token, expert) pairs; bench/simulator/replica_choice.py sweeps it
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """A worker's place in its group.

    Attributes:
        worker: number of this worker.
        num_workers: workers of the group.
        table: where experts live at first.
        num_credits: remote places that each expert worker keeps for each home.
        switch_gap: of two copies of an expert, the home changes to the one on the less loaded worker when the
            difference exceeds this number of waiting (token, expert) pairs. A change splits a batch, so small
            differences are not worth it.
        dtype: dtype of tensors, as in `Hop`.
        incarnation: how often the worker has started again. Its epochs are larger than those of its earlier lives, so
            expert workers that knew it listen to it again.
        counts_visits: whether results tell which workers computed each unit's experts.
        is_near: whether each worker is on this worker's machine. None means that all are.
    """

    worker: int
    num_workers: int
    table: ExpertTable
    num_credits: int
    switch_gap: int = SWITCH_GAP
    dtype: str = ""
    incarnation: int = 0
    counts_visits: bool = False
    is_near: tuple[bool, ...] | None = None


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
        # Pairs that wait on each worker: those of its last reply, and those sent that it had not taken in.
        self._backlog: Int64s = np.zeros(num_workers, np.int64)
        self._unreported = [deque[int]() for _ in range(num_workers)]  # pairs of each dispatch that no reply includes
        self._epoch = [settings.incarnation << _EPOCH_BITS] * num_workers
        self._next_seq = [0] * num_workers
        self._expected_seq = [0] * num_workers
        self._outbox = [Outbox(pool) for _ in range(num_workers)]
        self.num_dropped = self.num_switches = 0
        self._worker_of: Int16s = np.empty((0, 0), np.int16)
        self._may_use: NDArray[np.bool_] = np.empty((0, 0, 0), np.bool_)
        self._stand_near(settings.is_near)
        self._use(settings.table)

    # --- where experts live -----------------------------------------------------------------------------------------

    def _use(self, table: ExpertTable) -> None:
        before = self._worker_of, self._may_use
        self._table = table
        self._pool.table_version = table.version
        num_workers, num_layers, _ = table.logical_of.shape
        shape = (num_workers, num_layers, table.num_experts)
        self._slot_on = np.full(shape, EMPTY, np.int16)
        worker, layer, slot = np.nonzero(table.logical_of != EMPTY)
        self._slot_on[worker, layer, table.logical_of[worker, layer, slot]] = slot
        self._may_use = (self._slot_on != EMPTY) & table.is_alive[:, None, None]
        self._has_copies = self._may_use.sum(axis=0).max(axis=1, initial=0) > 1  # by layer
        self._worker_of = self._first_workers()  # int16[layers, experts], which get an expert's tokens now
        if before[1].shape == shape:  # An expert whose copies are the same stays where backlogs have brought it.
            is_same = (before[1] == self._may_use).all(axis=0)
            self._worker_of = np.where(is_same, before[0], self._worker_of)
        # The slot of the expert on that worker.
        self._slot_of = np.take_along_axis(self._slot_on, self._worker_of[None], axis=0)[0]

    def _stand_near(self, is_near: Sequence[bool] | None) -> None:
        """Note who is on this machine. A copy elsewhere counts as if `switch_gap` more pairs waited there."""
        gap = self._settings.switch_gap
        num_workers = self._settings.num_workers
        self._distance: Int64s = np.zeros(num_workers, np.int64)
        if is_near is not None:
            self._distance[:] = np.where(np.array(is_near), 0, gap)

    def _first_workers(self) -> Int16s:
        """Workers that get each expert's tokens at first: the home itself if it has a copy, else near copies in turn.

        In turn, so that no worker idles while the backlog differs too little for a change; by expert and alike in all
        homes, so that an expert's tokens meet in one batch. Copies on other machines have a turn if none is near.
        """
        may_use = self._may_use & (self._distance == 0)[:, None, None]
        may_use = np.where(may_use.any(axis=0), may_use, self._may_use)
        num_copies = np.maximum(may_use.sum(axis=0), 1)
        turn = np.arange(may_use.shape[2]) % num_copies
        workers = (may_use & (may_use.cumsum(axis=0) > turn)).argmax(axis=0)
        return np.where(may_use[self._worker], self._worker, workers).astype(np.int16)

    def change_table(self, table: ExpertTable, is_near: Sequence[bool] | None = None) -> list[Owed]:
        """Use another table.

        Args:
            is_near: as in `PeerSettings`.

        Returns:
            What waits for credits, and what workers owe that compute no longer; the caller sends it again
            (`send_again`).
        """
        stopped = true_rows(self._table.is_alive & ~table.is_alive)
        self._stand_near(is_near)
        self._use(table)
        waiting = [owed for worker in stopped if worker != self._worker for owed in self.lose(worker)]
        for outbox in self._outbox:
            waiting += [self._unsent(parcel) for parcel in outbox.empty()]
        return waiting

    @property
    def is_settled(self) -> bool:
        """Whether all contributions that this home waits for come from slots of the present table."""
        places, choices = np.nonzero(self._pool.owner != THERE)
        layers, experts = self._pool.layer_at[places], self._pool.topk_ids[places, choices]
        return bool((self._slot_on[self._pool.owner[places, choices], layers, experts] != EMPTY).all())

    def _unsent(self, parcel: Parcel) -> Owed:
        """Contributions that a parcel asks for. The same worker may owe its tokens others, which were sent before."""
        is_owed = np.zeros((len(parcel.places), self._pool.owner.shape[1]), np.bool_)
        is_owed[parcel.records["row"], parcel.records["choice"]] = True
        return Owed(parcel.layer, parcel.places, is_owed)

    def set_own_backlog(self, num_pairs: int) -> None:
        """Note how many pairs wait on this worker, which sends itself no replies that would say so."""
        self._backlog[self._worker] = num_pairs

    def _choose_copies(self, layer: int) -> None:
        """Choose, among the copies of each expert of a layer, the least backlog and distance, with hysteresis."""
        may_use, cost = self._may_use[:, layer], self._backlog + self._distance
        best = np.where(may_use, cost[:, None], np.iinfo(np.int64).max).argmin(axis=0)
        now = self._worker_of[layer]
        changes = cost[now] - cost[best] > self._settings.switch_gap
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
                sends += self._forward(worker, make_parcel(layer, records[part], at[part]))
        return own, sends

    def _forward(self, worker: int, parcel: Parcel) -> list[Send]:
        """Send a parcel, or let it wait for credits."""
        if not self._outbox[worker] and len(parcel.places) <= self._credits[worker]:
            return [self._send(worker, parcel)]
        self._outbox[worker].add(parcel)
        return list(self._flush(worker))

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
        """Send what the credits allow."""
        outbox = self._outbox[worker]
        while self._credits[worker] > 0 and (parcel := outbox.take(self._credits[worker])) is not None:
            yield self._send(worker, parcel)

    def _send(self, worker: int, parcel: Parcel) -> Send:
        layer, records, places = parcel
        self._credits[worker] -= len(places)
        self._backlog[worker] += len(records)
        self._unreported[worker].append(len(records))
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
        unreported = self._unreported[worker]
        while len(unreported) > self._next_seq[worker] - hop.num_taken:
            unreported.popleft()
        self._backlog[worker] = sum(hop.depths) + sum(unreported)
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
        self._unreported[worker].clear()
        self._outbox[worker].empty()
        places = np.flatnonzero((self._pool.owner == worker).any(axis=1)).astype(np.int32)
        layers, is_owed = self._pool.layer_at[places], self._pool.owner[places] == worker
        return [Owed(layer, places[layers == layer], is_owed[layers == layer]) for layer in np.unique(layers).tolist()]
