"""A balanced case of equal costs, in which asynchrony has nothing to gain: the bound says why.

Four workers have attention and two experts of each layer, and equally many requests that all decode from the start. In
lock-step every worker then computes nearly all the time, so a mode that waits for no worker cannot be much faster. It
can only be slower, because its batches are smaller.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.plain_stages import PlainStages, network
from support.routers import router

from moestro.core.experts.expert_table import spread_evenly
from moestro.cost.gate import PopularityGate
from moestro.cost.links import FREE_LINK, Machines
from moestro.cost.model import Batch, zipf_popularity
from moestro.engine.settings import SchedulerSettings
from moestro.flow.registry import make_step_policy
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.group_figures import drawn_visits, least_times, least_work_ns, throughput_bound
from moestro.sim.groups.lock_step_group import LockStepGroup, expert_parallel
from moestro.sim.groups.worker_group import GroupLayout, WorkerGroup
from moestro.workload.rows import RequestForm, RequestMaker, Rows

NUM_WORKERS, NUM_SEQS, NUM_TOKENS = 4, 128, 16
BOUNDS = SchedulerSettings(
    num_blocks=4000, block_size=16, max_model_len=64, max_num_seqs=NUM_SEQS, max_num_batched_tokens=NUM_SEQS
)
ROWS = Rows(*(np.full(NUM_WORKERS * NUM_SEQS, number) for number in (1, NUM_TOKENS)))  # a prompt of one token: decodes


def costs(fixed_ns: int) -> PlainStages:
    """Attention and experts at equal costs: a call, and 100 ns a token."""
    return PlainStages(network(), attention=(fixed_ns, 100), expert=(fixed_ns, 100), sample=(0, 10))


class DealingGate(PopularityGate):
    """Deals experts in turn: equally many tokens of the same position visit each expert of a layer."""

    def count(self, tokens, layers):
        chosen = self.choose_layers(tokens, layers)[:, :, 0]
        return np.array([np.bincount(column, minlength=8) for column in chosen.T])

    def choose(self, tokens, layer):
        return self.choose_layers(tokens, range(layer, layer + 1))[:, 0]

    def choose_layers(self, tokens, layers):
        number, position = tokens >> np.uint64(24), tokens & np.uint64((1 << 24) - 1)
        first = (number // np.uint64(NUM_WORKERS) + position).astype(np.int64)
        return ((first[:, None] + np.arange(layers.start, layers.stop)) % 8).astype(np.int32)[:, :, None]


def tokens_per_s(group) -> float:
    cluster = Cluster([group], router(NUM_WORKERS, "round_robin"))
    results = cluster.run(RequestMaker(ROWS, RequestForm(block_size=16)), AtTimes(np.zeros(len(ROWS), np.int64)))
    assert results.is_answered.all()
    return int(results.num_tokens.sum()) / int(results.last_token_ns.max()) * 1e9


def both(cost: PlainStages, gate: PopularityGate, policy: str) -> tuple[float, float, float]:
    """Output tokens a second of ideal `ep` and `async`, over the bound of any mode whose calls are as large as here."""
    deployment = expert_parallel(cost, gate, NUM_WORKERS)
    layout = GroupLayout(
        num_homes=NUM_WORKERS,
        table=spread_evenly(4, 8, list(range(NUM_WORKERS)), NUM_WORKERS),
        machines=Machines(machine_of=(0,) * NUM_WORKERS, within=FREE_LINK, across=FREE_LINK),
        gate=gate,
        policy_of=lambda _: make_step_policy(policy, 1.0),
    )
    ideal = tokens_per_s(LockStepGroup(BOUNDS, deployment))
    flow = tokens_per_s(WorkerGroup(BOUNDS, layout, lambda _: cost))
    decodes = Batch(np.zeros(NUM_SEQS), np.ones(NUM_SEQS))
    times = least_times(cost, decodes, most_rows=NUM_WORKERS * NUM_SEQS // 8)
    visits = drawn_visits(gate, 4)
    return ideal, flow, throughput_bound(least_work_ns(visits, times, deployment.table, range(NUM_WORKERS)))


@pytest.mark.parametrize("policy", ["defrag", "flfs", "mtfs"])
@pytest.mark.parametrize("fixed_ns", [0, 5_000])
def test_ideal_ep_is_at_the_bound_where_loads_are_equal(fixed_ns, policy):
    ideal, flow, bound = both(costs(fixed_ns), DealingGate(zipf_popularity(8, 0.0), 1), policy)
    assert ideal == pytest.approx(bound, rel=1e-3)
    assert flow <= ideal * 1.001


def test_drawn_loads_leave_only_their_own_unevenness_to_gain():
    """Experts are equally likely, but their tokens are drawn, so some step's busiest worker has more than the mean."""
    gate = PopularityGate(zipf_popularity(8, 0.0), 1)
    ideal, flow, bound = both(costs(0), gate, "defrag")
    assert 0.93 * bound < ideal < flow <= bound * 1.01, "without any cost of a call, small batches cost nothing"
    ideal, flow, bound = both(costs(5_000), gate, "defrag")
    assert flow < ideal < bound * 1.01, "with one, they cost more than waiting does"
