"""Groups in lock-step on virtual time: requests are conserved, runs repeat, and no baseline exceeds the bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.plain_stages import DealingGate, OneExpertGate, PlainStages, network
from support.routers import router

from moestro.cost.gate import PopularityGate
from moestro.cost.links import AllToAll
from moestro.cost.model import Batch, zipf_popularity
from moestro.cost.tables import qllm
from moestro.engine.settings import SchedulerSettings
from moestro.flow.policies.one_queue import in_order
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.group_figures import LeastTimes, least_times, least_work_ns, throughput_bound
from moestro.sim.groups.lock_step_group import (
    LOCK_STEP,
    PING_PONG,
    TWO_BATCH_OVERLAP,
    LockStepGroup,
    StepPrice,
    StepPricing,
    disaggregated,
    expert_parallel,
    plain_replica,
    with_stalls,
)
from moestro.sim.groups.worker_group import StagedRank
from moestro.sim.results import ANSWERED
from moestro.workload.rows import RequestForm, RequestMaker, Rows

BLOCK_SIZE = 4
BOUNDS = SchedulerSettings(
    num_blocks=400, block_size=BLOCK_SIZE, max_model_len=100, max_num_seqs=16, max_num_batched_tokens=64
)
COST = PlainStages(network(), attention=(700, 90), expert=(900, 130), sample=(300, 20))
GATE = PopularityGate(zipf_popularity(8, 1.2), 1)
LINK = AllToAll(start_ns=500, bytes_per_s=1e9, row_bytes=40)
BASELINES = {
    "ideal ep": (expert_parallel(COST, GATE, 4), LOCK_STEP),
    "ep": (expert_parallel(COST, GATE, 4, LINK), LOCK_STEP),
    "two-batch overlap": (expert_parallel(COST, GATE, 4, LINK), TWO_BATCH_OVERLAP),
    "ping-pong": (disaggregated(COST, GATE, 2, 2, LINK), PING_PONG),
    "replica": (plain_replica(COST, GATE), LOCK_STEP),
    "stalls": (expert_parallel(COST, GATE, 4), with_stalls(0.6)),
}


def rows(num: int, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    return Rows(num_prompt_tokens=rng.integers(1, 30, num), num_output_tokens=rng.integers(1, 30, num))


def serve(groups, some: Rows, offsets_ns):
    num_engines = sum(len(group.seats) for group in groups)
    cluster = Cluster(groups, router(num_engines, "round_robin"))
    results = cluster.run(RequestMaker(some, RequestForm(block_size=BLOCK_SIZE)), AtTimes(np.array(offsets_ns)))
    for group in groups:
        for seat in group.seats:
            seat.rank.scheduler.check()
            assert not seat.rank.scheduler.has_work
            assert seat.rank.scheduler.pool.num_free == seat.rank.scheduler.pool.num_blocks
    return results


@pytest.mark.parametrize("name", BASELINES)
def test_every_request_is_answered_and_the_same_run_gives_the_same_record(name):
    some, offsets = rows(80), np.sort(np.random.default_rng(1).integers(0, 2_000_000, 80))
    runs = []
    for _ in range(2):
        group = LockStepGroup(BOUNDS, *BASELINES[name])
        results = serve([group], some, offsets)
        assert (results.status == ANSWERED).all()
        assert (results.num_tokens == some.num_output_tokens).all()
        assert group.num_tokens == int((some.num_prompt_tokens + some.num_output_tokens - 1).sum())
        assert group.expert_counts.sum() == group.num_tokens * 4
        assert (group.stall_shares >= 0).all()
        assert (group.busy_ns <= group.stepping_ns).all()
        runs.append((results.digest(), group.busy_ns.tolist(), group.stepping_ns))
    assert runs[0] == runs[1]


def test_every_baseline_sees_the_same_experts():
    some, offsets = rows(40), np.arange(40) * 10_000
    counts = []
    for deployment, pricing in BASELINES.values():
        group = LockStepGroup(BOUNDS, deployment, pricing)
        serve([group], some, offsets)
        counts.append(group.expert_counts)
    assert all((other == counts[0]).all() for other in counts)


def test_a_lone_request_takes_the_sum_of_its_stages():
    """A prompt of 3 tokens, then one decode, on the second of two ranks."""
    cost, gate = COST, OneExpertGate(8)
    group = LockStepGroup(BOUNDS, expert_parallel(cost, gate, 2))
    one = Rows(num_prompt_tokens=np.array([3]), num_output_tokens=np.array([2]))
    results = serve([group], one, [0])
    steps = [
        4 * (cost.attention_ns(0, Batch(np.zeros(1), np.array([n]))) + cost.expert_ns(n)) + cost.sample_ns(1)
        for n in (3, 1)
    ]
    assert [results.first_token_ns[0], results.last_token_ns[0]] == [steps[0], sum(steps)]
    assert group.stepping_ns == sum(steps)
    assert group.num_steps == 2


def test_replicas_are_groups_of_their_own():
    groups = [LockStepGroup(BOUNDS, *BASELINES["replica"]) for _ in range(3)]
    results = serve(groups, rows(30), np.arange(30) * 1000)
    assert (results.status == ANSWERED).all()
    assert all(group.num_steps for group in groups)


def test_a_group_without_steps_has_no_stalls():
    assert LockStepGroup(BOUNDS, *BASELINES["ep"]).stall_shares.tolist() == [0.0] * 4


# --- the bound --------------------------------------------------------------------------------------------------------


def decoding(num: int) -> Rows:
    """Requests of one prompt token, so that every token is a decode."""
    return Rows(num_prompt_tokens=np.ones(num, np.int64), num_output_tokens=np.full(num, 12))


def bound_of(group: LockStepGroup, deployment, attention_workers) -> float:
    """The bound from the experts that the run has drawn."""
    times = least_times(COST, Batch(np.zeros(16, np.int32), np.ones(16, np.int32)), most_rows=64)
    visits = group.expert_counts / group.num_tokens
    return throughput_bound(least_work_ns(visits, times, deployment.table, attention_workers))


def tokens_per_s(group: LockStepGroup) -> float:
    return group.num_tokens / group.stepping_ns * 1e9


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("seed", range(3))
def test_no_baseline_exceeds_the_bound(name, seed):
    deployment, pricing = BASELINES[name]
    gate = PopularityGate(np.random.default_rng(seed).dirichlet(np.ones(8)), 1)
    group = LockStepGroup(BOUNDS, replace(deployment, gate=gate), pricing)
    serve([group], decoding(200), np.zeros(200, np.int64))
    assert tokens_per_s(group) <= bound_of(group, deployment, range(deployment.num_ranks))


def test_a_baseline_that_takes_half_the_time_of_its_busiest_worker_exceeds_the_bound():
    deployment, _ = BASELINES["ideal ep"]
    cheating = StepPricing(price=lambda step: StepPrice(int(LOCK_STEP.price(step).busy_ns.max() // 2), 0))
    group = LockStepGroup(BOUNDS, deployment, cheating)
    serve([group], decoding(200), np.zeros(200, np.int64))
    assert tokens_per_s(group) > bound_of(group, deployment, range(4))


def test_balanced_ranks_of_linear_costs_reach_the_bound():
    """The balanced case, in which no other mode can be faster."""
    cost = PlainStages(network(num_experts=4), attention=(0, 90), expert=(0, 130), sample=(0, 20))
    deployment = expert_parallel(cost, DealingAllGate(4), 4)
    group = LockStepGroup(BOUNDS, deployment)
    serve([group], decoding(64), np.zeros(64, np.int64))
    assert group.stall_shares.tolist() == [0.0] * 4
    visits = group.expert_counts / group.num_tokens
    work = least_work_ns(visits, LeastTimes(token_ns=4 * 90 + 20, expert_ns=130), deployment.table, range(4))
    assert tokens_per_s(group) == pytest.approx(throughput_bound(work))


class DealingAllGate(DealingGate):
    """Deals experts by a token's place in the batch, so that every step is balanced."""

    def count(self, tokens, layers):
        return super().count(np.arange(len(tokens), dtype=np.uint64), layers)


# --- beside the preemptive mode ---------------------------------------------------------------------------------------


def test_one_rank_visits_the_same_experts_and_takes_as_long_as_a_rank_that_works_in_stages():
    """`preemptive` mode with one class runs whole passes: the same stages at the same prices, one after another."""
    cost = qllm()
    gate = PopularityGate(cost.popularity, cost.network.experts.top_k)
    group = LockStepGroup(BOUNDS, plain_replica(cost, gate))
    staged = StagedRank(BOUNDS, cost, in_order, passes_decodes=False)
    some, offsets = rows(12), np.zeros(12, np.int64)
    results = [serve([ranks], some, offsets) for ranks in (group, staged)]
    assert (staged.seats[0].rank.expert_counts == group.expert_counts).all()
    assert (results[0].last_token_ns == results[1].last_token_ns).all()
