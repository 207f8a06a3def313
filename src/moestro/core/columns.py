"""What is done with columns everywhere."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def true_rows(column: NDArray[np.bool_]) -> list[int]:
    """Where `column`, bool[n], is true, ascending; cheap where it is nowhere, as it is in most steps."""
    rows: list[int] = column.nonzero()[0].tolist() if np.count_nonzero(column) else []
    return rows
