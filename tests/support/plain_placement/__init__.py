"""Plain searches that `moestro` must not fall behind: a descent by the objective, one step after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.plain_placement.layer_descent import SHARPNESSES, LayerDescent
from support.plain_placement.starts import fresh_start, present_start

from moestro.core.experts.expert_table import ExpertTable
from moestro.placement.contract import Holders, PlaceLimits, PlaceView, origins_of, table_with
from moestro.placement.integer_program import Floats, costs_of_layer, objective_s
from moestro.placement.score import on_one_core
from moestro.placement.search.problem import allowance_of, present_packing, problem_of, table_of
from moestro.placement.search.replicas import copy_counts
from moestro.placement.search.search import SearchLimits, improve, start_anew

_MAX_SWEEPS = 2  # over all layers; further ones find no step (bench/simulator/placement_constants.py)
# Restarts of a small layer, after which each of 240 random cases was within 1.7 % of its optimum (10 % without them).
_NUM_RESTARTS = 8
# Slots of a layer above which rounds of exchanges between pairs of devices take the place of single steps.
_LARGE_SLOTS = 32
# Rounds of these exchanges; and steps of a large layer afterwards, by the whole objective.
_ROUNDS, _LARGE_STEPS = SearchLimits(0.9995, 0.01, 24, 8, 0), 8


@on_one_core
def plain_descent(view: PlaceView) -> ExpertTable:
    """Return the better of two local optima of `objective_s`, or the present placement if neither is better.

    One search starts from the present placement, the other from a fresh one that balances tokens only. Each swaps,
    moves, adds and drops single copies as long as that lowers the objective. Of the limits, the policy uses the horizon
    only; the policy `moestro` keeps budgets.

    Raises:
        ValueError: The experts do not fit the live devices.
    """
    is_large = int(view.devices.num_slots[view.devices.is_alive].sum()) > _LARGE_SLOTS
    starts = _exchanged_starts(view) if is_large else (present_start(view), fresh_start(view))
    searches = [PlacementDescent(view, start) for start in starts]
    if is_large:
        best = min(searches, key=lambda each: each.value_s)
        best.step(_LARGE_STEPS)
    else:
        for each in searches:
            each.settle()
        best = min(searches, key=lambda each: each.value_s)
        best.try_restarts()
    found = table_with(view, best.holders)
    all_run = bool((view.table.is_alive == view.devices.is_alive).all())
    if all_run and objective_s(view, found) >= objective_s(view, view.table):
        return view.table
    return found


def _exchanged_starts(view: PlaceView) -> tuple[Holders, Holders]:
    """Return the present and a fresh placement after rounds of exchanges in all layers at once.

    The exchanges level work and rows, and then bring copies near their tokens; they do not know the objective itself.
    """
    covered = replace(view, table=table_with(view, present_start(view)))
    problem = problem_of(view, origins_of(view.load, view.devices), 0.0)
    present = present_packing(covered, problem)
    improve(problem, present, _ROUNDS, allowance_of(PlaceLimits(), 1, problem.shape[2]))
    first, second = (
        table_of(view, each.expert, each.share).num_copies > 0
        for each in (present, start_anew(problem, copy_counts(problem), _ROUNDS))
    )
    return first, second


class PlacementDescent:
    """A descent in all layers in turn. Layers share the maximum of received weights only."""

    def __init__(self, view: PlaceView, holders: Holders) -> None:
        self._layers = [
            LayerDescent(costs_of_layer(view, layer), holders[:, layer].T, view.devices)
            for layer in range(holders.shape[1])
        ]

    @property
    def holders(self) -> Holders:
        """bool[devices, layers, experts]."""
        return np.stack([layer.holders.T for layer in self._layers], axis=1)

    @property
    def value_s(self) -> float:
        """The objective, seconds per step."""
        return sum(layer.step_s for layer in self._layers) + float(self._received_s().max())

    def step(self, num_steps: int) -> None:
        """Take some good steps in each layer."""
        for layer in self._layers:
            layer.descend(self._received_s() - layer.weights_s, num_steps=num_steps)

    def settle(self) -> None:
        """Descend in one layer after another until none changes."""
        for _ in range(_MAX_SWEEPS):
            if not sum(self._settle(layer) for layer in self._layers):
                break

    def try_restarts(self) -> None:
        """Let each small layer try random placements, which a descent from two starts may miss."""
        draws = np.random.default_rng(0)
        for layer in self._layers:
            received_s = self._received_s() - layer.weights_s
            for nth in range(_NUM_RESTARTS if layer.is_small else 0):
                layer.restart(received_s, draws, SHARPNESSES[-1 - nth % 2 :])

    def _received_s(self) -> Floats:
        received_s: Floats = np.stack([layer.weights_s for layer in self._layers]).sum(axis=0)
        return received_s

    def _settle(self, layer: LayerDescent) -> bool:
        others_s = self._received_s() - layer.weights_s
        num_changes = sum(layer.descend(others_s, sharpness) for sharpness in SHARPNESSES)
        while layer.step_twice(others_s):
            layer.descend(others_s)
            num_changes += 1
        return num_changes > 0
