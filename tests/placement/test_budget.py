"""Which layers are changed: those whose savings over the horizon exceed the seconds of their move."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.placement.search.problem import Allowance, LayerOffers, layers_that_pay


@pytest.mark.parametrize(("horizon_steps", "chosen", "net_s"), [(10.5, [], 0.0), (11.5, [0], 0.5)])
def test_savings_must_exceed_the_move_by_the_hysteresis(horizon_steps, chosen, net_s):
    offers = LayerOffers(np.array([1.0]), np.array([[1]]), np.array([[10.0]]))
    layers, net = layers_that_pay(offers, Allowance(np.inf, np.array([np.inf])), None, horizon_steps, 0.1)
    assert layers.tolist() == chosen
    assert net == pytest.approx(net_s)
