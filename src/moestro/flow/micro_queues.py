"""What waits where: units before a layer's attention, and (token, choice) pairs before each expert of a layer.

Pairs leave an attention sorted by expert and stay so, in a *segment*: an expert's queue is one slice of each segment of
its layer, and running all of a fresh segment copies nothing. There are as many segments in a layer as waves stand in
it, which are few; there is no Python object per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moestro.core.stages import StageShape
from moestro.core.views import ATTENTION, NOBODY_WAITS_NS, NUM_CLASSES, QueueTable
from moestro.core.work import Int32s
from moestro.flow.token_pool import TokenPool

Int64s = NDArray[np.int64]


class Batches(NamedTuple):
    """Expert batches of one layer, one after another; see `core.stages.Experts`."""

    experts: Int32s
    counts: Int32s
    places: Int32s
    choices: Int32s


@dataclass(slots=True, eq=False)
class Segment:
    """Pairs of one class that left one attention together.

    Attributes:
        service_class: of all of them.
        places, choices: int32[n], sorted by expert.
        begin, end: int64[experts], the slice of each expert that still waits.
        num_waiting: pairs in all slices.
    """

    service_class: int
    places: Int32s
    choices: Int32s
    begin: Int64s
    end: Int64s
    num_waiting: int

    def waiting(self) -> tuple[Int64s, NDArray[np.int32]]:
        """Indices of the pairs that wait, sorted by expert, and the expert of each."""
        counts = self.end - self.begin
        experts = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        first = np.repeat(self.begin - (counts.cumsum() - counts), counts)
        return np.arange(len(experts)) + first, experts


class MicroQueues:
    """All queues of one device.

    Args:
        shape: of the device.
        pool: knows class, size and ages of each unit.
    """

    def __init__(self, shape: StageShape, pool: TokenPool) -> None:
        layers, groups = shape.num_layers + 1, 1 + shape.num_experts
        self._shape, self._pool = shape, pool
        self._n = np.zeros((NUM_CLASSES, layers, groups), np.int32)
        self._oldest_ns = np.full((NUM_CLASSES, layers, groups), NOBODY_WAITS_NS, np.int64)
        self._runnable = np.zeros((layers, groups), np.bool_)
        self._num_expert_tokens = np.zeros((NUM_CLASSES, layers), np.int32)
        self._seen = tuple(_read_only(each) for each in (self._n, self._oldest_ns, self._num_expert_tokens))
        self._nobody_passed = _read_only(np.zeros_like(self._oldest_ns))
        self._units: list[list[Int64s]] = [[np.empty(0, np.int64)] * layers for _ in range(NUM_CLASSES)]
        self._segments: list[list[Segment]] = [[] for _ in range(layers)]
        self._needs_places = np.array([*shape.is_sparse, False])
        self.num_waiting = 0

    def table(self) -> QueueTable:
        """What a step policy sees; it must not keep it."""
        runnable = self._runnable
        if short := self._layers_short_of_places():
            runnable = runnable.copy()
            runnable[short, ATTENTION] = False
        n, oldest_ns, num_expert_tokens = self._seen
        passed_ns = _read_only(self._longest_passed_ns()) if self._pool.num_passed else self._nobody_passed
        free = self._pool.num_free_places
        return QueueTable(n, oldest_ns, passed_ns, _read_only(runnable), num_expert_tokens, free)

    def short_of_places(self, service_class: int) -> Int64s:
        """Units of a class that wait for an attention which has no places for any unit."""
        queues = [self._units[service_class][layer] for layer in self._layers_short_of_places()]
        return np.concatenate(queues) if queues else np.empty(0, np.int64)

    def _layers_short_of_places(self) -> list[int]:
        """Layers with units before their attention and places for none of them."""
        free = self._pool.num_free_places
        if self.num_waiting <= free:
            return []
        crowded = self._needs_places & (self._n[:, :, ATTENTION].sum(0) > free)
        return [layer for layer in np.flatnonzero(crowded).tolist() if self._smallest_unit(layer) > free]

    def _longest_passed_ns(self) -> Int64s:
        """`QueueTable.passed_ns`. Made anew for each table, because it is asked for only while a unit is parked."""
        longest, passed_ns = np.zeros_like(self._oldest_ns), self._pool.passed_ns
        for service_class, layer in np.argwhere(self._n[:, :, ATTENTION]).tolist():
            longest[service_class, layer, ATTENTION] = passed_ns[self._units[service_class][layer]].max()
        for layer, segments in enumerate(self._segments):
            for segment in segments:
                index, experts = segment.waiting()
                units = self._pool.units_at(segment.places[index])
                np.maximum.at(longest[segment.service_class, layer, 1:], experts, passed_ns[units])
        return longest

    # --- attention and sampler --------------------------------------------------------------------------------------

    def add_units(self, layer: int, ids: Int64s, now_ns: int) -> None:
        """Units wait from now on for the attention of `layer`, or (layer `num_layers`) for the sampler."""
        self._pool.queued_ns[ids] = now_ns
        classes = self._pool.service_class[ids]
        lowest, highest = int(classes.min()), int(classes.max())
        for service_class in range(lowest, highest + 1):
            own = ids if lowest == highest else ids[classes == service_class]
            if len(own):
                queue = self._units[service_class]
                queue[layer] = np.concatenate([queue[layer], own]) if len(queue[layer]) else own
                self._recount_units(service_class, layer)

    def take_units(self, layer: int, max_rows: int, classes: tuple[int, ...]) -> Int64s:
        """Take units for which there are rows, and places where the layer wants them: the first classes first.

        Returns:
            int64[n], ascending; none, if none fits. The very first fits in any `max_rows`.
        """
        left = self._pool.num_free_places if self._needs_places[layer] else int(self._n[:, layer, ATTENTION].sum())
        taken: list[Int64s] = []
        for service_class in classes:
            ids = self._units[service_class][layer]
            if len(ids) == 0:
                continue
            num_tokens = int(self._n[service_class, layer, ATTENTION])
            if num_tokens <= min(left, max_rows):
                self._units[service_class][layer] = ids[:0]
            else:
                fits = self._fitting(ids, left, max_rows, may_exceed=not taken)
                self._units[service_class][layer], ids = ids[~fits], ids[fits]
                num_tokens = int(self._pool.num_tokens[ids].sum())
            if len(ids):
                taken.append(ids)
                left, max_rows = left - num_tokens, max_rows - num_tokens
                self._recount_units(service_class, layer)
        if not taken:
            return np.empty(0, np.int64)
        return np.sort(taken[0] if len(taken) == 1 else np.concatenate(taken))

    def _fitting(self, ids: Int64s, left: int, max_rows: int, *, may_exceed: bool) -> NDArray[np.bool_]:
        """Which of `ids`, in order, fit into `left` places and `max_rows` rows; one that does not is passed over."""
        fits = np.zeros(len(ids), np.bool_)
        for index, size in enumerate(self._pool.num_tokens[ids].tolist()):
            if size <= left and (size <= max_rows or (may_exceed and not fits.any())):
                fits[index] = True
                left, max_rows = left - size, max_rows - size
        return fits

    def _smallest_unit(self, layer: int) -> int:
        waiting = [self._pool.num_tokens[queue[layer]] for queue in self._units if len(queue[layer])]
        return int(min(sizes.min() for sizes in waiting))

    def _recount_units(self, service_class: int, layer: int) -> None:
        ids, at = self._units[service_class][layer], (service_class, layer, ATTENTION)
        num_tokens = int(self._pool.num_tokens[ids].sum())
        self.num_waiting += num_tokens - int(self._n[at])
        self._n[at] = num_tokens
        self._oldest_ns[at] = self._pool.queued_ns[ids].min() if len(ids) else NOBODY_WAITS_NS
        self._runnable[layer, ATTENTION] = self._n[:, layer, ATTENTION].any()

    # --- experts ----------------------------------------------------------------------------------------------------

    def add_pairs(
        self, layer: int, places: Int32s, topk_ids: Int32s, now_ns: int, wanted: NDArray[np.bool_] | None = None
    ) -> None:
        """Tokens wait from now on for their experts.

        Args:
            layer: of the experts.
            places: int32[tokens].
            topk_ids: int32[tokens, chosen], physical experts in ascending id.
            now_ns: the time.
            wanted: bool[tokens, chosen], for which of these; None: all.
        """
        units = self._pool.units_at(places)
        self._pool.queued_ns[units] = now_ns
        num_chosen = topk_ids.shape[1]
        choices = np.tile(np.arange(num_chosen, dtype=np.int32), len(places))
        units, places, experts = np.repeat(units, num_chosen), np.repeat(places, num_chosen), topk_ids.reshape(-1)
        if wanted is not None:
            units, places, choices, experts = (each[wanted.reshape(-1)] for each in (units, places, choices, experts))
        self._add_segments(layer, units, places, choices, experts)

    def give_back(self, layer: int, batches: Batches) -> None:
        """Batches that were taken and not run wait again, as long as if they had never been taken."""
        experts = np.repeat(batches.experts, batches.counts)
        self._add_segments(layer, self._pool.units_at(batches.places), batches.places, batches.choices, experts)

    def take_expert(self, layer: int, expert: int, max_rows: int, classes: tuple[int, ...]) -> Batches:
        """Take pairs of one expert, the first classes first."""
        places, choices, left = [], [], max_rows
        for service_class in classes:
            for segment in self._of_class(layer, service_class):
                begin = int(segment.begin[expert])
                end = min(int(segment.end[expert]), begin + left)
                if end > begin:
                    places.append(segment.places[begin:end])
                    choices.append(segment.choices[begin:end])
                    segment.begin[expert] = end
                    segment.num_waiting -= end - begin
                    left -= end - begin
            self._recount_pairs(service_class, layer, expert)
        num_taken = max_rows - left
        return Batches(
            np.array([expert] if num_taken else [], np.int32),
            np.array([num_taken] if num_taken else [], np.int32),
            np.concatenate(places) if places else np.empty(0, np.int32),
            np.concatenate(choices) if choices else np.empty(0, np.int32),
        )

    def take_every_expert(self, layer: int, max_rows: int, classes: tuple[int, ...]) -> Batches:
        """Take pairs of all experts, the first classes first; of one that does not fit, low experts first."""
        taken, left = [], max_rows
        for service_class in classes:
            waiting = int(self._num_expert_tokens[service_class, layer])
            if waiting and left >= waiting:
                segments = self._of_class(layer, service_class)
                taken += [_everything(segment, self._shape.num_experts) for segment in segments]
                self._segments[layer] = [s for s in self._segments[layer] if s.service_class != service_class]
                self._forget_pairs(service_class, layer)
                left -= waiting
            elif waiting:
                for expert in np.flatnonzero(self._n[service_class, layer, 1:]).tolist():
                    if left:
                        taken.append(self.take_expert(layer, expert, left, (service_class,)))
                        left -= len(taken[-1].places)
        return merge_batches(taken)

    def drop(self, ids: Int64s) -> None:
        """Take the units `ids` out of every queue."""
        for service_class, queue in enumerate(self._units):
            for layer, queued in enumerate(queue):
                gone = np.isin(queued, ids)
                if gone.any():
                    queue[layer] = queued[~gone]
                    self._recount_units(service_class, layer)
        for layer, segments in enumerate(self._segments):
            for segment in list(segments):
                self._drop_from(layer, segment, ids)

    def _drop_from(self, layer: int, segment: Segment, ids: Int64s) -> None:
        index, experts = segment.waiting()
        gone = np.isin(self._pool.units_at(segment.places[index]), ids)
        if not gone.any():
            return
        self._segments[layer].remove(segment)
        kept = index[~gone]
        if len(kept):
            sizes = np.bincount(experts[~gone], minlength=self._shape.num_experts)
            self._segments[layer].append(
                _segment(segment.service_class, segment.places[kept], segment.choices[kept], sizes)
            )
        for expert in np.unique(experts[gone]).tolist():
            self._recount_pairs(segment.service_class, layer, expert)

    def _add_segments(self, layer: int, units: Int32s, places: Int32s, choices: Int32s, experts: Int32s) -> None:
        """Pairs wait: `units`, `places`, `choices` and `experts` are int32[pairs], one of each for every pair."""
        classes = self._pool.service_class[units]
        lowest, highest = (int(classes.min()), int(classes.max())) if len(classes) else (0, -1)
        for service_class in range(lowest, highest + 1):
            own: NDArray[np.intp] | slice = slice(None)
            if lowest != highest:
                own = np.flatnonzero(classes == service_class)
            order = np.argsort(experts[own], kind="stable")
            if len(order) == 0:
                continue
            sizes = np.bincount(experts[own], minlength=self._shape.num_experts)
            self._segments[layer].append(_segment(service_class, places[own][order], choices[own][order], sizes))
            self._count_in(layer, service_class, sizes, self._pool.queued_ns[units[own][order]])

    def _count_in(self, layer: int, service_class: int, sizes: Int64s, queued_ns: Int64s) -> None:
        """`sizes`: int64[experts], new pairs of each; `queued_ns`: int64[pairs], sorted by expert."""
        self._n[service_class, layer, 1:] += sizes.astype(np.int32)
        oldest = self._oldest_ns[service_class, layer, 1:]
        some = np.flatnonzero(sizes)
        first = queued_ns.min()
        if first < queued_ns.max():
            first = np.minimum.reduceat(queued_ns, (sizes.cumsum() - sizes)[some])
        oldest[some] = np.minimum(oldest[some], first)
        self._runnable[layer, 1:] |= sizes > 0
        self._num_expert_tokens[service_class, layer] += len(queued_ns)
        self.num_waiting += len(queued_ns)

    def _of_class(self, layer: int, service_class: int) -> list[Segment]:
        return [segment for segment in self._segments[layer] if segment.service_class == service_class]

    def _recount_pairs(self, service_class: int, layer: int, expert: int) -> None:
        left, oldest = 0, NOBODY_WAITS_NS
        for segment in self._of_class(layer, service_class):
            waiting = segment.places[segment.begin[expert] : segment.end[expert]]
            if len(waiting):
                left += len(waiting)
                oldest = min(oldest, int(self._pool.queued_ns[self._pool.units_at(waiting)].min()))
        at = (service_class, layer, 1 + expert)
        change = left - int(self._n[at])
        self._n[at], self._oldest_ns[at] = left, oldest
        self._num_expert_tokens[service_class, layer] += change
        self.num_waiting += change
        self._runnable[layer, 1 + expert] = self._n[:, layer, 1 + expert].any()
        self._segments[layer] = [segment for segment in self._segments[layer] if segment.num_waiting]

    def _forget_pairs(self, service_class: int, layer: int) -> None:
        """No pair of this class waits in this layer any more."""
        self.num_waiting -= int(self._num_expert_tokens[service_class, layer])
        self._num_expert_tokens[service_class, layer] = 0
        self._n[service_class, layer, 1:] = 0
        self._oldest_ns[service_class, layer, 1:] = NOBODY_WAITS_NS
        self._runnable[layer, 1:] = self._n[:, layer, 1:].any(0)


def merge_batches(parts: list[Batches]) -> Batches:
    """All batches of `parts`, ascending by expert, at most one for each."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = np.empty(0, np.int32)
        return Batches(none, none, none, none)
    experts = np.concatenate([np.repeat(part.experts, part.counts) for part in parts])
    order = np.argsort(experts, kind="stable")
    sizes = np.bincount(experts)
    present = np.flatnonzero(sizes)
    return Batches(
        present.astype(np.int32),
        sizes[present].astype(np.int32),
        np.concatenate([part.places for part in parts])[order],
        np.concatenate([part.choices for part in parts])[order],
    )


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    seen = array.view()
    seen.flags.writeable = False
    return seen


def _segment(service_class: int, places: Int32s, choices: Int32s, sizes: Int64s) -> Segment:
    end = sizes.cumsum()
    return Segment(service_class, places, choices, end - sizes, end, len(places))


def _everything(segment: Segment, num_experts: int) -> Batches:
    sizes = segment.end - segment.begin
    present = np.flatnonzero(sizes)
    counts = sizes[present].astype(np.int32)
    if segment.num_waiting == len(segment.places):
        return Batches(present.astype(np.int32), counts, segment.places, segment.choices)
    index, _ = segment.waiting()
    return Batches(present.astype(np.int32), counts, segment.places[index], segment.choices[index])
