"""Host memory below the prefix cache of simulated engines: the production object, with the prices of the simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moestro.cost.model import Batch
from moestro.sim.engine_prices import make_prices
from moestro.sim.figures.results import Results
from moestro.sim.prices import load_prices
from moestro.sim.scenario import make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings, read_settings

NUM_BLOCKS, BLOCK_SIZE = 270, 64


def simulated(gib: float) -> Results:
    engines = SimEngineSettings(count=1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, kv_offloading_size=gib)
    workload = WorkloadSettings(sessions="chat", num_requests=60, rate=1.0)
    return run(make_scenario(SimSettings(workload=workload, engines=engines), Path()), PolicySettings(route="moestro"))


@pytest.fixture(scope="module")
def without() -> Results:
    return simulated(0)


def test_evicted_prefixes_are_hits_from_host_memory(without):
    tiered = simulated(4)
    assert not without.num_host_tokens.any()
    assert tiered.num_host_tokens.sum() > 0
    assert tiered.num_hit_tokens.sum() > without.num_hit_tokens.sum()
    assert (tiered.num_host_tokens <= tiered.num_hit_tokens).all()
    assert (tiered.first_token_ns - tiered.arrival_ns).mean() < (without.first_token_ns - without.arrival_ns).mean()


def test_a_larger_tier_has_more_hits(without):
    small, large = simulated(0.2), simulated(4)
    assert without.num_hit_tokens.sum() <= small.num_hit_tokens.sum() <= large.num_hit_tokens.sum()


def test_a_token_is_priced_by_what_it_adds_to_a_step():
    prices = make_prices(SimEngineSettings(count=1))
    loads = load_prices(prices, BLOCK_SIZE)
    step = prices.step_ns([Batch(np.zeros(1, np.int32), np.array([2048], np.int32))])
    assert 0 < loads.computing_ns(0, 2048) < step
    assert loads.copying_ns(1) == prices.move_ns(BLOCK_SIZE)
    assert loads.copying_ns(10) < loads.computing_ns(0, 10 * BLOCK_SIZE)


def test_the_command_line_replaces_the_size_of_the_file(tmp_path):
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(
        '[workload]\nsessions = "chat"\nnum_requests = 3\nrate = 1\n[engines]\ncount = 1\nkv_offloading_size = 1\n'
    )
    assert read_settings(scenario).engines.kv_offloading_size == 1
    assert read_settings(scenario, kv_offloading_size=3.5).engines.kv_offloading_size == 3.5
