"""Whether a change of placement pays: seconds saved per step against the seconds of the move."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.devices import Devices
from moestro.placement.registry import PlaceView
from moestro.placement.score import Moves, PlaceScore, move_s, moves_between, score


@dataclass(frozen=True, slots=True, eq=False)
class Payback:
    """What a change of placement saves, and what it costs.

    Attributes:
        before: Cost of the present placement, on the devices that live.
        after: Cost of the new placement.
        moves: Copies that devices receive.
        move_s: Seconds in which the busiest device receives its copies.
        steps: Steps after which the move has paid for itself. None means never. A change is due at once (0.0) where a
            dead device took the last copy of an expert.
    """

    before: PlaceScore
    after: PlaceScore
    moves: Moves
    move_s: float
    steps: float | None

    @property
    def saved_s(self) -> float:
        """Seconds saved per step; negative where the new placement is slower."""
        return self.before.step_s - self.after.step_s


def payback(view: PlaceView, new_table: ExpertTable) -> Payback:
    """Price the change from the present placement to a new one, by the traffic model.

    Args:
        view: Load, present placement, devices and prices.
        new_table: Placement to which the devices would change.
    """
    served = live_table(view.table, view.devices)
    before = score(view.load, served or view.table, view.devices, view.prices)
    after = score(view.load, new_table, view.devices, view.prices)
    moves = moves_between(view.table, new_table, view.devices)
    seconds = move_s(moves, view.devices, view.prices)
    saved_s = before.step_s - after.step_s
    steps: float | None = None
    if served is None:
        steps = 0.0
    elif saved_s > 0:
        steps = seconds / saved_s
    return Payback(before, after, moves, seconds, steps)


def live_table(table: ExpertTable, devices: Devices) -> ExpertTable | None:
    """Return the placement as the live devices serve it; None means that an expert has no live copy.

    Slots of dead devices become empty, and the other copies take over their shares in proportion.
    """
    is_alive = devices.is_alive & table.is_alive
    if is_alive.all():
        return table
    logical_of = np.where(is_alive[:, None, None], table.logical_of, np.int32(EMPTY))
    held = table.num_copies[is_alive].sum(axis=0)
    if (held == 0).any():
        return None
    shares = table.shares
    if shares is not None:
        left = np.where(logical_of == EMPTY, 0.0, shares)
        layer = np.broadcast_to(np.arange(left.shape[1])[None, :, None], left.shape)
        index = layer * table.num_experts + np.maximum(logical_of, 0)
        totals = np.bincount(index.ravel(), left.ravel(), held.size)[index]
        # An expert whose live copies had no share at all is served by all of them evenly.
        even = 1.0 / np.maximum(held.ravel(), 1)[index]
        shares = np.where(totals > 0, left / np.where(totals > 0, totals, 1.0), even) * (logical_of != EMPTY)
    return ExpertTable(table.version, logical_of, table.num_experts, is_alive, shares)
