"""What the flags of live placement mean for each policy."""

from __future__ import annotations

import pytest

from moestro.placement.contract import PLACE_POLICIES, PlaceLimits
from moestro.placement.payback import LastingPlans
from moestro.placement.policies.gimbal import FixedAffinity
from moestro.placement.settings import LivePlacementSettings
from moestro.sim.settings import GroupModeSettings

GATE = PlaceLimits().horizon_steps


@pytest.mark.parametrize(
    ("policy", "given", "horizon"),
    [
        *(("none", None, GATE), ("eplb", None, GATE), ("moestro", None, GATE), ("moestro", 0.0, 0.0)),
        *(("gimbal_v1", None, 0.0), ("gimbal_v1:top_pairs=4", None, 0.0), ("gimbal_v1", 500.0, 500.0)),
    ],
)
def test_a_gate_holds_by_default_but_for_algorithm_3(policy, given, horizon):
    settings = LivePlacementSettings(placement_policy=policy, placement_payback_horizon=given)
    assert settings.payback_horizon == horizon
    assert (settings.limits.horizon_steps == GATE) is (horizon == GATE)


def test_algorithm_3_keeps_its_set_with_and_without_a_gate():
    free = LivePlacementSettings(placement_policy="gimbal_v1")
    assert isinstance(free.lasting(PLACE_POLICIES.make("gimbal_v1")), FixedAffinity)
    gated = LivePlacementSettings(placement_policy="gimbal_v1", placement_payback_horizon=500.0)
    lasting = gated.lasting(PLACE_POLICIES.make("gimbal_v1"))
    assert isinstance(lasting, LastingPlans)
    assert isinstance(lasting.policy, FixedAffinity)
    other = LivePlacementSettings(placement_policy="eplb")
    assert isinstance(other.lasting(PLACE_POLICIES.make("eplb")), LastingPlans)


@pytest.mark.parametrize(
    ("place", "given", "steps"), [("gimbal_v1", None, 0), ("gimbal_v1", 9.0, 9.0), ("eplb", None, 40)]
)
def test_the_simulator_has_the_same_default(place, given, steps):
    settings = GroupModeSettings(mode="ep", place=place, place_interval_steps=40, place_payback_steps=given)
    assert settings.payback_horizon_steps == steps
