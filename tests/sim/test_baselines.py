"""Baselines of expert parallelism: formulas on small steps, and laws over random steps beside a plain oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain_pipeline import plain_pipeline_ns
from support.plain_stages import DealingGate, OneExpertGate, PlainStages, decodes, network, step_of

from moestro.core.experts.expert_table import ExpertTable, spread_evenly
from moestro.cost.drawn_step import KeyedBatch, SlotRows
from moestro.cost.gate import PopularityGate
from moestro.cost.links import (
    FREE,
    NVSWITCH_A100,
    AllReduce,
    AllToAll,
    Link,
    Machines,
    all_reduce,
    all_to_all,
    all_to_all_of,
)
from moestro.cost.model import Batch, zipf_popularity
from moestro.cost.roofline import HostCost
from moestro.errors import ConfigError
from moestro.sim.groups.lock_step_group import (
    AMOE_STALL_SHARE,
    disaggregated,
    expert_parallel,
    lock_step,
    micro_batched,
    pipelined,
    plain_replica,
    with_stalls,
)

LINK = AllToAll(start_ns=500, bytes_per_s=1e9, row_bytes=40)  # 40 ns a row
FIXED = PlainStages(network(), attention=(700, 90), expert=(900, 130), sample=(300, 20))


def drawn_gate(num_experts=8, top_k=1, exponent=0.8) -> PopularityGate:
    return PopularityGate(zipf_popularity(num_experts, exponent), top_k)


def some_batches(rng, num_ranks, most=12):
    """Decodes and chunks of random sizes on each rank; about every fifth rank idles, but not all."""
    batches = []
    for rank in range(num_ranks):
        if rank and rng.random() < 0.2:
            batches.append(None)
            continue
        num_tokens = np.where(rng.random(n := int(rng.integers(1, most))) < 0.8, 1, rng.integers(2, 30, n))
        keys = rng.integers(0, 1 << 60, int(num_tokens.sum())).astype(np.uint64)
        batches.append(KeyedBatch(Batch(rng.integers(0, 99, n).astype(np.int32), num_tokens.astype(np.int32)), keys))
    return batches


# --- examples ---------------------------------------------------------------------------------------------------------


def test_one_rank_takes_the_sum_of_its_stages():
    gate, cost = DealingGate(8), FIXED
    price = lock_step(step_of(expert_parallel(cost, gate, 1), [decodes(range(16))]))
    layer = cost.attention_ns(0, Batch(np.zeros(16), np.ones(16))) + 8 * cost.expert_ns(2)
    assert price.duration_ns == 4 * layer + cost.sample_ns(16)
    assert price.busy_ns.tolist() == [price.duration_ns]


def test_the_busiest_rank_sets_the_time_of_each_stage():
    cost = PlainStages(network(num_layers=2, num_experts=2), attention=(0, 100), expert=(0, 1000), sample=(0, 10))
    step = step_of(expert_parallel(cost, OneExpertGate(2, hot=(0, 1)), 2), [decodes(range(3)), decodes(range(5))])
    price = lock_step(step)
    assert price.duration_ns == 2 * (500 + 8000) + 50
    assert price.busy_ns.tolist() == [2 * 300 + 8000 + 30, 2 * 500 + 8000 + 50]


def test_an_idle_rank_computes_its_experts_for_the_others():
    cost = PlainStages(network(num_experts=2))
    price = lock_step(step_of(expert_parallel(cost, OneExpertGate(2, hot=(1,)), 2), [decodes(range(4)), None]))
    assert price.busy_ns[1] == 4 * 4 * 1000


def test_dense_layers_need_no_meeting():
    """Rank 0 is slow and rank 1 fast in the same proportion; only layers 1 and 3 have experts."""
    cost = PlainStages(network(num_layers=5, num_experts=2, dense=(0, 2, 4)), attention=(0, 100), expert=(0, 1))
    times = step_of(expert_parallel(cost, DealingGate(2), 2), [decodes(range(4)), decodes([0, 1])]).micro_batches(1)
    assert times.attention_ns[0].tolist() == [[800, 800, 400 + 40], [400, 400, 200 + 20]]
    assert times.experts_ns[0].tolist() == [[3, 3], [3, 3]]


def test_exchanges_move_only_rows_that_leave_their_rank():
    cost = PlainStages(network(num_layers=1, num_experts=2))
    deployment = expert_parallel(cost, OneExpertGate(2, hot=(0,)), 2, LINK)
    price = lock_step(step_of(deployment, [decodes(range(9)), decodes(range(3))]))
    assert price.duration_ns == 900 + 12_000 + 90 + 2 * (500 + 3 * 40), "rank 1 sends 3 rows"


def test_a_row_crosses_once_for_each_worker_however_many_experts_it_visits_there():
    cost = PlainStages(network(num_layers=1, num_experts=4, top_k=4))
    deployment = expert_parallel(cost, DealingGate(4, top_k=4), 2, LINK)
    step = step_of(deployment, [decodes(range(5)), decodes(range(5))])
    assert step.micro_batches(1).exchange_ns.tolist() == [[500 + 5 * 40]]


def test_machines_exchange_over_both_links_at_once_and_the_slower_one_counts():
    """Four ranks on two machines, one expert each; every rank has 4 tokens for every expert."""
    cost = PlainStages(network(num_layers=1, num_experts=4))
    fast = Link(name="fast", message_ns=100, latency_ns=50, bytes_per_s=8192 * 1e9 / 1)  # a row in 1 ns
    slow = Link(name="slow", message_ns=200, latency_ns=300, bytes_per_s=8192 * 1e9 / 10)
    machines = Machines(machine_of=(0, 0, 1, 1), within=fast, across=slow)
    deployment = expert_parallel(cost, DealingGate(4), 4, all_to_all_of(machines, cost.network))
    times = step_of(deployment, [decodes(range(16))] * 4).micro_batches(1)
    assert times.exchange_ns.tolist() == [[500 + 8 * 10]]
    alone = Machines(machine_of=(0, 0, 0, 0), within=fast, across=slow)
    assert all_to_all_of(alone, cost.network) == all_to_all(fast, cost.network)
    deployment = replace(deployment, exchange=all_to_all(fast, cost.network))
    assert step_of(deployment, [decodes(range(16))] * 4).micro_batches(1).exchange_ns.tolist() == [[150 + 12]]


def test_a_replica_pays_two_all_reduces_in_every_layer():
    cost = PlainStages(network(num_layers=3, dense=(1,)))
    ring = AllReduce(num_gpus=4, start_ns=100, bytes_per_s=1e9, row_bytes=40)
    batches = [decodes(range(10))]
    free = lock_step(step_of(plain_replica(cost, DealingGate(8)), batches))
    paid = lock_step(step_of(plain_replica(cost, DealingGate(8), ring), batches))
    assert paid.duration_ns - free.duration_ns == 3 * 2 * (100 + 2 * 3 / 4 * 10 * 40)
    assert paid.busy_ns.tolist() == free.busy_ns.tolist()
    alone = all_reduce(NVSWITCH_A100, cost.network, 1)
    assert alone.is_free
    assert lock_step(step_of(plain_replica(cost, DealingGate(8), alone), batches)) == free


def test_the_host_of_the_largest_batch_comes_on_top():
    host = HostCost(step_ns=1000, sequence_ns=7)
    deployment = expert_parallel(FIXED, DealingGate(8), 2)
    batches = [decodes(range(3)), decodes(range(5))]
    plain, hosted = (lock_step(step_of(some, batches)) for some in (deployment, replace(deployment, host=host)))
    assert hosted.duration_ns - plain.duration_ns == 1000 + 5 * 7


def test_two_batches_hide_an_exchange_behind_compute():
    """Halves of 10 tokens: 1 us of attention, 1 us of experts and 1 us of exchange each, on two equal ranks."""
    cost = PlainStages(network(num_layers=50, num_experts=2), attention=(0, 100), expert=(0, 100), sample=(0, 0))
    link = AllToAll(start_ns=800, bytes_per_s=1e9, row_bytes=40)  # 5 rows of a half leave: 1 us
    deployment = expert_parallel(cost, DealingGate(2), 2, link)
    step = step_of(deployment, [decodes(range(20)), decodes(range(20))], 2)
    plain, overlapped = pipelined(step, 1).duration_ns, pipelined(step, 2).duration_ns
    assert plain == 50 * (2000 + 2000 + 2 * 1200)
    assert overlapped <= 50 * 4000 + 4000, "only the first and the last exchanges are not hidden"


def test_ping_pong_keeps_attention_and_experts_busy_at_once():
    """Equal stages on equal workers: two micro-batches take turns, and neither side waits after the start."""
    cost = PlainStages(network(num_layers=50, num_experts=2), attention=(0, 100), expert=(0, 100), sample=(0, 0))
    step = step_of(disaggregated(cost, DealingGate(2), 2, 2), [decodes(range(20)), decodes(range(20))], 2)
    assert pipelined(step, 1).duration_ns == 50 * 4000
    assert pipelined(step, 2).duration_ns == 50 * 2000 + 1000
    assert pipelined(step, 2).busy_ns.tolist() == [50 * 2000] * 4


def test_one_micro_batch_is_chosen_where_fixed_costs_make_more_of_them_slower():
    cost = PlainStages(network(), attention=(1000, 0), expert=(3000, 0), sample=(0, 0))
    step = step_of(disaggregated(cost, OneExpertGate(8), 1, 1), [decodes(range(8))], 6)
    assert (
        micro_batched(1, 2, 3).price(step).duration_ns == lock_step(step).duration_ns < pipelined(step, 2).duration_ns
    )


@pytest.mark.parametrize("share", [0.3, AMOE_STALL_SHARE])
def test_published_stalls_are_reached_and_never_shortened(share):
    step = step_of(expert_parallel(FIXED, DealingGate(8), 4), [decodes(range(8))] * 4)
    price = with_stalls(share).price(step)
    assert 1 - price.busy_ns.mean() / price.duration_ns == pytest.approx(share, abs=1e-5)
    assert with_stalls(0).price(step).duration_ns == lock_step(step).duration_ns


def test_a_stall_share_of_one_is_refused():
    with pytest.raises(ConfigError, match=r"below 1, got 1\.0"):
        with_stalls(1.0)


def test_a_slow_worker_delays_all_others():
    deployment = expert_parallel(PlainStages(network()), DealingGate(8), 2)
    batches = [decodes(range(8)), decodes(range(8))]
    fast, slow = (
        lock_step(step_of(deployment, batches)),
        lock_step(step_of(replace(deployment, slowdown=np.array([1.0, 1.5])), batches)),
    )
    assert slow.duration_ns == 1.5 * fast.duration_ns
    assert slow.busy_ns.tolist() == [fast.busy_ns[0], 1.5 * fast.busy_ns[1]]


def test_jitter_multiplies_the_same_stages_whatever_the_number_of_micro_batches():
    rng = np.random.default_rng(3)
    deployment = expert_parallel(PlainStages(network()), DealingGate(8), 2)
    step = step_of(
        replace(deployment, jitter=lambda shape: 1 + rng.exponential(0.5, shape)), [decodes(range(8))] * 2, 2
    )
    whole, halves = step.micro_batches(1), step.micro_batches(2)
    np.testing.assert_allclose(halves.experts_ns.sum(axis=0), whole.experts_ns[0], atol=2)
    assert whole.busy_ns.min() > lock_step(step_of(deployment, [decodes(range(8))] * 2)).busy_ns.max()


def test_copies_share_the_tokens_of_an_expert_and_dead_workers_get_none():
    # int32[workers, layers, slots]: expert 0 is on all three workers, the others on one
    table = ExpertTable(
        0,
        np.array([[[0, 1]], [[0, 2]], [[0, -1]], [[0, -1]]], np.int32),
        3,
        np.array([True, True, True, False]),
    )
    rows = SlotRows(table).rows(np.array([[[[10, 5, 4]], [[2, 0, 0]]]]))
    assert rows[0].sum(axis=0)[:, 0].tolist() == [[5, 5], [3, 4], [4, 0], [0, 0]]


# --- laws -------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_the_same_tokens_visit_the_same_experts_however_many_ranks_and_micro_batches(seed):
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 1 << 60, 24).astype(np.uint64)
    gate, cost = drawn_gate(top_k=2), PlainStages(network(top_k=2))
    counts = [
        step_of(expert_parallel(cost, gate, ranks, link), [decodes(part) for part in np.array_split(keys, ranks)], n)
        for ranks in (1, 3, 4)
        for link in (FREE, LINK)
        for n in (1, 6)
    ]
    for step in counts:
        assert (step.expert_counts == counts[0].expert_counts).all()
        for number in (1, 2, 3) if step._pricer.num_segments == 6 else (1,):
            rows = step.micro_batches(number).experts_ns.sum() / cost.expert_ns(1)
            assert rows == 24 * 2 * 4, "every visit is computed once"


def test_every_token_and_every_sequence_is_in_one_micro_batch():
    rng = np.random.default_rng(1)
    cost = PlainStages(network(num_layers=1))
    for _ in range(50):
        batches = some_batches(rng, 3)
        times = step_of(expert_parallel(cost, drawn_gate(), 3), batches, 6)
        whole = times.micro_batches(1)
        for number in (2, 3, 6):
            parts = times.micro_batches(number)
            assert (parts.attention_ns.sum(axis=0) == whole.attention_ns[0]).all()
            assert (parts.experts_ns.sum(axis=0) == whole.experts_ns[0]).all()
            loads = parts.attention_ns[:, :, 0] / cost.attention[1]
            assert (loads.max(axis=0) - loads.min(axis=0) <= 1).all(), "micro-batches are equal to one token"


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["ep", "disaggregated"]), st.integers(1, 3))
def test_the_pipeline_is_that_of_a_plain_oracle(seed, kind, num_parts):
    rng = np.random.default_rng(seed)
    gate, num_ranks = drawn_gate(top_k=2), int(rng.integers(1, 4))
    cost = replace(FIXED, network=network(num_layers=3, top_k=2, dense=(0,) if seed % 2 else ()))
    if kind == "ep":
        deployment = expert_parallel(cost, gate, num_ranks, LINK)
    else:
        deployment = disaggregated(cost, gate, num_ranks, int(rng.integers(1, 4)), LINK)
    step = step_of(deployment, some_batches(rng, num_ranks), 6)
    price = pipelined(step, num_parts)
    assert price.duration_ns == plain_pipeline_ns(step.micro_batches(num_parts), num_ranks, kind == "ep")
    assert price.duration_ns >= price.busy_ns.max()
    assert price.duration_ns <= num_parts * lock_step(step).duration_ns


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_overlap_gains_nothing_where_exchanges_are_free_costs_linear_and_one_worker_always_hot(seed, num_ranks):
    """Halves of even batches: without fixed costs and exchanges there is nothing to hide and nothing to lose."""
    rng = np.random.default_rng(seed)
    cost = PlainStages(network(), attention=(0, 100), expert=(0, 1000), sample=(0, 10))
    num_tokens = 2 * int(rng.integers(1, 20))
    deployment = expert_parallel(cost, OneExpertGate(8, hot=(int(rng.integers(8)),)), num_ranks)
    step = step_of(deployment, [decodes(range(num_tokens))] * num_ranks, 2)
    assert pipelined(step, 2).duration_ns == pipelined(step, 1).duration_ns


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_the_chosen_number_of_micro_batches_is_never_slower_than_lock_step(seed, is_colocated):
    rng = np.random.default_rng(seed)
    gate = drawn_gate()
    deployment = expert_parallel(FIXED, gate, 4, LINK) if is_colocated else disaggregated(FIXED, gate, 3, 2, LINK)
    step = step_of(deployment, some_batches(rng, deployment.num_ranks), 6)
    price = micro_batched(1, 2, 3).price(step)
    assert max(price.busy_ns) <= price.duration_ns <= lock_step(step).duration_ns


def test_balanced_ranks_never_stall():
    step = step_of(expert_parallel(PlainStages(network()), DealingGate(8), 4), [decodes(range(16))] * 4)
    price = lock_step(step)
    assert price.busy_ns.tolist() == [price.duration_ns] * 4


def test_segments_must_suit_the_number_of_micro_batches():
    step = step_of(expert_parallel(FIXED, DealingGate(8), 1), [decodes(range(4))], 2)
    with pytest.raises(AssertionError, match="2 segments do not make 3 micro-batches"):
        step.micro_batches(3)
    assert micro_batched(1, 2, 3).num_segments == math.lcm(1, 2, 3)


def test_workers_without_experts_are_those_of_attention():
    deployment = disaggregated(FIXED, DealingGate(8), 2, 3)
    assert step_of(deployment, [decodes([1]), None]).holds_experts.tolist() == [False, False, True, True, True]
    table = spread_evenly(4, 8, [0, 1], 2)
    assert (deployment.table.logical_of[2:] != -1).sum() == (table.logical_of != -1).sum()
