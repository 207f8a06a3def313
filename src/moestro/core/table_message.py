"""The table of expert copies as it crosses a process border: layers with experts alone, and bytes instead of arrays."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.expert_table import ExpertTable

_NUMBER = np.dtype("<i4")


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
        logical_of: int32[workers, layers with experts, slots], little-endian; as in `ExpertTable`.
        alive: Whether each worker computes, or is waited for.
    """

    experts: ExpertLayers
    logical_of: bytes
    alive: tuple[bool, ...]

    @classmethod
    def of(cls, experts: ExpertLayers, logical_of: NDArray[np.int32], alive: tuple[bool, ...]) -> TableMessage:
        """Pack int32[workers, layers with experts, slots]."""
        return cls(experts=experts, logical_of=logical_of.astype(_NUMBER).tobytes(), alive=alive)

    def table(self, version: int) -> ExpertTable:
        """Make the table of all layers of the network. A layer without experts has those of the nearest before it.

        Raises:
            ValueError: The bytes do not fit the numbers, or an expert has no copy on a live worker.
        """
        layers = np.array(self.experts.layers)
        packed = np.frombuffer(self.logical_of, _NUMBER).reshape(len(self.alive), len(layers), -1)
        # No token visits the experts of a layer without any, but arrays have one row a layer.
        nearest = np.maximum(np.searchsorted(layers, np.arange(self.experts.num_layers), side="right") - 1, 0)
        logical_of = packed[:, nearest].astype(np.int32)
        return ExpertTable(version, logical_of, self.experts.num_experts, np.array(self.alive, np.bool_))
