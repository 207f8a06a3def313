"""The tokens of other homes among a worker's experts. Each has an input, and a home that waits for contributions.

An expert worker keeps nothing else: what it loses, the home sends again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.stages import HOP_RECORD, HopMessage, HopRecords, join_records
from moestro.core.views import LS
from moestro.core.work import Int32s
from moestro.errors import InvariantError

Int64s = NDArray[np.int64]

_GIVEN_UP = -1  # home of a remote token
_RECORD_BYTES = np.dtype((np.void, HOP_RECORD.itemsize))


class Pairs(msgspec.Struct, frozen=True, eq=False, gc=False):
    """(token, choice) pairs of one layer.

    Attributes:
        places, choices, slots: int32[n], of each pair.
    """

    places: Int32s
    choices: Int32s
    slots: Int32s

    def at(self, index: NDArray[np.integer]) -> Pairs:
        """Select pairs by their index."""
        return Pairs(self.places.take(index), self.choices.take(index), self.slots.take(index))

    def part(self, begin: int, end: int) -> Pairs:
        """View the pairs from `begin` to `end`."""
        return Pairs(self.places[begin:end], self.choices[begin:end], self.slots[begin:end])


_NO_NUMBERS = np.empty(0, np.int32)
NO_PAIRS = Pairs(_NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS)


def split_pairs(pairs: Pairs, num_places: int) -> tuple[Pairs, Pairs]:
    """Tell pairs of own tokens, whose places are below `num_places`, from those of remote tokens."""
    if num_places == 0:
        return NO_PAIRS, pairs
    is_own = pairs.places < num_places
    num_own = np.count_nonzero(is_own)
    if num_own == len(is_own):
        return pairs, NO_PAIRS
    return (pairs.at(is_own.nonzero()[0]), pairs.at((~is_own).nonzero()[0])) if num_own else (NO_PAIRS, pairs)


def all_pairs(places: Int32s, topk_ids: Int32s, wanted: NDArray[np.bool_] | None = None) -> Pairs:
    """Pairs of tokens and their experts on a device that has all experts in the slots of their ids.

    Args:
        places: int32[tokens].
        topk_ids: int32[tokens, chosen], ascending.
        wanted: bool[tokens, chosen], which of them. None means all.
    """
    num_chosen = topk_ids.shape[1]
    choices = np.tile(np.arange(num_chosen, dtype=np.int32), len(places))
    pairs = Pairs(np.repeat(places, num_chosen), choices, topk_ids.reshape(-1))
    return pairs if wanted is None else pairs.at(wanted.reshape(-1).nonzero()[0])


class RemoteReply(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What goes back to one home.

    Attributes:
        home, epoch: whose tokens these were, and its epoch.
        credits: remote places that are free again.
        records: HOP_RECORD[n], of the reply.
        places, choices: int32[n], of the computed pairs, in the order of `records`.
    """

    home: int
    epoch: int
    credits: int
    records: HopRecords
    places: Int32s
    choices: Int32s


class RemoteTokens:
    """Places of remote tokens; implements `PlaceTable`. Their numbers follow those of the worker's own places.

    All columns are by place, so that no place has to be converted; memory of own places is never touched.

    Args:
        first: number of the first remote place.
        num_remote_places: remote tokens that may be here at once.
        num_workers: workers of the group.

    Attributes:
        num_free: remote places left.
        num_passed: remote tokens that were passed over at all.
        num_best_effort: remote tokens of class BE.
    """

    def __init__(self, first: int, num_remote_places: int, num_workers: int) -> None:
        num_places = first + num_remote_places
        # Home of each token; _GIVEN_UP if it does not wait for the token any more. Free places have any.
        self._home: NDArray[np.int16] = np.zeros(num_places, np.int16)
        # The first record of each token: bytes for NumPy, which copies fields one by one.
        self._record: NDArray[np.void] = np.zeros(num_places, _RECORD_BYTES)
        self._service_class: NDArray[np.uint8] = np.zeros(num_places, np.uint8)
        self._entry: Int64s = np.zeros(num_places, np.int64)
        self._queued_ns: Int64s = np.zeros(num_places, np.int64)
        self._passed_ns: Int64s = np.zeros(num_places, np.int64)
        # Pairs of each token beyond the first that are not done, and their sum.
        self._more_pairs: Int32s = np.zeros(num_places, np.int32)
        self._num_more = 0
        self._is_free: NDArray[np.bool_] = np.arange(num_places) >= first
        self._first = self._next = first  # `_next`: the place after the one that was given out last
        self.num_free = num_remote_places
        self.num_passed = self.num_best_effort = self._num_given_up = 0
        # By home: the present epoch, and the credits that go back with the next reply.
        self._epoch_of = [0] * num_workers
        self._credits = [0] * num_workers

    def admit(self, entry: int, arrived: Sequence[tuple[HopMessage, int]]) -> tuple[Int32s, Pairs]:
        """Take in the tokens of dispatches.

        Args:
            entry: number of the first of these entries, larger than all before.
            arrived: dispatches, each of whose records are ordered by row, and when each arrived.

        Returns:
            int32[rows], the place of each row of the dispatches' tensors end to end, and the pairs in the order of the
            records end to end.

        Raises:
            InvariantError: the tokens are more than the places, or records do not match their header.
        """
        records = join_records([message.records for message, _ in arrived])
        sizes = [message.hop.num_rows for message, _ in arrived]
        index, places = self._take_places(sum(sizes))
        repeats = np.array(sizes)
        self._home[index] = _each([message.hop.src for message, _ in arrived], repeats)
        self._queued_ns[index] = _each([at_ns for _, at_ns in arrived], repeats)
        self._entry[index] = np.arange(entry, entry + len(arrived)).repeat(repeats)
        choices, slots = records["choice"].astype(np.int32), records["slot"].astype(np.int32)
        num_records = [len(message.records) for message, _ in arrived]
        if num_records == sizes:  # no token has two experts here
            self._enter(index, records)
            return places, Pairs(places, choices, slots)
        row = records["row"] + _each((repeats.cumsum() - repeats).tolist(), np.array(num_records))
        num_pairs = np.bincount(row, minlength=len(places))
        if len(num_pairs) != len(places) or not num_pairs.all():
            raise InvariantError(f"dispatches of {len(places)} rows have records of {np.count_nonzero(num_pairs)} rows")
        self._enter(index, records.take(num_pairs.cumsum() - num_pairs))
        self._more_pairs[index] = num_pairs - 1
        self._num_more += len(records) - len(places)
        return places, Pairs(places[row], choices, slots)

    def _take_places(self, num: int) -> tuple[slice | Int64s, Int32s]:
        """Take `num` free places: those after the last ones if they are free, because slices cost less.

        Returns:
            An index of the places, and their numbers.
        """
        if num > self.num_free:
            raise InvariantError(f"{num} remote tokens come where {self.num_free} places are free")
        self.num_free -= num
        begin = self._next if self._next + num <= len(self._is_free) else self._first
        index: slice | Int64s = slice(begin, begin + num)
        if np.count_nonzero(self._is_free[index]) == num:
            places = np.arange(begin, begin + num, dtype=np.int32)
        else:
            index = self._is_free.nonzero()[0][:num]
            places = index.astype(np.int32)
        self._is_free[index] = False
        self._next = int(places[-1]) + 1 if num else self._next
        return index, places

    def _enter(self, index: slice | Int64s, first: HopRecords) -> None:
        """Store the first record of each token."""
        self._record[index] = first.view(_RECORD_BYTES)
        if num_best_effort := int(np.count_nonzero(first["service_class"])):
            self._service_class[index] = first["service_class"]
            self.num_best_effort += num_best_effort
        if num_passed := int(np.count_nonzero(first["waited_us"])):
            self._passed_ns[index] = first["waited_us"].astype(np.int64) * 1000
            self.num_passed += num_passed

    def begin_epoch(self, home: int, epoch: int) -> Int32s:
        """Note that the home has given up what was under way before `epoch`.

        Returns:
            Places of its earlier tokens, int32[n]; the caller takes their waiting pairs out of the queues (`drop`).
        """
        self._epoch_of[home], self._credits[home] = epoch, 0
        old = ((self._home == home) & self._is_here()).nonzero()[0]
        self._home[old] = _GIVEN_UP
        self._num_given_up += len(old)
        given_up: Int32s = old.astype(np.int32)
        return given_up

    def _is_here(self) -> NDArray[np.bool_]:
        """bool[places], whether a place has a remote token."""
        is_here = ~self._is_free
        is_here[: self._first] = False
        return is_here

    def is_wanted(self, places: Int32s | Int64s) -> NDArray[np.bool_]:
        """bool[n], whether the homes of the tokens at `places` still wait for them."""
        is_wanted: NDArray[np.bool_] = self._home.take(places) != _GIVEN_UP
        return is_wanted

    def epoch_of(self, home: int) -> int:
        """The present epoch of a home."""
        return self._epoch_of[home]

    def drop(self, places: Int32s) -> None:
        """Forget one pair at each of `places` (which may repeat) that was never computed, without an answer."""
        self._leave(self._count_done(places.astype(np.int64)))

    def answer(self, pairs: Pairs) -> list[RemoteReply]:
        """Make the replies for pairs that were computed; tokens leave with the last of their pairs.

        Returns:
            One reply for each home, in order of its number. What a home has given up gets none.
        """
        done = pairs.places.astype(np.int64)  # NumPy would convert narrower indices each time
        choices, slots, kept = pairs.choices, pairs.slots, done
        if self._num_given_up:
            wanted = self.is_wanted(done).nonzero()[0]
            kept, choices, slots = done.take(wanted), choices.take(wanted), slots.take(wanted)
        homes = self._home.take(kept)
        sizes = np.bincount(homes).tolist()
        if sizes.count(0) < len(sizes) - 1:  # of several homes
            order = homes.argsort(kind="stable")
            kept, choices, slots = kept.take(order), choices.take(order), slots.take(order)
        records = self._records(kept, choices, slots)
        are_all_last = not (self._num_more or self._num_given_up)
        self._leave(self._count_done(done), sizes if are_all_last else None)
        places, rows = kept.astype(np.int32), np.arange(max(sizes, default=0), dtype=np.int32)
        replies, begin = [], 0
        for home, size in enumerate(sizes):
            if size:
                part = slice(begin, begin + size)
                records["row"][part] = rows[:size]
                epoch, num_credits = self._epoch_of[home], self._credits[home]
                replies.append(RemoteReply(home, epoch, num_credits, records[part], places[part], choices[part]))
                self._credits[home] = 0
                begin += size
        return replies

    def _records(self, places: Int64s, choices: Int32s, slots: Int32s) -> HopRecords:
        """Make records of replies, which echo the home's place, its generation and the class."""
        records = self._record.take(places).view(HOP_RECORD)
        records["choice"], records["slot"], records["waited_us"] = choices, slots, 0
        if self.num_passed:
            records["waited_us"] = np.minimum(self._passed_ns.take(places) // 1000, np.iinfo(np.uint32).max)
        return records

    def _count_done(self, places: Int64s) -> Int64s:
        """Count one pair of each of `places` (which may repeat). Returns the places of tokens without any more."""
        if not self._num_more:
            return places
        distinct, num_done = np.unique(places, return_counts=True)
        more = self._more_pairs[distinct] - num_done
        is_gone = more < 0
        self._num_more -= len(places) - int(np.count_nonzero(is_gone))
        self._more_pairs[distinct] = np.maximum(more, 0)
        gone: Int64s = distinct[is_gone]
        return gone

    def _leave(self, places: Int64s, num_by_home: list[int] | None = None) -> None:
        """Free places, and note the credits of their homes.

        Args:
            places: int64[n], distinct places.
            num_by_home: tokens of each home, where the caller has counted them.
        """
        if self.num_best_effort:
            self.num_best_effort -= int(np.count_nonzero(self._service_class[places]))
            self._service_class[places] = LS
        if self.num_passed:
            self.num_passed -= int(np.count_nonzero(self._passed_ns[places]))
            self._passed_ns[places] = 0
        self._is_free[places] = True
        self.num_free += len(places)
        if num_by_home is None:
            homes = self._home.take(places)
            if self._num_given_up:
                is_wanted = homes != _GIVEN_UP
                self._num_given_up -= len(homes) - int(np.count_nonzero(is_wanted))
                homes = homes[is_wanted]
            num_by_home = np.bincount(homes).tolist()
        for home, num_credits in enumerate(num_by_home):
            self._credits[home] += num_credits

    # --- ages -------------------------------------------------------------------------------------------------------

    def classes_at(self, places: Int32s) -> NDArray[np.uint8]:
        """Implement `PlaceTable`."""
        return self._service_class.take(places)

    def queued_ns_at(self, places: Int32s) -> Int64s:
        """Implement `PlaceTable`."""
        return self._queued_ns.take(places)

    def passed_ns_at(self, places: Int32s) -> Int64s:
        """Implement `PlaceTable`."""
        return self._passed_ns.take(places)

    def entries_at(self, places: Int32s) -> Int64s:
        """int64[n], number of the entry of each token."""
        return self._entry.take(places)

    def find_earlier(self, service_class: int, before: int) -> Int32s:
        """Places of the remote tokens of a class of entries with a number less than `before`."""
        is_earlier = self._is_here() & (self._service_class == service_class) & (self._entry < before)
        earlier: Int32s = is_earlier.nonzero()[0].astype(np.int32)
        return earlier

    def pass_over(self, places: Int32s, passed_ns: int) -> None:
        """Count that the tokens at `places` (distinct) were passed over for `passed_ns`, more than 0."""
        self.num_passed += len(places) - int(np.count_nonzero(self._passed_ns[places]))
        self._passed_ns[places] += passed_ns


def _each(values: Sequence[int], repeats: Int64s) -> Int64s | int:
    """Repeat each of `values`; one value that all share stands for all of them."""
    if values.count(values[0]) == len(values):
        return values[0]
    return np.array(values).repeat(repeats)
