"""Decodes that start with dummy KV: no prompt is computed, its blocks are held, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.routers import router

from moestro.cost.gpus import A100
from moestro.cost.model import Batch
from moestro.cost.networks import network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.engine.settings import SchedulerSettings
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.group import Group, OneRank
from moestro.sim.scenario import make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
from moestro.workload.rows import RequestForm, RequestMaker, Rows

BOUNDS = SchedulerSettings(
    num_blocks=4000, block_size=16, max_model_len=2000, max_num_seqs=64, max_num_batched_tokens=256
)
COST = Roofline(RooflineSettings(network=network_named("qwen3-30b-a3b"), gpu=A100))


def serve(rows: Rows, offsets_ns: list[int], bounds: SchedulerSettings = BOUNDS, *, dummy: bool = True):
    group = Group(bounds, OneRank(COST))
    group.seats[0].has_prompt_kv = dummy
    cluster = Cluster([group], router(1, "round_robin"))
    results = cluster.run(RequestMaker(rows, RequestForm(block_size=16)), AtTimes(np.array(offsets_ns)))
    scheduler = group.seats[0].rank.scheduler
    scheduler.check()
    assert not scheduler.has_work
    assert scheduler.waiting.num_kept == scheduler.waiting.num_tokens == 0
    return results, scheduler


def test_the_first_step_of_a_request_is_a_decode_behind_its_prompt():
    rows = Rows(np.array([900]), np.array([3]))
    results, _ = serve(rows, [50])
    decode_ns = [COST.step_ns(Batch(np.array([899 + i]), np.array([1]))) for i in range(3)]
    assert results.first_token_ns[0] == 50 + decode_ns[0]
    assert results.last_token_ns[0] == 50 + sum(decode_ns)


def test_blocks_of_the_prompt_are_held_and_nothing_is_copied():
    group = Group(BOUNDS, OneRank(COST))
    group.seats[0].has_prompt_kv = True
    maker = RequestMaker(Rows(np.array([900]), np.array([30])), RequestForm(block_size=16))
    group.add(0, *maker.make(0, 0), 0)
    group.turn(0)
    plan, pool = group.seats[0].plan, group.seats[0].rank.scheduler.pool
    assert plan.moves is None
    assert (plan.units.start.tolist(), plan.units.num_tokens.tolist()) == ([899], [1])
    assert pool.num_blocks - pool.num_free == -(-900 // 16)


@pytest.mark.parametrize("num_blocks", [4000, 100])
def test_every_request_has_its_tokens_also_where_blocks_are_scarce(num_blocks):
    rng = np.random.default_rng(2)
    rows = Rows(rng.integers(1, 300, 60), rng.integers(1, 200, 60))
    bounds = replace(BOUNDS, num_blocks=num_blocks, max_model_len=600)
    results, scheduler = serve(rows, np.sort(rng.integers(0, 10**9, 60)).tolist(), bounds)
    assert results.is_answered.all()
    assert np.array_equal(results.num_tokens, rows.num_output_tokens)
    assert (scheduler.counts.num_preemptions > 0) == (num_blocks == 100)
    assert scheduler.pool.num_free == num_blocks


def test_a_setting_of_the_engines_starts_all_requests_so():
    workload = WorkloadSettings(prompt_tokens=3000, output_tokens=4, num_requests=20, rate=50.0)
    ends = {}
    for dummy in (False, True):
        engines = SimEngineSettings(gpu="a100", num_blocks=5000, dummy_kv=dummy)
        policy = PolicySettings(route="round_robin")
        scenario = make_scenario(SimSettings(workload=workload, engines=engines, policies=(policy,)), None)
        results = run(scenario, policy)
        assert results.is_answered.all()
        ends[dummy] = (results.first_token_ns - results.arrival_ns).mean()
    assert ends[True] < 0.2 * ends[False]
