"""Loads of public networks on an H100 group at any number of tokens, and what a placement costs with its moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import ExpertTable
from moestro.cost.gpus import H100
from moestro.cost.links import INFINIBAND_NDR, NVSWITCH_H100
from moestro.placement.contract import PlacePrices, PlaceView
from moestro.placement.score import move_s, moves_between, score

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """Sizes of a network's experts, with two of its layers."""

    num_experts: int
    top_k: int
    hidden: int
    width: int
    weight_bytes: float
    num_groups: int = 1
    num_layers: int = 2

    @property
    def prices(self) -> PlacePrices:
        """Prices on H100 with NVSwitch and a 400 Gb/s port each."""
        expert_bytes = round(3 * self.hidden * self.width * self.weight_bytes)
        ways = (H100.memory_bytes_per_s / 2, NVSWITCH_H100.bytes_per_s, INFINIBAND_NDR.bytes_per_s)
        return PlacePrices(
            token_s=6 * self.hidden * self.width / (H100.bf16_flops_per_s * H100.expert_compute),
            expert_s=expert_bytes / (H100.memory_bytes_per_s * H100.expert_memory),
            row_s=(0.0, 1.5 * self.hidden / ways[1], 1.5 * self.hidden / ways[2]),
            expert_bytes=expert_bytes,
            move_bytes_per_s=ways,
        )


SHAPES = {
    "deepseek_v3": Shape(256, 8, 7168, 2048, 1.0, 8),
    "qwen3_30b": Shape(128, 8, 2048, 768, 2.0),
    "gpt_oss_20b": Shape(32, 4, 2880, 2880, 0.53),
}


def random_load(
    shape: Shape, num_devices: int, _num_nodes: int, tokens: float, skew: float, rng: np.random.Generator
) -> ExpertLoad:
    """All sources send the same mix by Zipf's law; steps are Poisson."""
    share = _popularity(shape, skew, rng)
    return _load_of(np.repeat(tokens * shape.top_k * share[None], num_devices, axis=0))


def clustered_load(
    shape: Shape, num_devices: int, num_nodes: int, tokens: float, skew: float, rng: np.random.Generator
) -> ExpertLoad:
    """Nodes serve different kinds of tasks, of which 60 % of the popularity is their own."""
    common, kinds = _popularity(shape, skew, rng), [_popularity(shape, skew, rng) for _ in range(4)]
    mixes = np.stack([0.4 * common + 0.6 * kinds[node % 4] for node in range(num_nodes)])
    return _load_of(tokens * shape.top_k * np.repeat(mixes, num_devices // num_nodes, axis=0))


def _popularity(shape: Shape, skew: float, rng: np.random.Generator) -> Floats:
    ranks = np.tile(np.arange(1.0, shape.num_experts + 1), (shape.num_layers, 1))
    found = rng.permuted(ranks, axis=1) ** -skew * rng.lognormal(0, 0.15, ranks.shape)
    return found / found.sum(axis=1, keepdims=True)


def _load_of(tokens: Floats) -> ExpertLoad:
    total = tokens.sum(axis=0)
    return ExpertLoad(tokens, total, 1 - np.exp(-total), 1000.0)


def price_with_moves(view: PlaceView, table: ExpertTable, hysteresis: float = 0.1) -> float:
    """Seconds per step of a placement, with those of the moves to it, as `moestro` weighs them."""
    moves = moves_between(view.table, table, view.devices)
    step_s = score(view.load, table, view.devices, view.prices).step_s
    return step_s + (1 + hysteresis) * move_s(moves, view.devices, view.prices) / view.limits.horizon_steps
