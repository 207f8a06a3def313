"""Random views for placement policies: source-dependent load, prices of which each term matters, a random table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.contract import Devices, PlaceLimits, PlacePrices, PlaceView, even_devices


@dataclass(frozen=True)
class Shape:
    experts: int
    devices: int
    slots: int
    layers: int = 1
    nodes: int = 1


def random_view(seed: int, shape: Shape, *, dead: tuple[int, ...] = (), speeds: bool = False) -> PlaceView:
    """Devices have equal slots; a dead device is still in the table, as right after its death."""
    rng = np.random.default_rng(seed)
    experts, num_devices, layers = shape.experts, shape.devices, shape.layers
    even = even_devices(num_devices, shape.slots, shape.nodes)
    is_alive = ~np.isin(np.arange(num_devices), dead)
    speed = rng.uniform(0.5, 1.5, num_devices) if speeds else even.speed
    devices = Devices(even.node_of, even.num_slots, is_alive, speed, even.source_on)
    popularity = rng.permuted(np.tile(np.arange(1.0, experts + 1) ** -rng.uniform(0.2, 1.2), (layers, 1)), axis=1)
    tokens = rng.dirichlet(np.full(experts, 2.0), (num_devices, layers)) * popularity * experts * rng.uniform(5, 50)
    load = ExpertLoad(tokens, np.zeros((layers, experts)), 1 - np.exp(-tokens.sum(axis=0)), 100.0)
    row_s = 10.0 ** rng.uniform(-8, -6)
    prices = PlacePrices(
        token_s=1e-6 * rng.random(),
        expert_s=10.0 ** rng.uniform(-7, -5),
        row_s=(0.0, row_s, row_s * rng.uniform(1, 9)),
        expert_bytes=1 << 20,
        move_bytes_per_s=(1e12, 1e11, 1e10),
    )
    limits = PlaceLimits(horizon_steps=10.0 ** rng.uniform(1, 4))
    return PlaceView(load, random_table(rng, shape), devices, prices, limits)


def random_table(rng: np.random.Generator, shape: Shape) -> ExpertTable:
    """One copy of each expert on a random device, and others in most of the slots left."""
    logical_of = np.full((shape.devices, shape.layers, shape.slots), EMPTY, np.int32)
    for layer in range(shape.layers):
        held: list[list[int]] = [[] for _ in range(shape.devices)]
        for expert in rng.permutation(shape.experts).tolist():
            held[rng.choice([d for d in range(shape.devices) if len(held[d]) < shape.slots])].append(expert)
        for device, has in enumerate(held):
            lacks = rng.permutation(np.setdiff1d(np.arange(shape.experts), has)).tolist()
            has += [each for each in lacks[: shape.slots - len(has)] if rng.random() < 0.8]
            logical_of[device, layer, : len(has)] = has
    return ExpertTable(3, logical_of, shape.experts, np.ones(shape.devices, np.bool_))


def random_pairs(rng: np.random.Generator, layers: int, experts: int, count: int) -> LayerPairs:
    """Some pairs, some of them twice, with small whole counts, so that ties are frequent and sums exact."""
    layer, expert, partner = (rng.integers(0, high, count, np.int32) for high in (max(layers - 1, 1), experts, experts))
    if layers == 1:
        layer, expert, partner = (each[:0] for each in (layer, expert, partner))
    return LayerPairs(layer, expert, partner, rng.integers(0, 9, len(layer)).astype(np.float64))
