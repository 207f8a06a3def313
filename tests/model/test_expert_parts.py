"""A layer's experts in parts: with and without own kernels, stopped anywhere."""

from __future__ import annotations

import pytest
import torch
from parity import tiny
from support.own_kernels import kernels

from moestro.model.experts.expert_pieces import PIECE_S, READ_RATES, PieceMeter, split_experts
from moestro.model.experts.routed import sum_experts
from moestro.model.kernels.exchange import KernelExchange

NUM_TOKENS = 9


@pytest.fixture(params=["own kernels", "torch's", "float32"])
def network(request, checkpoint):
    network = tiny.load(checkpoint("qwen3_moe"), dtype="float32" if request.param == "float32" else "bfloat16")
    if request.param == "own kernels":
        network.use_kernels(KernelExchange(kernels()))
    network.pack()
    return network


@pytest.mark.parametrize("max_experts", [1, 2, 3, 100])
def test_parts_give_the_bits_of_the_whole(network, max_experts):
    _, module = network.experts[0]
    generator = torch.Generator().manual_seed(max_experts)
    hidden = torch.randn(NUM_TOKENS, network.config.hidden_size, generator=generator).to(network.dtype)
    scores = torch.rand(NUM_TOKENS, network.num_experts, generator=generator)
    scores[:, 1] = 0  # no token visits this expert
    weights, ids = scores.topk(network.config.num_experts_per_tok)
    counts, counted = (torch.zeros(network.num_experts, dtype=torch.int64) for _ in range(2))
    with torch.inference_mode():
        whole = sum_experts(module, hidden, ids, weights, counts)
        parts, seen = split_experts(module, hidden, ids, weights, counted), [0]
        answers = {}
        while not parts.is_over:
            parts.advance(max_experts)
            assert torch.equal(counted[: parts.first_open], counts[: parts.first_open])
            assert not counted[parts.first_open :].any()
            has_answered = (ids.reshape(-1) < parts.first_open).nonzero()[:, 0]
            for pair, answer in zip(has_answered.tolist(), parts.answers(has_answered), strict=True):
                assert torch.equal(answers.setdefault(pair, answer), answer), "an answer stays"
            seen.append(parts.first_open)
        assert seen == sorted(seen)
        assert len(answers) == ids.numel()
        assert torch.equal(parts.total().to(whole.dtype), whole)
    assert torch.equal(counted, counts)


def test_a_piece_ends_when_its_weights_are_read():
    meter = PieceMeter(100, 8)
    assert meter.take(30, 2, 8) == 3, "three experts of one row each read 90 bytes"
    assert not meter.is_full
    meter.spend(10, 1)
    assert meter.is_full
    meter.restart()
    assert not meter.is_full
    meter.spend(10, 160)
    assert meter.is_full, "160 rows read 10 bytes 20 times"
    assert meter.take(30, 2, 8) == 1, "a piece does at least one expert"
    meter.restart()
    assert meter.take(1, 6400, 8) == 1, "100 reads of a byte by 800 rows each"
    meter.restart()
    assert meter.take(0, 8, 8) == 8
    assert meter.take(30, 2, 8, is_one_call=True) == 8
    assert meter.is_full


def test_a_piece_of_each_kind_of_device_takes_the_same_time():
    for kind, (least, most) in {"cpu": (15 << 20, 17 << 20), "cuda": (900 << 20, 1100 << 20)}.items():
        rate = READ_RATES[kind]
        assert least < rate.piece_bytes < most
        assert rate.piece_bytes / rate.bytes_per_s == pytest.approx(PIECE_S, rel=1e-6)
    # 128 experts of 9 MiB of a layer of Qwen3-30B-A3B, one row each.
    counts = {
        kind: PieceMeter(rate.piece_bytes, rate.rows).take(9 << 20, 128, 128) for kind, rate in READ_RATES.items()
    }
    assert counts == {"cpu": 1, "cuda": 114}
    # A prompt's 128 rows an expert: an accelerator computes them while it reads the weights, and a core does not.
    counts = {
        kind: PieceMeter(rate.piece_bytes, rate.rows).take(1 << 20, 128 * 128, 128) for kind, rate in READ_RATES.items()
    }
    assert counts == {"cpu": 1, "cuda": 128}
