"""The table of expert copies: which worker computes which logical expert in which slot. Only a dispatcher translates.

Choices of gates, counts and sums are *logical*. A *slot* is a physical expert of one worker in one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        shares: float64[workers, layers, slots], part of its expert's tokens that each slot gets. None means equal
            parts for all copies on live workers.

    Raises:
        ValueError: an expert has no copy on a live worker, or two copies on one worker; or its shares do not sum to 1.
    """

    version: int
    logical_of: NDArray[np.int32]
    num_experts: int
    is_alive: NDArray[np.bool_]
    shares: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        # Sums by layer and expert only: one by worker too would take most of the time in which a placement is planned.
        ordered = np.sort(self.logical_of, axis=2)
        is_twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != EMPTY)
        if is_twice.any():
            worker, layer, slot = np.argwhere(is_twice)[0].tolist()
            raise ValueError(
                f"worker {worker} has two copies of expert {ordered[worker, layer, slot]} in layer {layer}"
            )
        num_layers = self.logical_of.shape[1]
        index = np.arange(num_layers)[:, None] * self.num_experts + self.logical_of
        is_used = (self.logical_of != EMPTY) & self.is_alive[:, None, None]
        num_cells = num_layers * self.num_experts
        live = np.bincount(index[is_used], minlength=num_cells).reshape(num_layers, self.num_experts)
        if (live == 0).any():
            layer, expert = np.argwhere(live == 0)[0].tolist()
            raise ValueError(f"expert {expert} of layer {layer} has no copy on a live worker")
        if self.shares is not None:
            totals = np.bincount(index[is_used], self.shares[is_used], num_cells).reshape(live.shape)
            if not np.allclose(totals, 1.0):
                layer, expert = np.argwhere(~np.isclose(totals, 1.0))[0].tolist()
                raise ValueError(f"the shares of expert {expert} in layer {layer} sum to {totals[layer, expert]:g}")

    @property
    def parts(self) -> NDArray[np.float64]:
        """float64[workers, layers, experts], part of each expert's tokens that each worker gets."""
        num_workers, num_layers, _ = self.logical_of.shape
        parts = np.zeros((num_workers, num_layers, self.num_experts))
        worker, layer, slot = np.nonzero(self.logical_of != EMPTY)
        parts[worker, layer, self.logical_of[worker, layer, slot]] = self.slot_parts[worker, layer, slot]
        return parts

    @property
    def slot_parts(self) -> NDArray[np.float64]:
        """float64[workers, layers, slots], part of its expert's tokens that each slot gets; 0 for unused slots."""
        is_used = (self.logical_of != EMPTY) & self.is_alive[:, None, None]
        if self.shares is not None:
            return np.where(is_used, self.shares, 0.0)
        num_layers = self.logical_of.shape[1]
        index = np.arange(num_layers)[:, None] * self.num_experts + self.logical_of
        copies = np.bincount(index[is_used], minlength=num_layers * self.num_experts)
        parts: NDArray[np.float64] = np.where(is_used, 1.0 / np.maximum(copies, 1)[np.where(is_used, index, 0)], 0.0)
        return parts

    @property
    def num_copies(self) -> NDArray[np.int64]:
        """int64[workers, layers, experts], slots of each worker that hold the expert."""
        num_workers, num_layers, _ = self.logical_of.shape
        copies = np.zeros((num_workers, num_layers, self.num_experts), np.int64)
        worker, layer, slot = np.nonzero(self.logical_of != EMPTY)
        np.add.at(copies, (worker, layer, self.logical_of[worker, layer, slot]), 1)
        return copies


def experts_of_shares(num_experts: int, num_shares: int, shares: Sequence[int]) -> NDArray[np.int32]:
    """Return the experts of some shares, in the order of a worker's slots.

    Args:
        num_experts: logical experts of a layer.
        num_shares: equal parts, within one, into which they are divided; a share has consecutive experts.
        shares: the shares that a worker holds.

    Returns:
        int32[slots], logical expert in each slot, the same in every layer.
    """
    parts = np.array_split(np.arange(num_experts, dtype=np.int32), num_shares)
    return np.concatenate([np.empty(0, np.int32), *(parts[share] for share in shares)])


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """A network's routed experts, divided into shares.

    Attributes:
        num_layers, num_experts: of the network.
        num_shares: equal parts, within one, into which the experts of each layer are divided.
    """

    num_layers: int
    num_experts: int
    num_shares: int

    def slots_of(self, shares: Sequence[int]) -> NDArray[np.int32]:
        """int32[slots], logical expert in each slot of a worker that holds `shares`."""
        return experts_of_shares(self.num_experts, self.num_shares, shares)

    def table(
        self,
        version: int,
        held: Sequence[Sequence[int]],
        used: Sequence[Sequence[int]],
        alive: Sequence[bool] | None = None,
    ) -> ExpertTable:
        """Make the table of workers that hold shares.

        Args:
            version: number of the table.
            held: shares that each worker holds, which number its slots.
            used: those of them that get tokens from now on.
            alive: whether to wait for what each worker owes; None means all.

        Raises:
            ValueError: a share has no worker that uses it.
        """
        slots_of = [self.slots_of(shares) for shares in held]
        logical_of = np.full((len(slots_of), self.num_layers, max(map(len, slots_of))), EMPTY, np.int32)
        for worker, slots in enumerate(slots_of):
            is_used = np.isin(slots, self.slots_of(used[worker]))
            logical_of[worker, :, : len(slots)] = np.where(is_used, slots, EMPTY)
        is_alive = np.ones(len(slots_of), np.bool_) if alive is None else np.array(alive, np.bool_)
        return ExpertTable(version, logical_of, self.num_experts, is_alive)


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
