"""Gimbal's second paper, known by its abstract only: a reconstruction."""

from __future__ import annotations

import numpy as np

from moestro.core.expert_table import ExpertTable
from moestro.placement.layer_descent import SHARPNESSES, LayerDescent
from moestro.placement.linear_costs import costs_of_layer, objective_s
from moestro.placement.registry import PLACE_POLICIES, PlaceView
from moestro.placement.slots import Holders, table_with
from moestro.placement.starts import fresh_start, present_start

import os
NK = int(os.environ.get('NK','10'))
_MAX_SWEEPS = 8  # over all layers and sharpnesses; two of them settled in every case of bench `placement`


@PLACE_POLICIES.register_function(
    "gimbal_v2",
    "Descends from the present and a fresh placement by the seconds of load, source-aware rows and moves.",
    source="our reconstruction of Gimbal v2 (arXiv 2606.15177, abstract only); docs/placement_objective.md",
)
def gimbal_v2(view: PlaceView) -> ExpertTable:
    """Return the better of two local optima of `objective_s`, or the present placement if neither is better.

    One search starts from the present placement, the other from a fresh one that balances tokens only. Each swaps,
    moves, adds and drops single copies as long as that lowers the objective. Of the limits, the policy uses the horizon;
    budgets are the policy `moestro`'s.

    Raises:
        ValueError: The experts do not fit the live devices.
    """
    found = [table_with(view, _descended(view, start(view))) for start in (present_start, fresh_start)]
    if (view.table.is_alive == view.devices.is_alive).all():
        found.insert(0, view.table)  # it wins where all are equal
    return min(found, key=lambda table: objective_s(view, table))


def _descended(view: PlaceView, holders: Holders) -> Holders:
    """Return a local optimum, reached from `holders`. Layers share the maximum of received weights only."""
    layers = [
        LayerDescent(costs_of_layer(view, layer), holders[:, layer].T, view.devices)
        for layer in range(holders.shape[1])
    ]
    received_s = sum(layer.weights_s for layer in layers)
    for _ in range(_MAX_SWEEPS):
        has_changed = False
        for layer in layers:
            others_s = received_s - layer.weights_s
            for sharpness in SHARPNESSES:
                has_changed |= layer.descend(others_s, sharpness)
            num_failed = 0
            draws = np.random.default_rng(0)
            while num_failed < NK:
                num_failed = 0 if layer.kick(others_s, draws) else num_failed + 1
            received_s = others_s + layer.weights_s
        if not has_changed:
            break
    return np.stack([layer.holders.T for layer in layers], axis=1)
