"""QLLM's and AMoE's engines take what their papers say."""

import numpy as np
import pytest

from moestro.cost.gpus import A100_40G
from moestro.cost.model import Batch
from moestro.cost.networks import network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.tables import amoe, qllm

MQA = network_named("mixtral-8x7b-mqa")


def decodes(n: int) -> Batch:
    return Batch(np.full(n, 300), np.ones(n, np.int64))


def test_an_iteration_of_qllm_takes_300_to_400_ms():
    for num_sequences in (8, 16, 32):
        assert 300e6 < qllm().step_ns(decodes(num_sequences)) < 400e6


def test_one_expert_call_of_qllm_is_a_256th_of_it():
    engine = qllm()
    per_call = engine.step_ns(decodes(32)) / (32 * 8)
    assert engine.expert_ns(8) < per_call < 1.3 * engine.expert_ns(8)


def test_stages_of_amoe_take_what_figure_13_says():
    engine = amoe()
    assert engine.attention_ns(0, decodes(1000)) == 2_700_000
    assert abs(engine.expert_ns(444) / 1e6 - 0.8) < 0.01


def test_the_split_of_amoe_s_attention_step_agrees_with_its_load():
    attending, layers, gpus = amoe(), 32, 4
    tokens_a_second = 250 * 150 / 0.8  # medium requests, at 80 % of the most (figure 11)
    tokens = tokens_a_second * layers / gpus * attending.attention_ns(0, decodes(1000)) / 1e9
    assert 900 < tokens < 1100, "of one step, where a GPU attends all the time"


def test_a_token_of_amoe_passes_32_layers_of_both_stages():
    engine = amoe()
    step = engine.step_ns(decodes(160)) - engine.sample_ns(160)
    assert step == 32 * (engine.attention_ns(0, decodes(160)) + engine.expert_ns(40))


@pytest.mark.parametrize("cost", [amoe(gpu=A100_40G), Roofline(RooflineSettings(network=MQA, gpu=A100_40G))])
def test_the_throughput_of_an_expert_grows_nearly_linearly_to_128_rows_and_then_levels_off(cost):
    """AMoE's figure 3: one expert layer on an A100 of 40 GB."""
    rate = {rows: rows / cost.expert_ns(rows) for rows in (1, 64, 128, 256, 512, 1024)}
    assert rate[128] > 0.9 * 128 * rate[1]
    assert 1.2 * rate[128] < rate[256] < 1.8 * rate[128]
    assert rate[1024] < 1.2 * rate[512]


def test_reading_an_expert_takes_longer_from_slower_memory():
    rows = 16
    assert amoe(gpu=A100_40G).expert_ns(rows) > 1.15 * amoe().expert_ns(rows)
    assert amoe(gpu=A100_40G).expert_ns(500) == amoe().expert_ns(500)


def test_amoe_s_networks_have_the_experts_of_its_sections():
    for name, num_experts, top_k in [("mixtral-8x7b-mqa-top1", 8, 1), ("mixtral-16x7b-mqa-top1", 16, 1)]:
        engine = amoe(network_named(name))
        assert (len(engine.popularity), engine.network.experts.top_k) == (num_experts, top_k)
        assert engine.network.kv_bytes_per_token == MQA.kv_bytes_per_token
        assert engine.network.expert_bytes == MQA.expert_bytes
