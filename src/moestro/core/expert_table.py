"""The table of expert copies: which worker computes which logical expert in which slot. Only a dispatcher translates.

Choices of gates, counts and sums are *logical*. A *slot* is a physical expert of one worker in one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EMPTY = -1  # a slot that holds no expert


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTable:
    """A version of the placement of all experts.

    Attributes:
        version: number of this table; a later table has a larger one.
        logical_of: int32[workers, layers, slots], logical expert in each slot; EMPTY means none.
        num_experts: logical experts of a layer.
        is_alive: bool[workers], whether the worker computes; slots of the others are not used.

    Raises:
        ValueError: an expert has no copy on a live worker, or two copies on one worker.
    """

    version: int
    logical_of: NDArray[np.int32]
    num_experts: int
    is_alive: NDArray[np.bool_]

    def __post_init__(self) -> None:
        copies = self.num_copies
        if copies.max(initial=0) > 1:
            worker, layer, expert = np.argwhere(copies > 1)[0].tolist()
            raise ValueError(f"worker {worker} has two copies of expert {expert} in layer {layer}")
        live = copies[self.is_alive].sum(axis=0)
        if (live == 0).any():
            layer, expert = np.argwhere(live == 0)[0].tolist()
            raise ValueError(f"expert {expert} of layer {layer} has no copy on a live worker")

    @property
    def num_copies(self) -> NDArray[np.int64]:
        """int64[workers, layers, experts], slots of each worker that hold the expert."""
        num_workers, num_layers, _ = self.logical_of.shape
        copies = np.zeros((num_workers, num_layers, self.num_experts), np.int64)
        worker, layer, slot = np.nonzero(self.logical_of != EMPTY)
        np.add.at(copies, (worker, layer, self.logical_of[worker, layer, slot]), 1)
        return copies


def spread_evenly(num_layers: int, num_experts: int, workers: list[int], num_workers: int) -> ExpertTable:
    """Make version 0, in which each of `workers` holds consecutive experts, the same ones in every layer.

    Args:
        workers: workers that hold experts, as indices below `num_workers`.
        num_workers: all workers, including those without experts.
    """
    parts = np.array_split(np.arange(num_experts, dtype=np.int32), len(workers))
    logical_of = np.full((num_workers, num_layers, max(map(len, parts))), EMPTY, np.int32)
    for worker, part in zip(workers, parts, strict=True):
        logical_of[worker, :, : len(part)] = part
    return ExpertTable(0, logical_of, num_experts, np.ones(num_workers, np.bool_))
