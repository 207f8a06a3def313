"""The table of expert copies as it crosses a process border: layers with experts alone, and bytes instead of arrays."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable

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
