"""Seeded loads, tables and views for tests of placement policies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.contract import Devices, PlaceLimits, PlacePrices, PlaceView, even_devices

Floats = NDArray[np.float64]

# An expert of 44 MB (DeepSeek-V3, FP8) on devices of 3 TB/s that read 450 GB/s of their node and 50 GB/s of others.
PRICES = PlacePrices(
    token_s=1e-7,
    expert_s=0.0,
    row_s=(0.0, 1.4e-8, 2.8e-7),
    expert_bytes=44_000_000,
    move_bytes_per_s=(1e12, 4e11, 5e10),
)
LONG = PlaceLimits(horizon_steps=1e6)


def zipf_shares(num_layers: int, num_experts: int, exponent: float, seed: int = 1) -> Floats:
    """float64[layers, experts], shares of tokens by Zipf's law with 15 % noise, shuffled in each layer."""
    rng = np.random.default_rng(seed)
    ranks = np.arange(1, num_experts + 1) ** -exponent
    shares = rng.permuted(ranks * np.exp(0.15 * rng.standard_normal((num_layers, num_experts))), axis=1)
    return shares / shares.sum(axis=1, keepdims=True)


def drifted(shares: Floats, sigma: float, seed: int = 2) -> Floats:
    """Shares after every expert changed by lognormal noise."""
    changed = shares * np.exp(sigma * np.random.default_rng(seed).standard_normal(shares.shape))
    return changed / changed.sum(axis=1, keepdims=True)


def even_load(shares: Floats, num_devices: int, tokens: float = 65536.0) -> ExpertLoad:
    """Load whose sources all send the same mix."""
    each = np.repeat(shares[None] * (tokens / num_devices), num_devices, axis=0)
    return ExpertLoad(each, np.zeros(shares.shape), np.ones(shares.shape), 100.0)


def sticky_load(shares: Floats, num_devices: int, num_nodes: int, sticky: float = 0.9) -> ExpertLoad:
    """Load of four clusters of tasks, 60 % of each its own; node n serves cluster n % 4 with the weight `sticky`."""
    rng = np.random.default_rng(1)
    clusters = np.stack([0.4 * shares + 0.6 * rng.permuted(shares, axis=1) for _ in range(4)])
    weights = np.full((num_nodes, 4), (1 - sticky) / 4)
    weights[np.arange(num_nodes), np.arange(num_nodes) % 4] += sticky
    by_node = np.einsum("nc,cle->nle", weights, clusters)
    tokens = np.repeat(by_node, num_devices // num_nodes, axis=0) * (65536.0 / num_devices)
    return ExpertLoad(tokens, np.zeros(shares.shape), np.ones(shares.shape), 100.0)


def first_table(num_layers: int, num_experts: int, num_devices: int, num_slots: int) -> ExpertTable:
    """Table of consecutive experts, with the first experts again in the slots that are left."""
    logical_of = np.full((num_devices, num_slots), EMPTY, np.int32)
    again = 0
    for device, part in enumerate(np.array_split(np.arange(num_experts), num_devices)):
        logical_of[device, : len(part)] = part
    for device in range(num_devices):
        for slot in np.flatnonzero(logical_of[device] == EMPTY):
            while again % num_experts in logical_of[device]:
                again += 1
            logical_of[device, slot] = again % num_experts
            again += 1
    layers = np.repeat(logical_of[:, None], num_layers, axis=1)
    return ExpertTable(0, layers, num_experts, np.ones(num_devices, np.bool_))


def first_view(load: ExpertLoad, num_slots: int, num_nodes: int = 1, limits: PlaceLimits = LONG) -> PlaceView:
    """View of a load on equal devices, each the source of its tokens, with the first table."""
    num_devices, num_layers, num_experts = load.tokens.shape
    table = first_table(num_layers, num_experts, num_devices, num_slots)
    return PlaceView(load, table, even_devices(num_devices, num_slots, num_nodes), PRICES, limits)


def random_view(seed: int) -> PlaceView:
    """View of a random small group: unequal slots and speeds, dead devices, idle experts, a table that fits no load."""
    rng = np.random.default_rng(seed)
    num_devices, num_layers = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    num_experts = int(rng.integers(1, 13))
    is_alive = rng.random(num_devices) < 0.85
    is_alive[rng.integers(num_devices)] = True
    num_slots = rng.integers(1, 5, num_devices).astype(np.int32)
    num_slots[is_alive] += max(0, -(-(num_experts - int(num_slots[is_alive].sum())) // int(is_alive.sum())))
    devices = Devices(
        node_of=np.sort(rng.integers(0, 2, num_devices)).astype(np.int32),
        num_slots=num_slots,
        is_alive=is_alive,
        speed=rng.choice([1.0, 0.5, 1.7], num_devices),
        source_on=rng.integers(0, num_devices, int(rng.integers(1, 5))).astype(np.int32),
    )
    table = random_table(rng, devices, num_layers, num_experts)
    shape = (len(devices.source_on), num_layers, num_experts)
    tokens = rng.lognormal(3.0, 1.0, shape) * (rng.random(shape) < 0.8) * (seed % 10 > 0)
    activated = np.where(tokens.sum(axis=0) > 0, rng.random(shape[1:]), 0.0)
    load = ExpertLoad(tokens, tokens.sum(axis=0) * rng.random(), activated, 50.0)
    prices = PlacePrices(
        token_s=1e-6,
        expert_s=float(rng.choice([0.0, 1e-5, 1e-4])),
        row_s=(0.0, float(rng.choice([0.0, 1e-7])), float(rng.choice([0.0, 1e-7, 1e-5]))),
        expert_bytes=1000,
        move_bytes_per_s=(1e12, 1e7, 1e6),
    )
    limits = PlaceLimits(
        max_bytes=int(rng.integers(0, 20_000)) if rng.random() < 0.4 else None,
        max_receives=int(rng.integers(0, 4)) if rng.random() < 0.4 else None,
        max_layers=int(rng.integers(0, num_layers + 1)) if rng.random() < 0.4 else None,
        horizon_steps=float(rng.choice([0.0, 10.0, 1e4, 1e7])),
    )
    return PlaceView(load, table, devices, prices, limits)


def random_table(rng: np.random.Generator, devices: Devices, num_layers: int, num_experts: int) -> ExpertTable:
    """Table of a time when all devices lived; some experts may have no copy on a device that lives now."""
    num_devices, most = devices.num_devices, int(devices.num_slots.max())
    logical_of = np.full((num_devices, num_layers, most), EMPTY, np.int32)
    for layer in range(num_layers):
        free = np.repeat(np.arange(num_devices), devices.num_slots)
        rng.shuffle(free)
        for expert, device in enumerate(free[:num_experts].tolist()):
            slots = logical_of[device, layer]
            slots[np.flatnonzero(slots[: devices.num_slots[device]] == EMPTY)[0]] = expert
        for device in free[num_experts:].tolist():
            slots, extra = logical_of[device, layer], int(rng.integers(num_experts))
            if extra not in slots and rng.random() < 0.8:
                slots[np.flatnonzero(slots[: devices.num_slots[device]] == EMPTY)[0]] = extra
    return ExpertTable(3, logical_of, num_experts, np.ones(num_devices, np.bool_))
