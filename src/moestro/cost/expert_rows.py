"""Rows and prices of the slots of an expert table, from counts of logical experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.cost.model import Int64s, StageCostModel

_GOLDEN = (5**0.5 - 1) / 2  # multiples of it modulo 1 spread evenly


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

    An expert's tokens are spread over its live copies: evenly, or by the shares of a table that has them. The remainder
    goes to another copy for each source rank.

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
        flat = self._layer * table.num_experts + self._expert
        self._flat: Int64s = np.broadcast_to(flat, live.shape).ravel()
        self._ends = None if table.shares is None or not self.has_copies else _share_ends(table)
        self._phase: NDArray[np.float64] = (self._flat * _GOLDEN % 1).reshape(live.shape)  # one for each expert

    def rows(self, counts: Int64s) -> Int64s:
        """Divide tokens of logical experts among slots.

        Args:
            counts: int64[parts, sources, layers, experts], tokens of each source rank that visit each logical expert.

        Returns:
            int64[parts, sources, workers, layers, slots], tokens of each slot.
        """
        rows: Int64s = counts.reshape(*counts.shape[:2], -1).take(self._flat, axis=2)
        rows = rows.reshape(*counts.shape[:2], *self.is_live.shape)
        if self._ends is not None:
            rows = self._by_shares(rows)
        elif self.has_copies:
            source = np.arange(counts.shape[1])[:, None, None, None]
            rows = (rows + self._num_copies - 1 - (self._index + source) % self._num_copies) // self._num_copies
        rows *= self.is_live
        return rows

    def _by_shares(self, rows: Int64s) -> Int64s:
        """Divide the tokens of each expert by shares: a copy gets the whole numbers in its part of a line of tokens.

        The line of each source begins at another fraction, so that small counts of several sources do not all fall on
        the copy with the largest share.
        """
        assert self._ends is not None, "called for tables with shares"
        begins, ends = self._ends
        offset = (np.arange(rows.shape[1])[:, None, None, None] * _GOLDEN + self._phase) % 1
        divided: Int64s = (np.floor(rows * ends + offset) - np.floor(rows * begins + offset)).astype(np.int64)
        return divided


def _share_ends(table: ExpertTable) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Begin and end of each slot's part of its expert's tokens, float64[workers, layers, slots] each, in 0 .. 1."""
    parts = table.parts
    ends = parts.cumsum(axis=0)
    ends[-1] = 1.0  # exactly, so that no token is lost to rounding
    last = np.where(parts > 0, np.arange(len(parts))[:, None, None], -1).max(axis=0)
    ends[np.arange(len(parts))[:, None, None] >= last] = 1.0
    begins = np.concatenate([np.zeros_like(ends[:1]), ends[:-1]])
    where = (
        np.arange(len(parts))[:, None, None],
        np.arange(parts.shape[1])[None, :, None],
        np.maximum(table.logical_of, 0),
    )
    return begins[where], ends[where]
