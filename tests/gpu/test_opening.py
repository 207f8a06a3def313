"""What opening a device does on an accelerator before anything runs there, on the imitated one."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from parity import drive, tiny
from parity.conftest import checkpoint
from support import imitated_accelerator
from support.imitated_accelerator import DEVICE
from transformers import AutoModelForCausalLM

from moestro.core.experts.expert_table import ExpertTable
from moestro.core.work import LOGITS_LAST, Units
from moestro.errors import ConfigError
from moestro.model.device import open_device, trial_units
from moestro.model.experts.expert_open import open_expert_device
from moestro.model.network import WorkerShare
from moestro.model.settings import LocalRank
from moestro.model.staged.staged_device import open_staged_device

__all__ = ["checkpoint"]


@pytest.fixture(autouse=True)
def _imitated(monkeypatch):
    with imitated_accelerator.imitated(monkeypatch):
        yield


def _share(worker: int) -> WorkerShare:
    def table(num_layers: int, num_experts: int) -> ExpertTable:
        slots = np.arange(num_experts, dtype=np.int32).reshape(2, 1, -1).repeat(num_layers, axis=1)
        return ExpertTable(0, slots, num_experts, np.ones(2, np.bool_))

    return WorkerShare(worker=worker, make_table=table, num_remote_places=8)


OPENINGS = {
    "fused": open_device,
    "preemptive": lambda settings: open_staged_device(settings, 16),
    "home": lambda settings: open_staged_device(settings, 16, share=_share(0)),
    "experts": lambda settings: open_expert_device(settings, _share(1)),
}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("kind", OPENINGS)
def test_each_process_sets_its_device_before_it_uses_it(kind, load_format, checkpoint):
    """The imitated accelerator fails at memory, pinned memory and events before that, and at attention with cuDNN."""
    settings = tiny.settings_of(checkpoint("qwen3_moe"), device="cuda", load_format=load_format)
    device, info = OPENINGS[kind](settings)
    assert (info.device, device.network.device) == ("cuda", DEVICE)
    assert imitated_accelerator.current_device() == DEVICE
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_device_that_is_open_serves(checkpoint):
    device, _ = open_device(tiny.settings_of(checkpoint("qwen3_moe"), device="cuda"))
    units = drive.make_units([(0, [3, 4, 5])], [[0]], logits=np.full(1, LOGITS_LAST, np.uint8))
    assert drive.run(device, units).token_ids.min() >= 0


MIB = 1 << 20
LOCAL = LocalRank(max_tokens=64, max_seqs=8)


def _largest_step(num_blocks: int, max_model_len: int) -> Units:
    """The largest step, in blocks of its own where there are enough."""
    units = trial_units(LOCAL, max_model_len, drive.BLOCK_SIZE, tiny.VOCAB)
    tables = np.arange(units.block_tables.size).reshape(units.block_tables.shape) % num_blocks
    return msgspec.structs.replace(units, block_tables=tables.astype(np.int32))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "llama"])
@pytest.mark.parametrize(("utilization", "num_ranks"), [(0.9, 1), (0.5, 1), (1.0, 2)])
def test_the_kv_cache_is_what_the_share_leaves_and_the_largest_step_still_fits(
    family, utilization, num_ranks, checkpoint, monkeypatch
):
    imitated_accelerator.set_card(100 * MIB, other_bytes=5 * MIB)
    settings = tiny.settings_of(
        checkpoint(family), device="cuda", num_gpu_blocks_override=None, gpu_memory_utilization=utilization
    )
    local = LocalRank(rank=0, num_ranks=num_ranks, max_tokens=LOCAL.max_tokens, max_seqs=LOCAL.max_seqs)
    monkeypatch.setattr("moestro.model.device._CONTEXT_BYTES", 5 * MIB)
    device, info = open_device(settings, local=local)
    card = info.card
    assert card is not None
    assert card.kv_bytes == info.num_blocks * device.pools.bytes_per_block
    parts = card.weight_bytes + card.other_bytes + card.step_bytes + card.kv_bytes
    pages = len(list(device.pools.blocks())) * 2 * MIB
    assert 0 <= utilization * card.total_bytes / num_ranks - parts - pages < device.pools.bytes_per_block
    torch.cuda.reset_peak_memory_stats()
    drive.run(device, _largest_step(info.num_blocks, info.max_model_len))
    assert torch.cuda.max_memory_reserved() + card.other_bytes <= utilization * card.total_bytes / num_ranks


@pytest.mark.parametrize(
    ("total_bytes", "changes", "words"),
    [
        (100 * MIB, {"gpu_memory_utilization": 0.1}, "--gpu-memory-utilization 0.1 of 0.1 GiB allows 0.0 GiB"),
        (60_000, {}, "The weights do not fit cuda:0, which has 0.0 GiB of memory"),
        (400_000, {}, "A step of 64 tokens does not fit"),
    ],
)
def test_a_card_that_is_too_small_says_what_to_do(total_bytes, changes, words, checkpoint):
    imitated_accelerator.set_card(total_bytes)
    settings = tiny.settings_of(checkpoint("qwen3_moe"), device="cuda", num_gpu_blocks_override=None, **changes)
    with pytest.raises(ConfigError) as refused:
        open_device(settings, local=LOCAL)
    assert words in str(refused.value)


def test_a_share_that_is_too_small_for_a_given_length_says_what_to_do(checkpoint):
    imitated_accelerator.set_card(100 * MIB)
    settings = tiny.settings_of(checkpoint("qwen3_moe"), device="cuda", num_gpu_blocks_override=None)
    device, info = open_device(settings, local=LOCAL)
    card, pages = info.card, 2 * info.num_layers * 2 * MIB
    wanted = card.weight_bytes + card.step_bytes + pages + 10 * device.pools.bytes_per_block + 1000
    del device
    little = replace(settings, gpu_memory_utilization=wanted / card.total_bytes)
    assert open_device(little, local=LOCAL)[1].max_model_len == 10 * drive.BLOCK_SIZE
    with pytest.raises(ConfigError, match="64 are needed for 256 tokens: raise --gpu-memory-utilization, lower"):
        open_device(replace(little, max_model_len=256), local=LOCAL)


def test_bytes_of_the_kv_cache_hold_exactly_and_beside_tokens_inside_the_network(checkpoint):
    settings = tiny.settings_of(checkpoint("qwen3_moe"), device="cuda", num_gpu_blocks_override=None,
                                kv_cache_memory_bytes=MIB)  # fmt: skip
    device, info = open_device(settings, local=LOCAL)
    assert info.num_blocks == MIB // device.pools.bytes_per_block
    assert info.card is not None
    assert info.card.step_bytes > 0
    imitated_accelerator.set_card(100 * MIB)
    measured = replace(settings, kv_cache_memory_bytes=None)
    whole, staged = (
        open_device(measured, local=LOCAL)[1],
        open_staged_device(measured, LOCAL.max_tokens, local=LOCAL)[1],
    )
    assert whole.num_blocks > staged.num_blocks > whole.num_blocks // 2


def test_weights_are_read_to_the_device_without_a_copy_of_the_whole(checkpoint, monkeypatch):
    read = AutoModelForCausalLM.from_pretrained
    devices = []

    def from_pretrained(*args, **kwargs):
        model, report = read(*args, **kwargs)
        devices.extend({parameter.device for parameter in model.parameters()})
        return model, report

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    open_device(tiny.settings_of(checkpoint("qwen3_moe"), device="cuda"))
    assert devices == [DEVICE]
