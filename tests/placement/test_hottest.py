"""An expert that is too hot for its device to be level, where no expert can have a second copy."""

from __future__ import annotations

import numpy as np
import pytest
from support.expert_loads import even_load, first_view, zipf_shares

from moestro.placement.contract import origins_of
from moestro.placement.policies.moestro import MoestroPlacement
from moestro.placement.score import score
from moestro.placement.search.problem import packing_of, present_packing, problem_of
from moestro.placement.search.search import fill_hottest

NUM_EXPERTS, NUM_DEVICES = 64, 8
NUM_SLOTS = NUM_EXPERTS // NUM_DEVICES


def view_of(exponent: float, seed: int):
    shares = zipf_shares(12, NUM_EXPERTS, exponent, seed)
    return first_view(even_load(shares, NUM_DEVICES), NUM_SLOTS)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("exponent", [0.6, 0.9, 1.2])
def test_the_device_of_the_hottest_expert_has_the_lightest_others_where_it_is_above_the_level(exponent, seed):
    view = view_of(exponent, seed)
    problem = problem_of(view, origins_of(view.load, view.devices), 0.0)
    packing = present_packing(view, problem)
    before, level = packing.expert.copy(), problem.even_load(packing.work)
    is_above = fill_hottest(problem, packing, level)
    for layer in range(len(before)):
        order = np.argsort(problem.token_s[layer], kind="stable")
        device = int(np.nonzero((before[layer] == order[-1]).any(axis=1))[0][0])
        wanted = {int(order[-1]), *order[: NUM_SLOTS - 1].tolist()}
        work = problem.seconds(np.full(NUM_SLOTS, layer), np.array(sorted(wanted)), np.ones(NUM_SLOTS))
        assert is_above[layer] == (work.sum() >= level[layer])
        if is_above[layer]:
            assert set(packing.expert[layer, device].tolist()) == wanted
        else:
            assert (packing.expert[layer] == before[layer]).all()
        assert sorted(packing.expert[layer].ravel().tolist()) == list(range(NUM_EXPERTS))
    fresh = packing_of(problem, packing.expert, packing.share)
    assert (fresh.held == packing.held).all()
    assert fresh.work == pytest.approx(packing.work)


@pytest.mark.parametrize("seed", range(4))
def test_such_layers_reach_the_least_possible_largest_load(seed):
    view = view_of(1.2, seed)
    table = MoestroPlacement(risk=0.0, hysteresis=0.0, slack=0.0)(view)
    tokens = view.load.total
    largest = score(view.load, table, view.devices, view.prices).tokens.max(axis=1)
    order = np.sort(tokens, axis=1)
    least = order[:, -1] + order[:, : NUM_SLOTS - 1].sum(axis=1)
    assert (least > tokens.sum(axis=1) / NUM_DEVICES).all()
    assert (largest <= least * 1.002).all()
