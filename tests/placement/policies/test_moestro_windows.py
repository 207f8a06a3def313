"""Goals of Moestro's placement policy in the next window, whose load has 10 % noise: as placed, and with new shares."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.expert_loads import LONG, drifted, even_load, first_view, zipf_shares

from moestro.placement.contract import PlaceView
from moestro.placement.policies.moestro import MoestroPlacement
from moestro.placement.score import moves_between, score

NUM_DEVICES = 32


@cache
def planned_view(exponent: float) -> PlaceView:
    view = first_view(even_load(zipf_shares(58, 256, exponent), NUM_DEVICES), 9, 4)
    return replace(view, table=MoestroPlacement()(view))


@pytest.mark.parametrize(("exponent", "least"), [(0.4, 0.929), (0.6, 0.926)])
def test_the_placement_alone_levels_the_next_window(exponent, least):
    view = planned_view(exponent)
    balances = [
        score(even_load(drifted(zipf_shares(58, 256, exponent), 0.1, seed), 32), view.table, view.devices, view.prices)
        for seed in range(2, 8)
    ]
    assert np.mean([each.mean_balance for each in balances]) >= least


@pytest.mark.parametrize("exponent", [0.4, 0.6, 0.8])
def test_shares_set_anew_level_the_next_window_without_a_move(exponent):
    view = planned_view(exponent)
    load = even_load(drifted(zipf_shares(58, 256, exponent), 0.1), NUM_DEVICES)
    new = MoestroPlacement()(replace(view, load=load, limits=replace(LONG, max_receives=0)))
    assert len(moves_between(view.table, new, view.devices)) == 0
    assert score(load, new, view.devices, view.prices).mean_balance >= 0.955
