"""The placement objective, a copy at a time: its terms are linear in the copies while each expert keeps their number.

With equal shares and r copies, an expert's copy gets 1/r of its tokens. `score` and `move_s` give the same sums for
whole tables; searches and the exact solver need the terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable
from moestro.core.experts.near_experts import OTHER_NODE
from moestro.placement.registry import PlaceView
from moestro.placement.score import move_s, moves_between, score

Floats = NDArray[np.float64]
TERMS = COMPUTE, ROWS, WEIGHTS = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class LinearCosts:
    """What copies of experts cost in one layer.

    Attributes:
        tokens: float64[experts], tokens per step.
        idle: float64[experts], fraction of steps without a token.
        token_s: float64[devices], seconds of one token.
        expert_s: float64[devices], seconds of one activated copy.
        owned: float64[experts, devices], tokens per step of the sources that each device has.
        row_s: float64[devices, devices], seconds of one row from the first device to the second.
        arriving_s: float64[experts, devices], seconds in which the device receives an expert's tokens if it computes
            all of them.
        receive_s: float64[experts, devices], seconds in which the device receives the expert's weights, divided by the
            steps of the horizon; 0 where it has them.
    """

    tokens: Floats
    idle: Floats
    token_s: Floats
    expert_s: Floats
    owned: Floats
    row_s: Floats
    arriving_s: Floats
    receive_s: Floats

    def seconds(self, expert: NDArray[np.int64], holders: Floats, copies: Floats) -> Floats:
        """Return what some experts' copies add to each term of the objective on each device.

        Args:
            expert: int64[rows].
            holders: float64[rows, devices], 1 where a copy counts and 0 elsewhere.
            copies: float64[rows], number of the expert's copies in the whole layer, among which its tokens are shared.

        Returns:
            float64[rows, TERMS, devices]: seconds per step that the device computes, receives rows (answers included),
            and receives weights.
        """
        shared = copies[:, None]
        tokens, idle = self.tokens[expert, None], self.idle[expert, None]
        work_s = self.token_s * tokens / shared + self.expert_s * (1.0 - idle ** (1.0 / shared))
        answers_s = self.owned[expert] * (holders @ self.row_s.T)
        arriving_s = holders * self.arriving_s[expert]
        return np.stack([holders * work_s, (answers_s + arriving_s) / shared, holders * self.receive_s[expert]], axis=1)

    def slopes(self, slope: Floats, copies: Floats) -> Floats:
        """Return each possible copy's `seconds` times a factor for each term and device.

        Args:
            slope: float64[TERMS, devices], the factors.
            copies: float64[experts], copies among which each expert's tokens are shared.

        Returns:
            float64[experts, devices].
        """
        shared = copies[:, None]
        activated = 1.0 - self.idle[:, None] ** (1.0 / shared)
        work_s = self.token_s * self.tokens[:, None] / shared + self.expert_s * activated
        answers = (self.owned * slope[ROWS]) @ self.row_s
        rows = (answers + slope[ROWS] * self.arriving_s) / shared
        found: Floats = slope[COMPUTE] * work_s + rows + slope[WEIGHTS] * self.receive_s
        return found


def costs_of_layer(view: PlaceView, layer: int) -> LinearCosts:
    """Return the costs of copies in one layer."""
    load, devices, prices = view.load, view.devices, view.prices
    owned = np.zeros((devices.num_devices, view.table.num_experts))
    np.add.at(owned, devices.source_on, load.tokens[:, layer])
    row_s = np.array(prices.row_s)[devices.distance]
    return LinearCosts(
        tokens=load.total[layer],
        idle=1.0 - np.minimum(load.activated[layer], 1.0),
        token_s=prices.token_s / devices.speed,
        expert_s=prices.expert_s / devices.speed,
        owned=owned.T,
        row_s=row_s,
        arriving_s=owned.T @ row_s,
        receive_s=_receive_s(view, layer) / view.limits.horizon_steps,
    )


def _receive_s(view: PlaceView, layer: int) -> Floats:
    """float64[experts, devices], seconds in which the device gets the expert from the nearest live holder."""
    devices = view.devices
    has = view.table.num_copies[:, layer].T > 0  # [experts, devices]
    seconds = view.prices.expert_bytes / np.array(view.prices.move_bytes_per_s)
    is_near = has & devices.is_alive
    way = np.full(has.shape, OTHER_NODE)
    for kind in range(OTHER_NODE):
        closer = (is_near[:, :, None] & (devices.distance == kind)).any(axis=1)
        way = np.where(closer, np.minimum(way, kind), way)
    return np.where(has, 0.0, seconds[way])


def objective_s(view: PlaceView, table: ExpertTable) -> float:
    """Return seconds per step of a placement, with the moves that it needs spread over the horizon."""
    moves = moves_between(view.table, table, view.devices)
    step_s = score(view.load, table, view.devices, view.prices).step_s
    return step_s + move_s(moves, view.devices, view.prices) / view.limits.horizon_steps
