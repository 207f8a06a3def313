"""Operations on columns that several rooms share.

Columns mostly have few rows, and there the fixed time of a call decides. Two arrays of one type are added in 0.3 us, an
array and a number of Python in 0.6, whatever the length, and a reduction takes 1 us. So hot paths take their constants
from here, and add up lists. `column[rows]` takes 0.12 us with int64 rows, and `column.take(rows)` 0.24; with two
dimensions or structured rows, `take` is the faster one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

ZERO, ONE = np.array(0, np.int32), np.array(1, np.int32)
SHORT = 64  # rows up to which lists are faster; at 128 both ways take the same time


@lru_cache(maxsize=1024)
def int32(number: int) -> NDArray[np.int32]:
    """`number` as an array of shape (), for sums with columns. Callers must not write to it."""
    return np.array(number, np.int32)


def has_true(column: NDArray[np.bool_]) -> bool:
    """Whether any row of `column`, bool[n], is true. A search in its bytes takes a tenth of the time of `any`."""
    return 1 in column.tobytes()


def all_true(column: NDArray[np.bool_]) -> bool:
    """Whether all rows of `column`, bool[n], are true."""
    return 0 not in column.tobytes()


def all_nonzero(column: NDArray[np.integer[Any]]) -> bool:
    """Whether no row of `column`, int[n], is 0."""
    return all(column.tolist()) if len(column) <= SHORT else bool(np.count_nonzero(column) == len(column))


def true_rows(column: NDArray[np.bool_]) -> list[int]:
    """Rows of `column`, bool[n], that are true, ascending. Columns without a true row, the usual case, cost little."""
    rows: list[int] = column.nonzero()[0].tolist() if 1 in column.tobytes() else []
    return rows


def column_sum(column: NDArray[np.integer[Any]]) -> int:
    """Sum of `column`, int[n]. A list is summed faster than an array as long as it is short."""
    return sum(column.tolist()) if len(column) <= SHORT else int(np.add.reduce(column))
