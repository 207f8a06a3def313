"""Host memory below the prefix cache of simulated engines: the production object, with the prices of the simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from moestro.cost.gpus import H20
from moestro.cost.model import Batch
from moestro.cost.networks import network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.tables import (
    FORMAT,
    DecodePoint,
    HostCopies,
    HostTimes,
    PrefillPoint,
    ShortChunksPoint,
    Table,
)
from moestro.errors import ConfigError
from moestro.sim.groups.group import CopyQueue, OneRank, load_prices
from moestro.sim.groups.group_setup import make_prices
from moestro.sim.results import Results
from moestro.sim.scenario import make_bounds, make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings, read_settings

NUM_BLOCKS, BLOCK_SIZE = 270, 64
COST = Roofline(RooflineSettings(network=network_named("qwen3-30b-a3b"), gpu=H20))


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


@pytest.mark.parametrize("ep_ranks", [1, 4])
def test_a_token_is_priced_by_what_it_adds_to_a_step(ep_ranks):
    prices = make_prices(SimEngineSettings(count=1, ep_ranks=ep_ranks))
    loads = load_prices(prices, BLOCK_SIZE)
    batch = Batch(np.zeros(1, np.int32), np.array([2048], np.int32))
    step = prices.step_ns([batch, *[None] * (ep_ranks - 1)])
    assert 0 < loads.computing_ns(0, 2048) < step
    assert loads.copying_ns(1) == prices.move_ns(BLOCK_SIZE)
    assert loads.copying_ns(10) < loads.computing_ns(0, 10 * BLOCK_SIZE)


def priced(copies: HostCopies | None, folder: Path, gib: float = 2.0) -> SimEngineSettings:
    """Engines with a table of round numbers in a folder."""
    table = Table(
        format=FORMAT,
        model="made up",
        device="cpu",
        prefill=tuple(PrefillPoint(new=n, cached=c, ns=1e6 + n * 1e5, spread=0.0) for n in (1, 512) for c in (0, 512)),
        short_chunks=(ShortChunksPoint(tokens=512, chunk=64, ns=5e7, spread=0.0),),
        decode=tuple(DecodePoint(sequences=n, context=c, ns=1e6 * n, spread=0.0) for n in (1, 8) for c in (16, 512)),
        host=HostTimes(step_ns=0.0, sequence_ns=0.0),
        copies=copies,
    )
    (folder / "table.json").write_bytes(msgspec.json.encode(table))
    return SimEngineSettings(table="table.json", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kv_offloading_size=gib)


def test_a_table_with_copies_prices_host_memory_and_tells_how_many_blocks_it_holds(tmp_path):
    engines = priced(HostCopies(token_ns=500.0, token_bytes=4096.0), tmp_path)
    bounds = make_bounds(engines, directory=tmp_path)
    assert bounds.num_host_blocks == 2 * (1 << 30) // (4096 * BLOCK_SIZE)
    prices = make_prices(engines, tmp_path)
    assert prices.move_ns(BLOCK_SIZE) == 500 * BLOCK_SIZE
    assert not prices.copies_beside  # a CPU copies itself


def test_host_memory_is_refused_with_a_table_that_prices_no_copy(tmp_path):
    with pytest.raises(ConfigError, match=r"kv_offloading_size = 2 needs the price of a copy, which table table.json"):
        make_bounds(priced(None, tmp_path), directory=tmp_path)
    assert make_bounds(priced(None, tmp_path, 0.0), directory=tmp_path).num_host_blocks == 0


class TenNanosecondsAToken(OneRank):
    """Prices of copies alone."""

    def move_ns(self, num_tokens: int) -> int:
        return 10 * num_tokens


def copy_queue(*, beside: bool) -> CopyQueue:
    return CopyQueue(TenNanosecondsAToken(COST, copies_beside=beside))


def test_a_step_waits_for_what_it_reads_and_not_for_what_leaves():
    copies = copy_queue(beside=True)
    copies.may_plan_ns = 1000  # the step before lasted from 1,000 to 1,100
    assert copies.until_ns(50, 0, 1100) == 1100  # to the host until 1,500
    copies.may_plan_ns = 1100
    assert copies.until_ns(0, 20, 1200) == 1700  # the link is taken until 1,500
    copies.may_plan_ns = 1700
    assert copies.until_ns(0, 20, 2500) == 2500  # behind the step before


def test_a_cpu_copies_in_line_with_its_steps():
    copies = copy_queue(beside=False)
    copies.may_plan_ns = 1000
    assert copies.until_ns(50, 20, 1100) == 1800


def test_copies_beside_the_steps_cost_less_time_than_in_line():
    engines = SimEngineSettings(count=1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, kv_offloading_size=4)
    workload = WorkloadSettings(sessions="chat", num_requests=60, rate=1.0)
    scenario = make_scenario(SimSettings(workload=workload, engines=engines), Path())
    in_line = replace(scenario, prices=OneRank(COST, copies_beside=False))
    beside = replace(scenario, prices=OneRank(COST, copies_beside=True))
    means = [
        (found.first_token_ns - found.arrival_ns).mean()
        for found in (run(each, PolicySettings(route="moestro")) for each in (beside, in_line))
    ]
    assert means[0] < means[1]


def test_the_command_line_replaces_the_size_of_the_file(tmp_path):
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(
        '[workload]\nsessions = "chat"\nnum_requests = 3\nrate = 1\n[engines]\ncount = 1\nkv_offloading_size = 1\n'
    )
    assert read_settings(scenario).engines.kv_offloading_size == 1
    assert read_settings(scenario, kv_offloading_size=3.5).engines.kv_offloading_size == 3.5
