"""The upper bound on throughput: who must work for a token, and how work that several devices can do is spread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain_stages import PlainStages, network

from moestro.core.experts.expert_table import ExpertTable, spread_evenly
from moestro.cost.gate import PopularityGate
from moestro.cost.model import Batch
from moestro.sim.groups.group_figures import (
    LeastTimes,
    drawn_visits,
    largest_share,
    least_times,
    least_work_ns,
    throughput_bound,
)

TIMES = LeastTimes(token_ns=400.0, expert_ns=100.0)


def test_equal_experts_on_attention_ranks_share_the_work_equally():
    work = least_work_ns(np.full((2, 4), 0.25), TIMES, spread_evenly(2, 4, [0, 1, 2, 3], 4), range(4))
    assert work.tolist() == [100 + 50] * 4
    assert throughput_bound(work) == pytest.approx(1e9 / 150)
    assert 1 / largest_share(work) == pytest.approx(4)


def test_hot_experts_bound_more_tightly_when_the_same_are_hot_in_all_layers():
    table = spread_evenly(2, 2, [2, 3], 4)
    same = least_work_ns(np.array([[0.9, 0.1], [0.9, 0.1]]), TIMES, table, range(2))
    permuted = least_work_ns(np.array([[0.9, 0.1], [0.1, 0.9]]), TIMES, table, range(2))
    assert same.tolist() == pytest.approx([200, 200, 180, 20])
    assert permuted.tolist() == pytest.approx([200, 200, 100, 100])


def test_requests_may_avoid_the_rank_with_the_hot_expert():
    work = least_work_ns(
        np.array([[0.9, 0.1]]), LeastTimes(token_ns=60, expert_ns=100), spread_evenly(1, 2, [0, 1], 2), [0, 1]
    )
    assert work.tolist() == pytest.approx([90, 70]), "all attention on the other rank"


def test_copies_take_the_load_of_an_expert():
    table = ExpertTable(0, np.array([[[0, 1]], [[0, -1]]], np.int32), 2, np.ones(2, np.bool_))
    work = least_work_ns(np.array([[0.8, 0.2]]), LeastTimes(token_ns=0, expert_ns=100), table, [0, 1])
    assert work.tolist() == pytest.approx([50, 50])
    dead = ExpertTable(1, table.logical_of, 2, np.array([True, False]))
    assert least_work_ns(np.array([[0.8, 0.2]]), LeastTimes(token_ns=0, expert_ns=100), dead, [0])[0] == pytest.approx(
        100
    )


def test_attention_leaves_a_slow_worker_until_both_work_equally_long():
    times, table = LeastTimes(token_ns=60, expert_ns=100), spread_evenly(1, 2, [0, 1], 2)
    slow = least_work_ns(np.array([[0.5, 0.5]]), times, table, [0, 1], np.array([1.0, 2.0]))
    assert slow.tolist() == pytest.approx([320 / 3] * 2), (
        "most attention is on the first, its half of the experts on the second"
    )
    even = least_work_ns(np.array([[0.5, 0.5]]), times, table, [0, 1], np.array([2.0, 2.0]))
    assert even.tolist() == pytest.approx([160, 160])


def test_least_times_are_those_of_the_best_batch():
    cost = PlainStages(network(), attention=(1000, 90), expert=(900, 130), sample=(300, 20))
    batch = Batch(np.zeros(10, np.int32), np.ones(10, np.int32))
    times = least_times(cost, batch, most_rows=1000)
    assert times.token_ns == pytest.approx(4 * (100 + 90) + 30 + 20)
    assert times.expert_ns == pytest.approx(0.9 + 130)


def test_visits_are_drawn_because_no_expert_is_chosen_twice():
    popularity = np.array([0.7, 0.1, 0.1, 0.1])
    for top_k, hottest in ((1, 0.7), (2, 0.7 + 0.3 * 0.7 / 0.9)):
        visits = drawn_visits(PopularityGate(popularity, top_k), 3)
        assert visits.sum(axis=1) == pytest.approx([top_k] * 3)
        assert visits[:, 0] == pytest.approx([hottest] * 3, abs=0.02)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_the_spread_is_the_best_of_a_plain_search(seed):
    """The largest work equals the bound of the tightest set of workers (max-flow min-cut), and nothing is lost."""
    rng = np.random.default_rng(seed)
    num_workers, num_experts = int(rng.integers(1, 5)), int(rng.integers(1, 6))
    held = rng.random((num_workers, num_experts)) < 0.5
    held[rng.integers(num_workers, size=num_experts), np.arange(num_experts)] = True
    logical_of = np.where(held, np.arange(num_experts), -1).astype(np.int32)[:, None, :]
    table = ExpertTable(0, logical_of, num_experts, np.ones(num_workers, np.bool_))
    visits = rng.dirichlet(np.ones(num_experts))[None]
    attention = np.flatnonzero(rng.random(num_workers) < 0.6)
    attention = attention if len(attention) else np.array([0])
    times = LeastTimes(token_ns=float(rng.random() * 100), expert_ns=100.0)
    slowdown = rng.uniform(0.5, 3.0, num_workers) if seed % 2 else np.ones(num_workers)
    work = least_work_ns(visits, times, table, attention, slowdown)
    assert (work / slowdown).sum() == pytest.approx(times.token_ns + 100)
    most = 0.0
    for chosen in range(1, 1 << num_workers):  # work that only these workers can do
        inside = np.array([bool(chosen >> worker & 1) for worker in range(num_workers)])
        forced = 100 * visits[0, ~held[~inside].any(axis=0)].sum()
        forced += times.token_ns if inside[attention].all() else 0.0
        most = max(most, forced / (1 / slowdown)[inside].sum())
    assert work.max() == pytest.approx(most, rel=1e-3)
