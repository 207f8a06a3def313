"""Views of one scheduler's sequences for the batch and the evict policy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.views import BE, LS, BatchView
from moestro.core.work import Slots
from moestro.engine.client_shares import ClientShares
from moestro.engine.sequences import Sequence, SequenceTable
from moestro.engine.waiting_admission import AdmissionCandidate


class PolicyViews:
    """Makes views of `table`, and never changes it.

    Args:
        shares: parts of the clients.
        promotes_after_ns: waiting time after which a best-effort sequence counts as latency-sensitive
            (`OrderPolicy.promotes_after_ns`).
    """

    def __init__(self, table: SequenceTable, shares: ClientShares, promotes_after_ns: int) -> None:
        self._table, self._shares = table, shares
        self._promotes_after_ns = promotes_after_ns
        # Constant columns of the usual step, cut to length: running rows, then candidates.
        self._num_slots = len(table.sequences)
        self._is_waiting = np.arange(2 * self._num_slots) >= self._num_slots
        self._all_ls = np.full(self._num_slots, LS, np.uint8)

    def running(self, slots: Slots, now_ns: int) -> BatchView:
        """View of the running sequences in `slots`, as they will be when their units in flight are done."""
        table = self._table
        computed, known = table.progress(slots)
        num_left = known - computed
        classes, none_waits = self.classes(slots, now_ns), self._is_waiting[: len(slots)]
        if self._shares.are_needed:
            clients, part = table.client[slots], self._shares.part
            return BatchView(num_left, none_waits, classes, table.num_units_in_flight, clients, part)
        return BatchView(num_left, none_waits, classes, table.num_units_in_flight)

    def with_candidates(self, view: BatchView, candidates: list[AdmissionCandidate], now_ns: int) -> BatchView:
        """Append a row for each candidate to `view`. There are at most as many as free slots."""
        old, num = len(view.num_left), len(candidates)
        num_left = np.empty(old + num, np.int32)
        num_left[:old] = view.num_left
        has_be = self._table.num_be > 0
        for row, candidate in enumerate(candidates, old):  # they are few, and a list of them would become an array
            num_left[row] = candidate.needs.num_left
            has_be = has_be or candidate.sequence.service_class == BE
        if has_be:
            classes = np.concatenate((view.service_class, self._classes_of(candidates, now_ns)))
        else:
            classes = self._all_ls[: old + num]
        return BatchView(
            num_left,
            self._is_waiting[self._num_slots - old : self._num_slots + num],
            classes,
            view.num_in_flight,
            None if view.client is None else np.append(view.client, [each.sequence.client for each in candidates]),
            view.part,
        )

    def _classes_of(self, candidates: list[AdmissionCandidate], now_ns: int) -> NDArray[np.uint8]:
        return np.array([self.class_of(candidate.sequence, now_ns) for candidate in candidates], np.uint8)

    def class_of(self, sequence: Sequence, now_ns: int) -> int:
        """LS or BE. A best-effort sequence counts as LS once the order policy has promoted it."""
        is_promoted = now_ns - sequence.request.arrival_ns >= self._promotes_after_ns
        return LS if is_promoted else sequence.service_class

    def classes(self, slots: Slots, now_ns: int) -> NDArray[np.uint8]:
        """uint8[n], `class_of` of the sequences in `slots`."""
        table = self._table
        if table.num_be == 0:
            return self._all_ls[: len(slots)]
        promoted = now_ns - table.arrival_ns[slots] >= self._promotes_after_ns
        return np.where(promoted, np.uint8(LS), table.service_class[slots])

    def holds_until_ns(self, slots: Slots, now_ns: int) -> int:
        """Time at which the next sequence in `slots` is promoted. FOREVER_NS means never."""
        if self._table.num_be == 0:
            return FOREVER_NS
        promoted_ns = self._table.arrival_ns[slots] + self._promotes_after_ns
        return int(promoted_ns.min(initial=FOREVER_NS, where=self.classes(slots, now_ns) == BE))
