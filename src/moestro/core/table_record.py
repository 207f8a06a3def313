"""A table of expert copies as data that crosses process borders."""

from __future__ import annotations

import msgspec
import numpy as np

from moestro.core.expert_table import ExpertTable


class TableRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of the experts of a network, over those of its layers that have experts.

    Attributes:
        version: number of the table.
        layers: the network's layers that have experts, ascending.
        num_experts: logical experts of a layer.
        num_workers: workers that hold experts.
        logical_of: int32[workers, layers, slots] as bytes, logical expert in each slot; EMPTY means none.
        shares: float64[workers, layers, slots] as bytes, as `ExpertTable.shares`. Empty means equal parts.
    """

    version: int
    layers: tuple[int, ...]
    num_experts: int
    num_workers: int
    logical_of: bytes
    shares: bytes = b""

    def table(self) -> ExpertTable:
        """Return the table. All its workers are alive.

        Raises:
            ValueError: as `ExpertTable`.
        """
        shape = (self.num_workers, len(self.layers), -1)
        return ExpertTable(
            self.version,
            np.frombuffer(self.logical_of, np.int32).reshape(shape).copy(),
            self.num_experts,
            np.ones(self.num_workers, np.bool_),
            np.frombuffer(self.shares, np.float64).reshape(shape).copy() if self.shares else None,
        )


def record_of(table: ExpertTable, layers: tuple[int, ...]) -> TableRecord:
    """Return a table as data. `layers`: the network's layer of each of its layers."""
    return TableRecord(
        version=table.version,
        layers=layers,
        num_experts=table.num_experts,
        num_workers=len(table.logical_of),
        logical_of=table.logical_of.astype(np.int32).tobytes(),
        shares=b"" if table.shares is None else table.shares.astype(np.float64).tobytes(),
    )
