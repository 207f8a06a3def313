"""A simulated router gives its policy what the file's signals bring, and TTFTs at the prices of the engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moestro.cost.model import Batch
from moestro.errors import ConfigError
from moestro.routing.registry import policy_from
from moestro.routing.router import Router
from moestro.routing.settings import ANY_ENGINE, EngineSpec
from moestro.sim.scenario import Scenario, make_scenario, route_inputs, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
from moestro.sim.signals import ChannelSettings, SignalSettings

LOAD = WorkloadSettings(prompt_tokens=700, output_tokens=8, num_requests=40, rate=20.0, arrivals="poisson")
KV_USAGE = SignalSettings(channels=(ChannelSettings(figures=("kv_usage",)),))


def scenario(**settings) -> Scenario:
    return make_scenario(SimSettings(workload=LOAD, engines=SimEngineSettings(count=2), **settings), Path())


def test_llm_d_predicts_with_the_prices_of_the_engines():
    made = scenario()
    policy = policy_from("llm-d", inputs=route_inputs(made, PolicySettings()))
    budget = made.bounds.max_num_batched_tokens
    step_ns = made.prices.step_ns([Batch(np.array([0]), np.array([budget]))])
    assert policy._predict(np.array([float(budget)]), np.zeros(1), np.zeros(1, np.int64)).tolist() == [step_ns]


@pytest.mark.parametrize("name", ["llm-d", "llm-d-affinity", "preble", "moestro"])
def test_policies_that_predict_serve_every_request(name):
    assert run(scenario(), PolicySettings(route=name)).is_answered.all()


@pytest.mark.parametrize(("ep_ranks", "groups"), [(1, [None, None]), (2, [0, 0, 1, 1])])
def test_ranks_that_step_together_are_a_group_of_the_router(monkeypatch, ep_ranks, groups):
    specs: list[EngineSpec] = []

    class Watched(Router):
        def add_engine(self, spec: EngineSpec = ANY_ENGINE) -> int:
            specs.append(spec)
            return super().add_engine(spec)

    monkeypatch.setattr("moestro.sim.scenario.Router", Watched)
    engines = SimEngineSettings(count=2, ep_ranks=ep_ranks, kv_offloading_size=1.0)
    made = make_scenario(SimSettings(workload=LOAD, engines=engines), Path())
    assert run(made, PolicySettings(route="moestro")).is_answered.all()
    assert [spec.group for spec in specs] == groups
    assert {spec.num_host_blocks for spec in specs} == {made.bounds.num_host_blocks}


def test_a_policy_is_refused_without_the_signals_that_it_requires():
    made = scenario()
    with pytest.raises(ConfigError, match=r"most_free_kv requires kv_usage.* \[\[signals.channels\]\]"):
        run(made, PolicySettings(route="most_free_kv"))
    assert run(made, PolicySettings(route="most_free_kv", signals=KV_USAGE)).is_answered.all()
    assert run(scenario(signals=KV_USAGE), PolicySettings(route="gimbal-v1")).is_answered.all()
