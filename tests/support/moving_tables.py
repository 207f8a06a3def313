"""Random placements to move to."""

from __future__ import annotations

import numpy as np

from moestro.core.experts.expert_table import EMPTY, ExpertTable


def random_target(rng: np.random.Generator, table: ExpertTable, *, has_shares: bool = True) -> ExpertTable:
    """A random placement in the shape of a table: copies in some of its free slots, and random shares."""
    num_workers, num_layers, num_slots = table.logical_of.shape
    logical_of = np.full_like(table.logical_of, EMPTY)
    for layer in range(num_layers):
        free = np.full(num_workers, num_slots)
        held: list[list[int]] = [[] for _ in range(num_workers)]
        for expert in rng.permutation(table.num_experts).tolist():
            worker = int(rng.choice(np.flatnonzero(free)))
            held[worker].append(expert)
            free[worker] -= 1
        for worker in range(num_workers):
            others = [expert for expert in range(table.num_experts) if expert not in held[worker]]
            num_more = int(rng.integers(0, free[worker] + 1))
            held[worker] += rng.permutation(others)[:num_more].tolist()
            logical_of[worker, layer, rng.permutation(num_slots)[: len(held[worker])]] = held[worker]
    even = ExpertTable(0, logical_of, table.num_experts, table.is_alive)
    if not has_shares:
        return even
    weights = np.where(logical_of == EMPTY, 0.0, rng.random(logical_of.shape) + 0.05)
    shares = np.zeros_like(weights)
    for layer in range(num_layers):
        for expert in range(table.num_experts):
            here = logical_of[:, layer] == expert
            shares[:, layer][here] = weights[:, layer][here] / weights[:, layer][here].sum()
    return ExpertTable(0, logical_of, table.num_experts, table.is_alive, shares)
