"""FP8 checkpoints on an accelerator: weights stay FP8 where kernels read them, and change no bit of an answer.

The accelerator is imitated, and the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from gpu.test_worker import served
from parity import drive, tiny
from safetensors.torch import load_file, save_file
from support import imitated_accelerator
from support.fake_device import make_request
from support.quantized_checkpoints import fp8_twins

from moestro.model import load
from moestro.model.device import open_device
from moestro.model.experts.expert_open import ExpertReader
from moestro.model.experts.expert_slots import from_bytes, num_expert_bytes, read_expert, to_bytes, write_expert
from moestro.model.tensors import FLOAT8, Float8Linear, ScaleBlock

pytest.importorskip("triton")

FAMILIES = ["qwen3_moe", "deepseek_v3"]
# A latent of 12 entries has 20 rows with its rotated part: the last block is smaller, as in DeepSeek-V3.
SIZES = {"qwen3_moe": {"num_hidden_layers": 1}, "deepseek_v3": {"num_hidden_layers": 2, "kv_lora_rank": 12}}
OWN = {"dtype": "bfloat16", "kernels": "own", "enforce_eager": True}


@pytest.fixture(autouse=True)
def capability(monkeypatch):
    """A function that gives the imitated accelerator another compute capability than 9.0."""
    with imitated_accelerator.imitated(monkeypatch):

        def change(major: int, minor: int) -> None:
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (major, minor))

        change(9, 0)
        yield change


def twins(tmp_path, family: str):
    """(a checkpoint in float8, the same numbers in bfloat16)."""
    return fp8_twins(tmp_path, family, dtype=torch.bfloat16, **SIZES[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_answers_from_fp8_weights_as_from_dequantised_ones(family, tmp_path):
    requests = [make_request(name, [5, 6, 7, len(name)], max_tokens=5) for name in ("a", "bb")]
    packed, plain = (served(each, "cuda", requests, "", **OWN).tokens for each in twins(tmp_path, family))
    assert packed == plain
    assert {len(tokens) for tokens in packed.values()} == {5}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_bits_of_dequantised_weights_and_weights_take_fewer_bytes(family, tmp_path):
    found = []
    for directory in twins(tmp_path, family):
        device, info = open_device(tiny.settings_of(directory, device="cuda", **OWN))
        device.network = network = drive.recording(device.network)
        assert not network.exchange.kept, "each module computes what torch does with the dequantised weight"
        drive.run(device, drive.make_units([(0, [3, 4, 5, 6]), (0, [9])], [[0], [1]]))
        found.append((network, info))
    (packed, info), (plain, plain_info) = found
    assert info.card.weight_bytes < plain_info.card.weight_bytes
    assert torch.equal(packed.last_logits, plain.last_logits)
    assert packed.exchange.num_planned == plain.exchange.num_planned
    dtypes = {name: parameter.dtype for name, parameter in packed.model.named_parameters()}
    in_float8 = {name.rpartition(".layers.")[2] for name, dtype in dtypes.items() if dtype is FLOAT8}
    assert {"0.self_attn.o_proj.weight", f"{len(packed.layer_bytes) - 1}.mlp.experts.down_proj"} <= in_float8
    assert not [name for name in in_float8 if "gate.weight" in name or "norm" in name or "kv_b" in name]
    assert dtypes["lm_head.weight"] is torch.bfloat16
    assert packed.bytes_per_expert < 0.6 * plain.bytes_per_expert
    assert [note for note in info.notes if note.startswith("FP8 weights stay FP8: ")]
    assert packed.num_parameters == plain.num_parameters


@pytest.mark.parametrize(
    ("settings", "version", "words"),
    [
        ({}, (8, 6), "the GPU has compute capability 8.6, and FP8 needs 8.9 or more"),
        ({"kernels": "eager"}, (9, 0), "torch's kernels do not read them (--kernels eager)"),
        ({"dtype": "float16"}, (9, 0), "there are own kernels for bfloat16 and float32"),
        ({"device": "cpu"}, (9, 0), "the kernels of a CPU do not read FP8"),
    ],
)
def test_fp8_weights_are_dequantised_elsewhere_and_a_note_says_why(settings, version, words, tmp_path, capability):
    capability(*version)
    packed, _ = twins(tmp_path, "qwen3_moe")
    found = tiny.settings_of(packed, **{"device": "cuda", "dtype": "bfloat16", "kernels": "auto", **settings})
    network, notes = load.load_network(found, load.read_config(found))
    assert [note for note in notes if words in note], notes
    assert not [module for module in network.model.modules() if isinstance(module, Float8Linear)]
    assert {parameter.dtype for parameter in network.model.parameters()} == {getattr(torch, found.dtype)}


def _store(directory, change) -> None:
    path = directory / "model.safetensors"
    save_file({name: change(name, tensor) for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def _network(directory):
    settings = tiny.settings_of(directory, device="cuda", **OWN)
    return load.load_network(settings, load.read_config(settings))


def test_a_checkpoint_whose_modules_are_not_those_of_its_config_is_dequantised(tmp_path):
    """One projection in bfloat16 that modules_to_not_convert does not name would be rounded to float8 unnoticed."""
    packed, plain = twins(tmp_path, "qwen3_moe")
    path, name = packed / "model.safetensors", "model.layers.0.self_attn.o_proj.weight"
    tensors, wanted = load_file(path), load_file(plain / "model.safetensors")
    del tensors[f"{name}_scale_inv"]
    save_file({**tensors, name: wanted[name]}, path, {"format": "pt"})
    network, notes = _network(packed)
    assert "another form than config.json says" in notes[0]
    assert torch.equal(network.model.model.layers[0].self_attn.o_proj.weight.cpu(), wanted[name])
    # With its name there, the others stay FP8.
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", name.removesuffix(".weight")]
    (packed / "config.json").write_text(json.dumps(config))
    attention = _network(packed)[0].model.model.layers[0].self_attn
    assert torch.equal(attention.o_proj.weight.cpu(), wanted[name])
    assert isinstance(attention.q_proj, Float8Linear)


def test_scales_in_bfloat16_are_widened_and_another_float8_is_dequantised(tmp_path):
    packed, _ = twins(tmp_path, "qwen3_moe")
    _store(packed, lambda name, each: each.to(torch.bfloat16) if name.endswith("_scale_inv") else each)
    network, notes = _network(packed)
    assert notes[0].startswith("FP8 weights stay FP8")
    scales = {each.dtype for name, each in network.model.named_parameters() if name.endswith("_scale_inv")}
    assert scales == {torch.float32}
    _store(packed, lambda _, each: each.float().to(torch.float8_e5m2) if each.dtype is FLOAT8 else each)
    network, notes = _network(packed)
    assert notes[0].startswith("FP8 weights are dequantised")


def test_q_k_and_v_whose_rows_share_a_block_keep_their_own_weights_and_compute_the_same(tmp_path):
    """Blocks of 24 rows: k has 32, so that joined rows would begin inside a block."""
    logits = []
    for directory in fp8_twins(tmp_path, "qwen3_moe", ScaleBlock(24, 16), torch.bfloat16, num_hidden_layers=1):
        device, _ = open_device(tiny.settings_of(directory, device="cuda", **OWN))
        device.network = network = drive.recording(device.network)
        assert not network.exchange.kept
        drive.run(device, drive.make_units([(0, [3, 4, 5, 6])], [[0]]))
        logits.append((network.exchange.num_planned, network.last_logits))
    assert [planned for planned, _ in logits] == [0, 1]
    assert torch.equal(logits[0][1], logits[1][1])


def test_experts_move_with_their_scales(tmp_path):
    """As bytes between workers, and from the checkpoint: a slot then answers as the expert did where it came from."""
    packed, _ = twins(tmp_path, "qwen3_moe")
    settings = tiny.settings_of(packed, device="cuda", **OWN)
    whole, cut = (load.load_network(settings, load.read_config(settings))[0] for _ in range(2))
    cut.keep_experts(np.array([[0, 1]], np.int32))
    source, target = whole.experts[0][1], cut.experts[0][1]
    moved = to_bytes(read_expert(source, 5))
    assert len(moved) == num_expert_bytes(source) == whole.bytes_per_expert
    write_expert(target, 1, 5, from_bytes(target, moved))
    [from_file] = ExpertReader(settings, whole.device).read(0, [3])
    write_expert(target, 0, 3, from_file)
    for slot, expert in ((0, 3), (1, 5)):
        for mine, theirs in zip(read_expert(target, slot), read_expert(source, expert), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine.view(torch.uint8).cpu(), theirs.view(torch.uint8).cpu())
