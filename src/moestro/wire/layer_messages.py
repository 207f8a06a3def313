"""Messages about moves of experts between the ranks of a group in mode `ep`."""

from __future__ import annotations

import msgspec

from moestro.core.experts.layer_moves import LayerPlan, SettledLayer
from moestro.core.experts.table_message import TableMessage

# From the API server to all ranks of a group.


class MoveLayer(msgspec.Struct, frozen=True, tag=True):
    """Move the experts of a layer. All ranks of the group get the same plan, and begin when all of them know it."""

    plan: LayerPlan


class DropLayer(msgspec.Struct, frozen=True, tag=True):
    """End the moves of a layer before their commit. `version`: number of the plan."""

    version: int


# From rank 0 to the API server.


class ExpertsPlaced(msgspec.Struct, frozen=True, tag=True):
    """Tell by which placement the group serves from its start on."""

    placed: TableMessage


class LayerMoving(msgspec.Struct, frozen=True, tag=True):
    """Tell how far a layer's moves are, after each step with moves.

    Attributes:
        version: Number of the plan.
        num_bytes: Bytes of weights that went from one rank to another, so far.
    """

    version: int
    num_bytes: int


class LayerSettled(msgspec.Struct, frozen=True, tag=True):
    """Tell what became of a layer's moves."""

    settled: SettledLayer
