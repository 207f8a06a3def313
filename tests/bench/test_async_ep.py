"""`bench/serving/async_ep.py`: its closed load, its judgement of paced runs, and a small group on virtual time."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moestro.cost.model import PopularityForm

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from serving.async_ep_figures import compared, measured_summary
from serving.async_ep_load import Load
from serving.async_ep_servers import lateness
from serving.async_ep_sim import Case, ClosedLoop, HostTimes, simulate

LOAD = Load(num_requests=12, num_users=8, num_shared=64, num_own=8, outputs=(2, 4), num_warm=4, seed=1)
CASE = Case(
    mode="async",
    num_workers=8,
    num_expert_workers=4,
    gpu="a100",
    network="mixtral-8x7b",
    link="nvswitch-a100",
    gate=PopularityForm(family="uniform"),
    policy="priority",
    route="least_loaded",
    num_seqs=8,
    num_batched_tokens=512,
)


@pytest.mark.parametrize("num_users", [1, 5, 12, 20])
def test_a_closed_load_sends_each_request_once_and_keeps_its_bound(num_users):
    load = replace(LOAD, num_users=num_users)
    loop = ClosedLoop(load)
    assert loop.first_rows[: load.num_warm].tolist() == list(range(load.num_warm))
    in_flight, seen = loop.first_rows[load.num_warm :].tolist(), []
    now_ns = 20_000_000_000
    while in_flight:
        assert len(in_flight) <= num_users
        seen.append(in_flight.pop(0))
        now_ns += 1
        if (following := loop.next_turn(seen[-1], now_ns)) is not None:
            assert following[1] == now_ns
            in_flight.append(following[0])
    assert seen == list(range(load.num_warm, load.num_warm + load.num_requests))
    assert loop.next_turn(0, now_ns) is None  # the warm-up is followed by nothing


@pytest.mark.parametrize("mode", ["async", "ep"])
def test_a_slower_host_lengthens_a_simulated_run(mode):
    case = replace(CASE, mode=mode, num_expert_workers=4 if mode == "async" else 0)
    load = replace(LOAD, num_warm=case.num_workers - case.num_expert_workers)
    slow = replace(case, host=HostTimes(attention_us=2000, expert_us=2000, step_us=50_000))
    ideal, real, dilated = (simulate(each, load) for each in (case, slow, replace(slow, dilation=1e6)))
    assert real["duration_s"] > 1.5 * ideal["duration_s"]
    assert dilated["tokens_per_s"] == pytest.approx(ideal["tokens_per_s"], rel=0.02)
    assert len(ideal["stall_shares"]) == 8
    assert all(0 <= share < 1 for share in ideal["stall_shares"])
    if mode == "async":
        depths = np.array(ideal["queues"]["experts"])
        assert depths.shape == (len(ideal["queues"]["at_s"]), 33)  # 32 layers and the sampler
        assert depths.max() > 0


def paced_row(tokens_per_s: float, stall: float) -> dict[str, object]:
    times = {"mean": 10.0, "p99": 20.0}
    return {
        "mode": "ep",
        "gate": "uniform",
        "dilation": 8,
        "is_valid": True,
        "worst_late_share": 0.01,
        "tokens_per_s": tokens_per_s,
        "itl_ms": times,
        "ttft_ms": times,
        "stall_shares": [stall] * 8,
    }


def test_paced_figures_beyond_the_goal_are_named():
    [row] = compared([paced_row(88.0, 0.3)], [paced_row(100.0, 0.25)])
    assert row["tokens_per_s"]["difference"] == pytest.approx(-0.12)
    assert row["stall_engines"]["difference"] == pytest.approx(0.05)  # of the time, and not of the stall
    assert row["beyond_goal"] == ["tokens_per_s"]


def test_late_items_or_late_messages_make_a_run_invalid():
    good = {"num_items": 10, "item_ns": 1000, "late_ns": 40, "num_messages": 5, "message_late_ns": 20}
    assert lateness({"a": good}) == {"worst_late_share": 0.04, "is_valid": True}
    assert not lateness({"a": good, "b": {**good, "late_ns": 60}})["is_valid"]
    assert not lateness({"a": good, "b": {**good, "message_late_ns": 60}})["is_valid"]


def test_ratios_of_measured_systems_are_taken_round_by_round():
    rows = [
        {"round": number, "system": system, "tokens_per_s": value, "cpu_ms_per_token": 1.0}
        for number, pair in enumerate(((100.0, 50.0), (200.0, 50.0)))
        for system, value in zip(("fused", "ep 2"), pair, strict=True)
    ]
    summary = {row["system"]: row for row in measured_summary(rows)}
    assert summary["ep 2"]["tokens_per_s_over_fused"] == {"median": 0.375, "min": 0.25, "max": 0.5}
