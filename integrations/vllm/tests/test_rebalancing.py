"""Answers to vLLM's balancer without vLLM: the start file, the policy, what happens on failure, and the alarm."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from moestro_vllm.rebalancing import Rebalancing, rebalancing_from
from moestro_vllm.stall_alarm import StallAlarm

from moestro.errors import ConfigError
from moestro.placement.hosted import HostLoad, HostSizes

SIZES = HostSizes(6, 1, 1, 2)
OWN = np.array([[0, 1, 2, 3, 0, 1]] * 2)
BUSY = HostLoad.of_sum(np.array([[9.0, 1.0, 1.0, 1.0]] * 2), 10)


def rebalancing(tmp_path, rows: object = None, **environment: str) -> Rebalancing:
    config = {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 100, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "intermediate_size": 64, "first_k_dense_replace": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment.setdefault("MOESTRO_VLLM_NETWORK", str(tmp_path))
    if rows is not None:
        (tmp_path / "start.json").write_text(json.dumps({"physical_to_logical_map": rows}))
        environment["MOESTRO_VLLM_START_FILE"] = str(tmp_path / "start.json")
    return rebalancing_from(environment)


def place(found: Rebalancing, load: HostLoad = BUSY) -> list[list[int]]:
    return found.place(load, SIZES, OWN, lambda: OWN).tolist()


def test_a_file_whose_layers_are_alike_is_vllms_first_placement(tmp_path):
    row = [3, 2, 1, 0, 3, 3]
    found = rebalancing(tmp_path, [row, row])
    assert found.start.shared_row(4, 2) == row
    # A file of `moestro place --sglang` has a row for each dense layer too, which says nothing.
    assert rebalancing(tmp_path, [[0, 1, 2, 3, 0, 1], row, row]).start.shared_row(4, 2) == row


def test_a_file_whose_layers_differ_is_installed_by_the_first_rearrangement_with_tokens(tmp_path):
    rows = [[0, 1, 2, 3, 0, 0], [3, 2, 1, 0, 3, 3]]
    found = rebalancing(tmp_path, rows)
    assert found.start.shared_row(4, 2) is None
    idle = HostLoad.of_sum(np.zeros((2, 4)), 10)
    assert place(found, idle) == OWN.tolist()  # vLLM's trial run
    assert place(found) == rows
    assert place(found) == OWN.tolist()  # afterwards vLLM's own policy places
    dense_too = rebalancing(tmp_path, [[0, 1, 2, 3, 0, 1], *rows])
    assert place(dense_too) == rows


def test_after_the_start_file_the_policy_places(tmp_path):
    rows = [[0, 1, 2, 3, 0, 0], [3, 2, 1, 0, 3, 3]]
    found = rebalancing(tmp_path, rows, MOESTRO_VLLM_PLACEMENT="eplb")
    assert place(found) == rows
    placed = place(found)
    assert placed not in (rows, OWN.tolist())
    assert all(set(row) == {0, 1, 2, 3} for row in placed)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 1, 2, 3]], "has 4 slots; the server has 4 experts and num_redundant_experts 2: give --eplb-config .* 0"),
        ([[0, 1, 2, 2, 1, 0]], "a layer lacks one of 4 experts, or has others"),
        ([[0, 1, 2, 3, 4, 0]], "a layer lacks one of 4 experts, or has others"),
        ([[0, 1, 2, 3, -1, 0]], "a layer lacks one of 4 experts, or has others"),
    ],
)
def test_a_file_that_does_not_fit_the_server_is_refused(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        rebalancing(tmp_path, rows).start.shared_row(4, 2)


@pytest.mark.parametrize("rows", [[], [[]], [[0, 1], [0]], "x", [["a"]], {"a": 1}])
def test_a_file_without_equally_long_rows_is_refused_by_name(tmp_path, rows):
    with pytest.raises(ConfigError, match=r"MOESTRO_VLLM_START_FILE=.*start\.json"):
        rebalancing(tmp_path, rows)


def test_a_file_that_is_not_there_is_refused_and_the_writer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"No such file .* `moestro place --sglang .*none\.json` writes such a file"):
        rebalancing(tmp_path, MOESTRO_VLLM_START_FILE=str(tmp_path / "none.json"))


def test_a_file_for_another_network_leaves_the_first_rearrangement_to_vllm(tmp_path, caplog):
    found = rebalancing(tmp_path, [[0, 1, 2, 3, 0, 0]] * 4 + [[3, 2, 1, 0, 3, 3]])
    assert place(found) == OWN.tolist()
    assert "the file has 5 layers, and the engine has 2 layers with experts; MOESTRO_VLLM_NETWORK is" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_file_for_another_network_leaves_the_first_rearrangement_to_the_policy(tmp_path):
    rows = [[0, 1, 2, 3, 0, 0]] * 4 + [[3, 2, 1, 0, 3, 3]]
    found = rebalancing(tmp_path, rows, MOESTRO_VLLM_PLACEMENT="eplb")
    assert place(found) == place(rebalancing(tmp_path, MOESTRO_VLLM_PLACEMENT="eplb")) != OWN.tolist()


@pytest.mark.parametrize("name", ["WINDOW_SIZE", "STEP_INTERVAL", "STALL_S"])
def test_a_number_out_of_range_is_refused_by_name(tmp_path, name):
    with pytest.raises(ConfigError, match=f"MOESTRO_VLLM_{name} must be a whole number, 1 or more, got '-1'"):
        rebalancing(tmp_path, MOESTRO_VLLM_PLACEMENT="eplb", **{f"MOESTRO_VLLM_{name}": "-1"})


def alarm(limit_s: float = 10.0) -> tuple[StallAlarm, list[str], list[float]]:
    reports: list[str] = []
    now = [0.0]
    return StallAlarm(limit_s, reports.append, lambda: now[0]), reports, now


def test_a_plan_that_goes_on_is_reported_before_it_ends_and_after():
    reports: list[str] = []
    real = StallAlarm(0.05, reports.append)
    with real.during("planning"):
        deadline = time.monotonic() + 60
        while not reports and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.01)
    assert reports[0] == "planning has taken 0.05 s and goes on"
    assert reports[1].startswith("planning took 0.")


def test_a_quick_plan_and_quick_moves_are_not_reported():
    found, reports, now = alarm()
    with found.during("planning"):
        now[0] += 9
    for _ in range(5):
        for is_moving in (True, True, False):
            found.observe(is_moving=is_moving, is_worker_gone=False)
            now[0] += 4
    assert reports == []


def test_moves_that_do_not_end_are_reported_once_for_each_stall():
    found, reports, now = alarm()
    for _ in range(2):
        for _ in range(30):
            found.observe(is_moving=True, is_worker_gone=False)
            now[0] += 1
        found.observe(is_moving=False, is_worker_gone=False)
    assert reports == ["experts have been moving for 11 s: vLLM makes no new placement meanwhile"] * 2


def test_a_thread_that_ends_after_a_stall_is_reported_too():
    found, reports, now = alarm()
    found.observe(is_moving=True, is_worker_gone=False)
    now[0] += 11
    found.observe(is_moving=True, is_worker_gone=False)
    for _ in range(2):
        found.observe(is_moving=True, is_worker_gone=True)
    assert [text.split(":")[0] for text in reports] == [
        "experts have been moving for 11 s",
        "the thread that moves experts has ended",
    ]


def test_a_thread_that_ended_is_reported_at_once_and_once():
    found, reports, _ = alarm()
    for is_moving in (False, True, True):
        found.observe(is_moving=is_moving, is_worker_gone=True)
    assert len(reports) == 1
    assert "the thread that moves experts has ended" in reports[0]
