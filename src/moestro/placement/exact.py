"""The optimum of the placement objective where the number of copies is fixed: an oracle for tests and benches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable
from moestro.placement.integer_program import Ids, IntegerProgram
from moestro.placement.registry import PlaceView
from moestro.placement.search.linear_costs import COMPUTE, ROWS, TERMS, WEIGHTS, costs_of_layer
from moestro.placement.search.slots import table_with


def exact_placement(
    view: PlaceView, copies: NDArray[np.int64] | None = None, time_limit_s: float = 60.0
) -> ExpertTable:
    """Return the placement with the least `objective_s` among those with these numbers of copies and equal shares.

    Args:
        copies: int64[layers, experts], at least 1; None means as many as the present table has on live devices.
        time_limit_s: time after which the search gives up, seconds.

    Raises:
        ConfigError: scipy is not installed.
        ValueError: The copies do not fit, or no optimum is proven within the time.
    """
    live = np.flatnonzero(view.devices.is_alive)
    held = view.table.num_copies
    if copies is None:
        copies = held[live].sum(axis=0)
    seconds = _seconds_of_copies(view, copies)
    solver = IntegerProgram("exact_placement")
    x = solver.binaries(*copies.shape, len(live))
    totals = solver.continuous(len(copies), len(TERMS), cost=1.0)  # the maxima over devices of each layer's terms
    solver.constrain(
        x.reshape(-1, len(live)), 1.0, copies.ravel().astype(np.float64), copies.ravel().astype(np.float64)
    )
    for layer, each in enumerate(x):
        solver.constrain(each.T, 1.0, 0.0, view.devices.num_slots[live].astype(np.float64))
        for term in (COMPUTE, ROWS):
            _bound_maximum(solver, each, seconds[layer, :, :, term], totals[layer, term])
    _bound_maximum(solver, x, seconds[:, :, :, WEIGHTS], totals[0, WEIGHTS])  # one maximum for all layers
    values = solver.solve(time_limit_s)
    holders = np.zeros(held.shape, np.bool_)
    holders[live] = np.moveaxis(values[x] > 0.5, 2, 0)
    return table_with(view, holders)


def _seconds_of_copies(view: PlaceView, copies: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return float64[layers, experts, live devices, TERMS, devices]: what each possible copy adds to each term.

    The largest entry is 1, because the solver's tolerances are absolute.
    """
    live = np.flatnonzero(view.devices.is_alive)
    num_layers, num_experts = copies.shape
    expert = np.repeat(np.arange(num_experts), len(live))
    holders = np.tile(np.eye(view.devices.num_devices)[live], (num_experts, 1))
    seconds = np.stack(
        [
            costs_of_layer(view, layer).seconds(expert, holders, copies[layer, expert] + 0.0)
            for layer in range(num_layers)
        ]
    ).reshape(num_layers, num_experts, len(live), len(TERMS), -1)
    largest = float(seconds.max(initial=0.0))
    return seconds / largest if largest else seconds


def _bound_maximum(solver: IntegerProgram, x: Ids, seconds: NDArray[np.float64], maximum: np.int64) -> None:
    """Require that `maximum` is at least what each device adds up: seconds[..., device] times the copies `x`."""
    per_device = np.moveaxis(seconds, -1, 0).reshape(seconds.shape[-1], -1)
    ids = np.tile(np.append(x, maximum), (len(per_device), 1))
    solver.constrain(ids, np.hstack([per_device, np.full((len(per_device), 1), -1.0)]), -np.inf, 0.0)
