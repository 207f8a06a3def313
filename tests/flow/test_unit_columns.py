"""Units of several plans, gathered from their columns: everything that belongs to a unit goes with it."""

from __future__ import annotations

import numpy as np
import pytest
from support.random_units import random_units, unit_by_unit

from moestro.flow.token_pool import UnitColumns


def put(columns: UnitColumns, rng: np.random.Generator, free: list[int], num: int, width: int) -> dict[int, dict]:
    """Store units in random rows; what each of them has, by the number of its first row."""
    units = random_units(rng, num, width=width)
    rows = np.array([free.pop(int(rng.integers(len(free)))) for _ in range(len(units.token_ids))], np.int32)
    ids = rows[units.num_tokens.cumsum() - units.num_tokens].astype(np.int64)
    columns.put(ids, rows, units)
    return dict(zip(ids.tolist(), unit_by_unit(units), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_a_gathered_unit_is_what_was_put(seed):
    rng = np.random.default_rng(seed)
    columns, free, known = UnitColumns(64), list(range(64)), {}
    for width in (3, 2, 5):
        known |= put(columns, rng, free, 4, width)
    gone = rng.permutation(list(known))[:3]
    columns.forget(gone)
    ids = np.array([unit for unit in known if unit not in gone])  # units that came together stand together
    ids = ids[np.sort(rng.permutation(len(ids))[: rng.integers(1, len(ids) + 1)])]
    rows = columns.rows_of(ids)
    assert len(rows) == columns.num_tokens[ids].sum()
    assert unit_by_unit(columns.gather(ids, rows)) == [known[unit] for unit in ids.tolist()]


def test_numbers_whose_ends_lie_as_far_apart_as_consecutive_ones_are_not_taken_for_them():
    columns, units = UnitColumns(64), random_units(np.random.default_rng(1), 4, width=2)
    first = units.num_tokens.cumsum() - units.num_tokens
    rows = np.arange(20, 20 + len(units.token_ids), dtype=np.int32)
    rows[first] = (5, 9, 2, 8)
    columns.put(rows[first].astype(np.int64), rows, units)
    ids = np.array([9, 2])
    assert columns.gather(ids, columns.rows_of(ids)).serial.tolist() == units.serial[1:3].tolist()


def test_units_of_hashed_traces_have_no_tokens():
    rng = np.random.default_rng(0)
    columns, units = UnitColumns(64), random_units(rng, 3, width=2)
    rows = np.arange(len(units.token_ids), dtype=np.int32)
    ids = rows[units.num_tokens.cumsum() - units.num_tokens].astype(np.int64)
    columns.put(
        ids, rows, type(units)(**{name: getattr(units, name) for name in units.__struct_fields__} | {"token_ids": None})
    )
    assert columns.gather(ids, rows).token_ids is None
