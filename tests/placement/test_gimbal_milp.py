"""Gimbal v1's integer program, equations 3 to 12, against every map of tiny models; HiGHS solves it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from support.gimbal_cases import Shape, random_pairs, random_view

from moestro.errors import ConfigError
from moestro.placement.policies.gimbal import GimbalMilpPlacement, GimbalProgram, rank_pairs, solve_program

pytest.importorskip("scipy")


def plain_cost(program: GimbalProgram, weights: np.ndarray, gpu_of: tuple[int, ...]) -> float:
    """Equation 12, term by term."""
    num_gpus = len(program.sizes)
    deviation = 0.0
    for row in program.activation.tolist():
        for gpu in range(num_gpus):
            load = sum(a for a, where in zip(row, gpu_of, strict=True) if where == gpu)
            deviation = max(deviation, abs(load - sum(row) / num_gpus))
    cut = sum(weights[j, k] for j in range(len(gpu_of)) for k in range(j + 1, len(gpu_of)) if gpu_of[j] != gpu_of[k])
    return program.alpha * deviation + program.beta * cut


@pytest.mark.parametrize("seed", range(24))
def test_the_program_finds_the_best_of_all_maps(seed):
    rng = np.random.default_rng(seed)
    sizes = np.array([[2, 2], [3, 3], [3, 2], [2, 2, 2]][seed % 4])
    experts, layers = int(sizes.sum()), 3
    pairs = random_pairs(rng, layers, experts, 12)
    weights = np.zeros((experts, experts))
    np.add.at(weights, (pairs.expert, pairs.next_expert), pairs.count)
    is_symmetric = seed % 8 >= 4
    affinity = rank_pairs(pairs, experts, "model", "symmetric" if is_symmetric else "literal")
    activation = rng.random((layers, experts)) * 9
    program = GimbalProgram(activation, affinity, sizes, float(rng.uniform(0.2, 3)), float(rng.uniform(0.2, 3)))
    weights = weights + weights.T if is_symmetric else weights
    maps = [
        m for m in product(range(len(sizes)), repeat=experts) if (np.bincount(m, minlength=len(sizes)) == sizes).all()
    ]
    best = min(plain_cost(program, weights, each) for each in maps)
    found = solve_program(program, 20.0)
    assert np.bincount(found, minlength=len(sizes)).tolist() == sizes.tolist()
    assert program.cost(found) == pytest.approx(plain_cost(program, weights, tuple(found.tolist())))
    assert program.cost(found) == pytest.approx(best, rel=1e-6, abs=1e-6)


def test_a_device_with_too_little_load_counts_as_one_with_too_much():
    # Equation 9. Without it, the program takes a map whose lightest device is 7 below the mean.
    activation = np.array([[9.0, 10, 0, 2, 0, 0], [9, 4, 0, 2, 5, 5], [11, 5, 8, 0, 0, 9]])
    none = rank_pairs(random_pairs(np.random.default_rng(0), 3, 6, 0), 6, "model", "literal")
    program = GimbalProgram(activation, none, np.array([2, 2, 2]), 1.0, 1.0)
    maps = [m for m in product(range(3), repeat=6) if (np.bincount(m, minlength=3) == 2).all()]
    best = min(program.cost(np.array(each)) for each in maps)
    assert best == pytest.approx(17 / 3)
    assert program.cost(solve_program(program, 20.0)) == pytest.approx(best)


def test_the_policy_uses_live_devices_and_one_map_for_all_layers():
    view = random_view(1, Shape(6, 3, 3, layers=3), dead=(1,))
    view = replace(view, load=replace(view.load, pairs=random_pairs(np.random.default_rng(1), 3, 6, 20)))
    table = GimbalMilpPlacement()(view)
    assert table.num_copies[1].sum() == 0
    assert (table.num_copies == table.num_copies[:, :1]).all()
    assert (table.num_copies[[0, 2]].sum(axis=2) == 3).all()


def test_a_search_that_runs_out_of_time_says_so():
    rng = np.random.default_rng(0)
    affinity = rank_pairs(random_pairs(rng, 4, 24, 200), 24, "model", "symmetric")
    program = GimbalProgram(rng.random((4, 24)) * 9, affinity, np.full(4, 6), 1.0, 1.0)
    with pytest.raises(ValueError, match="no optimum within"):
        solve_program(program, 0.01)


@pytest.mark.parametrize("setting", [{"alpha": 0.0}, {"beta": -1.0}, {"time_limit_s": 0.0}])
def test_weights_and_time_must_be_above_0(setting):
    with pytest.raises(ConfigError, match="above 0"):
        GimbalMilpPlacement(**setting)
