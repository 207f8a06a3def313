"""The tokens of a home inside the network, and the contributions that each still lacks: columns for any top-k.

A unit is named by the first of its rows. A unit is complete in a layer when it lacks no contribution; only then it goes
on. (AMoE's token pool, arXiv:2505.08944 section 3.2, generalised from top-2 and from single tokens.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from moestro.core.stages import Merges, StageShape
from moestro.core.work import (
    LOGITS_PROMPT,
    SAMPLING_ROW,
    Int32s,
    LogitEdits,
    Slots,
    StepVisits,
    Units,
    join_edits,
    range_ends,
    select_edits,
)
from moestro.errors import InvariantError

# The units in the network as columns, from which any set of them is gathered at once.

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


class UnitVisits:
    """(Token, expert) pairs of each unit by range of layers and worker.

    Args:
        num_rows: rows of the token pool, by which units are named.
        num_layers: layers of the network.
        num_workers: workers of the group.
    """

    def __init__(self, num_rows: int, num_layers: int, num_workers: int) -> None:
        self._ends = range_ends(num_layers)
        self._range_of = np.searchsorted(np.array(self._ends), np.arange(num_layers), side="right")
        self._num_pairs = np.zeros((num_rows, len(self._ends), num_workers), np.int64)

    def enter(self, ids: NDArray[np.int64]) -> None:
        """Begin to count for the units `ids`."""
        self._num_pairs[ids] = 0

    def add(self, ids: Int32s, layers: NDArray[np.int16], workers: NDArray[np.int16]) -> None:
        """Count contributions that have arrived, one for each entry of the columns."""
        np.add.at(self._num_pairs, (ids, self._range_of.take(layers), workers), 1)

    def of(self, ids: NDArray[np.int64], version: int) -> StepVisits:
        """Return the counts of some units. `version`: of the expert table that is in use."""
        return StepVisits(version, self._ends, self._num_pairs[ids])


THERE = -1  # owner of a contribution that has arrived, or that no token waits for
_NO_PLACE = -1
_KNOWN_WAVES = 16  # those that return in the next layer: one that runs and a few that are parked
NO_MERGES = Merges(np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(slots=True, eq=False)
class Wave:
    """Units that an item takes together.

    Attributes:
        ids: int64[n], in the order of `units`: by entry, then by number.
        rows: int32[tokens], of their tokens end to end.
    """

    ids: Int64s
    rows: Int32s
    _columns: UnitColumns
    _units: Units | None = field(default=None)

    @property
    def units(self) -> Units:
        """The units. The same wave gives the same object, by which a device knows it again."""
        if self._units is None:
            self._units = self._columns.gather(self.ids, self.rows)
        return self._units


class TokenPool:
    """Rows, places and missing contributions of all units in the network; implements `PlaceTable`.

    Args:
        shape: numbers of rows and places.
        num_visited: workers whose contributions are counted for each unit; 0 means that none are.

    Attributes:
        columns: the units, by unit.
        entry_of: int64[rows], by unit, number of its entry. Later entries have larger numbers.
        queued_ns: int64[rows], by unit, when it came into the queue, or the layer's expert queues, where it waits.
        passed_ns: int64[rows], by unit, for how long it was passed over since it entered; 0 for rows without a unit.
        num_passed: units whose `passed_ns` is not 0.
        lacking: int64[rows], by unit, contributions of this layer that have not arrived.
        generation: uint32[places], how often the place was given out. A reply to an older generation is dropped.
        owner: int16[places, chosen], worker that owes the contribution; THERE if none does.
        layer_at: int16[places], layer of the experts that the token visits.
        topk_ids: int32[places, chosen], logical experts of the token.
        num_units: units in the network.
        num_best_effort, num_decodes: those of them of class BE, and those of one token.
        num_free_rows, num_free_places: numbers of those left.
        table_version: version of the expert table that is in use.
    """

    def __init__(self, shape: StageShape, num_visited: int = 0) -> None:
        num_rows, num_places = shape.num_rows, shape.num_places
        self._num_chosen = shape.num_chosen
        self.columns = UnitColumns(num_rows)
        self.service_class, self.num_tokens = self.columns.service_class, self.columns.num_tokens
        self.entry_of: Int64s = np.zeros(num_rows, np.int64)
        self.queued_ns: Int64s = np.zeros(num_rows, np.int64)
        self.passed_ns: Int64s = np.zeros(num_rows, np.int64)
        self.num_passed = 0
        self.lacking: Int64s = np.zeros(num_rows, np.int64)
        self.generation: NDArray[np.uint32] = np.zeros(num_places, np.uint32)
        self.owner: NDArray[np.int16] = np.full((num_places, shape.num_chosen), THERE, np.int16)
        self.layer_at: NDArray[np.int16] = np.zeros(num_places, np.int16)
        self.topk_ids: Int32s = np.zeros((num_places, shape.num_chosen), np.int32)
        self.num_units = self.num_best_effort = self.num_decodes = 0
        self.num_free_rows, self.num_free_places = num_rows, num_places
        self.table_version = 0
        self._visits = UnitVisits(num_rows, shape.num_layers, num_visited) if num_visited else None
        self._is_unit = np.zeros(num_rows, np.bool_)
        self._row_is_free = np.ones(num_rows, np.bool_)
        self._place_is_free = np.ones(num_places, np.bool_)
        self._unit_of_row: Int32s = np.zeros(num_rows, np.int32)
        self._place_of_row: Int32s = np.full(num_rows, _NO_PLACE, np.int32)
        self._unit_of_place: Int32s = np.zeros(num_places, np.int32)
        self._left: dict[int, int] = {}  # units of each entry that are in the network
        self._waves: dict[bytes, Wave] = {}

    @property
    def num_entries(self) -> int:
        """Number of entries with units in the network."""
        return len(self._left)

    def has_entry(self, number: int) -> bool:
        """Whether units of this entry are in the network."""
        return number in self._left

    # --- units ------------------------------------------------------------------------------------------------------

    def enter(self, number: int, units: Units) -> Int64s:
        """Give rows to units, for whose tokens there are enough.

        Args:
            number: of the entry, larger than all before.

        Returns:
            int64[n], the units' names.
        """
        num_tokens = int(units.num_tokens.sum())
        if num_tokens > self.num_free_rows:
            raise InvariantError(f"{num_tokens} tokens enter where {self.num_free_rows} rows are free")
        rows = _lowest(self._row_is_free, self.num_free_rows, num_tokens)
        self._row_is_free[rows] = False
        self.num_free_rows -= num_tokens
        are_all_single = num_tokens == len(units)
        ids: Int64s = rows if are_all_single else rows[units.num_tokens.cumsum() - units.num_tokens]
        unit_rows = rows.astype(np.int32)
        self.columns.put(ids, unit_rows, units)
        self.lacking[ids] = 0
        if self._visits is not None:
            self._visits.enter(ids)
        self.entry_of[ids] = number
        self._is_unit[ids] = True
        self._unit_of_row[rows] = ids if are_all_single else np.repeat(ids, units.num_tokens)
        self._left[number] = len(ids)
        self.num_units += len(ids)
        self.num_best_effort += int(np.count_nonzero(units.service_class))
        self.num_decodes += len(ids) if are_all_single else int(np.count_nonzero(units.num_tokens == 1))
        self._remember(ids.tobytes(), Wave(ids, unit_rows, self.columns, units))
        return ids

    def leave(self, ids: Int64s) -> None:
        """Free the rows and places of units that have a result, or that were recalled."""
        if not self._is_unit[ids].all():
            raise InvariantError("a unit leaves that is not in the network")
        rows = self.wave(np.sort(ids)).rows
        places = self._place_of_row[rows]
        self._release(rows, places if places.min() >= 0 else places[places >= 0])
        self._row_is_free[rows] = True
        self._is_unit[ids] = False
        self.num_free_rows += len(rows)
        self.num_units -= len(ids)
        self.num_best_effort -= int(np.count_nonzero(self.service_class[ids]))
        self.num_decodes -= int(np.count_nonzero(self.num_tokens[ids] == 1))
        if self.num_passed:
            self.num_passed -= int(np.count_nonzero(self.passed_ns[ids]))
            self.passed_ns[ids] = 0
        self.columns.forget(ids)
        for number, count in _count_each(self.entry_of[ids]):
            self._left[number] -= count
            if self._left[number] == 0:
                del self._left[number]
        # The names may soon be those of other units.
        if not self.num_units:
            self._waves.clear()
            return
        self._waves = {key: wave for key, wave in self._waves.items() if self._is_unit[wave.ids].all()}

    def visits_of(self, ids: Int64s, slots: Slots) -> StepVisits | None:
        """Workers that computed the experts of the units `ids`, in the order of their `slots`. None: not counted."""
        if self._visits is None:
            return None
        of_ids = self.columns.slot[ids]
        by_slot = of_ids.argsort()
        return self._visits.of(ids[by_slot[of_ids[by_slot].searchsorted(slots)]], self.table_version)

    def wave(self, ids: Int64s) -> Wave:
        """The units `ids` (int64, distinct, ascending) as one wave."""
        key = ids.tobytes()
        wave = self._waves.get(key)
        if wave is None:
            if len(self._left) > 1:
                ids = ids.take(self.entry_of.take(ids).argsort(kind="stable"))
            wave = Wave(ids, self.columns.rows_of(ids), self.columns)
            self._remember(key, wave)
        return wave

    def _remember(self, key: bytes, wave: Wave) -> None:
        self._waves[key] = wave
        if len(self._waves) > _KNOWN_WAVES:
            del self._waves[next(iter(self._waves))]

    def find(self, slots: Slots) -> Int64s:
        """Names of the units of these slots that are in the network, ascending."""
        ids = np.flatnonzero(self._is_unit)
        found: Int64s = ids[np.isin(self.columns.slot[ids], slots)]
        return found

    def find_earlier(self, service_class: int, before: int) -> Int64s:
        """Names of the units of a class that are in the network, of entries with a number less than `before`."""
        return np.flatnonzero(self._is_unit & (self.service_class == service_class) & (self.entry_of < before))

    def pass_over(self, ids: Int64s, passed_ns: int) -> None:
        """Count that the units `ids` (distinct) were passed over for `passed_ns`, more than 0."""
        self.num_passed += len(ids) - int(np.count_nonzero(self.passed_ns[ids]))
        self.passed_ns[ids] += passed_ns

    def passed_elsewhere(self, places: Int32s, waited_us: NDArray[np.uint32]) -> None:
        """Note for how long other workers say that the tokens at `places` (which may repeat) were passed over."""
        if np.count_nonzero(waited_us):
            longer = waited_us.nonzero()[0]
            units, reported_ns = self.units_at(places[longer]), waited_us[longer].astype(np.int64) * 1000
            before = np.count_nonzero(self.passed_ns[np.unique(units)])
            np.maximum.at(self.passed_ns, units, reported_ns)
            self.num_passed += int(np.count_nonzero(self.passed_ns[np.unique(units)]) - before)

    # --- places -----------------------------------------------------------------------------------------------------

    def num_lacking_places(self, ids: Int64s) -> Int32s:
        """int32[n], tokens of each unit that have no place yet."""
        lacking: Int32s = self.num_tokens.take(ids) * (self._place_of_row.take(ids) < 0)
        return lacking

    def take_places(self, wave: Wave, merges: Merges) -> Int32s:
        """Give a place to each token of `wave` that has none. Places that tokens have begin a new generation.

        Args:
            merges: the tokens that have one.
        """
        places = merges.places
        if len(merges) < len(wave.rows):
            places = self._place_of_row.take(wave.rows)
            lacks = (places < 0).nonzero()[0]
            if len(lacks) > self.num_free_places:
                raise InvariantError(f"{len(lacks)} tokens go where {self.num_free_places} places are free")
            taken = _lowest(self._place_is_free, self.num_free_places, len(lacks)).astype(np.int32)
            self._place_is_free[taken] = False
            self.num_free_places -= len(taken)
            rows = wave.rows[lacks]
            self._place_of_row[rows] = taken
            self._unit_of_place[taken] = self._unit_of_row[rows]
            places[lacks] = taken
        self.generation[places.astype(np.int64)] += 1  # NumPy converts narrower indices, twice here
        return places

    def merges(self, wave: Wave) -> Merges:
        """The tokens of `wave` that have a place, and so contributions that the next item merges."""
        places: Int32s = self._place_of_row.take(wave.rows)
        has_place = places >= 0
        num_placed = np.count_nonzero(has_place)
        if num_placed == len(places):
            return Merges(wave.rows, places)
        if not num_placed:
            return NO_MERGES
        return Merges(wave.rows[has_place], places[has_place])

    def release_places(self, merged: Merges) -> None:
        """Free the places of tokens whose contributions were merged."""
        self._release(merged.rows, merged.places)

    def _release(self, rows: Int32s, places: Int32s) -> None:
        if len(places):
            self._place_of_row[rows] = _NO_PLACE
            self._place_is_free[places] = True
            self.generation[places] += 1
            self.owner[places] = THERE
            self.num_free_places += len(places)

    def places_of(self, ids: Int64s) -> Int32s:
        """int32[tokens], places of units that have some."""
        return self._place_of_row[self.columns.rows_of(ids)]

    def units_at(self, places: Int32s) -> Int32s:
        """The unit that each place is given to."""
        units: Int32s = self._unit_of_place.take(places)
        return units

    def classes_at(self, places: Int32s) -> NDArray[np.uint8]:
        """Implement `PlaceTable`."""
        return self.service_class.take(self.units_at(places))

    def queued_ns_at(self, places: Int32s) -> Int64s:
        """Implement `PlaceTable`."""
        return self.queued_ns.take(self.units_at(places))

    def passed_ns_at(self, places: Int32s) -> Int64s:
        """Implement `PlaceTable`."""
        return self.passed_ns[self.units_at(places)]

    def layer_of(self, ids: Int64s) -> NDArray[np.int16]:
        """int16[n], the layer whose experts units with places visit."""
        return self.layer_at[self._place_of_row[ids]]

    def could_run_on(self, worker: int, ids: Int64s) -> NDArray[np.bool_]:
        """bool[n], whether each unit lacks no contribution, or lacks one that `worker` owes."""
        lacks = self.lacking[ids] > 0
        could_run = ~lacks
        if lacks.any():
            some, sizes = ids[lacks], self.num_tokens[ids[lacks]]
            is_owed = (self.owner[self.places_of(some)] == worker).any(axis=1)
            could_run[lacks] = np.logical_or.reduceat(is_owed, sizes.cumsum() - sizes)
        return could_run

    # --- contributions ----------------------------------------------------------------------------------------------

    def expect(self, ids: Int64s, places: Int32s, layer: int, topk_ids: Int32s, owner: NDArray[np.int16] | int) -> None:
        """Note that the units `ids` lack all contributions of a layer.

        Args:
            places: int32[tokens], of the units' tokens.
            topk_ids: int32[tokens, chosen], logical experts.
            owner: int16[tokens, chosen] or one worker, which owes them.
        """
        at = places.astype(np.int64)
        self.layer_at[at] = layer
        if self._num_chosen > 1:
            self.topk_ids[at], self.owner[at] = topk_ids, owner
        else:  # NumPy takes several times as long to store rows of one number
            self.topk_ids[:, 0][at] = topk_ids[:, 0]
            self.owner[:, 0][at] = owner if isinstance(owner, int) else owner[:, 0]
        self.lacking[ids] = self.num_tokens.take(ids) * self._num_chosen

    def arrive(self, places: Int32s, choices: Int32s) -> Int64s:
        """Note that contributions which were owed are there, one for each pair.

        Returns:
            int64[n], units that lack nothing else, ascending.
        """
        pairs = places.astype(np.int64) * self._num_chosen + choices
        owner = self.owner.reshape(-1)
        if owner.take(pairs).min(initial=0) == THERE:
            raise InvariantError("a contribution arrives that is there already, or that no token waits for")
        if self._visits is not None:
            self._visits.add(self.units_at(places), self.layer_at.take(places), owner.take(pairs))
        owner[pairs] = THERE
        given = np.bincount(self.units_at(places))
        lacking = self.lacking[: len(given)]
        lacking -= given
        complete: Int64s = ((given > 0) & (lacking == 0)).nonzero()[0]
        return complete


def _lowest(is_free: NDArray[np.bool_], num_free: int, count: int) -> Int64s:
    """Find the lowest `count` free numbers: below them are none but those, and at most all that are taken."""
    return is_free[: len(is_free) - num_free + count].nonzero()[0][:count]


def _count_each(numbers: Int64s) -> list[tuple[int, int]]:
    """Count how often each number is there; mostly they are all one."""
    if numbers[0] == numbers[-1] and (numbers == numbers[0]).all():
        return [(int(numbers[0]), len(numbers))]
    unique, counts = np.unique(numbers, return_counts=True)
    return list(zip(unique.tolist(), counts.tolist(), strict=True))
