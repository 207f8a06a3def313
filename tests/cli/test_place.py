"""`moestro place` from a server's dump to files for engines, as an operator runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml

from moestro.cli import main
from moestro.cli.placing.question import filled_slots, first_table, make_devices, missing_ranks, spread_sources
from moestro.cli.placing.settings import DeviceSettings
from moestro.cli.placing.verb import mean_sources
from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.cost.networks import known_name, network_named
from moestro.errors import ConfigError
from moestro.placement.placement_file import PlacementFile, table_of_slots

DUMPS = Path(__file__).parents[1] / "workload" / "sglang_dumps"
EXAMPLE = Path(__file__).parents[2] / "examples" / "gptoss20b_mmlu.npz"
RANKS = [DUMPS / "per_token_0.pt", DUMPS / "per_token_1.pt"]
HEAVIEST_FIRST = """
import numpy as np
from moestro.core.experts.expert_table import EMPTY, ExpertTable

def heaviest_first(view):
    devices, total = view.devices, view.load.total
    logical_of = np.full_like(view.table.logical_of, EMPTY)
    for layer, weights in enumerate(total):
        load, used = np.zeros(devices.num_devices), np.zeros(devices.num_devices, int)
        for expert in np.argsort(-weights, kind="stable"):
            room = devices.is_alive & (used < devices.num_slots)
            device = int(np.argmin(np.where(room, load, np.inf)))
            logical_of[device, layer, used[device]] = expert
            used[device] += 1
            load[device] += weights[expert]
    return ExpertTable(view.table.version + 1, logical_of, view.table.num_experts, devices.is_alive)

def nonsense(view):
    return "no table" if view.table.num_experts > 4 else view.table

def overfull(view):
    if view.table.num_experts == 4:
        return view.table
    every = np.broadcast_to(np.arange(12, dtype=np.int32), (*view.table.logical_of.shape[:2], 12))
    return ExpertTable(1, every.copy(), 12, view.devices.is_alive)
"""


class MoeLoadBalancerConfig(msgspec.Struct, forbid_unknown_fields=True):
    """TensorRT-LLM's class of this name (`llmapi/llm_args.py`, strict pydantic): its fields and types."""

    num_slots: int | None = None
    initial_global_assignments: dict[int, list[int]] | None = None
    layer_updates_per_iter: int = 0


@pytest.fixture
def policy(tmp_path: Path) -> str:
    (tmp_path / "my_policy.py").write_text(HEAVIEST_FIRST)
    return f"{tmp_path / 'my_policy.py'}:"


def place(*arguments: object) -> int:
    """Run the command in this process; returns the exit status."""
    try:
        main(["place", *map(str, arguments)])
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def test_a_dump_becomes_files_for_the_engines(tmp_path, policy):
    arguments = [
        *RANKS, "--devices", 4, "--slots-per-device", 4, "--nodes", 2, "--current", RANKS[0],
        "--policy", f"{policy}heaviest_first", "--compare", "--check", DUMPS / "stat.pt",
        "--out", "out.json", "--sglang", "init.json", "--tensorrt-llm", "moe.yaml", "--png", "load.png",
        "--save-profile", "load.moestro",
    ]  # fmt: skip
    command = [sys.executable, "-c", "from moestro.cli import main; main()", "place", *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("3 layers with 12 experts, 2 sources, 6 steps", "balance, mean of ratios (SGLang)", "Payback: ",
                  "Moves by device", "all under their default settings", "Under the load of stat.pt",
                  "--ep-size 4 --ep-num-redundant-experts 4"):  # fmt: skip
        assert words in done.stdout, words
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")

    found = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=PlacementFile)
    assert (found.layers, found.num_model_layers) == ([1, 2, 3], 4)
    assert found.after["step_s"] < found.before["step_s"]
    assert {layer for layer, *_ in found.moves} <= {1, 2, 3}
    table = np.array(found.table)

    slots = json.loads((tmp_path / "init.json").read_text())
    assert list(slots) == ["physical_to_logical_map"]  # SGLang refuses any other key
    rows = np.array(slots["physical_to_logical_map"])
    assert rows.shape == (4, 16)
    for layer, row in enumerate(rows):
        assert set(row.tolist()) == set(range(12))
        for device, held in enumerate(row.reshape(4, 4).tolist()):
            assert len(set(held)) == 4
            assert layer == 0 or set(table[layer - 1, device].tolist()) - {EMPTY} <= set(held)

    assert_tensorrt_llm_takes(tmp_path / "moe.yaml", num_ranks=4, num_experts=12, layers=(1, 2, 3))
    balancer = yaml.safe_load((tmp_path / "moe.yaml").read_text())
    assert balancer["initial_global_assignments"] == {layer: rows[layer].tolist() for layer in (1, 2, 3)}


def assert_tensorrt_llm_takes(path: Path, num_ranks: int, num_experts: int, layers: tuple[int, ...]) -> None:
    """Read a file as TensorRT-LLM does, and check what it and its load balancer require of each layer with experts.

    `validate_load_balancer` calls `yaml.safe_load` and passes the keys to the class; then each layer with experts asks
    for its row by number, whose length must be `num_slots`, and takes `num_slots // ep_size` successive slots a rank.
    """
    config = msgspec.convert(yaml.safe_load(path.read_text()), MoeLoadBalancerConfig)
    assert config.layer_updates_per_iter == 0  # static
    assert config.num_slots % num_ranks == 0
    assert set(config.initial_global_assignments) == set(layers)
    for row in config.initial_global_assignments.values():
        assert len(row) == config.num_slots
        assert set(row) == set(range(num_experts))


@pytest.mark.parametrize("dead", [None, "2"])
def test_tensorrt_llm_takes_files_of_other_groups(tmp_path, policy, dead):
    path = tmp_path / "moe.yaml"
    arguments = [DUMPS / "stat.pt", "--devices", 6, "--slots-per-device", 3, "--policy", f"{policy}heaviest_first"]
    assert place(*arguments, "--tensorrt-llm", path, *([] if dead is None else ["--dead", dead])) == 0
    assert_tensorrt_llm_takes(path, num_ranks=6 if dead is None else 5, num_experts=12, layers=(1, 2, 3))


def test_layers_for_multi_token_prediction_get_rows_for_tensorrt_llm(tmp_path, policy, capsys):
    path = tmp_path / "moe.yaml"
    arguments = [DUMPS / "stat.pt", "--devices", 6, "--slots-per-device", 3, "--policy", f"{policy}heaviest_first"]
    assert place(*arguments, "--mtp-layers", 2) == 2
    assert "give that too" in capsys.readouterr().err
    assert place(*arguments, "--tensorrt-llm", path) == 0
    assert "with multi-token prediction it needs rows of --mtp-layers" in " ".join(capsys.readouterr().out.split())
    placed = yaml.safe_load(path.read_text())["initial_global_assignments"]
    assert place(*arguments, "--tensorrt-llm", path, "--mtp-layers", 2) == 0
    assert_tensorrt_llm_takes(path, num_ranks=6, num_experts=12, layers=(1, 2, 3, 4, 5))
    in_order = [slot % 12 for slot in range(18)]
    assert yaml.safe_load(path.read_text())["initial_global_assignments"] == placed | {4: in_order, 5: in_order}


def test_a_written_placement_is_a_present_placement_and_a_written_profile_a_profile(tmp_path, policy, capsys):
    common = ["--devices", 4, "--slots-per-device", 4]
    out, again, own = tmp_path / "out.json", tmp_path / "again.json", tmp_path / "own"
    assert place(*RANKS, *common, "--policy", f"{policy}heaviest_first", "--out", out, "--save-profile", own) == 0
    assert place(own, *common, "--policy", "static", "--current", out, "--out", again) == 0
    first, second = (json.loads(path.read_text()) for path in (out, again))
    assert second["before"] == pytest.approx(first["after"])
    assert second["table"] == first["table"]
    assert second["moves"] == []
    assert "Moves: none" in capsys.readouterr().out


def test_a_placement_for_sglang_is_a_present_placement(tmp_path, policy):
    common = [DUMPS / "stat.pt", "--devices", 4, "--policy", "static"]
    init, out = tmp_path / "init.json", tmp_path / "out.json"
    assert place(*common, "--slots-per-device", 4, "--sglang", init) == 0
    assert place(*common, "--slots-per-device", 5, "--current", init, "--out", out) == 0
    rows = np.array(json.loads(init.read_text())["physical_to_logical_map"]).reshape(4, 4, 4)[1:]
    assert (np.array(json.loads(out.read_text())["table"])[:, :, :4] == rows).all()


def test_a_dead_device_gets_nothing_and_lost_experts_come_from_the_checkpoint(tmp_path, policy, capsys):
    out, init = tmp_path / "out.json", tmp_path / "init.json"
    arguments = ["--devices", 4, "--slots-per-device", 4, "--dead", "1,", "--out", out, "--sglang", init]
    assert place(DUMPS / "stat.pt", *arguments) == 2
    arguments[5] = "1"
    assert place(DUMPS / "stat.pt", *arguments, "--policy", f"{policy}heaviest_first") == 0
    shown = capsys.readouterr().out
    assert "1 of them dead" in shown
    assert "experts without a live copy: up to 4 a layer, in 3 layers" in shown
    assert "come from the checkpoint" in shown
    found = json.loads(out.read_text())
    assert all(expert == EMPTY for layer in found["table"] for expert in layer[1])
    assert len(json.loads(init.read_text())["physical_to_logical_map"][0]) == 12  # three devices


def test_a_topology_has_its_own_slots_and_speeds(tmp_path, policy):
    topology, out = tmp_path / "topology.yaml", tmp_path / "out.json"
    topology.write_text(
        "devices:\n- {node: a, slots: 6, speed: 2.0}\n- {node: b, slots: 4, count: 2}\n- {node: b, slots: 4, alive: no}"
    )
    common = [DUMPS / "stat.pt", "--topology", topology, "--policy", f"{policy}heaviest_first"]
    assert place(*common, "--out", out) == 0
    devices = json.loads(out.read_text())["devices"]
    assert [(each["node"], each["slots"], each["speed"], each["alive"]) for each in devices] == [
        (0, 6, 2.0, True), (1, 4, 1.0, True), (1, 4, 1.0, True), (1, 4, 1.0, False),
    ]  # fmt: skip
    assert place(*common, "--sglang", tmp_path / "x.json") == 2


GOOD = [DUMPS / "stat.pt", "--devices", 4, "--slots-per-device", 4, "--policy", "static"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.pt", *GOOD[1:]], "missing.pt cannot be read"),
        ([GOOD[0], "--policy", "static"], "give --devices, or --topology"),
        ([GOOD[0], "--devices", 4, "--slots-per-device", 2], "have 8 slots in a layer, too few for 12 experts"),
        ([*GOOD, "--nodes", 3], "cannot be spread evenly over 3 nodes"),
        ([*GOOD, "--dead", 4], "devices have the numbers 0 to 3"),
        ([*GOOD, "--dead", "x"], "expected numbers of devices"),
        ([*GOOD, "--model", "gpt-oss-20b"], "12 experts a layer, and 32 were expected"),
        ([*GOOD, "--model", "qwen2-7b"], "has no experts to place"),
        ([*GOOD, "--gpu", "abacus"], "no constants for GPU 'abacus'"),
        ([*GOOD, "--num-groups", 5], "--num-groups 5 does not divide 12 experts"),
        ([*GOOD[:-1], "unknown"], "unknown place policy 'unknown'"),
        ([*GOOD, "--topology", "t.yaml"], "leave out their flags"),
        ([*GOOD, "--current", "missing.json"], "cannot be read"),
        ([*GOOD, "--out", "/missing/folder/x.json"], "--out /missing/folder/x.json cannot be written"),
        ([*GOOD, "--sglang", "/missing/folder/x.json"], "there is no folder /missing/folder"),
        ([*GOOD, "--save-profile", "/missing/folder/x"], "--save-profile /missing/folder/x cannot be written"),
        ([*GOOD, "--max-layers", -1], "--max-layers must be at least 0"),
        ([*GOOD, "--check", "missing.pt"], "missing.pt cannot be read"),
        ([*GOOD, "--png", "picture"], "--png picture: the name must end in the form of the picture, such as .png"),
        ([*GOOD, "--dead", "0,1,2,3"], "all 4 devices are dead"),
        ([GOOD[0], "--devices", 1_000_000], "--devices must be between 1 and 1024"),
        ([*GOOD[:3], "--slots-per-device", 1_000_000], "--slots-per-device must be between 1 and 1024"),
    ],
)
def test_wrong_settings_end_with_status_2_before_anything_is_placed(arguments, words, capsys):
    assert place(*arguments) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert "Priced by" not in printed.out


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ("{}", "is no placement"),
        ("[", "cannot be read"),
        ('{"physical_to_logical_map": [[0, 1]]}', "expected a row for each of 3 layers"),
        ('{"physical_to_logical_map": 3}', "expected a row for each of 3 layers"),
        ('{"physical_to_logical_map": [[0, 1], [0, 1], [0, 1]]}', "its 2 slots are not those of 4 devices"),
        (json.dumps({"physical_to_logical_map": [[0] * 16] * 3}), "expert 1 of layer 0 has no copy"),
        (json.dumps({"physical_to_logical_map": [[12] * 16] * 3}), "must have numbers below 12"),
        ('{"moestro_placement": 2, "num_experts": 12, "table": []}', "has version 2"),
        ('{"moestro_placement": 1, "num_experts": 12}', "does not fit"),
        ('{"table_version": 1, "num_experts": 12, "workers": [0, 1], "table": null}', "placement?arrays=true"),
        ('{"table_version": 1, "num_experts": 12, "workers": [0, 1], "table": [[[0]]]}', "does not fit"),
        ('{"moestro_placement": 1, "num_experts": 12, "table": [[[0]]]}', "it has 1 devices, and 4 are placed"),
    ],
)
def test_a_present_placement_that_does_not_fit_is_refused(tmp_path, contents, words, capsys):
    (tmp_path / "c.json").write_text(contents)
    assert place(*GOOD, "--current", tmp_path / "c.json") == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ("devices: []", "length >= 1"),
        ("devices: [{slots: 4, colour: red}]", "unknown field `colour`"),
        ("devices: [{slots: 4, speed: 0}]", "> 0"),
        ("devices: [{slots: 12, speed: .inf}]", "the speed of a device must be finite"),
        ("devices: [{slots: 12, count: 1000}, {slots: 12, count: 25}]", "has 1,025 devices: name at most 1,024"),
        ("devices: [{slots: 12, alive: no}]", "all 1 devices are dead"),
        ("devices: {", "t.yaml"),
        ("devices: [{slots: 4}]", "too few for 12 experts"),
    ],
)
def test_a_topology_of_another_form_is_refused(tmp_path, contents, words, capsys):
    (tmp_path / "t.yaml").write_text(contents)
    assert place(GOOD[0], "--topology", tmp_path / "t.yaml") == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("name", "words"), [("nonsense", "in place of an ExpertTable"), ("overfull", "has the shape")])
def test_a_policy_that_fails_ends_with_status_1(policy, name, words, capsys):
    assert place(*GOOD[:-1], f"{policy}{name}") == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(20))
def test_sources_keep_their_tokens_on_live_devices(seed):
    rng = np.random.default_rng(seed)
    num_sources, num_devices = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    dead = rng.permutation(num_devices)[: rng.integers(0, num_devices)]
    text = ",".join(map(str, dead)) or None
    devices = make_devices(DeviceSettings(devices=num_devices, slots_per_device=5, dead=text), 5)
    tokens = rng.random((num_sources, 2, 5))
    load = ExpertLoad(tokens, np.zeros((2, 5)), np.ones((2, 5)), 1.0)
    spread = spread_sources(load, devices)
    assert spread.total == pytest.approx(load.total)
    assert not spread.tokens[dead].any()
    if num_sources == num_devices and not len(dead):
        assert (spread.tokens == tokens).all()


def test_a_change_without_moves_is_reported(tmp_path, capsys):
    counts, out = tmp_path / "counts.npy", tmp_path / "out.json"
    np.save(counts, 1e4 * np.random.default_rng(0).pareto(1.2, (3, 12)))
    arguments = [EXAMPLE, "--devices", 8, "--slots-per-device", 5]
    stays = "Moves: none; the present placement stays."
    assert place(*arguments, "--policy", "static") == 0
    assert stays in capsys.readouterr().out
    assert place(*arguments, "--max-bytes", 0, "--out", out) == 0  # shares alone change
    printed = capsys.readouterr().out
    assert "Moves: none; copies get other shares of their experts' tokens in " in printed
    assert "µs shorter." in printed
    for policy in ("static", "moestro"):
        assert place(*arguments, "--max-bytes", 0, "--current", out, "--policy", policy) == 0
        assert stays in capsys.readouterr().out
    assert place(counts, "--devices", 4, "--slots-per-device", 15, "--sglang", tmp_path / "init.json") == 0
    assert "Moves: none; copies get other shares" in capsys.readouterr().out
    assert place(*arguments, "--policy", "gimbal_v1", "--current", out) == 0
    assert "µs longer." in capsys.readouterr().out


@pytest.mark.parametrize("columns", [20, 80])
def test_no_figure_is_cut_off_where_lines_are_short(tmp_path, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    counts = tmp_path / "counts.npy"
    np.save(counts, np.random.default_rng(0).pareto(1.2, (3, 12)))
    assert place(counts, "--devices", 4, "--slots-per-device", 4, "--policy", "eplb", "--compare") == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    compared = printed.partition("This policy, and all")[2].splitlines()
    (row,) = [line.split() for line in compared if line.strip().startswith("static ")]
    assert len(row) == 7
    sentences = (" failed: ", " is priced ")
    figures = [line for line in compared if not any(words in line for words in sentences)]
    assert columns < 80 or all(len(line) <= columns for line in figures)


def test_a_network_is_known_by_the_name_of_its_repository(tmp_path, capsys):
    rng = np.random.default_rng(0)
    routed = rng.permuted(np.tile(np.arange(64), (200, 48, 1)), axis=2)[:, :, :8].tolist()  # 64 of 128 are never chosen
    response = {"model": "Qwen/Qwen3-30B-A3B", "choices": [{"routed_experts": routed}]}
    path, other = tmp_path / "r.jsonl", tmp_path / "other.jsonl"
    path.write_text(json.dumps(response))
    arguments = ["--devices", 8, "--policy", "static"]
    assert place(path, *arguments) == 0
    printed = capsys.readouterr().out
    assert "48 layers with 128 experts" in printed
    assert "prices are those of qwen3-30b-a3b, which the profile names" in printed
    assert place(path, *arguments, "--model", "Qwen/Qwen3-30B-A3B") == 0
    other.write_text(json.dumps(response | {"model": "openai/gpt-oss-20b"}))  # it has other layers
    assert place(other, *arguments) == 0
    assert "no known network has 64 experts in 48 layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("GPT-OSS-20b", "gpt-oss-20b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("/models/gpt-oss-20b", None),
        ("./gpt-oss-20b", None),
        ("a/b/gpt-oss-20b", None),
        ("gpt-oss", None),
        ("", None),
    ],
)
def test_names_of_networks(name, known):
    assert known_name(name) == known


def test_filling_slots_for_engines_keeps_within_limits_or_says_that_it_cannot(tmp_path, capsys):
    init, more, counts = tmp_path / "init.json", tmp_path / "more.json", tmp_path / "counts.npy"
    np.save(counts, np.random.default_rng(0).pareto(1.2, (3, 12)))
    assert place(counts, "--devices", 4, "--slots-per-device", 4, "--sglang", init) == 0
    arguments = [counts, "--devices", 4, "--slots-per-device", 5, "--current", init, "--sglang", more]
    num_bytes = 3 * 4 * int(network_named("qwen3-30b-a3b").expert_bytes)  # its prices hold where no network fits
    assert place(*arguments, "--max-bytes", num_bytes - 1) == 2
    assert f"filling the empty slots moves {num_bytes:,} bytes, and the limit is" in capsys.readouterr().err
    assert not more.exists()
    assert place(*arguments, "--max-bytes", num_bytes, "--out", tmp_path / "out.json") == 0
    assert len(json.loads((tmp_path / "out.json").read_text())["moves"]) == 3 * 4
    assert place(counts, *arguments[1:3], "--slots-per-device", 4, *arguments[5:], "--max-bytes", 0) == 0
    now, before = (json.loads(path.read_text())["physical_to_logical_map"] for path in (more, init))
    assert (np.sort(np.reshape(now, (3, 4, 4)), axis=2) == np.sort(np.reshape(before, (3, 4, 4)), axis=2)).all()


@pytest.mark.parametrize("num_slots", [5, 12, 15])
def test_what_is_written_for_engines_is_what_was_priced(tmp_path, num_slots):
    counts, init, out = (tmp_path / name for name in ("counts.npy", "init.json", "out.json"))
    load = np.random.default_rng(num_slots).pareto(1.2, (3, 12))
    np.save(counts, load)
    assert place(counts, "--devices", 4, "--slots-per-device", num_slots, "--sglang", init, "--out", out) == 0
    rows = np.array(json.loads(init.read_text())["physical_to_logical_map"])
    # SGLang and TensorRT-LLM divide the tokens of an expert by all of its physical copies.
    part = np.stack([held / np.bincount(row) for held, row in zip(load, rows, strict=True)])
    tokens = np.take_along_axis(part, rows, axis=1).reshape(3, 4, num_slots).sum(axis=2)
    found = json.loads(out.read_text())["after"]
    assert found["mean_balance"] == pytest.approx((tokens.mean(axis=1) / tokens.max(axis=1)).mean())
    assert found["balance_of_sums"] == pytest.approx(tokens.mean(axis=1).sum() / tokens.max(axis=1).sum())


@pytest.mark.parametrize("seed", range(20))
def test_filled_slots_repeat_no_expert_on_a_device(seed):
    rng = np.random.default_rng(seed)
    num_devices, num_experts = int(rng.integers(2, 6)), int(rng.integers(2, 10))
    num_slots = int(rng.integers(-(-num_experts // num_devices), num_experts + 1))
    devices = make_devices(DeviceSettings(devices=num_devices, slots_per_device=num_slots), num_experts)
    table = first_table(devices, 2, num_experts)
    emptied = table.logical_of.copy()
    for device in range(num_devices):
        for slot in range(num_slots):
            held = emptied[device, 0, slot]
            if rng.random() < 0.7 and (emptied[:, 0] == held).sum() > 1:
                emptied[device, 0, slot] = EMPTY
    table = ExpertTable(0, emptied, num_experts, np.ones(num_devices, np.bool_))
    rows = filled_slots(table, devices, rng.random((2, num_experts)))
    assert rows.min() >= 0
    for layer, held in enumerate(rows.reshape(2, num_devices, num_slots)):
        for device in range(num_devices):
            assert len(set(held[device].tolist())) == num_slots
            assert set(emptied[device, layer].tolist()) - {EMPTY} <= set(held[device].tolist())


def test_a_second_copy_on_a_device_becomes_a_larger_share():
    devices = make_devices(DeviceSettings(devices=2, slots_per_device=3), 3)
    table = table_of_slots(np.array([[0, 0, 1, 0, 2, 1]]), devices, 3)
    assert table.parts[:, 0] == pytest.approx(np.array([[2 / 3, 0.5, 0.0], [1 / 3, 0.5, 1.0]]))
    assert (table.num_copies <= 1).all()


def test_devices_without_a_number_of_slots_have_just_enough():
    assert make_devices(DeviceSettings(devices=3), 8).num_slots.tolist() == [3, 3, 3]
    assert make_devices(DeviceSettings(devices=3, dead="0"), 8).num_slots.tolist() == [4, 4, 4]
    with pytest.raises(ConfigError, match="all 1 devices are dead"):
        make_devices(DeviceSettings(devices=1, dead="0"), 8)


@pytest.mark.parametrize(
    ("url", "words"), [("http://127.0.0.1:9", "cannot be reached"), ("ftp://localhost", "give the address of a server")]
)
def test_a_server_that_cannot_take_the_placement_is_named(url, words, capsys):
    assert place(*GOOD, "--apply", url) == 1
    assert f"--apply {url}" in (error := capsys.readouterr().err)
    assert words in error


# Worker 1 has no experts, as an attention worker; the others hold all experts of three layers in reverse order.
SERVED = {
    "table_version": 7,
    "num_experts": 12,
    "workers": [0, 2, 3, 4],
    "table": [[[11, 10, 9, -1], [-1] * 4, [8, 7, 6, -1], [5, 4, 3, -1], [2, 1, 0, -1]]] * 3,
    "shares": [[[1.0, 1.0, 1.0, 0.0], [0.0] * 4, *[[1.0, 1.0, 1.0, 0.0]] * 3]] * 3,
}


PRICES = {"prices": {"expert_bytes": 5_000_000, "move_s": 0.01, "move_across_s": 0.02}}


def test_moves_are_priced_with_the_bytes_of_the_server(tmp_path, admin_url, capsys, monkeypatch):
    monkeypatch.setitem(SERVED, "prices", PRICES["prices"])
    assert place(*GOOD[:5], "--policy", "eplb", "--apply", admin_url, "--horizon-steps", 1e9) == 0
    printed = capsys.readouterr().out
    assert f"- moves are priced with the experts and links of {admin_url}" in printed
    moves = int(printed.split("Moves: ")[1].split()[0])
    assert f"{moves * 5} MB" in printed


def test_files_and_ranks_that_are_given_twice_are_named(tmp_path, capsys):
    again = tmp_path / "again.pt"
    again.write_bytes(RANKS[0].read_bytes())
    assert place(*RANKS, RANKS[0], "--devices", 4) == 2
    assert f"{RANKS[0]} has the same contents as {RANKS[0]}" in capsys.readouterr().err
    assert place(RANKS[0], again, "--devices", 4) == 2
    assert f"{again} has the same contents as {RANKS[0]}: give each file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "num_devices", "words"),
    [
        ((0,), 8, "ranks 1-7 have no file, and the load is that of rank 0 alone"),
        ((0, 2), 3, "rank 1 has no file, and the load is that of ranks 0, 2 alone"),
        ((1, 4, 5, 6), 4, "ranks 0, 2, 3 have no file, and the load is that of ranks 1, 4-6 alone"),
    ],
)
def test_ranks_without_a_file_are_named(ranks, num_devices, words):
    assert missing_ranks(ranks, num_devices).startswith(words)
    assert not missing_ranks(tuple(range(num_devices)), num_devices)
    assert not missing_ranks((), num_devices)


def test_one_rank_of_a_recording_does_not_pass_as_all(capsys):
    assert place(RANKS[0], "--devices", 4, "--slots-per-device", 4, "--policy", "static") == 0
    assert "- ranks 1-3 have no file" in capsys.readouterr().out


def test_the_comparison_says_which_policy_is_priced_lowest(capsys):
    assert place(*GOOD, "--compare", "--horizon-steps", 1e9) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\w+ is priced \d+\.\d% lower than static, .* --policy \w+", printed)
    assert place(*GOOD[:5], "--compare", "--horizon-steps", 1e9) == 0
    assert "moestro is priced lowest" in capsys.readouterr().out


def test_plans_for_engines_see_the_mean_of_the_sources(tmp_path, capsys):
    group = (*RANKS, "--devices", 2, "--slots-per-device", 8, "--sglang", tmp_path / "a.json")
    assert place(*group) == 0
    assert "- plans see the mean of all sources (--sources own" in capsys.readouterr().out
    assert place(*group, "--sources", "own") == 0
    assert "the mean of all sources" not in capsys.readouterr().out


def test_the_mean_of_sources_keeps_what_each_one_sends_and_each_expert_gets():
    tokens = np.random.default_rng(0).random((3, 2, 4))
    found = mean_sources(ExpertLoad(tokens, tokens.sum(axis=0), np.ones((2, 4)), 10.0)).tokens
    assert found.sum(axis=0) == pytest.approx(tokens.sum(axis=0))
    assert found.sum(axis=(1, 2)) == pytest.approx(tokens.sum(axis=(1, 2)))
    assert found[0] / found[0].sum() == pytest.approx(found[1] / found[1].sum())


@pytest.fixture
def admin_url() -> Iterator[str]:
    """Address of an operators' port that shows SERVED, and has every placement already."""

    class Admin(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(SERVED if self.path == "/admin/placement?arrays=true" else {})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer({"num_moves": 0})

        def _answer(self, contents: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(contents).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Admin) as port:
        thread = threading.Thread(target=port.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{port.server_port}"
        port.shutdown()
        thread.join()


def test_the_placement_of_a_server_is_the_present_one(tmp_path, admin_url, capsys):
    live, out = tmp_path / "live.json", tmp_path / "out.json"
    live.write_text(json.dumps(SERVED))
    assert place(*GOOD, "--current", live, "--out", out) == 0
    expected = [[[11, 10, 9, -1], [8, 7, 6, -1], [5, 4, 3, -1], [2, 1, 0, -1]]] * 3
    assert json.loads(out.read_text())["table"] == expected
    out.unlink()
    capsys.readouterr()
    assert place(*GOOD, "--apply", admin_url, "--out", out) == 0
    assert json.loads(out.read_text())["table"] == expected
    printed = capsys.readouterr().out
    assert f"- the present placement is that of {admin_url}" in printed
    assert "has this placement already" in printed
    assert place(*GOOD[:3], "--slots-per-device", 5, "--current", live, "--policy", "static") == 0
    assert place(GOOD[0], "--devices", 5, "--slots-per-device", 4, "--apply", admin_url) == 2
    assert f"--apply {admin_url}: the server's placement: it does not fit: it has 4 devices" in capsys.readouterr().err


def test_what_is_written_for_engines_pays_for_its_moves_or_moves_nothing(tmp_path, capsys):
    """The search drops copies whose reads cost more than they save. To fill their slots with others never pays."""
    counts = tmp_path / "counts.npy"
    np.save(counts, np.random.default_rng(1).integers(900, 1100, (2, 16)))
    arguments = (counts, "--devices", 4, "--slots-per-device", 6, "--horizon-steps", 10, "--compare")
    assert place(*arguments, "--sglang", tmp_path / "init.json") == 0
    shown = capsys.readouterr().out
    assert "Moves: none; the present placement stays." in shown
    assert "moestro:weighted=0 is priced lowest" in shown


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ('{"logical_count": [[1%s, 2]]}' % ("0" * 400), "logical_count is no array of numbers: int too large"),
        ('{"logical_count": [[1e308, 1e308]]}', "logical_count has figures that are negative, too large or not finite"),
    ],
)
def test_counts_that_are_too_large_are_refused_by_file(tmp_path, contents, words, capsys):
    (tmp_path / "counts.json").write_text(contents)
    assert place(tmp_path / "counts.json", "--devices", 2) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_layer_with_experts_but_no_load_has_a_row_for_tensorrt_llm(tmp_path, capsys):
    """TensorRT-LLM ends where a layer with experts lacks a row; layer 0 is dense."""
    config = {
        "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 100, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "intermediate_size": 64, "first_k_dense_replace": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    counts = np.random.default_rng(1).integers(1, 1000, (5, 8))
    counts[[0, 3]] = 0
    np.save(tmp_path / "counts.npy", counts)
    arguments = (tmp_path / "counts.npy", "--devices", 4, "--model", tmp_path / "config.json")
    assert place(*arguments, "--tensorrt-llm", tmp_path / "moe.yaml") == 0
    rows = yaml.safe_load((tmp_path / "moe.yaml").read_text())["initial_global_assignments"]
    assert list(rows) == [1, 2, 3, 4]
    assert rows[3] == list(range(8))
    assert re.search(r"- 1 layer of .* without a load: experts in order", capsys.readouterr().out)
