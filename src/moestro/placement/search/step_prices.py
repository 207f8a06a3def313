"""Prices of single copies: what a step of the search by price adds to a layer, and what it takes away."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.placement.registry import PlaceView
from moestro.placement.search.activation import idle_parts
from moestro.placement.search.problem import PlaceProblem
from moestro.placement.traffic import Floats, TokenOrigins


@dataclass(frozen=True, slots=True, eq=False)
class StepPrices:
    """What copies with equal shares cost in each layer. Devices are the live ones.

    Attributes:
        work_s: float64[layers, experts, copies + 1], seconds at speed 1 of each copy of an expert with so many copies.
        near_s: float64[layers, experts, devices], seconds in which a device receives the rows of an expert of which it
            has the only copy, less what it then receives sooner as a source on the device than as one on its node.
        sooner_s: float64[layers, experts, devices], seconds by which a device receives its own answers sooner from a
            copy on its node than from elsewhere.
        rest_s: float64[layers, devices], seconds of all answers if they came from other nodes.
        speed: float64[devices].
        node_at: int64[devices], number of the node of each device.
        room: bool[devices, slots], slots that exist.
        moved: bool[layers, experts + 1, devices], whether a device would have to receive the expert.
        move_s: Seconds of one received copy, spread over devices and the horizon; infinity allows none.
    """

    work_s: Floats
    near_s: Floats
    sooner_s: Floats
    rest_s: Floats
    speed: Floats
    node_at: NDArray[np.int64]
    room: NDArray[np.bool_]
    moved: NDArray[np.bool_]
    move_s: float


def step_prices(
    view: PlaceView, problem: PlaceProblem, origin: TokenOrigins, layers: NDArray[np.intp], *, may_receive: bool
) -> StepPrices:
    """Return the prices of some layers.

    Args:
        problem: The view as the search has it.
        origin: Sums of the view's load.
        may_receive: Whether devices may receive copies; without, copies are only dropped.
    """
    prices, live = view.prices, np.flatnonzero(view.devices.is_alive)
    own_s, node_s, far_s = prices.row_s
    total = origin.total[layers]
    owned = origin.by_device[live][:, layers].transpose(1, 2, 0)
    node_at = origin.node_at[live]
    of_node = origin.by_node[:, layers][node_at].transpose(1, 2, 0)
    sooner_s = (far_s - node_s) * owned
    near_s = far_s * total[:, :, None] - (far_s - node_s) * of_node - 2 * (node_s - own_s) * owned
    return StepPrices(
        work_s=_work_by_copies(view, total, layers, len(live)),
        near_s=np.ascontiguousarray(near_s),
        sooner_s=np.ascontiguousarray(sooner_s),
        rest_s=far_s * owned.sum(axis=1),
        speed=problem.speed,
        node_at=np.ascontiguousarray(node_at),
        room=problem.room,
        moved=np.ascontiguousarray(problem.moved[layers]),
        move_s=problem.move_s if may_receive else np.inf,
    )


def _work_by_copies(view: PlaceView, total: Floats, layers: NDArray[np.intp], num_devices: int) -> Floats:
    prices = view.prices
    copies = np.arange(num_devices + 1)
    share = 1.0 / np.maximum(copies, 1)
    idle = np.repeat((1 - np.minimum(view.load.activated[layers], 1.0))[:, :, None], len(copies), axis=2)
    reads = prices.expert_s * (1 - idle_parts(idle, np.broadcast_to(share, idle.shape)))
    work: Floats = prices.token_s * total[:, :, None] * share + reads
    work[:, :, 0] = 0.0
    return work
