"""The units that wait before each layer's attention, and before the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import ATTENTION, BE, EMPTY_QUEUE_NS, LS, NUM_CLASSES, Run
from moestro.core.work import Int32s
from moestro.flow.queue_columns import QueueColumns
from moestro.flow.token_pool import TokenPool

Int64s = NDArray[np.int64]

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
