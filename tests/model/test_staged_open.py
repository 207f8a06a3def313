"""Shares of a network: what each kind of worker keeps, what it frees, and what it can be given again."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from parity import tiny
from support.expert_tables import scatter

from moestro.core.experts.expert_table import EMPTY, ExpertTable, spread_evenly
from moestro.model.device import open_device
from moestro.model.experts import expert_open
from moestro.model.experts.expert_open import open_expert_device
from moestro.model.experts.expert_slots import read_expert, write_expert
from moestro.model.experts.routed import tag_of, weights_of
from moestro.model.network import WorkerShare
from moestro.model.staged.staged_device import open_staged_device

pytestmark = pytest.mark.transformers

BUDGET = 24
LAYERS, EXPERTS = 3, 8  # of qwen3_moe


def share_of(worker: int, holders: list[int], num_remote_places: int = 5) -> WorkerShare:
    def make_table(num_layers: int, num_experts: int) -> ExpertTable:
        return spread_evenly(num_layers, num_experts, holders, 4)

    return WorkerShare(worker=worker, make_table=make_table, num_remote_places=num_remote_places)


def tensor_bytes() -> int:
    """Bytes of all tensors that live."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    living = [each for each in gc.get_objects() if type(each) in kinds and each.device.type == "cpu"]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in living}
    return sum(storages.values())


def test_a_dense_network_runs_in_stages_with_units_of_many_tokens(checkpoint):
    device, _ = open_staged_device(tiny.settings_of(checkpoint("llama"), max_parked_bytes=1 << 20), BUDGET)
    assert device.shape.num_places == device.shape.num_rows == 2 * BUDGET


def test_workers_have_the_slots_of_their_row(checkpoint):
    settings = tiny.settings_of(checkpoint("qwen3_moe"))
    home, info = open_staged_device(settings, BUDGET, share=share_of(0, [2, 3]))
    assert (home.shape.num_experts, home.shape.num_remote_places, info.num_experts) == (0, 5, EXPERTS)
    both, _ = open_staged_device(settings, BUDGET, share=share_of(1, [0, 1, 2]))
    assert (both.shape.num_experts, both.shape.num_remote_places) == (3, 5)
    expert, info = open_expert_device(settings, share_of(3, [2, 3]))
    assert (expert.shape.num_experts, expert.shape.num_rows, expert.shape.num_places) == (4, 0, 0)
    assert (info.num_experts, info.num_blocks, info.num_layers) == (EXPERTS, 0, LAYERS)
    assert expert.shape.is_sparse == home.shape.is_sparse


@pytest.mark.parametrize("way", ["layer by layer", "whole", "dummy"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_an_expert_worker_has_its_experts_however_they_are_read(name, way, checkpoint, monkeypatch):
    settings = tiny.settings_of(checkpoint(name), load_format="dummy" if way == "dummy" else "auto")
    whole = tiny.load_settings(settings)
    if way == "whole":
        monkeypatch.setattr(expert_open, "_count_chosen", lambda *_: None)
    device, info = open_expert_device(settings, share_of(3, [2, 3]))
    assert device.shape.num_chosen == info.num_experts_per_token == whole.probe(4)[1]
    assert (info.num_parameters, device.network.bytes_per_expert) == (whole.num_parameters, whole.bytes_per_expert)
    for (layer, mine), (_, theirs) in zip(device.network.experts, whole.experts, strict=True):
        for slot in range(device.shape.num_experts):
            assert tag_of(mine).logical_of[slot] == slot + whole.num_experts // 2, layer
            assert_equal(read_expert(mine, slot), read_expert(theirs, slot + whole.num_experts // 2))


def test_a_device_of_whole_steps_keeps_its_slots(checkpoint):
    phases = []
    device, info = open_device(tiny.settings_of(checkpoint("mixtral")), phases.append, share=share_of(1, [0, 1, 2]))
    assert (device.network.num_slots, info.num_experts) == (2, 6)
    assert phases[-4:] == ["cut weights", "pack weights", "allocate KV cache", "ready"]


def test_what_a_worker_does_not_own_is_freed(checkpoint):
    """Unpacked, so that every weight is a tensor that can be counted."""
    settings = tiny.settings_of(checkpoint("qwen3_moe"), dtype="float64", num_gpu_blocks_override=8)
    network = tiny.load(checkpoint("qwen3_moe"), dtype="float64")
    experts = sum(each.nbytes for _, module in network.experts for each in module.parameters())
    others = sum(each.nbytes for each in network.model.parameters()) - experts
    del network
    start = tensor_bytes()
    expert, _ = open_expert_device(settings, share_of(3, [2, 3], num_remote_places=0))
    assert 0 <= tensor_bytes() - start - experts // 2 < 2000  # counts and other small tensors
    del expert
    assert tensor_bytes() == start
    home, _ = open_staged_device(settings, BUDGET, share=share_of(0, [2, 3], num_remote_places=0))
    held = sum(each.nbytes for each in home.pools.blocks()) + BUDGET * 2 * sum(
        (home.staged.token_form(3).row_bytes, home.staged.token_form(3).place_bytes)
    )
    assert others <= tensor_bytes() - start - held < others + experts // 10  # K and V of a probe, and small tensors
    del home
    assert tensor_bytes() == start


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_leave_and_enter_slots_bit_for_bit(name, dtype, checkpoint):
    """Packed in float32 and bfloat16; `gpt_oss` is transposed and has biases."""
    whole = tiny.load(checkpoint(name), dtype=dtype)
    sizes = (whole.num_layers, whole.num_experts)
    table = scatter(np.random.default_rng(2), sizes, [0, 1], 2)
    share = WorkerShare(worker=1, make_table=lambda *_: table)
    cut = tiny.load(checkpoint(name), dtype=dtype)
    share.cut(cut)
    cut.pack_experts()
    for (layer, mine), (_, theirs) in zip(cut.experts, whole.experts, strict=True):
        logical_of = table.logical_of[1, layer]
        for slot in np.flatnonzero(logical_of != EMPTY).tolist():
            assert_equal(read_expert(mine, slot), read_expert(theirs, int(logical_of[slot])))
        for slot in range(len(logical_of)):  # the empty ones too
            logical = (3 * slot + 1) % whole.num_experts
            write_expert(mine, slot, logical, read_expert(theirs, logical))
            assert tag_of(mine).logical_of[slot] == logical
        for slot in range(len(logical_of)):
            assert_equal(read_expert(mine, slot), read_expert(theirs, int(tag_of(mine).logical_of[slot])))
    assert all(weight is None or weight.device.type == "cpu" for _, m in cut.experts for weight in weights_of(m))
    assert table.logical_of.max() < whole.num_experts
    assert (table.logical_of == EMPTY).any(), "a rewritten slot must not change the table"


def assert_equal(ours, theirs) -> None:
    for mine, given in zip(ours, theirs, strict=True):
        assert (mine is None) == (given is None)
        if mine is not None:
            assert torch.equal(mine, given)
