"""The table of expert copies: which worker computes which logical expert in which slot. Only a dispatcher translates.

Choices of gates, counts and sums are *logical*. A *slot* is a physical expert of one worker in one layer. An expert is
near a rank on its device or on its machine. A table that crosses a process border has bytes in place of arrays, and
leaves out layers without experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
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


def slots_of_shares(
    num_experts: int, num_shares: int, shares_of: Sequence[Sequence[int]], num_spare: int = 0
) -> NDArray[np.int32]:
    """Return the slots with which the workers of a group start, the same in every layer.

    Args:
        num_experts, num_shares: as for `experts_of_shares`.
        shares_of: the shares that each worker holds.
        num_spare: empty slots of the worker that holds most; the others have as many slots in all.

    Returns:
        int32[workers, slots], logical expert in each slot; EMPTY means none.
    """
    held = [experts_of_shares(num_experts, num_shares, shares) for shares in shares_of]
    slots = np.full((len(held), max(map(len, held)) + num_spare), EMPTY, np.int32)
    for worker, experts in enumerate(held):
        slots[worker, : len(experts)] = experts
    return slots


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


_NUMBER, _SHARE = np.dtype("<i4"), np.dtype("<f8")


class ExpertLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a network that have experts.

    Attributes:
        num_layers: All layers of the network.
        layers: Numbers of those with experts, ascending.
        num_experts: Experts of the layer that has most.
    """

    num_layers: int
    layers: tuple[int, ...]
    num_experts: int


class TableMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of all workers of a group.

    Attributes:
        experts: Layers that the slots belong to.
        version: Number of the table.
        logical_of: int32[workers, layers with experts, slots], little-endian; as in `ExpertTable`.
        alive: Whether each worker computes, or is waited for.
        shares: float64[workers, layers with experts, slots], little-endian; as in `ExpertTable`. b"" means equal parts.
    """

    experts: ExpertLayers
    version: int
    logical_of: bytes
    alive: tuple[bool, ...]
    shares: bytes = b""

    @classmethod
    def of_slots(
        cls, experts: ExpertLayers, version: int, logical_of: NDArray[np.int32], alive: Sequence[bool]
    ) -> TableMessage:
        """Pack slots of which some experts may have no live copy. `logical_of`: int32[workers, layers, slots]."""
        return cls(experts=experts, version=version, logical_of=_bytes(logical_of, _NUMBER), alive=tuple(alive))

    @classmethod
    def of_table(cls, experts: ExpertLayers, table: ExpertTable) -> TableMessage:
        """Pack a table over the layers with experts."""
        return cls(
            experts=experts,
            version=table.version,
            logical_of=_bytes(table.logical_of, _NUMBER),
            alive=tuple(table.is_alive.tolist()),
            shares=b"" if table.shares is None else _bytes(table.shares, _SHARE),
        )

    def table(self) -> ExpertTable:
        """Make the table of the layers that have experts.

        Raises:
            ValueError: The bytes do not fit the numbers, or an expert has no copy on a live worker.
        """
        shape = (len(self.alive), len(self.experts.layers), -1)
        return ExpertTable(
            self.version,
            np.frombuffer(self.logical_of, _NUMBER).reshape(shape).astype(np.int32),
            self.experts.num_experts,
            np.array(self.alive, np.bool_),
            np.frombuffer(self.shares, _SHARE).reshape(shape).astype(np.float64) if self.shares else None,
        )

    def whole_table(self) -> ExpertTable:
        """Make the table of all layers of the network. A layer without experts has those of the nearest before it.

        Raises:
            ValueError: As `table`.
        """
        own = self.table()
        # No token visits the experts of a layer without any, but arrays have one row a layer.
        at = np.searchsorted(self.experts.layers, np.arange(self.experts.num_layers), side="right")
        nearest = np.maximum(at - 1, 0)
        shares = None if own.shares is None else own.shares[:, nearest]
        return ExpertTable(own.version, own.logical_of[:, nearest], own.num_experts, own.is_alive, shares)


def _bytes(array: NDArray[np.generic], dtype: np.dtype[np.generic]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


SAME_DEVICE, SAME_NODE, OTHER_NODE = 0, 1, 2  # how far a row or an expert travels
DISTANCES = ("device", "machine", "other")  # their names for operators

Floats = NDArray[np.float64]


def expert_shares(parts: Floats, machine_of: NDArray[np.integer], num_sources: int) -> Floats:
    """Tell which part of each layer's experts is how near to each source of tokens.

    An expert counts at the distance of its nearest copy.

    Args:
        parts: float64[workers, layers, experts], part of each expert's tokens that each worker gets; 0 means no copy.
        machine_of: int[workers], machine of each worker.
        num_sources: sources (attention DP ranks), of which source s has its device on worker s.

    Returns:
        float64[sources, 3, layers], fractions by distance, which sum to 1.
    """
    has_copy = parts > 0
    shares = np.zeros((num_sources, len(DISTANCES), parts.shape[1]))
    for source in range(num_sources):
        own, near = has_copy[source], has_copy[machine_of == machine_of[source]].any(axis=0)
        shares[source, SAME_DEVICE] = own.mean(axis=1)
        shares[source, SAME_NODE] = (near & ~own).mean(axis=1)
        shares[source, OTHER_NODE] = (~near).mean(axis=1)
    return shares


def visit_shares(visits: Floats, parts: Floats, machine_of: NDArray[np.integer]) -> Floats:
    """Tell how far the tokens of each source travel to their experts, if each copy gets its part of all tokens.

    Args:
        visits: float64[sources, layers, experts], visits of each source's tokens.
        parts, machine_of: as in `expert_shares`.

    Returns:
        float64[sources, 3], fractions of a source's visits by distance; NaN for a source without visits.
    """
    shares = np.full((len(visits), len(DISTANCES)), np.nan)
    on_machines = {machine: parts[machine_of == machine].sum(axis=0) for machine in np.unique(machine_of).tolist()}
    for source, own in enumerate(visits):
        total = own.sum()
        if total > 0:
            at_home = float((own * parts[source]).sum())
            on_machine = float((own * on_machines[int(machine_of[source])]).sum())
            shares[source] = np.array([at_home, on_machine - at_home, total - on_machine]) / total
    return shares.clip(0.0, 1.0)  # differences may round below 0
