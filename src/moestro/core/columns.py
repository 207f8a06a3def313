"""Operations on columns that several rooms share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def true_rows(column: NDArray[np.bool_]) -> list[int]:
    """Rows of `column`, bool[n], that are true, ascending. Columns without a true row, the usual case, cost little."""
    rows: list[int] = column.nonzero()[0].tolist() if np.count_nonzero(column) else []
    return rows
