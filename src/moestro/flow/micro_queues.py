"""Micro-queues of one device: units before each layer's attention and the sampler, and pairs before each expert.

Step policies see the columns of all queues as a `QueueTable`.

Pairs that arrive together form a *segment*, sorted by slot. An expert's queue is one slice of each segment of its
layer, and running all of a fresh segment copies nothing. A layer has as many segments as arrivals stand in it, which
are few. There is no Python object per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.stages import StageShape
from moestro.core.views import ATTENTION, BE, EMPTY_QUEUE_NS, LS, NUM_CLASSES, QueueTable, Run
from moestro.core.work import Int32s, Units
from moestro.flow.remote_tokens import Pairs, RemoteTokens
from moestro.flow.token_pool import TokenPool

Int64s = NDArray[np.int64]


class QueueColumns:
    """Counts and ages of all micro-queues of one device.

    Args:
        shape: of the device.

    Attributes:
        n, oldest_ns, num_expert_tokens: as in `QueueTable`.
        num_prefill_tokens: as in `QueueTable`.
        seen: read-only views of `n`, `oldest_ns`, `num_expert_tokens` and `num_prefill_tokens`.
        num_of_slot: int64[slots], pairs that wait in each slot, summed over layers and classes.
        num_waiting: tokens in attention queues and pairs in expert queues.
        num_pairs: pairs in expert queues.
    """

    def __init__(self, shape: StageShape) -> None:
        layers, groups = shape.num_layers + 1, 1 + shape.num_experts
        self.n: Int32s = np.zeros((NUM_CLASSES, layers, groups), np.int32)
        self.oldest_ns: Int64s = np.full((NUM_CLASSES, layers, groups), EMPTY_QUEUE_NS, np.int64)
        self.num_expert_tokens: Int32s = np.zeros((NUM_CLASSES, layers), np.int32)
        self.num_prefill_tokens: Int32s = np.zeros((NUM_CLASSES, layers), np.int32)
        columns = self.n, self.oldest_ns, self.num_expert_tokens, self.num_prefill_tokens
        self.seen = tuple(read_only(each) for each in columns)
        self.num_of_slot: Int64s = np.zeros(shape.num_experts, np.int64)
        self.num_waiting = self.num_pairs = 0

    def set_queue(self, at: tuple[int, int, int], num_tokens: int, oldest_ns: int) -> None:
        """Store one queue's count and age. `at`: class, layer, group."""
        change = num_tokens - int(self.n[at])
        self.num_waiting += change
        if at[2] != ATTENTION:
            self.num_expert_tokens[at[:2]] += change
            self.num_of_slot[at[2] - 1] += change
            self.num_pairs += change
        self.n[at], self.oldest_ns[at] = num_tokens, oldest_ns

    def add_to_queue(self, at: tuple[int, int, int], num_tokens: int, oldest_ns: int) -> None:
        """Add tokens that wait since `oldest_ns` to one queue. `at`: class, layer, group."""
        self.set_queue(at, int(self.n[at]) + num_tokens, min(int(self.oldest_ns[at]), oldest_ns))

    def add_pairs(self, service_class: int, layer: int, sizes: Int64s, oldest_ns: Int64s) -> None:
        """Add pairs to a layer's expert queues.

        Args:
            sizes: int64[slots], pairs of each slot.
            oldest_ns: int64[slots], since when the oldest of them waits; EMPTY_QUEUE_NS where there is none.
        """
        n, oldest = self.n[service_class, layer, 1:], self.oldest_ns[service_class, layer, 1:]
        np.add(n, sizes, out=n, casting="same_kind")
        np.minimum(oldest, oldest_ns, out=oldest)
        self.num_of_slot += sizes
        num_pairs = int(sizes.sum())
        self.num_expert_tokens[service_class, layer] += num_pairs
        self.num_waiting += num_pairs
        self.num_pairs += num_pairs

    def clear_experts(self, service_class: int, layer: int) -> None:
        """No pair of this class waits in this layer any more."""
        num_pairs = int(self.num_expert_tokens[service_class, layer])
        self.num_waiting -= num_pairs
        self.num_pairs -= num_pairs
        self.num_of_slot -= self.n[service_class, layer, 1:]
        self.num_expert_tokens[service_class, layer] = 0
        self.n[service_class, layer, 1:] = 0
        self.oldest_ns[service_class, layer, 1:] = EMPTY_QUEUE_NS


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """View an array without the right to write."""
    seen = array.view()
    seen.flags.writeable = False
    return seen


# The units that wait before each layer's attention, and before the sampler.

_NO_UNITS = np.empty(0, np.int64)


@dataclass(slots=True)
class _Room:
    """Room that a take may still use.

    Attributes:
        rows: tokens that may still be taken; the first unit is taken even if it has more.
        max_unit_tokens: length of the longest unit that may be taken.
        places: free places. None means that the layer wants none.
        is_untouched: whether nothing was taken so far.
    """

    rows: int
    max_unit_tokens: int
    places: int | None
    is_untouched: bool = True

    def admit_all(self, num_tokens: int, num_wanted: int) -> bool:
        """Admit units if all of them fit.

        Args:
            num_tokens: tokens of the units.
            num_wanted: places that they still want.
        """
        if num_tokens > min(self.rows, self.max_unit_tokens) or (self.places is not None and num_wanted > self.places):
            return False
        self._use(num_tokens, num_wanted)
        return True

    def admit(self, sizes: Int32s, wanted: Int32s) -> NDArray[np.bool_]:
        """Find which units, in order, fit; one that does not is passed over.

        Args:
            sizes: int32[n], tokens of each unit.
            wanted: int32[n], places that each unit still wants.
        """
        fits = np.zeros(len(sizes), np.bool_)
        for index, (size, lacks) in enumerate(zip(sizes.tolist(), wanted.tolist(), strict=True)):
            has_places = self.places is None or lacks <= self.places
            if size <= self.max_unit_tokens and has_places and (size <= self.rows or self.is_untouched):
                fits[index] = True
                self._use(size, lacks)
        return fits

    def _use(self, num_tokens: int, num_places: int) -> None:
        self.rows -= num_tokens
        self.places = None if self.places is None else self.places - num_places
        self.is_untouched = False


class AttentionQueues:
    """The attention queues of one home.

    Args:
        columns: the device's columns; these queues keep those of group `ATTENTION`.
        is_sparse: whether each layer has routed experts, so that its tokens need places.
        pool: knows the units.
    """

    def __init__(self, columns: QueueColumns, is_sparse: tuple[bool, ...], pool: TokenPool) -> None:
        self._columns, self._pool = columns, pool
        self._needs_places = np.array([*is_sparse, False])
        self._units: list[list[Int64s]] = [[np.empty(0, np.int64)] * (len(is_sparse) + 1) for _ in range(NUM_CLASSES)]
        # Tokens without a place in each queue; only their number decides whether an attention is short of places.
        self._num_without_place = np.zeros((NUM_CLASSES, len(is_sparse) + 1), np.int64)

    def add(self, layer: int, ids: Int64s, now_ns: int) -> None:
        """Let units wait for the attention of `layer`, or (layer `num_layers`) for the sampler."""
        self._pool.queued_ns[ids] = now_ns
        if not self._pool.num_best_effort:
            self._add(LS, layer, ids, now_ns)
            return
        classes = self._pool.service_class.take(ids)
        for service_class in (LS, BE):
            own = ids[classes == service_class]
            if len(own):
                self._add(service_class, layer, own, now_ns)

    def _add(self, service_class: int, layer: int, ids: Int64s, now_ns: int) -> None:
        queue = self._units[service_class]
        queue[layer] = np.concatenate([queue[layer], ids]) if len(queue[layer]) else ids
        self._count_in(service_class, layer, ids, now_ns)

    def _count_in(self, service_class: int, layer: int, ids: Int64s, now_ns: int) -> None:
        """Count units that came now, at the end of their queue."""
        columns, at = self._columns, (service_class, layer, ATTENTION)
        num_tokens = len(ids)
        if self._pool.num_decodes < self._pool.num_units:
            sizes = self._pool.num_tokens.take(ids)
            num_tokens = int(sizes.sum())
            if num_tokens > len(ids):
                columns.num_prefill_tokens[service_class, layer] += sizes.sum(where=sizes > 1)
        self._num_without_place[service_class, layer] += self._pool.num_lacking_places(ids).sum()
        columns.add_to_queue(at, num_tokens, now_ns)

    def take(self, run: Run) -> Int64s:
        """Take units for which there are rows, and places where the layer wants them: the first classes first.

        Returns:
            int64[n], ascending; none, if none fits. The very first fits in any `Run.max_rows`.
        """
        layer = run.layer
        room = _Room(
            run.max_rows, run.max_unit_tokens, self._pool.num_free_places if self._needs_places[layer] else None
        )
        taken: list[Int64s] = []
        for service_class in run.classes:
            ids = self._units[service_class][layer]
            if len(ids) == 0:
                continue
            num_without_place = int(self._num_without_place[service_class, layer])
            if room.admit_all(int(self._columns.n[service_class, layer, ATTENTION]), num_without_place):
                taken.append(ids)
                self._units[service_class][layer] = _NO_UNITS
                self.recount(service_class, layer)
                continue
            fits = room.admit(self._pool.num_tokens[ids], self._pool.num_lacking_places(ids))
            if fits.any():
                taken.append(ids[fits])
                self._units[service_class][layer] = ids[~fits]
                self.recount(service_class, layer)
        if not taken:
            return _NO_UNITS
        ids = taken[0].copy() if len(taken) == 1 else np.concatenate(taken)
        ids.sort()
        return ids

    def drop(self, ids: Int64s) -> None:
        """Take the units `ids` out of every queue."""
        for service_class, queue in enumerate(self._units):
            for layer in np.flatnonzero(self._columns.n[service_class, :, ATTENTION]).tolist():
                gone = np.isin(queue[layer], ids)
                if gone.any():
                    queue[layer] = queue[layer][~gone]
                    self.recount(service_class, layer)

    def layers_short_of_places(self, service_class: int) -> list[int]:
        """Layers with units of a class before their attention and places for none of them."""
        free, units = self._pool.num_free_places, self._units[service_class]
        crowded = np.flatnonzero(self._needs_places & (self._num_without_place[service_class] > free))
        return [layer for layer in crowded.tolist() if self._pool.num_lacking_places(units[layer]).min() > free]

    def is_short_of_places(self, service_class: int) -> bool:
        """Whether units of a class wait for an attention which has places for none of them."""
        if not np.count_nonzero(self._num_without_place[service_class] > self._pool.num_free_places):
            return False
        return bool(self.layers_short_of_places(service_class))

    def short_of_places(self, service_class: int) -> Int64s:
        """Units of a class that wait for an attention which has places for none of them."""
        queues = [self._units[service_class][layer] for layer in self.layers_short_of_places(service_class)]
        return np.concatenate(queues) if queues else np.empty(0, np.int64)

    def holding_places(self, service_class: int) -> tuple[int, Int64s] | None:
        """Find units of a class that wait with places, and their layer: those of the lowest such layer."""
        for layer in np.flatnonzero(self._columns.n[service_class, :, ATTENTION]).tolist():
            ids = self._units[service_class][layer]
            held = ids[self._pool.num_lacking_places(ids) == 0]
            if len(held):
                return layer, np.sort(held)
        return None

    def longest_passed_ns(self, longest: Int64s) -> None:
        """Fill in `QueueTable.passed_ns` of these queues."""
        for service_class, layer in np.argwhere(self._columns.n[:, :, ATTENTION]).tolist():
            ids = self._units[service_class][layer]
            longest[service_class, layer, ATTENTION] = self._pool.passed_ns[ids].max()

    def recount(self, service_class: int, layer: int) -> None:
        """Count a queue from its units, for instance after these have lost their places."""
        ids, at = self._units[service_class][layer], (service_class, layer, ATTENTION)
        if len(ids):
            sizes = self._pool.num_tokens[ids]
            num_tokens = int(sizes.sum())
            oldest_ns = int(self._pool.queued_ns[ids].min())
            num_without_place = int(self._pool.num_lacking_places(ids).sum())
            num_prefill = int(sizes.sum(where=sizes > 1)) if num_tokens > len(ids) else 0
        else:
            num_tokens, oldest_ns, num_without_place, num_prefill = 0, EMPTY_QUEUE_NS, 0, 0
        self._num_without_place[service_class, layer] = num_without_place
        self._columns.num_prefill_tokens[service_class, layer] = num_prefill
        self._columns.set_queue(at, num_tokens, oldest_ns)


# The (token, choice) pairs that wait before each expert of a layer, and the holders of their places.


class PlaceTable(Protocol):
    """Class and age of the tokens at places: `TokenPool` for a home's own tokens, `RemoteTokens` for others."""

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


# All queues, as step policies see them.


class MicroQueues:
    """The queues of one device: before each layer's attention, and before each of its experts.

    Args:
        shape: of the device.
        pool: the device's own tokens.
        remote: tokens of other homes.

    Attributes:
        attention, experts: the queues.
    """

    def __init__(self, shape: StageShape, pool: TokenPool, remote: RemoteTokens) -> None:
        self._columns, self._alone = QueueColumns(shape), QueueColumns(shape)
        self._pool, self._remote = pool, remote
        self.attention = AttentionQueues(self._columns, shape.is_sparse, pool)
        self.experts = ExpertQueues(self._columns, shape.num_layers, shape.num_experts)
        self._none_passed = read_only(np.zeros_like(self._columns.oldest_ns))

    @property
    def num_waiting(self) -> int:
        """Tokens that wait for an attention, and pairs that wait for an expert."""
        return self._columns.num_waiting

    @property
    def num_pairs(self) -> int:
        """Pairs that wait for an expert."""
        return self._columns.num_pairs

    def num_waiting_in(self, layer: int, slot: int) -> int:
        """Pairs that wait in one slot of a layer."""
        return int(self._columns.n[:, layer, 1 + slot].sum())

    def depths(self) -> tuple[int, ...]:
        """Pairs that wait in each slot, summed over all layers and classes."""
        return tuple(self._columns.num_of_slot.tolist())

    def waiting_by_layer(self, now_ns: int) -> tuple[Int64s, Int64s]:
        """Count what waits before each layer, whose last is the sampler, and say for how long the oldest waits.

        Returns:
            int64[num_layers + 1] tokens of an attention and pairs of experts, and int64[num_layers + 1] ns.
        """
        num_waiting = self._columns.n.sum(axis=(0, 2), dtype=np.int64)
        oldest_ns = self._columns.oldest_ns.min(axis=(0, 2))
        return num_waiting, np.where(num_waiting > 0, np.maximum(now_ns - oldest_ns, 0), 0)

    def table(self) -> QueueTable:
        """What a step policy sees; it must not keep it."""
        columns = self._columns
        runnable = columns.n > 0
        if self._pool.num_units and columns.num_waiting > self._pool.num_free_places:
            self._leave_out_crowded_attention(runnable)
        passed_ns = self._none_passed
        if self._pool.num_passed or self._remote.num_passed:
            passed_ns = read_only(self._longest_passed_ns())
        return self._make_table(columns, runnable, passed_ns)

    def table_alone(self, units: Units, came_ns: int) -> QueueTable:
        """Make the table of `units` that came at `came_ns`, with nothing else on the device."""
        columns, sizes = self._alone, units.num_tokens
        num_tokens = np.bincount(units.service_class, sizes, NUM_CLASSES).tolist()
        columns.num_prefill_tokens[:, 0] = np.bincount(units.service_class, sizes * (sizes > 1), NUM_CLASSES)
        for service_class, num in enumerate(num_tokens):
            columns.set_queue((service_class, 0, ATTENTION), int(num), came_ns if num else EMPTY_QUEUE_NS)
        return self._make_table(columns, columns.n > 0, self._none_passed)

    def _make_table(self, columns: QueueColumns, runnable: NDArray[np.bool_], passed_ns: Int64s) -> QueueTable:
        n, oldest_ns, num_expert_tokens, num_prefill_tokens = columns.seen
        return QueueTable(
            n=n,
            oldest_ns=oldest_ns,
            passed_ns=passed_ns,
            runnable=runnable,
            num_expert_tokens=num_expert_tokens,
            num_free_places=self._pool.num_free_places,
            num_prefill_tokens=num_prefill_tokens,
        )

    def _leave_out_crowded_attention(self, runnable: NDArray[np.bool_]) -> None:
        """Take the attention queues that have places for none of their units out of `runnable`."""
        for service_class in range(NUM_CLASSES):
            runnable[service_class, self.attention.layers_short_of_places(service_class), ATTENTION] = False

    def _longest_passed_ns(self) -> Int64s:
        """Make `QueueTable.passed_ns`. It is made for each table, because it is wanted only while units are parked."""
        longest = np.zeros_like(self._columns.oldest_ns)
        self.attention.longest_passed_ns(longest)
        self.experts.longest_passed_ns(longest)
        return longest
