"""Rows and prices of the slots of an expert table, from counts of logical experts."""

from __future__ import annotations

import numpy as np

from moestro.core.expert_table import EMPTY, ExpertTable
from moestro.cost.model import Int64s, StageCostModel


class ExpertPrices:
    """Prices of one expert by number of rows, computed once for each number.

    Args:
        cost: prices of the stages.
    """

    def __init__(self, cost: StageCostModel) -> None:
        self._cost = cost
        self._prices: Int64s = np.zeros(1, np.int64)

    def of(self, rows: Int64s) -> Int64s:
        """Return the time of a call over each number of rows, in the shape of `rows`; no rows take no time."""
        most = int(rows.max(initial=0))
        if most >= len(self._prices):
            missing = range(len(self._prices), max(2 * len(self._prices), most + 1))
            added = np.array([self._cost.expert_ns(num_rows) for num_rows in missing], np.int64)
            self._prices = np.concatenate([self._prices, added])
        return self._prices[rows]


class SlotRows:
    """Slots of a table, as the indices that turn counts of logical experts into rows of slots.

    An expert's tokens are spread evenly over its live copies. The remainder goes to another copy for each source rank.

    Args:
        table: slots of each worker.

    Attributes:
        is_live: bool[workers, layers, slots], slots that hold an expert of a live worker.
        has_copies: whether an expert has several of them.
    """

    def __init__(self, table: ExpertTable) -> None:
        live = table.logical_of != EMPTY
        live &= table.is_alive[:, None, None]
        self.is_live = live
        self._expert = np.where(live, table.logical_of, 0)
        self._layer = np.arange(live.shape[1])[None, :, None]
        copies = table.num_copies * table.is_alive[:, None, None]
        self._num_copies: Int64s = copies.sum(axis=0)[self._layer, self._expert]
        before = copies.cumsum(axis=0) - copies
        self._index: Int64s = before[np.arange(len(live))[:, None, None], self._layer, self._expert]
        self.has_copies = bool((self._num_copies > 1)[live].any())

    def rows(self, counts: Int64s) -> Int64s:
        """Divide tokens of logical experts among slots.

        Args:
            counts: int64[parts, sources, layers, experts], tokens of each source rank that visit each logical expert.

        Returns:
            int64[parts, sources, workers, layers, slots], tokens of each slot.
        """
        rows: Int64s = counts[:, :, self._layer, self._expert]
        if self.has_copies:
            source = np.arange(counts.shape[1])[:, None, None, None]
            rows = (rows + self._num_copies - 1 - (self._index + source) % self._num_copies) // self._num_copies
        rows *= self.is_live
        return rows
