"""QLLM's and AMoE's engines take what their papers say."""

import numpy as np

from moestro.cost.model import Batch
from moestro.cost.staged_engines import amoe, qllm


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
    assert abs(engine.attention_ns(0, decodes(160)) / 1e6 - 2.7) < 0.15
    assert abs(engine.expert_ns(290) / 1e6 - 0.8) < 0.01


def test_a_token_of_amoe_passes_32_layers_of_both_stages():
    engine = amoe()
    step = engine.step_ns(decodes(160)) - engine.sample_ns(160)
    assert step == 32 * (engine.attention_ns(0, decodes(160)) + engine.expert_ns(40))
