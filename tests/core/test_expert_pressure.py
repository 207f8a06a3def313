"""Expert pressure: examples, a slow oracle, and what it may never do."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.core.experts.expert_load import FULL_WAIT_S, PRIOR_VISITS, expert_pressures
from moestro.core.experts.expert_table import spread_evenly

MANY = 1e9  # visits against which the prior is nothing


def even_parts(num_workers: int, num_layers: int, num_experts: int) -> np.ndarray:
    return spread_evenly(num_layers, num_experts, list(range(num_workers)), num_workers).parts


def oracle(visits: np.ndarray, parts: np.ndarray, oldest_s: np.ndarray) -> list[float]:
    num_sources, num_layers, num_experts = visits.shape
    pressures = []
    for source in range(num_sources):
        by_layer = []
        for layer in range(num_layers):
            total = visits[:, layer].sum()
            if total == 0:
                continue
            load = [sum(visits[:, layer].sum(axis=0) * part[layer]) for part in parts]
            holders = [worker for worker, part in enumerate(parts) if part[layer].any()]
            mean = sum(load) / len(holders)
            own = [
                visits[source, layer, e] + PRIOR_VISITS * visits[:, layer, e].sum() / total for e in range(num_experts)
            ]
            met = sum(
                own[e] * parts[worker, layer, e] * (load[worker] / mean + oldest_s[worker] / FULL_WAIT_S)
                for worker in range(len(parts))
                for e in range(num_experts)
            )
            by_layer.append(met / sum(own))
        pressures.append(sum(by_layer) / len(by_layer))
    return pressures


def test_tokens_of_the_busy_worker_have_its_load_and_others_have_theirs():
    visits = np.array([[[3, 3, 0, 0]], [[0, 0, 1, 1]]]) * MANY
    assert expert_pressures(visits, even_parts(2, 1, 4)) == pytest.approx([6 / 4, 2 / 4])


def test_the_pressure_of_one_mix_is_that_of_the_load_and_1_where_it_is_even():
    mix = np.array([[4.0, 2, 1, 1]])
    visits = np.stack([mix, 2 * mix]) * MANY
    load = np.array([6, 2]) / 4
    assert expert_pressures(visits, even_parts(2, 1, 4)) == pytest.approx([(6 * load[0] + 2 * load[1]) / 8] * 2)
    assert expert_pressures(np.ones((2, 1, 4)), even_parts(2, 1, 4)) == pytest.approx([1, 1])


def test_a_source_without_tokens_has_the_pressure_of_the_group():
    visits = np.array([[[6, 2, 0, 0]], [[0, 0, 0, 0]]]) * MANY
    both = expert_pressures(visits, even_parts(2, 1, 4))
    assert both[1] == pytest.approx(both[0]) == 2


def test_workers_without_experts_of_a_layer_are_no_part_of_its_mean():
    visits = np.array([[[3, 3, 0, 0]], [[0, 0, 1, 1]]]) * MANY
    alone = even_parts(2, 1, 4)
    with_idle = np.concatenate([alone, np.zeros((3, 1, 4))])
    assert expert_pressures(visits, with_idle) == pytest.approx(expert_pressures(visits, alone)) == [6 / 4, 2 / 4]


def test_a_waiting_token_counts_for_those_whose_tokens_go_there():
    visits = np.array([[[1, 1, 0, 0]], [[0, 0, 1, 1]]]) * MANY
    oldest_s = np.array([0.05, 0.0])
    assert expert_pressures(visits, even_parts(2, 1, 4), oldest_s) == pytest.approx([1.5, 1], abs=1e-6)


def test_nothing_visited_is_no_pressure():
    assert expert_pressures(np.zeros((2, 1, 4)), even_parts(2, 1, 4)).tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_law_the_oracle_agrees_and_the_mean_over_visits_is_at_least_1(seed):
    rng = np.random.default_rng(seed)
    num_sources, num_workers = rng.integers(1, 5, 2)
    visits = rng.integers(0, 500, (num_sources, 3, 8)).astype(float)
    visits[:, rng.integers(3)] = 0  # a dense layer
    parts = np.where(rng.random((num_workers, 3, 8)) < 0.7, rng.random((num_workers, 3, 8)), 0)
    parts[0] += 0.1
    parts /= parts.sum(axis=0)
    oldest_s = rng.random(num_workers)
    found = expert_pressures(visits, parts, oldest_s)
    assert found == pytest.approx(oracle(visits, parts, oldest_s))
    calm = expert_pressures(visits * MANY, parts)
    assert (calm * visits.sum(axis=(1, 2))).sum() / visits.sum() >= 0.99
