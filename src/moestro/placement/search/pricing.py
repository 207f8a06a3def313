"""Prices placements of the search by the traffic model: many at once, each of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.registry import PlaceView
from moestro.placement.score import score_slots
from moestro.placement.search.copies import Packing, even_shares, normal_shares, packing_of
from moestro.placement.search.problem import Experts, PlaceProblem
from moestro.placement.traffic import Floats, TokenOrigins

SAME_SHARE = 1e-9  # shares that differ by less are equal


@dataclass(frozen=True, slots=True, eq=False)
class LayerPrices:
    """What placements of one layer each cost.

    Attributes:
        compute_s: float64[placements], seconds per step of the slowest device.
        exchange_s: float64[placements], seconds per step in which the busiest device receives rows.
        receives: int64[placements, devices], copies that each live device receives.
        receive_s: float64[placements, devices], seconds of these copies.
    """

    compute_s: Floats
    exchange_s: Floats
    receives: Experts
    receive_s: Floats

    @property
    def step_s(self) -> Floats:
        """float64[placements], seconds per step."""
        return self.compute_s + self.exchange_s

    def with_layers(self, layers: NDArray[np.intp], other: LayerPrices) -> LayerPrices:
        """Return the same with those of `other`, which are of these layers alone."""
        changed = []
        for name in ("compute_s", "exchange_s", "receives", "receive_s"):
            figures = getattr(self, name).copy()
            figures[layers] = getattr(other, name)
            changed.append(figures)
        return LayerPrices(*changed)


@dataclass(frozen=True, slots=True, eq=False)
class Pricer:
    """Prices placements for one view.

    Attributes:
        view, problem: What is placed.
        origin: Sums of the view's load.
        in_node: bool[live devices, layers, experts], whether a live device of the same node holds the expert.
    """

    view: PlaceView
    problem: PlaceProblem
    origin: TokenOrigins
    in_node: NDArray[np.bool_]

    @classmethod
    def of(cls, view: PlaceView, problem: PlaceProblem, origin: TokenOrigins) -> Pricer:
        """Make the pricer of a view."""
        live = np.flatnonzero(view.devices.is_alive)
        nodes, node_at = np.unique(view.devices.node_of[live], return_inverse=True)
        in_node = np.zeros((len(nodes), *problem.shape[:2]), np.bool_)
        device, layer, slot = np.nonzero(view.table.logical_of[live] != EMPTY)
        in_node[node_at[device], layer, view.table.logical_of[live[device], layer, slot]] = True
        return cls(view, problem, origin, in_node[node_at])

    def price(self, packing: Packing, layers: NDArray[np.intp] | None = None) -> LayerPrices:
        """Price placements.

        Args:
            packing: Placements, a layer each.
            layers: int64[placements], the layer that each of them places; None means all layers in order.
        """
        view, load, origin = self.view, self.view.load, self.origin
        if layers is None:
            layers = np.arange(self.problem.shape[0])
        else:
            load = ExpertLoad(load.tokens[:, layers], load.variance[layers], load.activated[layers], load.num_steps)
            origin = origin.of_layers(layers)
        found = score_slots(load, _slots_of(view, packing), view.devices, view.prices, origin)
        num_devices = self.problem.shape[2]
        every = np.arange(num_devices)[:, None]
        row, device, slot = np.nonzero(self.problem.moved[layers[:, None, None], packing.expert, every])
        is_near = self.in_node[device, layers[row], packing.expert[row, device, slot]]
        _, node_s, far_s = (view.prices.expert_bytes / each for each in view.prices.move_bytes_per_s)
        index, shape = row * num_devices + device, (len(layers), num_devices)
        receives = np.bincount(index, minlength=shape[0] * shape[1]).reshape(shape)
        seconds = np.where(is_near, node_s, far_s)
        receive_s = np.bincount(index, seconds, shape[0] * shape[1]).astype(float).reshape(shape)
        return LayerPrices(found.compute_s, found.exchange_s, receives, receive_s)


def present_packing(view: PlaceView, problem: PlaceProblem) -> Packing:
    """Return the present placement on the live devices."""
    live = np.flatnonzero(view.devices.is_alive)
    num_experts = problem.shape[1]
    expert = view.table.logical_of[live].swapaxes(0, 1).astype(np.int64)
    expert[~np.broadcast_to(problem.room, expert.shape)] = EMPTY
    if view.table.shares is None:
        return packing_of(problem, expert, even_shares(expert, num_experts))
    share = normal_shares(expert, view.table.shares[live].swapaxes(0, 1), num_experts)
    return packing_of(problem, expert, share)


def table_of(view: PlaceView, packing: Packing) -> ExpertTable:
    """Return placements as a table with a layer each, and without shares where all copies have equal ones."""
    logical_of, parts = _slots_of(view, packing)
    is_even = np.abs(packing.share - even_shares(packing.expert, view.table.num_experts)).max(initial=0.0) <= SAME_SHARE
    shares = None if is_even else parts
    return ExpertTable(view.table.version + 1, logical_of, view.table.num_experts, view.devices.is_alive.copy(), shares)


def _slots_of(view: PlaceView, packing: Packing) -> tuple[NDArray[np.int32], Floats]:
    """Return int32[devices, layers, slots] and float64 of the same shape, experts and shares, EMPTY on dead devices."""
    live = view.devices.is_alive
    shape = (len(live), len(packing.expert), packing.expert.shape[2])
    logical_of, parts = np.full(shape, EMPTY, np.int32), np.zeros(shape)
    logical_of[live], parts[live] = packing.expert.swapaxes(0, 1), packing.share.swapaxes(0, 1)
    return logical_of, parts
