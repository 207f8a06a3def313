"""Counts which workers computed the experts of each unit in the network, for the record of its request."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.work import Int32s, StepVisits, range_ends


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
