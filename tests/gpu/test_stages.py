"""Preemptive mode on an accelerator: tokens of transformers, and at most two pieces ahead of the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from parity.test_stages import EAGER_ONLY, check_greedy, make_policy, make_requests, serve, staged_device
from support.torch_stages import NO_MERGES, finish, make_staged_device

from moestro.core.stages import Passage, Stopped
from moestro.model.staged import staged_device as under_test

FAMILIES = ["qwen3_moe", "granitemoe", "deepseek_v3", "gpt_oss", "mixtral-window", "llama"]


@pytest.mark.parametrize("policy", ["random", "qllm"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_stages_gets_the_greedy_tokens_of_transformers(name, policy, checkpoint, accelerator):
    device = staged_device(accelerator.place(tiny.load(checkpoint(name), dtype="float64")))
    rng = np.random.default_rng(len(name))
    requests = make_requests(rng, 4)
    tokens, _ = serve(device, make_policy(policy), requests, rng)
    oracle = tiny.load_oracle(checkpoint(name), torch.float64, "eager" if name in EAGER_ONLY else "sdpa")
    for request in requests:
        check_greedy(oracle, request, tokens[request.request_id], f"{name} under {policy}")


def test_kv_that_was_in_host_memory_gives_the_same_tokens(checkpoint, accelerator):
    network = accelerator.place(tiny.load(checkpoint("qwen3_moe"), dtype="float64"))
    oracle = tiny.load_oracle(checkpoint("qwen3_moe"), torch.float64, "sdpa")
    rng = np.random.default_rng(0)
    requests = make_requests(rng, 8)
    device = staged_device(network, num_blocks=14, num_host_blocks=40)
    tokens, rank = serve(device, make_policy("random"), requests, rng, 40)
    for request in requests:
        check_greedy(oracle, request, tokens[request.request_id], "host memory")
    assert rank.stats().num_restored_tokens > 0


def _passage(shape, first: int, count: int) -> Passage:
    rows = np.arange(first, first + count, dtype=np.int32)
    units = drive.make_units([(0, list(range(7, 7 + count)))], np.array([[first // 4, first // 4 + 1]]))
    return Passage(0, shape.num_layers + 1, units, rows, rows, NO_MERGES)


def _ahead(device) -> int:
    return sum(len(launched.events) for launched in device._running)


def test_the_host_is_at_most_two_pieces_ahead_and_a_withdrawn_item_stops(checkpoint, accelerator):
    network = accelerator.place(tiny.load(checkpoint("qwen3_moe")))
    device = make_staged_device(network, drive.BLOCK_SIZE, 8, num_rows=8, num_places=8)
    assert not device.works_when_polled
    alone = finish(device, _passage(device.shape, 0, 5)).token_ids.tolist()
    items = [_passage(device.shape, 0, 5), _passage(device.shape, 5, 3)]
    for item in items:
        device.launch(item, 0)
        assert _ahead(device) == under_test._PIECES_AHEAD
    results = []
    while len(results) < 2:
        results += device.poll(0)
        assert _ahead(device) <= under_test._PIECES_AHEAD
    assert results[0].token_ids.tolist() == alone
    stopped = finish(device, _passage(device.shape, 0, 5), patience=2)
    assert isinstance(stopped, Stopped)
    assert stopped.expert_counts.sum() > 0


def test_in_bfloat16_a_passage_is_whole_layers_of_grouped_experts(checkpoint, accelerator):
    network = accelerator.place(tiny.load(checkpoint("qwen3_moe"), dtype="bfloat16"))
    device = make_staged_device(network, drive.BLOCK_SIZE, 8, num_rows=8, num_places=8)
    result = finish(device, _passage(device.shape, 0, 5))
    fused = drive.run(drive.make_device(network), drive.make_units([(0, [7, 8, 9, 10, 11])], np.array([[0, 1]])))
    assert result.token_ids.tolist() == fused.token_ids.tolist()
    assert result.expert_counts.sum() == 5 * 3 * 3


def test_a_passage_of_a_small_network_is_one_piece_of_an_accelerator(checkpoint, accelerator):
    """All weights take far less than the time of a piece, on an accelerator as on a core."""
    network = accelerator.place(tiny.load(checkpoint("qwen3_moe")))
    small = make_staged_device(network, drive.BLOCK_SIZE, 8, num_rows=8, num_places=8)
    device = under_test.StagedTorchDevice(small.staged, small.pools, small.shape)
    device.launch(_passage(device.shape, 0, 5), 0)
    assert (_ahead(device), device._running[0].is_over) == (1, True)
    assert device._runner._experts._piece_bytes > 1 << 29
