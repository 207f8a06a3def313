"""Places for latency-sensitive sequences alone (`max_num_urgent_seqs`) in a group of workers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.plain_stages import PlainStages, network
from support.routers import router

from moestro.core.experts.expert_table import spread_evenly
from moestro.core.views import BE
from moestro.cost.gate import PopularityGate
from moestro.cost.links import FREE_LINK, Machines
from moestro.cost.model import zipf_popularity
from moestro.engine.settings import SchedulerSettings
from moestro.flow.registry import make_step_policy
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.worker_group import GroupLayout, WorkerGroup
from moestro.workload.rows import RequestForm, RequestMaker, Rows

NUM_SEQS = 2
BOUNDS = SchedulerSettings(
    num_blocks=500, block_size=4, max_model_len=80, max_num_seqs=NUM_SEQS, max_num_batched_tokens=8,
    scheduling_policy="qllm",
)  # fmt: skip
COST = PlainStages(network(), attention=(1000, 10), expert=(1000, 10), sample=(10, 0))


def make_group(num_urgent: int) -> WorkerGroup:
    layout = GroupLayout(
        num_homes=1,
        table=spread_evenly(4, 8, [1, 2], 3),
        machines=Machines(machine_of=(0, 0, 0), within=FREE_LINK, across=FREE_LINK),
        gate=PopularityGate(zipf_popularity(8, 0.0), 1),
        policy_of=lambda _: make_step_policy("qllm", float("inf")),
    )
    return WorkerGroup(replace(BOUNDS, max_num_urgent_seqs=num_urgent), layout, lambda _: COST)


def serve(num_urgent: int, is_ls: list[bool], arrivals_ns: list[int], num_tokens: int = 30):
    """Serve requests of 4 tokens; results, and the most sequences that ran at once, of all and of best effort."""
    group, num = make_group(num_urgent), len(is_ls)
    table, most, turn = group.seats[0].rank.scheduler.table, [0, 0], group.turn

    def watched(*args):
        output = turn(*args)
        most[:] = max(most[0], len(table.running)), max(most[1], int((table.service_class[table.running] == BE).sum()))
        return output

    group.turn = watched
    rows = Rows(np.full(num, 4), np.where(is_ls, 5, num_tokens), is_ls=np.array(is_ls))
    results = Cluster([group], router(1, "round_robin")).run(
        RequestMaker(rows, RequestForm(block_size=4)), AtTimes(np.array(arrivals_ns))
    )
    assert results.is_answered.all()
    assert np.array_equal(results.num_tokens, rows.num_output_tokens)
    pool = group.executors[0]._core._pool
    assert pool.num_free_rows == group.executors[0]._core.shape.num_rows
    return results, most


@pytest.mark.parametrize(("num_urgent", "waits"), [(0, True), (2, False)])
def test_an_urgent_request_takes_its_own_place_while_best_effort_has_all_others(num_urgent, waits):
    results, _ = serve(num_urgent, [False, False, True], [0, 0, 50_000])
    first_end_ns = results.last_token_ns[:2].min()
    assert (results.first_token_ns[2] > first_end_ns) is np.bool_(waits)


def test_best_effort_takes_no_place_of_urgent_requests_and_these_take_both_kinds():
    _, most = serve(2, [False] * 6, [0] * 6)
    assert most == [NUM_SEQS, NUM_SEQS]
    _, most = serve(2, [True] * 8, [0] * 8)
    assert most == [NUM_SEQS + 2, 0]


@pytest.mark.parametrize("seed", range(3))
def test_law_all_requests_end_and_places_are_never_exceeded(seed):
    rng = np.random.default_rng(seed)
    num = 14
    is_ls = (rng.random(num) < 0.5).tolist()
    _, (most, most_be) = serve(3, is_ls, np.sort(rng.integers(0, 2_000_000, num)).tolist(), int(rng.integers(2, 20)))
    assert most <= NUM_SEQS + 3
    assert most_be <= NUM_SEQS
