"""Divisions of GPUs: what fits, by arithmetic beside an independent count, and commands that our server accepts."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest

from moestro.cli.app import app
from moestro.cli.main import register
from moestro.config.serve_settings import ServeSettings
from moestro.cost.gpus import GPUS
from moestro.cost.links import NVSWITCH_A100, Machines, with_both_kinds
from moestro.cost.networks import CONFIGS
from moestro.cost.settings import read_network
from moestro.errors import ConfigError
from moestro.planner.divisions import GpuDivision, divisions_of, fewest_gpus, memory_of, why_not_served
from moestro.planner.plan import launch_of
from moestro.planner.question import make_question
from moestro.planner.settings import HardwareSettings, PlanSearchSettings, PlanSettings, TrafficSettings
from moestro.planner.simulated import FittingDivision

WORKSPACE = 6e9


def question_of(model="mixtral-8x7b", gpu="a100-40g", num_gpus=8, *, isl=100, osl=100, **hardware):
    return make_question(
        PlanSettings(
            model=str(model),
            hardware=HardwareSettings(gpu=gpu, num_gpus=num_gpus, **hardware),
            traffic=TrafficSettings(isl=isl, osl=osl),
        )
    )


def fitting(question):
    return [each for each in divisions_of(question) if memory_of(question, each).why_not is None]


def test_nothing_fits_two_small_gpus_and_four_would_do():
    """Mixtral has 93.4 GB of weights; a GPU of 40 GiB may use 38.7 GB, 6 of them for workspace."""
    question = question_of(num_gpus=2)
    assert fitting(question) == []
    assert fewest_gpus(question) == (4, GpuDivision("fused", 1, 4))
    assert "93.4 GB" in memory_of(question, GpuDivision("fused", 2, 1)).why_not
    assert "90.2 GB" in memory_of(question, GpuDivision("async", 1, 2, 1)).why_not


def test_only_spread_experts_fit_where_nothing_can_be_divided(tmp_path):
    """An odd intermediate size rules tensor parallelism out; 54 GB of experts fit neither one GPU nor one of two."""
    config = {**CONFIGS["mixtral-8x7b"], "intermediate_size": 8601}
    (tmp_path / "config.json").write_text(json.dumps(config))
    question = question_of(tmp_path, num_gpus=2)
    assert [each.title for each in fitting(question)] == ["ep 2", "ep-overlap 2", "async 2"]
    assert "not divisible" in memory_of(question, GpuDivision("fused", 1, 2)).why_not


def test_a_request_that_exceeds_the_kv_cache_does_not_fit():
    question = question_of(num_gpus=4, isl=60_000)
    why = memory_of(question, GpuDivision("ep", 1, 4)).why_not
    assert "tokens, and the longest request needs" in why
    assert memory_of(question_of(num_gpus=4), GpuDivision("ep", 1, 4)).why_not is None


def test_a_dense_network_has_replicas_alone():
    assert {each.mode for each in divisions_of(question_of("qwen2-7b"))} == {"fused"}


def test_served_only_leaves_out_what_the_server_cannot_run():
    question = question_of()
    narrowed = replace(question.settings, search=PlanSearchSettings(served_only=True))
    assert all(why_not_served(question, each) is None for each in divisions_of(replace(question, settings=narrowed)))
    assert not all(why_not_served(question, each) is None for each in divisions_of(question))


def test_titles_are_distinct_and_large_groups_have_few_ratios():
    divisions = divisions_of(question_of("qwen3-30b-a3b", num_gpus=64))
    assert len({each.title for each in divisions}) == len(divisions)
    assert len([each for each in divisions if each.gpus_per_group == 64 and each.mode == "afd"]) == 7
    assert all(each.num_groups * each.gpus_per_group == 64 for each in divisions)


@pytest.mark.parametrize(
    ("num_gpus", "per_machine", "sizes"),
    [
        (24, 8, {1, 2, 4, 8, 24}),
        (18, 8, {1, 2, 3, 6, 18}),
        (12, 6, {1, 2, 3, 6, 12}),
        (9, 8, {1, 3}),
        (6, 8, {1, 2, 3, 6}),
    ],
)
def test_groups_have_room_on_the_machines(num_gpus, per_machine, sizes):
    """Two groups of 12 GPUs would need four machines of 8, of which there are three; one of 9 is not halved."""
    question = question_of("qwen3-30b-a3b", num_gpus=num_gpus, gpus_per_machine=per_machine)
    assert {each.gpus_per_group for each in divisions_of(question)} == sizes


def weights_of(config, division):
    """Bytes of weights on a GPU with attention, and on one with experts alone, counted product by product."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    parts = division.gpus_per_group if division.mode == "fused" else 1
    kv_here = max(kv // parts, 1)
    attention = hidden * size * (heads // parts + 2 * kv_here) + heads // parts * size * hidden
    vocabulary = 2 * hidden * -(-config["vocab_size"] // parts)
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    num_experts = config.get("num_experts") or config["num_local_experts"]
    expert = 3 * hidden * (inner // parts)
    slots = num_experts if division.mode == "fused" else -(-num_experts // division.num_holders)
    dense = 2 * (layers * (attention + num_experts * hidden) + vocabulary)
    experts = 2 * layers * slots * expert
    return dense + (0 if division.num_expert_workers else experts), experts


@pytest.mark.parametrize("seed", range(24))
def test_what_fits_never_exceeds_the_memory_and_its_commands_are_accepted(seed):
    rng = np.random.default_rng(seed)
    name = str(rng.choice(["mixtral-8x7b", "qwen3-30b-a3b", "mixtral-16x7b-mqa-top1"]))
    gpu = str(rng.choice([name for name in GPUS if name != "rtx-pro-6000"]))
    question = question_of(
        name, gpu, int(rng.integers(1, 17)), isl=int(rng.integers(1, 4000)), osl=int(rng.integers(2, 2000)),
        gpu_memory_utilization=float(rng.uniform(0.5, 1)), gpus_per_machine=int(rng.integers(1, 9)),
    )  # fmt: skip
    usable = GPUS[gpu].memory_bytes * question.settings.hardware.gpu_memory_utilization
    for division in divisions_of(question):
        memory = memory_of(question, division)
        if memory.why_not is not None:
            continue
        weights, experts = weights_of(CONFIGS[name], division)
        share = question.network.attention.num_kv_heads
        parts = division.gpus_per_group if division.mode == "fused" else 1
        kv = memory.kv_tokens * question.network.kv_bytes_per_token / share * max(share // parts, 1)
        assert weights + kv + WORKSPACE <= usable * (1 + 1e-9), division.title
        if division.num_expert_workers:
            assert experts + WORKSPACE <= usable, division.title
        if why_not_served(question, division) is None and rng.random() < 0.2:
            check_commands(FittingDivision(question, division, memory), int(rng.integers(1, 5000)))


def check_commands(fitting_division, num_requests):
    """Parse the commands by our own command line, whose settings check themselves."""
    division = fitting_division.division
    launch = launch_of(fitting_division, num_requests)
    commands = [shlex.split(line, comments=True) for line in fitting_division.question.system.commands(launch)]
    for command in commands:
        if command[1] == "serve":
            register(["serve"])
            _, bound, _ = app.parse_args(command[1:], print_error=False, exit_on_error=False)
            settings = bound.arguments["settings"]
            assert isinstance(settings, ServeSettings)
            assert settings.num_engines == (
                division.num_groups if division.mode == "fused" else division.num_attention_workers
            )
            assert settings.scheduler.max_num_seqs * fitting_division.num_engines >= num_requests
    assert (commands[-1][1] == "route") == (division.mode != "fused" and division.num_groups > 1)


def test_each_machine_gets_both_kinds_of_workers():
    machines = Machines(machine_of=(0, 0, 0, 0, 1, 1, 1, 1), within=NVSWITCH_A100, across=NVSWITCH_A100)
    assert with_both_kinds(machines, 4, 4).machine_of == (0, 0, 1, 1, 0, 0, 1, 1)
    assert with_both_kinds(machines, 6, 2).machine_of == (0, 0, 0, 1, 1, 1, 0, 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (PlanSettings(model="no-such-network"), "known: qwen3-30b-a3b"),
        (PlanSettings(model="mixtral-8x7b", hardware=HardwareSettings(gpu="b300")), "known: a100-80g"),
        (PlanSettings(model="mixtral-8x7b", hardware=HardwareSettings(gpu="rtx-pro-6000")), "--link-within"),
        (PlanSettings(model="mixtral-8x7b", traffic=TrafficSettings(popularity="zipf")), "--popularity 'zipf'"),
        (PlanSettings(model="mixtral-8x7b", traffic=TrafficSettings(popularity="zipf:x")), "--popularity 'zipf:x'"),
    ],
)
def test_unknown_names_are_refused_with_those_that_are_known(settings, text):
    with pytest.raises(ConfigError, match=text):
        make_question(settings)


def test_a_directory_names_a_network_by_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-30b-a3b"]))
    assert read_network(str(tmp_path)).experts == read_network("qwen3-30b-a3b").experts
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="it must hold one JSON object"):
        read_network(str(tmp_path))
