"""The units in the network as columns, from which any set of them is gathered at once."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from moestro.core.unit_sets import join_edits, select_edits
from moestro.core.work import LOGITS_PROMPT, SAMPLING_ROW, Int32s, LogitEdits, Slots, Units

Int64s = NDArray[np.int64]

_WRITTEN_LATER = ("serial", "start", "write_start", "logits", "sampling")


class UnitColumns:
    """Columns of `Units` by the number of the unit, which is the number of its first row.

    Args:
        num_rows: tokens that may be in the network at once.

    Attributes:
        slot, service_class, num_tokens: as in `Units`, [num_rows].
        serial, start, write_start, logits, sampling: the same; `gather` reads them.
    """

    def __init__(self, num_rows: int) -> None:
        self.slot: Slots = np.zeros(num_rows, np.int64)
        self.serial: Int64s = np.zeros(num_rows, np.int64)
        self.service_class: NDArray[np.uint8] = np.zeros(num_rows, np.uint8)
        self.start: Int32s = np.zeros(num_rows, np.int32)
        self.num_tokens: Int32s = np.zeros(num_rows, np.int32)
        self.write_start: Int32s = np.zeros(num_rows, np.int32)
        self.logits: NDArray[np.uint8] = np.zeros(num_rows, np.uint8)
        self.sampling: NDArray[np.void] = np.zeros(num_rows, SAMPLING_ROW)
        # Zeroed memory takes no space before it is written, so long tables of few units cost little.
        self._tables: Int32s = np.zeros((num_rows, 0), np.int32)
        self._table_width: Int32s = np.zeros(num_rows, np.int32)
        self._token_ids: Int32s = np.zeros(num_rows, np.int32)  # by row
        self._next_token_ids: Int32s = np.zeros(num_rows, np.int32)  # by row
        self._rows: dict[int, Int32s] = {}  # of units of more than one token
        self._edits: dict[int, tuple[Units, int]] = {}  # units that came with edits of logits, and the place there
        self._has_token_ids = False
        self._unwritten: list[tuple[Int64s, Int32s, Units]] = []

    def put(self, ids: Int64s, rows: Int32s, units: Units) -> None:
        """Store `units` under the numbers `ids`. `rows`: int32[tokens], of their tokens end to end.

        Most columns are written only when some of the units are wanted without the others.
        """
        self.slot[ids], self.service_class[ids] = units.slot, units.service_class
        self.num_tokens[ids] = units.num_tokens
        self._unwritten.append((ids, rows, units))

    def _write(self) -> None:
        for ids, rows, units in self._unwritten:
            self._write_units(ids, rows, units)
        self._unwritten.clear()

    def _write_units(self, ids: Int64s, rows: Int32s, units: Units) -> None:
        # Units that enter together mostly have consecutive rows, and a slice is written several times as fast.
        at = slice(int(ids[0]), int(ids[-1]) + 1) if np.all(ids[1:] - ids[:-1] == 1) else ids
        for name in _WRITTEN_LATER:
            getattr(self, name)[at] = getattr(units, name)
        width = units.block_tables.shape[1]
        if width > self._tables.shape[1]:
            tables = np.zeros((len(self._tables), max(width, 2 * self._tables.shape[1])), np.int32)
            used = np.flatnonzero(self._table_width)
            tables[used, : self._tables.shape[1]] = self._tables[used]
            self._tables = tables
        self._tables[at, :width], self._table_width[at] = units.block_tables, width
        self._has_token_ids = units.token_ids is not None
        if units.token_ids is not None:
            self._token_ids[rows] = units.token_ids
        if units.next_token_ids is not None:
            asks = np.repeat(units.logits & LOGITS_PROMPT != 0, units.num_tokens)
            self._next_token_ids[rows[asks]] = units.next_token_ids
        if len(rows) > len(ids):
            first = units.num_tokens.cumsum() - units.num_tokens
            for index in np.flatnonzero(units.num_tokens > 1).tolist():
                self._rows[int(ids[index])] = rows[first[index] : first[index] + units.num_tokens[index]]
        if units.edits is not None:
            self._edits.update({unit: (units, index) for index, unit in enumerate(ids.tolist())})

    def forget(self, ids: Int64s) -> None:
        """Drop what is stored for units outside the columns."""
        for index, (unwritten, _, _) in enumerate(self._unwritten):
            if unwritten is ids or np.array_equal(unwritten, ids):
                del self._unwritten[index]
                return
        self._write()
        self._table_width[ids] = 0
        if self._rows or self._edits:
            for unit in ids.tolist():
                self._rows.pop(unit, None)
                self._edits.pop(unit, None)

    def rows_of(self, ids: Int64s) -> Int32s:
        """int32[tokens], rows of the units' tokens end to end."""
        self._write()
        if not self._rows:
            return ids.astype(np.int32)
        num_tokens = self.num_tokens.take(ids)
        first = num_tokens.cumsum() - num_tokens
        rows = np.empty(int(num_tokens.sum()), np.int32)
        rows[first] = ids
        for index in np.flatnonzero(num_tokens > 1).tolist():
            rows[first[index] : first[index] + num_tokens[index]] = self._rows[int(ids[index])]
        return rows

    def gather(self, ids: Int64s, rows: Int32s) -> Units:
        """The units `ids`, in that order, whose tokens have these rows."""
        self._write()
        following = None
        logits = self.logits.take(ids)
        asks = logits & LOGITS_PROMPT != 0
        if np.count_nonzero(asks):
            following = self._next_token_ids[rows[np.repeat(asks, self.num_tokens[ids])]]
        return Units(
            slot=self.slot.take(ids),
            serial=self.serial.take(ids),
            service_class=self.service_class.take(ids),
            start=self.start.take(ids),
            num_tokens=self.num_tokens.take(ids),
            write_start=self.write_start.take(ids),
            logits=logits,
            block_tables=self._tables.take(ids, axis=0)[:, : int(self._table_width.take(ids).max())],
            sampling=self.sampling.take(ids),
            token_ids=self._token_ids.take(rows) if self._has_token_ids else None,
            next_token_ids=following,
            edits=self._gather_edits(ids) if self._edits else None,
        )

    def _gather_edits(self, ids: Int64s) -> LogitEdits | None:
        """Changes to the logits of the units `ids`, selected once for all neighbours that came together."""
        parts: list[tuple[LogitEdits | None, int]] = []
        found = [self._edits.get(unit, (None, 0)) for unit in ids.tolist()]
        for units, group in groupby(found, key=lambda each: each[0]):
            index = np.array([each[1] for each in group])
            edits = None if units is None or units.edits is None else select_edits(units.edits, index, len(units))
            parts.append((edits, len(index)))
        return join_edits(parts)
