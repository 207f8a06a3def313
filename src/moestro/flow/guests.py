"""The tokens of other homes among a worker's experts. A guest has an input, and a home that waits for contributions.

An expert worker keeps nothing else: what it loses, the home sends again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moestro.core.columns import true_rows
from moestro.core.hops import HOP_RECORD, Hop, HopRecords, join_records
from moestro.core.work import Int32s
from moestro.errors import InvariantError

Int64s = NDArray[np.int64]


class Pairs(NamedTuple):
    """(token, choice) pairs of one layer.

    Attributes:
        places, choices, slots: int32[n], of each pair.
    """

    places: Int32s
    choices: Int32s
    slots: Int32s


class GuestArrival(NamedTuple):
    """A dispatch, and the time at which it arrived."""

    hop: Hop
    records: HopRecords
    at_ns: int


class GuestReply(NamedTuple):
    """What goes back to one home.

    Attributes:
        home, epoch: whose guests these were, and its epoch.
        credits: guest places that are free again.
        records: HOP_RECORD[n], of the reply.
        pairs: the computed pairs, in the order of `records`.
    """

    home: int
    epoch: int
    credits: int
    records: HopRecords
    pairs: Pairs


class Guests:
    """Places of guests; implements `PlaceTable`. Their numbers follow those of the worker's own places.

    Args:
        first: number of the first guest place.
        num_guests: guests that may be here at once.
        num_workers: workers of the group.

    Attributes:
        num_free: guest places left.
        num_passed: guests that were passed over at all.
    """

    def __init__(self, first: int, num_guests: int, num_workers: int) -> None:
        self._first = first
        self._home: Int32s = np.zeros(num_guests, np.int32)
        self._epoch: Int64s = np.zeros(num_guests, np.int64)
        self._home_place: Int32s = np.zeros(num_guests, np.int32)
        self._generation: NDArray[np.uint32] = np.zeros(num_guests, np.uint32)
        self._service_class: NDArray[np.uint8] = np.zeros(num_guests, np.uint8)
        self._entry: Int64s = np.zeros(num_guests, np.int64)
        self._queued_ns: Int64s = np.zeros(num_guests, np.int64)
        self._passed_ns: Int64s = np.zeros(num_guests, np.int64)
        self._num_left: Int32s = np.zeros(num_guests, np.int32)
        self._is_free = np.ones(num_guests, np.bool_)
        self.num_free = num_guests
        self.num_passed = 0
        self.num_best_effort = 0
        # By home: the present epoch, and the credits that go back with the next reply.
        self._epoch_of: Int64s = np.zeros(num_workers, np.int64)
        self._credits: Int64s = np.zeros(num_workers, np.int64)

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
        records = join_records([each.records for each in arrived])
        sizes = np.array([each.hop.num_rows for each in arrived])
        num_rows, row = int(sizes.sum()), records["row"]
        if len(arrived) > 1:
            row = row + (sizes.cumsum() - sizes).repeat([len(each.records) for each in arrived])
        free = self._is_free.nonzero()[0][:num_rows]
        if len(free) < num_rows:
            raise InvariantError(f"{num_rows} guests come where {len(free)} places are free")
        num_pairs = np.bincount(row, minlength=num_rows)
        if len(num_pairs) != num_rows or not num_pairs.min(initial=1):
            raise InvariantError(f"dispatches of {num_rows} rows have records of {np.count_nonzero(num_pairs)} rows")
        self._is_free[free] = False
        self.num_free -= num_rows
        self._home[free] = np.array([each.hop.src for each in arrived]).repeat(sizes)
        self._epoch[free] = np.array([each.hop.epoch for each in arrived]).repeat(sizes)
        self._queued_ns[free] = np.array([each.at_ns for each in arrived]).repeat(sizes)
        self._entry[free] = entry + np.arange(len(arrived)).repeat(sizes)
        self._enter(free, records if len(records) == num_rows else records[num_pairs.cumsum() - num_pairs])
        self._num_left[free] = num_pairs
        places = (free + self._first).astype(np.int32)
        choices, slots = records["choice"].astype(np.int32), records["slot"].astype(np.int32)
        return places, Pairs(places[row], choices, slots)

    def _enter(self, guests: Int64s, first: HopRecords) -> None:
        """Store the first record of each guest."""
        self._home_place[guests], self._generation[guests] = first["place"], first["generation"]
        self._service_class[guests] = first["service_class"]
        self.num_best_effort += int(np.count_nonzero(first["service_class"]))
        waited_us = first["waited_us"]
        if np.count_nonzero(waited_us):
            self._passed_ns[guests] = waited_us.astype(np.int64) * 1000
            self.num_passed += int(np.count_nonzero(waited_us))

    def begin_epoch(self, home: int, epoch: int) -> Int32s:
        """Note that the home has given up what was under way before `epoch`.

        Returns:
            Places of its earlier guests, int32[n]; the caller takes their waiting pairs out of the queues (`drop`).
        """
        self._epoch_of[home], self._credits[home] = epoch, 0
        old = np.flatnonzero(~self._is_free & (self._home == home) & (self._epoch < epoch))
        return (old + self._first).astype(np.int32)

    def epoch_of(self, home: int) -> int:
        """The present epoch of a home."""
        return int(self._epoch_of[home])

    def drop(self, places: Int32s) -> None:
        """Forget one pair at each of `places` (which may repeat) that was never computed, without an answer."""
        self._count_done(places - self._first)

    def answer(self, pairs: Pairs) -> list[GuestReply]:
        """Make the replies for pairs that were computed; guests leave with the last of their pairs.

        Returns:
            One reply for each home, in order of its number. What a home has given up gets none.
        """
        guests = pairs.places - self._first
        homes = self._home[guests]
        is_wanted = self._epoch[guests] == self._epoch_of[homes]
        wanted, own = guests, pairs
        if not is_wanted.all():
            wanted, homes = guests[is_wanted], homes[is_wanted]
            own = Pairs(*(each[is_wanted] for each in pairs))
        order = homes.argsort(kind="stable")
        own = Pairs(*(each[order] for each in own))
        records = self._records(wanted[order], own)
        num_of_home = np.bincount(homes, minlength=1)
        ends = num_of_home.cumsum().tolist()
        self._count_done(guests)
        replies = []
        for home in true_rows(num_of_home > 0):
            part = slice(ends[home] - int(num_of_home[home]), ends[home])
            records["row"][part] = np.arange(num_of_home[home])
            epoch, num_credits = int(self._epoch_of[home]), int(self._credits[home])
            replies.append(GuestReply(home, epoch, num_credits, records[part], Pairs(*(each[part] for each in own))))
            self._credits[home] = 0
        return replies

    def _records(self, guests: NDArray[np.integer], pairs: Pairs) -> HopRecords:
        records = np.empty(len(guests), HOP_RECORD)
        records["place"], records["generation"] = self._home_place[guests], self._generation[guests]
        records["choice"], records["slot"] = pairs.choices, pairs.slots
        records["service_class"] = self._service_class[guests]
        records["waited_us"] = 0
        if self.num_passed:
            records["waited_us"] = np.minimum(self._passed_ns[guests] // 1000, np.iinfo(np.uint32).max)
        return records

    def _count_done(self, guests: NDArray[np.integer]) -> None:
        """Count one pair of each of `guests` (which may repeat); those without pairs leave."""
        done = np.bincount(guests)
        self._num_left[: len(done)] -= done.astype(np.int32)
        gone = np.flatnonzero((done > 0) & (self._num_left[: len(done)] == 0))
        if not len(gone):
            return
        self._is_free[gone] = True
        self.num_free += len(gone)
        self.num_passed -= int(np.count_nonzero(self._passed_ns[gone]))
        self.num_best_effort -= int(np.count_nonzero(self._service_class[gone]))
        self._passed_ns[gone] = 0
        current = gone[self._epoch[gone] == self._epoch_of[self._home[gone]]]
        self._credits += np.bincount(self._home[current], minlength=len(self._credits))

    # --- ages -------------------------------------------------------------------------------------------------------

    def classes_at(self, places: Int32s) -> NDArray[np.uint8]:
        """Implement `PlaceTable`."""
        return self._service_class[places - self._first]

    def queued_ns_at(self, places: Int32s) -> Int64s:
        """Implement `PlaceTable`."""
        return self._queued_ns[places - self._first]

    def passed_ns_at(self, places: Int32s) -> Int64s:
        """Implement `PlaceTable`."""
        return self._passed_ns[places - self._first]

    def entries_at(self, places: Int32s) -> Int64s:
        """int64[n], number of the entry of each guest."""
        return self._entry[places - self._first]

    def find_earlier(self, service_class: int, before: int) -> Int32s:
        """Places of the guests of a class of entries with a number less than `before`."""
        found = np.flatnonzero(~self._is_free & (self._service_class == service_class) & (self._entry < before))
        return (found + self._first).astype(np.int32)

    def pass_over(self, places: Int32s, passed_ns: int) -> None:
        """Count that the guests at `places` (distinct) were passed over for `passed_ns`, more than 0."""
        guests = places - self._first
        self.num_passed += len(guests) - int(np.count_nonzero(self._passed_ns[guests]))
        self._passed_ns[guests] += passed_ns
