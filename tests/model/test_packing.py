"""Packed weights change the speed of a network and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny

from moestro.model.kernels.packing import PackedLinear, can_pack

pytestmark = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.bfloat16), reason="this CPU has no packed kernels for bfloat16"
)
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe", "phimoe", "llama"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_network_gives_the_logits_of_the_plain_one(name, dtype, tmp_path):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config(name))
    prompts = [np.random.default_rng(0).integers(3, tiny.VOCAB, length).tolist() for length in (3, 9, 17)]
    logits = []
    for packed in (False, True):
        network = drive.recording(tiny.load(directory, dtype=dtype))
        if packed:
            network.pack()
        driven = drive.drive(drive.make_device(network), prompts, 6, np.random.default_rng(1))
        logits.append([sequence.logits for sequence in driven])
    tolerance = 0 if dtype == "bfloat16" else 1e-5
    for plain, packed in zip(*logits, strict=True):
        assert plain.keys() == packed.keys()
        for position, row in plain.items():
            torch.testing.assert_close(packed[position], row, atol=tolerance, rtol=tolerance)


def test_packing_drops_the_unpacked_weights_and_keeps_the_count_of_parameters(tmp_path):
    network = tiny.load(tiny.save_checkpoint(tmp_path, tiny.make_config("qwen3_moe")), dtype="bfloat16")
    before = network.num_parameters
    network.pack()
    assert network.num_parameters == before
    experts = [m for m in network.model.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "is_transposed")]
    assert experts
    assert all(m.gate_up_proj.numel() == m.down_proj.numel() == 0 for m in experts)
    linears = [m for m in network.model.modules() if isinstance(m, PackedLinear)]
    assert linears
    assert all(m.weight.device.type == "meta" for m in linears)
    assert not any(type(m) is torch.nn.Linear for m in network.model.modules())


def test_float64_and_accelerators_stay_unpacked(tmp_path):
    assert not can_pack(torch.device("cpu"), torch.float64)
    assert not can_pack(torch.device("cuda"), torch.bfloat16)
    network = tiny.load(tiny.save_checkpoint(tmp_path, tiny.make_config("llama")), dtype="float64")
    network.pack()
    assert any(type(m) is torch.nn.Linear for m in network.model.modules())
