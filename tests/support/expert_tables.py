"""Random placements of experts."""

from __future__ import annotations

import numpy as np

from moestro.core.experts.expert_table import EMPTY, ExpertTable


def scatter(
    rng: np.random.Generator, sizes: tuple[int, int], holders: list[int], num_workers: int, num_copies: int = 0
) -> ExpertTable:
    """Every expert on one of `holders`, another one in each layer, and up to `num_copies` more copies a layer.

    Slots are in random order, and a few are empty. `sizes`: (layers, experts).
    """
    num_layers, num_experts = sizes
    placed: list[list[list[int]]] = [[[] for _ in range(num_layers)] for _ in range(num_workers)]
    for layer in range(num_layers):
        for expert in range(num_experts):
            placed[int(rng.choice(holders))][layer].append(expert)
        for _ in range(num_copies if num_experts else 0):
            worker, expert = int(rng.choice(holders)), int(rng.integers(num_experts))
            if expert not in placed[worker][layer]:
                placed[worker][layer].append(expert)
    width = 1 + max(len(slots) for by_layer in placed for slots in by_layer)
    logical_of = np.full((num_workers, num_layers, width), EMPTY, np.int32)
    for worker, by_layer in enumerate(placed):
        for layer, slots in enumerate(by_layer):
            logical_of[worker, layer, rng.permutation(width)[: len(slots)]] = slots
    return ExpertTable(0, logical_of, num_experts, np.ones(num_workers, np.bool_))
