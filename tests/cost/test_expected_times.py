"""Iteration times worked out once, outside this code, for the same model: a change of a formula or constant shows.

Milliseconds at 1,024 tokens of context; the host takes 1.5 ms and 20 us a sequence; popularity zipf 0.6 (Mixtral 0.3).
A column dN is N decodes on each rank, pN one prefill chunk of N tokens on each.
"""

import numpy as np
import pytest

from moestro.cost.gpus import gpu_named
from moestro.cost.model import Batch, even_gating, zipf_popularity
from moestro.cost.networks import network_named
from moestro.cost.roofline import HostCost, Roofline, RooflineSettings

COLUMNS = [
    *((decodes, None) for decodes in (1, 8, 32, 64, 128, 256)),
    *((0, chunk) for chunk in ((0, 512), (0, 2048), (0, 8192))),
    (64, (0, 1984)),
    (0, (8192, 2048)),
]
EXPECTED = {
    ("qwen3-30b-a3b", "a100", 1): [9.4, 21.5, 40.3, 50.3, 60.7, 78.1, 62.3, 125, 483, 132, 201],
    ("qwen3-30b-a3b", "a100", 2): [10.4, 19.6, 29.8, 35.1, 43.4, 60.7, 45.4, 111, 480, 117, 187],
    ("qwen3-30b-a3b", "h20", 1): [6.5, 12.1, 21.1, 26.8, 34.2, 47.4, 43.7, 126, 608, 130, 228],
    ("qwen3-30b-a3b", "h200", 1): [6.2, 10.5, 17.5, 21.3, 25.5, 32.7, 22.1, 37.3, 133, 40.6, 59.5],
    ("mixtral-8x7b", "a100", 2): [19.8, 37.9, 45.0, 53.9, 71.6, 108, 121, 384, 1508, 392, 435],
    ("mixtral-8x7b", "a100", 8): [13.5, 16.3, 23.0, 31.9, 49.7, 86.7, 99.5, 366, 1501, 373, 416],
    ("mixtral-8x7b", "h200", 1): [9.7, 23.7, 27.9, 30.4, 35.7, 46.9, 41.5, 102, 375, 106, 117],
}


def roofline(name: str, gpu: str, ranks: int, imbalance: float = 1.0) -> Roofline:
    network = network_named(name)
    popularity = zipf_popularity(network.experts.num_experts, 0.3 if "mixtral" in name else 0.6)
    return Roofline(
        RooflineSettings(
            network=network,
            gpu=gpu_named(gpu),
            host=HostCost(step_ns=1_500_000, sequence_ns=20_000),
            num_ep_ranks=ranks,
            gating=even_gating(popularity, network.experts.top_k, ranks, imbalance),
        )
    )


def batch(decodes: int, chunk: tuple[int, int] | None, other_tokens: int = 0) -> Batch:
    chunks = [] if chunk is None else [chunk]
    return Batch(
        np.array([1023] * decodes + [cached for cached, _ in chunks], np.int32),
        np.array([1] * decodes + [new for _, new in chunks], np.int32),
        other_tokens,
    )


@pytest.mark.parametrize(("name", "gpu", "ranks"), EXPECTED)
def test_iteration_times_are_those_worked_out_elsewhere(name, gpu, ranks):
    model = roofline(name, gpu, ranks)
    priced = [model.group_step_ns([batch(*column)] * ranks) / 1e6 for column in COLUMNS]
    # The last digit shown may be rounded: half of it, and half a per cent.
    np.testing.assert_allclose(priced, EXPECTED[name, gpu, ranks], rtol=5e-3, atol=0.05)


@pytest.mark.parametrize(("name", "gpu", "ranks"), EXPECTED)
def test_a_rank_that_knows_only_others_tokens_prices_like_a_group_of_equals(name, gpu, ranks):
    model = roofline(name, gpu, ranks)
    for column in COLUMNS:
        own = batch(*column)
        alone = Batch(own.start, own.num_tokens, (ranks - 1) * int(own.num_tokens.sum()))
        assert model.step_ns(alone) == model.group_step_ns([own] * ranks)


def test_skew_matters_in_prefill_and_barely_in_decode():
    skewed = [roofline("qwen3-30b-a3b", "a100", 2, imbalance) for imbalance in (1.0, 1.2, 1.5)]
    prefill = [model.group_step_ns([batch(0, (0, 2048))] * 2) / 1e6 for model in skewed]
    decode = [model.group_step_ns([batch(128, None)] * 2) / 1e6 for model in skewed]
    np.testing.assert_allclose(prefill, [111, 121, 136], rtol=5e-3)
    np.testing.assert_allclose(decode, [43.4, 44.0, 44.9], rtol=5e-3)
