"""The (token, choice) pairs that wait before each expert of a layer.

Pairs that arrive together form a *segment*, sorted by slot. An expert's queue is one slice of each segment of its
layer, and running all of a fresh segment copies nothing. A layer has as many segments as arrivals stand in it, which
are few. There is no Python object per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.views import BE, EMPTY_QUEUE_NS, LS
from moestro.core.work import Int32s
from moestro.flow.guests import Pairs
from moestro.flow.queue_columns import QueueColumns

# The holders of places, as the micro-queues ask them.

Int64s = NDArray[np.int64]


class PlaceTable(Protocol):
    """Class and age of the tokens at places: `TokenPool` for a home's own tokens, `Guests` for those of other homes."""

    def classes_at(self, places: Int32s) -> NDArray[np.uint8]:
        """uint8[n], service class of the token at each place."""
        ...

    def queued_ns_at(self, places: Int32s) -> Int64s:
        """int64[n], time since when each token waits for its experts."""
        ...

    def passed_ns_at(self, places: Int32s) -> Int64s:
        """int64[n], for how long each token was passed over so far (`QueueTable.passed_ns`)."""
        ...

    @property
    def num_best_effort(self) -> int:
        """Number of tokens or units of class BE; 0 tells the class of all without a look."""
        ...

    @property
    def num_passed(self) -> int:
        """Number of tokens or units that were passed over at all."""
        ...


# Taking the pairs of a slot costs about a microsecond for each segment of its layer (17 us with 8, 79 us with 64).
_MANY_SEGMENTS = 16


class Batches(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Expert batches of one layer, one after another; see `core.stages.Experts`."""

    experts: Int32s
    counts: Int32s
    places: Int32s
    choices: Int32s


@dataclass(slots=True, eq=False)
class Segment:
    """Pairs of one class that arrived together.

    Attributes:
        holder: knows their ages.
        service_class: of all of them.
        places, choices: int32[n], sorted by slot.
        begin, end: int64[slots], the slice of each slot that still waits.
        num_waiting: pairs in all slices.
    """

    holder: PlaceTable
    service_class: int
    places: Int32s
    choices: Int32s
    begin: Int64s
    end: Int64s
    num_waiting: int

    def waiting(self) -> tuple[Int64s, Int32s]:
        """Indices of the pairs that wait, sorted by slot, and the slot of each."""
        counts = self.end - self.begin
        slots = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        first = np.repeat(self.begin - (counts.cumsum() - counts), counts)
        return np.arange(len(slots)) + first, slots


class ExpertQueues:
    """The expert queues of one device.

    Args:
        columns: the device's columns; these queues keep those of the groups from 1 on.
        num_layers, num_slots: layers, and physical experts of the device in each.
    """

    def __init__(self, columns: QueueColumns, num_layers: int, num_slots: int) -> None:
        self._columns, self._num_slots = columns, num_slots
        self._empty_ns: Int64s = np.full(num_slots, EMPTY_QUEUE_NS, np.int64)
        self._segments: list[list[Segment]] = [[] for _ in range(num_layers + 1)]

    def add(self, holder: PlaceTable, layer: int, pairs: Pairs, since_ns: int | None = None) -> None:
        """Let pairs wait.

        Args:
            holder: knows since when each of them waits.
            since_ns: that time, where it is the same for all; it saves looking it up.
        """
        if not len(pairs.places):
            return
        if not holder.num_best_effort:
            self._add_segment(holder, (LS, layer), pairs, since_ns)
            return
        is_best_effort = holder.classes_at(pairs.places) == BE
        for service_class, is_own in ((LS, ~is_best_effort), (BE, is_best_effort)):
            index = is_own.nonzero()[0]
            if len(index):
                self._add_segment(holder, (service_class, layer), pairs.at(index), since_ns)

    def _add_segment(self, holder: PlaceTable, queue: tuple[int, int], pairs: Pairs, since_ns: int | None) -> None:
        """Add pairs of one class to the `queue` (class, layer)."""
        places, choices, (service_class, layer) = pairs.places, pairs.choices, queue
        if self._num_slots == 1:  # nothing to sort, and nothing to count
            begin, end = np.zeros(1, np.int64), np.array([len(places)])
            segment = Segment(holder, service_class, places, choices, begin, end, len(places))
            if since_ns is None:
                since_ns = int(np.minimum.reduce(holder.queued_ns_at(places)))
            self._columns.add_to_queue((service_class, layer, 1), len(places), since_ns)
        else:
            sizes = np.bincount(pairs.slots, minlength=self._num_slots)
            # NumPy sorts numbers of 16 bits by their digits, three times as fast as wider ones.
            order = pairs.slots.astype(np.int16).argsort(kind="stable")
            places, choices = places.take(order), choices.take(order)
            segment = _segment(holder, service_class, places, choices, sizes)
            some, oldest_ns = sizes.nonzero()[0], self._empty_ns.copy()
            if since_ns is None:
                oldest_ns[some] = np.minimum.reduceat(holder.queued_ns_at(places), segment.begin[some])
            else:
                oldest_ns[some] = since_ns
            self._columns.add_pairs(service_class, layer, sizes, oldest_ns)
        self._segments[layer].append(segment)
        if len(self._segments[layer]) > _MANY_SEGMENTS:
            self._join_segments(layer)

    def _join_segments(self, layer: int) -> None:
        """Make one segment of all segments of a holder and a class, in the order of their arrival."""
        joined: list[Segment] = []
        for key in dict.fromkeys((id(each.holder), each.service_class) for each in self._segments[layer]):
            parts = [each for each in self._segments[layer] if (id(each.holder), each.service_class) == key]
            waiting = [part.waiting() for part in parts]
            slots = np.concatenate([part_slots for _, part_slots in waiting])
            order = slots.argsort(kind="stable")
            places = np.concatenate([p.places[index] for p, (index, _) in zip(parts, waiting, strict=True)])
            choices = np.concatenate([p.choices[index] for p, (index, _) in zip(parts, waiting, strict=True)])
            sizes = np.bincount(slots, minlength=self._num_slots)
            joined.append(_segment(parts[0].holder, key[1], places[order], choices[order], sizes))
        self._segments[layer] = joined

    def take_one(self, layer: int, slot: int, max_rows: int, classes: tuple[int, ...]) -> Batches:
        """Take pairs of one slot, the first classes first."""
        places, choices, left = [], [], max_rows
        for service_class in classes:
            at = (service_class, layer, 1 + slot)
            num_waiting = int(self._columns.n[at])
            if not num_waiting:
                continue
            takes_all = num_waiting <= left
            for segment in self._of_class(layer, service_class):
                begin = int(segment.begin[slot])
                end = min(int(segment.end[slot]), begin + left)
                if end > begin:
                    places.append(segment.places[begin:end])
                    choices.append(segment.choices[begin:end])
                    segment.begin[slot] = end
                    segment.num_waiting -= end - begin
                    left -= end - begin
            if takes_all:
                self._columns.set_queue(at, 0, EMPTY_QUEUE_NS)
                self._leave_out_empty(layer)
            else:
                self._recount(service_class, layer, slot)
        num_taken = max_rows - left
        return Batches(
            np.array([slot] if num_taken else [], np.int32),
            np.array([num_taken] if num_taken else [], np.int32),
            _join(places),
            _join(choices),
        )

    def take_every(self, layer: int, max_rows: int, classes: tuple[int, ...]) -> Batches:
        """Take pairs of all slots, the first classes first; of a class that does not fit, low slots first."""
        taken, left = [], max_rows
        for service_class in classes:
            waiting = int(self._columns.num_expert_tokens[service_class, layer])
            if waiting and left >= waiting:
                taken += [_everything(segment) for segment in self._of_class(layer, service_class)]
                self._segments[layer] = [s for s in self._segments[layer] if s.service_class != service_class]
                self._columns.clear_experts(service_class, layer)
                left -= waiting
            elif waiting:
                for slot in np.flatnonzero(self._columns.n[service_class, layer, 1:]).tolist():
                    if left:
                        taken.append(self.take_one(layer, slot, left, (service_class,)))
                        left -= len(taken[-1].places)
        return merge_batches(taken)

    def drop(self, places: Int32s) -> Int32s:
        """Take all pairs at `places` out of every queue. Returns the place of each such pair, int32[n]."""
        dropped = [np.empty(0, np.int32)]
        for layer in np.flatnonzero(self._columns.num_expert_tokens.any(axis=0)).tolist():
            dropped += [self._drop_from(layer, segment, places) for segment in list(self._segments[layer])]
        return np.concatenate(dropped)

    def _drop_from(self, layer: int, segment: Segment, places: Int32s) -> Int32s:
        index, slots = segment.waiting()
        gone = np.isin(segment.places[index], places)
        if not gone.any():
            return np.empty(0, np.int32)
        self._segments[layer].remove(segment)
        kept = index[~gone]
        if len(kept):
            sizes = np.bincount(slots[~gone], minlength=self._num_slots)
            holder, service_class = segment.holder, segment.service_class
            left = _segment(holder, service_class, segment.places[kept], segment.choices[kept], sizes)
            self._segments[layer].append(left)
        for slot in np.unique(slots[gone]).tolist():
            self._recount(segment.service_class, layer, slot)
        return segment.places[index[gone]]

    def longest_passed_ns(self, longest: Int64s) -> None:
        """Fill in `QueueTable.passed_ns` of these queues."""
        for layer, segments in enumerate(self._segments):
            for segment in segments:
                if segment.holder.num_passed:
                    index, slots = segment.waiting()
                    passed_ns = segment.holder.passed_ns_at(segment.places[index])
                    np.maximum.at(longest[segment.service_class, layer, 1:], slots, passed_ns)

    def _of_class(self, layer: int, service_class: int) -> list[Segment]:
        return [segment for segment in self._segments[layer] if segment.service_class == service_class]

    def _recount(self, service_class: int, layer: int, slot: int) -> None:
        left, oldest_ns = 0, EMPTY_QUEUE_NS
        for segment in self._of_class(layer, service_class):
            begin, end = int(segment.begin[slot]), int(segment.end[slot])
            if end > begin:
                left += end - begin
                oldest_ns = min(oldest_ns, int(segment.holder.queued_ns_at(segment.places[begin:end]).min()))
        self._columns.set_queue((service_class, layer, 1 + slot), left, oldest_ns)
        self._leave_out_empty(layer)

    def _leave_out_empty(self, layer: int) -> None:
        self._segments[layer] = [segment for segment in self._segments[layer] if segment.num_waiting]


def merge_batches(parts: list[Batches]) -> Batches:
    """Join the batches of `parts`, ascending by slot, at most one for each."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = np.empty(0, np.int32)
        return Batches(none, none, none, none)
    slots = np.concatenate([np.repeat(part.experts, part.counts) for part in parts])
    order = np.argsort(slots, kind="stable")
    sizes = np.bincount(slots)
    present = np.flatnonzero(sizes)
    return Batches(
        present.astype(np.int32),
        sizes[present].astype(np.int32),
        np.concatenate([part.places for part in parts])[order],
        np.concatenate([part.choices for part in parts])[order],
    )


def _join(parts: list[Int32s]) -> Int32s:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _segment(holder: PlaceTable, service_class: int, places: Int32s, choices: Int32s, sizes: Int64s) -> Segment:
    end = sizes.cumsum()
    return Segment(holder, service_class, places, choices, end - sizes, end, len(places))


def _everything(segment: Segment) -> Batches:
    sizes = segment.end - segment.begin
    present = np.flatnonzero(sizes)
    counts = sizes[present].astype(np.int32)
    if segment.num_waiting == len(segment.places):
        return Batches(present.astype(np.int32), counts, segment.places, segment.choices)
    index, _ = segment.waiting()
    return Batches(present.astype(np.int32), counts, segment.places[index], segment.choices[index])
