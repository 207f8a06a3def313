"""The tokens of other homes among a worker's experts. A guest has an input, and a home that waits for contributions.

An expert worker keeps nothing else: what it loses, the home sends again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moestro.core.hops import HOP_RECORD, HopMessage, HopRecords, join_records
from moestro.core.views import LS
from moestro.core.work import Int32s
from moestro.errors import InvariantError

Int64s = NDArray[np.int64]

_NOBODY, _GIVEN_UP = -1, -2


class Pairs(NamedTuple):
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
    return pairs if wanted is None else Pairs(*(each[wanted.reshape(-1)] for each in pairs))


class GuestArrival(NamedTuple):
    """A dispatch, and the time at which it arrived."""

    message: HopMessage
    at_ns: int


class GuestReply(NamedTuple):
    """What goes back to one home.

    Attributes:
        home, epoch: whose guests these were, and its epoch.
        credits: guest places that are free again.
        records: HOP_RECORD[n], of the reply.
        places, choices: int32[n], of the computed pairs, in the order of `records`.
    """

    home: int
    epoch: int
    credits: int
    records: HopRecords
    places: Int32s
    choices: Int32s


class Guests:
    """Places of guests; implements `PlaceTable`. Their numbers follow those of the worker's own places.

    All columns are by place, so that no place has to be converted; memory of own places is never touched.

    Args:
        first: number of the first guest place.
        num_guests: guests that may be here at once.
        num_workers: workers of the group.

    Attributes:
        num_free: guest places left.
        num_passed: guests that were passed over at all.
        num_best_effort: guests of class BE.
    """

    def __init__(self, first: int, num_guests: int, num_workers: int) -> None:
        num_places = first + num_guests
        # Home of each guest; _NOBODY at a free place, and _GIVEN_UP if the home does not wait for the guest any more.
        self._home: NDArray[np.int16] = np.full(num_places, _NOBODY, np.int16)
        self._home_place: Int32s = np.zeros(num_places, np.int32)
        self._generation: NDArray[np.uint32] = np.zeros(num_places, np.uint32)
        self._service_class: NDArray[np.uint8] = np.zeros(num_places, np.uint8)
        self._entry: Int64s = np.zeros(num_places, np.int64)
        self._queued_ns: Int64s = np.zeros(num_places, np.int64)
        self._passed_ns: Int64s = np.zeros(num_places, np.int64)
        # Pairs of each guest beyond the first that are not done, and their sum.
        self._more_pairs: Int32s = np.zeros(num_places, np.int32)
        self._num_more = 0
        self._free: Int64s = np.arange(first, num_places)  # the last `num_free` of them
        self.num_free = num_guests
        self.num_passed = self.num_best_effort = self._num_given_up = 0
        # By home: the present epoch, and the credits that go back with the next reply.
        self._epoch_of = [0] * num_workers
        self._credits = [0] * num_workers

    def admit(self, entry: int, arrived: Sequence[GuestArrival]) -> tuple[Int32s, Pairs]:
        """Take in the tokens of dispatches.

        Args:
            entry: number of the first of these entries, larger than all before.
            arrived: dispatches, each of whose records are ordered by row.

        Returns:
            int32[rows], the place of each row of the dispatches' tensors end to end, and the pairs in the order of the
            records end to end.

        Raises:
            InvariantError: the guests are more than the places, or records do not match their header.
        """
        records = join_records([message.records for message, _ in arrived])
        sizes = [message.hop.num_rows for message, _ in arrived]
        guests = self._take_places(sum(sizes))
        index = _dispatch_of_rows(sizes)
        self._home[guests] = _each([message.hop.src for message, _ in arrived], index)
        self._queued_ns[guests] = _each([at_ns for _, at_ns in arrived], index)
        self._entry[guests] = index + entry
        places = guests.astype(np.int32)
        choices, slots = records["choice"].astype(np.int32), records["slot"].astype(np.int32)
        num_records = [len(message.records) for message, _ in arrived]
        if num_records == sizes:  # no token has two experts here
            self._enter(guests, records)
            return places, Pairs(places, choices, slots)
        row = records["row"] + _each((np.cumsum(sizes) - sizes).tolist(), _dispatch_of_rows(num_records))
        num_pairs = np.bincount(row, minlength=len(guests))
        if len(num_pairs) != len(guests) or not num_pairs.all():
            raise InvariantError(f"dispatches of {len(guests)} rows have records of {np.count_nonzero(num_pairs)} rows")
        self._enter(guests, records.take(num_pairs.cumsum() - num_pairs))
        self._more_pairs[guests] = num_pairs - 1
        self._num_more += len(records) - len(guests)
        return places, Pairs(places[row], choices, slots)

    def _take_places(self, num: int) -> Int64s:
        """Take `num` free places, those first that became free last."""
        if num > self.num_free:
            raise InvariantError(f"{num} guests come where {self.num_free} places are free")
        first = len(self._free) - self.num_free
        self.num_free -= num
        return self._free[first : first + num].copy()

    def _enter(self, guests: Int64s, first: HopRecords) -> None:
        """Store the first record of each guest."""
        self._home_place[guests], self._generation[guests] = first["place"], first["generation"]
        if num_best_effort := int(np.count_nonzero(first["service_class"])):
            self._service_class[guests] = first["service_class"]
            self.num_best_effort += num_best_effort
        if num_passed := int(np.count_nonzero(first["waited_us"])):
            self._passed_ns[guests] = first["waited_us"].astype(np.int64) * 1000
            self.num_passed += num_passed

    def begin_epoch(self, home: int, epoch: int) -> Int32s:
        """Note that the home has given up what was under way before `epoch`.

        Returns:
            Places of its earlier guests, int32[n]; the caller takes their waiting pairs out of the queues (`drop`).
        """
        self._epoch_of[home], self._credits[home] = epoch, 0
        old = (self._home == home).nonzero()[0]
        self._home[old] = _GIVEN_UP
        self._num_given_up += len(old)
        given_up: Int32s = old.astype(np.int32)
        return given_up

    def is_wanted(self, places: Int32s) -> NDArray[np.bool_]:
        """bool[n], whether the homes of the guests at `places` still wait for them."""
        is_wanted: NDArray[np.bool_] = self._home.take(places) != _GIVEN_UP
        return is_wanted

    def epoch_of(self, home: int) -> int:
        """The present epoch of a home."""
        return self._epoch_of[home]

    def drop(self, places: Int32s) -> None:
        """Forget one pair at each of `places` (which may repeat) that was never computed, without an answer."""
        self._leave(self._count_done(places))

    def answer(self, pairs: Pairs) -> list[GuestReply]:
        """Make the replies for pairs that were computed; guests leave with the last of their pairs.

        Returns:
            One reply for each home, in order of its number. What a home has given up gets none.
        """
        done = pairs.places
        if self._num_given_up:
            pairs = pairs.at(self.is_wanted(done).nonzero()[0])
        homes = self._home.take(pairs.places)
        sizes = np.bincount(homes).tolist()
        are_all_last = not (self._num_more or self._num_given_up)
        if sizes.count(0) < len(sizes) - 1:  # of several homes
            pairs = pairs.at(homes.argsort(kind="stable"))
        records = self._records(pairs)
        self._leave(self._count_done(done), sizes if are_all_last else None)
        replies, begin = [], 0
        for home, size in enumerate(sizes):
            if size:
                end = begin + size
                own, (places, choices, _) = records[begin:end], pairs.part(begin, end)
                own["row"] = np.arange(size)
                replies.append(GuestReply(home, self._epoch_of[home], self._credits[home], own, places, choices))
                self._credits[home], begin = 0, end
        return replies

    def _records(self, pairs: Pairs) -> HopRecords:
        guests = pairs.places
        records = np.empty(len(guests), HOP_RECORD)
        records["place"], records["generation"] = self._home_place.take(guests), self._generation.take(guests)
        records["choice"], records["slot"] = pairs.choices, pairs.slots
        records["service_class"] = self._service_class.take(guests) if self.num_best_effort else LS
        records["waited_us"] = 0
        if self.num_passed:
            records["waited_us"] = np.minimum(self._passed_ns.take(guests) // 1000, np.iinfo(np.uint32).max)
        return records

    def _count_done(self, places: Int32s) -> Int64s:
        """Count one pair of each of `places` (which may repeat). Returns the guests without any more."""
        if not self._num_more:
            return places.astype(np.int64)
        guests, num_done = np.unique(places, return_counts=True)
        more = self._more_pairs[guests] - num_done
        is_gone = more < 0
        self._num_more -= len(places) - int(np.count_nonzero(is_gone))
        self._more_pairs[guests] = np.maximum(more, 0)
        return guests[is_gone].astype(np.int64)

    def _leave(self, guests: Int64s, num_by_home: list[int] | None = None) -> None:
        """Free the places of guests, and note the credits of their homes.

        Args:
            guests: int64[n], distinct places.
            num_by_home: guests of each home, where the caller has counted them.
        """
        if self.num_best_effort:
            self.num_best_effort -= int(np.count_nonzero(self._service_class[guests]))
            self._service_class[guests] = LS
        if self.num_passed:
            self.num_passed -= int(np.count_nonzero(self._passed_ns[guests]))
            self._passed_ns[guests] = 0
        homes = self._home.take(guests) if num_by_home is None else None
        self._home[guests] = _NOBODY
        self.num_free += len(guests)
        first = len(self._free) - self.num_free
        self._free[first : first + len(guests)] = guests
        if homes is not None:
            if self._num_given_up:
                is_wanted = homes != _GIVEN_UP
                self._num_given_up -= len(homes) - int(np.count_nonzero(is_wanted))
                homes = homes[is_wanted]
            num_by_home = np.bincount(homes).tolist()
        for home, num_credits in enumerate(num_by_home or ()):
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
        """int64[n], number of the entry of each guest."""
        return self._entry.take(places)

    def find_earlier(self, service_class: int, before: int) -> Int32s:
        """Places of the guests of a class of entries with a number less than `before`."""
        is_earlier = (self._home != _NOBODY) & (self._service_class == service_class) & (self._entry < before)
        earlier: Int32s = is_earlier.nonzero()[0].astype(np.int32)
        return earlier

    def pass_over(self, places: Int32s, passed_ns: int) -> None:
        """Count that the guests at `places` (distinct) were passed over for `passed_ns`, more than 0."""
        self.num_passed += len(places) - int(np.count_nonzero(self._passed_ns[places]))
        self._passed_ns[places] += passed_ns


def _dispatch_of_rows(sizes: list[int]) -> Int64s | int:
    """int64[rows], number of the dispatch of each row, for dispatches of `sizes` rows; 0 stands for those of one."""
    return np.arange(len(sizes)).repeat(np.array(sizes)) if len(sizes) > 1 else 0


def _each(values: list[int], index: Int64s | int) -> Int64s | int:
    """Return `values` by the number of the dispatch; one value that all dispatches share stands for all rows."""
    if values.count(values[0]) == len(values):
        return values[0]
    return np.array(values).take(index)
