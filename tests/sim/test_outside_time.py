"""Time of a request outside its engine: it delays all tokens alike, and the next turn of its session."""

from __future__ import annotations

import numpy as np
import pytest
from support.routers import router

from moestro.cost.gpus import A100
from moestro.cost.networks import network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError
from moestro.sim.cluster import IN_NO_TIME, AtTimes, ClosedLoop, Cluster, OutsideTime
from moestro.sim.groups.group import Group, OneRank
from moestro.sim.settings import SimEngineSettings
from moestro.workload.rows import RequestForm, RequestMaker, Rows

BOUNDS = SchedulerSettings(
    num_blocks=4000, block_size=16, max_model_len=2000, max_num_seqs=64, max_num_batched_tokens=256
)
COST = Roofline(RooflineSettings(network=network_named("qwen3-30b-a3b"), gpu=A100))
ROWS = Rows(np.array([900, 100, 17, 300]), np.array([3, 20, 1, 7]))
TIMES = np.array([0, 10, 20, 3_000_000])


def serve(outside: OutsideTime, arrivals):
    cluster = Cluster([Group(BOUNDS, OneRank(COST))], router(1, "round_robin"), outside=outside)
    return cluster.run(RequestMaker(ROWS, RequestForm(block_size=16)), arrivals)


def test_all_tokens_of_an_answer_are_later_by_it():
    plain, late = serve(IN_NO_TIME, AtTimes(TIMES)), serve(OutsideTime(2e6, 1e3), AtTimes(TIMES))
    delay = 2_000_000 + 1000 * ROWS.num_prompt_tokens
    assert (late.first_token_ns - plain.first_token_ns).tolist() == delay.tolist()
    assert (late.last_token_ns - plain.last_token_ns).tolist() == delay.tolist()
    assert late.arrival_ns.tolist() == plain.arrival_ns.tolist()


def test_the_next_turn_comes_after_the_client_has_its_answer():
    session, think = np.zeros(4, np.int64), np.full(4, 500)
    late = serve(OutsideTime(2e6), ClosedLoop(session, TIMES, think))
    assert (late.arrival_ns[1:] - late.last_token_ns[:-1]).tolist() == [500] * 3


def test_a_negative_time_is_refused():
    with pytest.raises(ConfigError, match=r"\[engines\] api_us must be at least 0"):
        SimEngineSettings(api_us=-1)
