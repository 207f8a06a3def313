"""Choice of the copy of an expert that each token of a worker visits, by the shares of the placement."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.core.experts.expert_table import EMPTY

# Visits after which an order begins again. Shares are rounded to its parts: 0.4 % is far less than loads of experts
# vary between two plans.
PERIOD = 256


def visit_orders(parts: NDArray[np.float64], first: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Make the orders in which the copies of some experts are visited.

    Args:
        parts: float64[experts, copies], part of the expert's visits that each copy gets; a row sums to 1. An expert
            with fewer copies than others has zeros.
        first: copy that comes first where two are due alike. Sources with different ones do not all begin with the
            same copy.

    Returns:
        order: int64[experts, PERIOD], copy of each visit.
        period: int64[experts], visits after which the order begins again. Equal parts are kept exactly.
    """
    num_experts, num_copies = parts.shape
    counts, period = _in_whole_visits(parts)
    # argmin takes the first of equal deadlines, so each row begins with the copy that is due first. It is counted among
    # the row's own copies: else all sources would turn the padding of an expert with few copies into its first one.
    rank = (counts > 0).cumsum(axis=1) - 1
    start = (rank == first % (rank[:, -1:] + 1)).argmax(axis=1)[:, None]
    turned = np.take_along_axis(counts, (np.arange(num_copies) + start) % num_copies, axis=1)
    done, order = np.zeros_like(turned), np.empty((num_experts, PERIOD), np.int64)
    rows = np.arange(num_experts)
    for visit in range(PERIOD):
        is_behind = done * period[:, None] < (visit + 1) * turned
        deadline = np.where(is_behind, (done + 1) / np.maximum(turned, 1), np.inf)
        chosen = deadline.argmin(axis=1)
        done[rows, chosen] += 1
        order[:, visit] = (chosen + start[:, 0]) % num_copies
    return order, period


def _in_whole_visits(parts: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Visits of each copy in a period, int64[experts, copies], and the periods, int64[experts]."""
    num_used = (parts > 0).sum(axis=1)
    is_even = np.isclose(parts.max(axis=1), 1 / num_used) & np.isclose(parts.sum(axis=1), 1.0)
    period = np.where(is_even, num_used, PERIOD)
    exact = parts * period[:, None]
    counts = np.where(is_even[:, None], np.rint(exact), np.floor(exact)).astype(np.int64)
    # What rounding down leaves goes to the copies with the largest remainders.
    left = period - counts.sum(axis=1)
    ranks = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1, kind="stable")
    counts += ranks < left[:, None]
    return counts, period


class _SharedExperts(NamedTuple):
    """Experts of a layer that have several copies with a share.

    Attributes:
        row_of: int64[experts], row of each expert here; -1 for one with a single copy.
        order: int64[rows, visits], worker * slots + slot of each visit.
        period: int64[rows], visits after which the order begins again.
        visits: int64[rows], visits so far, less whole periods.
    """

    row_of: Tensor
    order: Tensor
    period: Tensor
    visits: Tensor


class CopyChoice:
    """Copies of one layer's experts, for the tokens of one worker.

    A running count of the worker's visits to the expert decides which copy is next. So the tokens of a batch are
    divided, and so are those of many batches with one token each.

    Args:
        rows: int32[workers, slots], logical expert in each slot; EMPTY means none.
        parts: float64[workers, slots], part of its expert's tokens that each slot gets.
        num_experts: logical experts.
        worker: the worker whose tokens visit.
        device: device of the choices.
    """

    def __init__(
        self, rows: NDArray[np.int32], parts: NDArray[np.float64], num_experts: int, worker: int, device: torch.device
    ) -> None:
        flat_rows, flat_parts = rows.reshape(-1), parts.reshape(-1)
        used = np.flatnonzero((flat_rows != EMPTY) & (flat_parts > 0))
        used = used[np.argsort(flat_rows[used], kind="stable")]  # by expert, then by worker
        num_copies = np.bincount(flat_rows[used], minlength=num_experts)
        starts = num_copies.cumsum() - num_copies
        self._slot_of = torch.from_numpy(used[starts].astype(np.int64)).to(device)
        self._shared: _SharedExperts | None = None
        shared = np.flatnonzero(num_copies > 1)
        if not len(shared):
            return
        nth = np.arange(num_copies.max())
        has_copy = nth < num_copies[shared, None]
        slots = used[np.minimum(starts[shared, None] + nth, len(used) - 1)]
        order, period = visit_orders(np.where(has_copy, flat_parts[slots], 0.0), worker)
        row_of = np.full(num_experts, -1, np.int64)
        row_of[shared] = np.arange(len(shared))
        tensors = (row_of, np.take_along_axis(slots, order, axis=1), period, np.zeros_like(period))
        self._shared = _SharedExperts(*(torch.from_numpy(each).to(device) for each in tensors))

    def slots_for(self, experts: Tensor) -> Tensor:
        """Choose the copies for some visits, and count them.

        Args:
            experts: int64[visits], logical experts.

        Returns:
            int64[visits], worker * slots + slot.
        """
        slots, shared = self._slot_of[experts], self._shared
        if shared is None or not len(experts):
            return slots
        rows = shared.row_of[experts]
        at = (rows >= 0).nonzero().view(-1)
        rows = rows[at]
        by_row = rows.argsort(stable=True)
        counts = rows.bincount(minlength=len(shared.period))
        nth = torch.empty_like(rows)
        nth[by_row] = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows[by_row]]
        slots[at] = shared.order[rows, (shared.visits[rows] + nth) % shared.period[rows]]
        shared.visits.copy_((shared.visits + counts) % shared.period)
        return slots
