"""Who is in the network and what each still lacks: columns by row, for any number of experts a token.

A unit is named by the first of its rows. A unit is complete in a layer when it lacks no contribution; then, and only
then, it goes on. (AMoE's token pool, arXiv:2505.08944 section 3.4, generalised from top-2 and from single tokens.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moestro.core.stages import StageShape
from moestro.core.unit_sets import join_units, select_units, token_spans
from moestro.core.work import Int32s, Plan, Slots, Units
from moestro.errors import InvariantError

Int64s = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _PlanInside:
    """A plan some of whose units are in the network.

    Attributes:
        units: all of its units.
        rows: int32[tokens], those of its units end to end.
        ids: int64[n], its units' names.
        num_left: units whose result is not there.
    """

    units: Units
    rows: Int32s
    ids: Int64s
    num_left: int


@dataclass(slots=True, eq=False)
class Wave:
    """Units that an item takes together.

    Attributes:
        ids: int64[n], in the order of `units`.
        rows: int32[tokens], of their tokens end to end.
        units: theirs. The same wave gives the same object, by which a device knows it again.
    """

    ids: Int64s
    rows: Int32s
    _parts: list[tuple[_PlanInside, Int64s]]
    _units: Units | None = field(default=None)

    @property
    def units(self) -> Units:
        """See the class."""
        if self._units is None:
            self._units = join_units([_part_of(plan, index) for plan, index in self._parts])
        return self._units


class TokenPool:
    """Rows, places and missing contributions of all units in the network.

    Args:
        shape: how many there may be.

    Attributes:
        service_class, num_tokens, slot: uint8, int32, int64 [rows], by unit.
        plan_of: int64[rows], by unit, the number of its plan; plans are numbered as they enter.
        queued_ns: int64[rows], by unit, when it came into the queue, or the layer's expert queues, where it waits.
        passed_ns: int64[rows], by unit, for how long it was passed over since it entered; 0 for rows without a unit.
        num_passed: units whose `passed_ns` is not 0.
        lacking: int32[rows], by unit, contributions of this layer that are neither there nor under way.
        num_free_rows, num_free_places: how many are left.
    """

    def __init__(self, shape: StageShape) -> None:
        self._num_chosen = shape.num_chosen
        self.service_class: NDArray[np.uint8] = np.zeros(shape.num_rows, np.uint8)
        self.num_tokens: Int32s = np.zeros(shape.num_rows, np.int32)
        self.plan_of: Int64s = np.zeros(shape.num_rows, np.int64)
        self.queued_ns: Int64s = np.zeros(shape.num_rows, np.int64)
        self.passed_ns: Int64s = np.zeros(shape.num_rows, np.int64)
        self.num_passed = 0
        self.lacking: Int32s = np.zeros(shape.num_rows, np.int32)
        self.slot: Slots = np.zeros(shape.num_rows, np.int64)
        self.num_free_rows, self.num_free_places = shape.num_rows, shape.num_places
        self._row_is_free = np.ones(shape.num_rows, np.bool_)
        self._place_is_free = np.ones(shape.num_places, np.bool_)
        self._unit_of_row: Int32s = np.zeros(shape.num_rows, np.int32)
        self._place_of_row: Int32s = np.zeros(shape.num_rows, np.int32)
        self._row_of_place: Int32s = np.zeros(shape.num_places, np.int32)
        self._index_of: Int32s = np.zeros(shape.num_rows, np.int32)
        self._plans: dict[int, _PlanInside] = {}
        self._waves: dict[bytes, Wave] = {}
        self._num_plans = 0

    def __len__(self) -> int:
        """Plans with units in the network."""
        return len(self._plans)

    def enter(self, plan: Plan) -> Int64s:
        """Give rows to a plan's units, for whose tokens there are enough.

        Returns:
            int64[n], their names.
        """
        units = plan.units
        rows = np.flatnonzero(self._row_is_free)[: plan.num_tokens]
        if len(rows) < plan.num_tokens:
            raise InvariantError(f"a plan of {plan.num_tokens} tokens enters where {len(rows)} rows are free")
        self._row_is_free[rows] = False
        self.num_free_rows -= len(rows)
        ids: Int64s = rows[units.num_tokens.cumsum() - units.num_tokens]
        self.service_class[ids] = units.service_class
        self.num_tokens[ids] = units.num_tokens
        self.slot[ids] = units.slot
        self.lacking[ids] = 0
        self._unit_of_row[rows] = np.repeat(ids, units.num_tokens)
        self.plan_of[ids] = self._num_plans
        self._index_of[ids] = np.arange(len(ids))
        plan_rows = rows.astype(np.int32)
        inside = self._plans[self._num_plans] = _PlanInside(units, plan_rows, ids, len(ids))
        self._waves[ids.tobytes()] = Wave(ids, plan_rows, [(inside, np.arange(len(ids)))])
        self._num_plans += 1
        return ids

    def wave(self, ids: Int64s) -> Wave:
        """The units `ids` (int64, distinct, ascending) as one wave."""
        key = ids.tobytes()
        wave = self._waves.get(key)
        if wave is None:
            wave = self._waves[key] = self._make_wave(ids)
        return wave

    def take_places(self, wave: Wave) -> Int32s:
        """Give a place to each token of `wave`, and note that each lacks all of its contributions."""
        num_tokens = len(wave.rows)
        places = np.flatnonzero(self._place_is_free)[:num_tokens].astype(np.int32)
        if len(places) < num_tokens:
            raise InvariantError(f"{num_tokens} tokens go where {len(places)} places are free")
        self._place_is_free[places] = False
        self.num_free_places -= num_tokens
        self._place_of_row[wave.rows] = places
        self._row_of_place[places] = wave.rows
        self.lacking[wave.ids] = self.num_tokens[wave.ids] * self._num_chosen
        return places

    def places_of(self, rows: Int32s) -> Int32s:
        """The places of rows that have some."""
        return self._place_of_row[rows]

    def units_at(self, places: Int32s) -> Int32s:
        """The unit that each place is given to."""
        return self._unit_of_row[self._row_of_place[places]]

    def contribute(self, places: Int32s) -> Int64s:
        """One contribution to each of `places` (which may repeat) is under way.

        Returns:
            int64[n], the units that lack nothing else, ascending.
        """
        given = np.bincount(self.units_at(places))
        lacking = self.lacking[: len(given)]
        lacking -= given.astype(np.int32)
        return np.flatnonzero((given > 0) & (lacking == 0))

    def take_back(self, places: Int32s) -> None:
        """One contribution to each of `places` (which may repeat) will not come for now."""
        given = np.bincount(self.units_at(places))
        self.lacking[: len(given)] += given.astype(np.int32)

    def complete(self, ids: Int64s) -> None:
        """The units lack nothing."""
        self.lacking[ids] = 0

    def give_back_places(self, places: Int32s) -> None:
        """Tokens whose layer is complete need no place."""
        self._place_is_free[places] = True
        self.num_free_places += len(places)

    def leave(self, ids: Int64s) -> None:
        """The units' results are there, or nobody wants them: their rows are free."""
        rows = self.wave(ids).rows
        if self._row_is_free[rows].any():
            raise InvariantError("a unit leaves that is not in the network")
        self._row_is_free[rows] = True
        self.num_free_rows += len(rows)
        if self.num_passed:
            self.num_passed -= int(np.count_nonzero(self.passed_ns[ids]))
            self.passed_ns[ids] = 0
        for number, count in _count_each(self.plan_of[ids]):
            plan = self._plans[number]
            plan.num_left -= count
            if plan.num_left == 0:
                del self._plans[number]
        # Its names may soon be another's. Waves of units that stay are found again, or made again.
        self._waves.clear()

    def find(self, slots: Slots) -> Int64s:
        """Names of the units of these slots that are in the network, ascending."""
        found = [np.empty(0, np.int64)]
        for number, plan in self._plans.items():
            found.append(self._still_inside(number, plan.ids[np.isin(plan.units.slot, slots)]))
        return np.sort(np.concatenate(found))

    def find_earlier(self, service_class: int, before: int) -> Int64s:
        """Names of the units of a class that are in the network, of plans with a number less than `before`."""
        found = [np.empty(0, np.int64)]
        for number, plan in self._plans.items():
            if number < before:
                found.append(self._still_inside(number, plan.ids[plan.units.service_class == service_class]))
        return np.concatenate(found)

    def pass_over(self, ids: Int64s, passed_ns: int) -> None:
        """The units `ids` (distinct) were passed over for `passed_ns`, more than 0."""
        self.num_passed += len(ids) - int(np.count_nonzero(self.passed_ns[ids]))
        self.passed_ns[ids] += passed_ns

    def _still_inside(self, number: int, ids: Int64s) -> Int64s:
        """Those of a plan's `ids` that have not left: the rows of the others are free, or another unit's by now."""
        inside: Int64s = ids[~self._row_is_free[ids] & (self._unit_of_row[ids] == ids) & (self.plan_of[ids] == number)]
        return inside

    def _make_wave(self, ids: Int64s) -> Wave:
        parts, rows = [], []
        numbers = self.plan_of[ids]
        for number in np.unique(numbers).tolist():
            plan = self._plans[number]
            index = self._index_of[ids[numbers == number]].astype(np.int64)
            parts.append((plan, index))
            first = plan.units.num_tokens.cumsum() - plan.units.num_tokens
            rows.append(plan.rows[token_spans(first[index], plan.units.num_tokens[index])])
        # In the order of the parts, which is that of the units.
        order = np.concatenate([plan.ids[index] for plan, index in parts])
        return Wave(order, np.concatenate(rows), parts)


def _count_each(numbers: Int64s) -> list[tuple[int, int]]:
    """How often each number is there; mostly they are all one."""
    if numbers[0] == numbers[-1] and (numbers == numbers[0]).all():
        return [(int(numbers[0]), len(numbers))]
    unique, counts = np.unique(numbers, return_counts=True)
    return list(zip(unique.tolist(), counts.tolist(), strict=True))


def _part_of(plan: _PlanInside, index: Int64s) -> Units:
    return plan.units if len(index) == len(plan.units) else select_units(plan.units, index)
