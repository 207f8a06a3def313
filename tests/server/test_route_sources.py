"""A server's route policy gets what its engines report, and one that requires more is refused before they start."""

from __future__ import annotations

import pytest

from moestro.config.serve_settings import ProcessSettings, ServeSettings
from moestro.errors import ConfigError
from moestro.flow.settings import SteppingSettings
from moestro.routing.registry import ROUTE_POLICIES, policy_from
from moestro.server.figures.recording import route_inputs


def test_every_registered_policy_works_in_a_server():
    inputs = route_inputs(ServeSettings())
    for name in ROUTE_POLICIES.names():
        assert policy_from(name, inputs=inputs)


def test_a_score_of_expert_pressure_requires_engines_that_share_experts():
    score = "num_waiting * expert_pressure"
    with pytest.raises(ConfigError, match=r"requires expert_pressure.*--mode ep or async"):
        policy_from("moestro", score, route_inputs(ServeSettings()))
    group = ServeSettings(stepping=SteppingSettings(mode="ep"), processes=ProcessSettings(engines=2))
    assert policy_from("moestro", score, route_inputs(group))
