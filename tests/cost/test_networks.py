"""Sizes of networks: the named ones against what their authors publish, any other from its config."""

import json
from pathlib import Path

import pytest

import moestro
from moestro.cost.gpus import (
    A100,
    A100_40G,
    H20,
    WORKSPACE_BYTES,
    check_experts_fit,
    gpu_named,
    kv_blocks,
    worker_kv_blocks,
)
from moestro.cost.networks import CONFIGS, network_from_config, network_named
from moestro.cost.settings import positions_of
from moestro.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes_per_token"),
    [
        ("qwen3-30b-a3b", 30.5, 96 << 10),
        ("mixtral-8x7b", 46.7, 128 << 10),
        ("mixtral-8x7b-mqa", 46.5, 16 << 10),
        ("deepseek-v3", 671.0, 61 * 576 * 2),
        ("qwen2-7b", 7.62, 56 << 10),
    ],
)
def test_parameters_and_kv_are_those_published(name, billions, kv_bytes_per_token):
    config = {key: value for key, value in CONFIGS[name].items() if key != "quantization_config"}
    network = network_from_config(name, config)  # in bf16, two bytes a parameter
    assert network.weight_bytes() / 2e9 == pytest.approx(billions, rel=0.005)
    assert network.kv_bytes_per_token == kv_bytes_per_token


@pytest.mark.parametrize(("name", "gigabytes"), [("gpt-oss-20b", 13.8), ("gpt-oss-120b", 65.2)])
def test_four_bit_experts_weigh_what_the_checkpoints_do(name, gigabytes):
    assert network_named(name).weight_bytes() / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, None),
        ({"max_position_embeddings": 40960}, 40960),
        ({"text_config": {"max_position_embeddings": 40960}}, 40960),
        ({"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        ({"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default"}}, 8192),
    ],
)
def test_positions_are_those_of_the_config_with_their_factor(tmp_path, fields, most):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert positions_of(str(tmp_path)) == most


def test_an_expert_of_each():
    assert network_named("qwen3-30b-a3b").expert_bytes == pytest.approx(9.44e6, rel=1e-3)
    assert network_named("mixtral-8x7b").expert_bytes == pytest.approx(352e6, rel=1e-3)
    assert network_named("deepseek-v3").expert_bytes == pytest.approx(44e6, rel=2e-3)
    assert network_named("qwen2-7b").expert_bytes == 0


def test_layers_that_differ_are_groups():
    deepseek = network_named("deepseek-v3")
    assert [(group.num_layers, group.has_experts, group.dense_size) for group in deepseek.groups] == [
        (3, False, 18432),
        (58, True, 2048),
    ]
    gpt_oss = network_named("gpt-oss-20b")
    assert [(group.layers[:2], group.window) for group in gpt_oss.groups] == [((0, 2), 128), ((1, 3), None)]


def test_latent_attention_keeps_one_latent_and_expands_it_only_in_prefill():
    attention = network_named("deepseek-v3").attention
    assert attention.kv_bytes_per_token == (512 + 64) * 2
    assert attention.decode_flops == 2 * 128 * (576 + 512)
    assert attention.prefill_flops == 2 * 128 * (192 + 128)
    assert attention.expand_flops == 2 * 512 * 128 * 256


def test_the_demo_model_s_own_config_is_read():
    path = Path(moestro.__file__).parent / "assets" / "demo" / "config.json"
    config = json.loads(path.read_text())
    network = network_from_config("demo", config)
    assert network.num_layers == config["num_hidden_layers"]
    assert network.experts is not None
    bytes_per_weight = sum(file.stat().st_size for file in path.parent.glob("*.safetensors")) / (
        network.weight_bytes() / 2
    )
    assert 0.95 < bytes_per_weight / round(bytes_per_weight) < 1.05, "a whole number of bytes for each weight"


def test_names_that_are_not_known_are_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"no sizes for network 'gpt-5'.*qwen3-30b-a3b.*config\.json"):
        network_named("gpt-5")
    with pytest.raises(ConfigError, match=r"no constants for GPU 'tpu'.*a100-80g"):
        gpu_named("tpu")
    assert gpu_named("A100") is A100


def test_a_config_without_a_size_is_refused_by_its_name():
    with pytest.raises(ConfigError, match="mine: the cost model needs 'intermediate_size'"):
        network_from_config(
            "mine", {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
        )
    without_top_k = {key: value for key, value in CONFIGS["mixtral-8x7b"].items() if key != "num_experts_per_tok"}
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        network_from_config("mine", without_top_k)


def test_what_is_left_beside_the_weights_is_kv_cache():
    network = network_named("qwen3-30b-a3b")
    blocks = kv_blocks(network, H20, 16)
    left = H20.memory_bytes * 0.9 - network.weight_bytes() - WORKSPACE_BYTES
    assert blocks == int(left / (98304 * 16))
    assert kv_blocks(network, H20, 16, num_ep_ranks=2) > blocks + 27e9 // (98304 * 16)


def test_a_network_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"mixtral-8x7b does not fit a a100-80g: 93.4 GB of weights"):
        kv_blocks(network_named("mixtral-8x7b"), A100, 16)
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        kv_blocks(network_named("qwen3-30b-a3b"), H20, 16, gpu_memory_utilization=1.5)


@pytest.mark.parametrize("name", ["mixtral-8x7b-mqa", "deepseek-v3", "qwen3-30b-a3b", "qwen2-7b"])
def test_attention_and_expert_workers_hold_the_whole_network_together(name):
    network = network_named(name)
    num_experts = network.experts.num_experts if network.experts else 0
    together = network.attention_weight_bytes + network.slot_weight_bytes(num_experts)
    assert together == pytest.approx(network.weight_bytes(), rel=1e-12)


def test_an_attention_worker_has_the_kv_that_expert_weights_leave_elsewhere():
    network = network_named("mixtral-8x7b-mqa")
    assert network.attention_weight_bytes / 1e9 == pytest.approx(2.75, abs=0.05)
    alone = worker_kv_blocks(network, A100, 16)
    assert alone == int((A100.memory_bytes * 0.9 - network.attention_weight_bytes - WORKSPACE_BYTES) / (16384 * 16))
    assert alone > 4 * worker_kv_blocks(network, A100, 16, num_slots=5) > 0
    assert worker_kv_blocks(network, A100, 16, num_slots=1) == kv_blocks(network, A100, 16, num_ep_ranks=8)
    with pytest.raises(ConfigError, match="does not fit"):
        worker_kv_blocks(network, A100, 16, num_slots=8)


def test_amoe_s_expert_workers_fit_their_gpus():
    network = network_named("mixtral-8x7b-mqa")
    check_experts_fit(network, A100, 2)  # 8 experts on 4 GPUs of 80 GB
    check_experts_fit(network_named("mixtral-16x7b-mqa-top1"), A100_40G, 2)  # 16 experts on 8 GPUs of 40 GB
    with pytest.raises(ConfigError, match=r"7 experts of each layer of mixtral-8x7b-mqa weigh 78\.9 GB"):
        check_experts_fit(network, A100, 7)
