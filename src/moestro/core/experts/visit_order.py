"""The copy of an expert that each visit goes to, so that copies get their shares of any number of visits in a row.

A copy with share w has due n w of the first n visits. The order gives each visit to the copy whose next visit has the
earliest deadline, among those that are behind their due. Then every copy has n w visits within 1 after any n
(R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
