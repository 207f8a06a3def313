"""Weights: read, dequantized, drawn at random, and never silently missing."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import drive, tiny
from safetensors.torch import load_file, save_file
from support import own_kernels
from support.loaded_processes import LOADED, send_what_reading_loads
from support.quantized_checkpoints import fp8_twins, mxfp4_twins

from moestro.errors import UnsupportedModelError
from moestro.model.device import open_device

pytestmark = pytest.mark.transformers


def fp8_twins_with_partial_blocks(tmp_path):
    """A projection has 20 rows in blocks of 8, as DeepSeek-V3's of latents has 576 in blocks of 128."""
    return fp8_twins(tmp_path, "deepseek_v3", kv_lora_rank=12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make_twins", [fp8_twins, fp8_twins_with_partial_blocks, mxfp4_twins])
def test_quantized_weights_are_dequantized_exactly(make_twins, dtype, tmp_path):
    packed, plain = make_twins(tmp_path)
    ours = tiny.load(packed, dtype=dtype)
    wanted = dict(tiny.load(plain, dtype=dtype).model.named_parameters())
    found = dict(ours.model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        assert parameter.dtype == wanted[name].dtype
        assert parameter.dtype == getattr(torch, dtype) or "correction_bias" in name
        assert torch.equal(parameter, wanted[name]), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("family", "part"), [("deepseek_v3", "e_score_correction_bias"), ("ernie4_5_moe", "gate.weight")]
)
def test_what_a_family_keeps_in_float32_stays_there(family, part, packed, tmp_path):
    directory = fp8_twins(tmp_path, family)[0 if packed else 1]
    state = tiny.load(directory, dtype="bfloat16").model.state_dict()
    kept = [tensor.dtype for name, tensor in state.items() if part in name]
    assert kept
    assert set(kept) == {torch.float32}
    assert {tensor.dtype for name, tensor in state.items() if "proj.weight" in name} == {torch.bfloat16}


def test_dummy_weights_need_a_config_alone_and_are_keyed_by_the_seed(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint("qwen3_moe") / "config.json").read_text())
    logits = []
    for seed in (1, 1, 2):
        device, info = open_device(tiny.settings_of(tmp_path, load_format="dummy", seed=seed))
        network = drive.recording(device.network)
        device.network = network
        drive.run(device, drive.make_units([(0, [5, 6, 7])], [[0]]))
        logits.append(network.last_logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    assert 0.1 < float(logits[0].std()) < 10
    assert info.notes == ("Weights are random (--load-format dummy).",)


def test_dummy_weights_ignore_how_the_checkpoint_is_quantized(tmp_path):
    packed, _ = mxfp4_twins(tmp_path)
    _, info = open_device(tiny.settings_of(packed, load_format="dummy", dtype="bfloat16"))
    assert info.dtype == "bfloat16"


def test_the_dtype_is_the_checkpoints_own_unless_named(tmp_path):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("qwen2"))
    assert open_device(tiny.settings_of(directory, dtype="auto"))[1].dtype == "float32"
    assert open_device(tiny.settings_of(directory, dtype="float16"))[1].dtype == "float16"


def test_a_missing_tensor_is_refused_and_not_made_up(tmp_path):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("qwen2"))
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        open_device(tiny.settings_of(directory))


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("qwen2"))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"has the shape \[5\], and config.json makes it \[32\]"):
        open_device(tiny.settings_of(directory))


def test_a_torn_file_is_refused(tmp_path):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("qwen2"))
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        open_device(tiny.settings_of(directory))


def test_tensors_that_nothing_reads_are_noted(tmp_path):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("qwen2"))
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, "stray.weight": torch.ones(2)}, directory / "model.safetensors", {"format": "pt"})
    assert (
        "1 tensors of the checkpoint are not used, first stray.weight."
        in open_device(tiny.settings_of(directory))[1].notes
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_half_precision_runs_and_stays_near_float32(name, dtype, checkpoint):
    answers = []
    for each in ("float32", dtype):
        network = drive.recording(tiny.load(checkpoint(name), dtype=each))
        drive.run(
            drive.make_device(network),
            drive.make_units([(0, list(range(3, 20))), (0, [7])], [[0, 1, 2, 3, 4], [9] * 5]),
        )
        answers.append(network.last_logits)
    assert answers[1].dtype == torch.float32
    assert float((answers[0] - answers[1]).abs().median()) < 0.1
    assert np.isfinite(answers[1].numpy()).all()


def _is_mapped(directory: Path) -> bool:
    return f"{directory}/model.safetensors" in Path("/proc/self/maps").read_text()


def _stored_in(directory: Path, dtype: str) -> None:
    """Store a checkpoint's weights in the dtype in which they will be computed, so that reading them copies nothing."""
    path = directory / "model.safetensors"
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="not Linux")
@pytest.mark.parametrize(("dtype", "kernels"), [("float32", "auto"), ("bfloat16", "eager"), ("bfloat16", "own")])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_packed_network_lets_the_files_of_its_checkpoint_go(family, dtype, kernels, tmp_path):
    """A file that stays mapped keeps the pages of all weights, which were read to be packed."""
    if kernels == "own":
        own_kernels.kernels()
    directory = own_kernels.save_checkpoint(tmp_path / "checkpoint", family)
    _stored_in(directory, dtype)
    settings = tiny.settings_of(directory, dtype=dtype, kernels=kernels)
    network = tiny.load_settings(settings)
    assert _is_mapped(directory), "weights are read from the mapped file"
    del network
    gc.collect()  # modules of transformers refer to each other
    assert not _is_mapped(directory)
    device, _ = open_device(settings)
    assert not _is_mapped(directory)
    units = drive.make_units([(0, [3, 4, 5])], [[0]])
    assert drive.run(device, units).token_ids.min() >= 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="not Linux")
def test_a_dense_network_that_is_not_packed_stays_in_the_files_that_engines_share(checkpoint, tmp_path):
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "llama")
    _stored_in(directory, "float16")
    device, _ = open_device(tiny.settings_of(directory, dtype="float16"))
    assert _is_mapped(directory)
    del device


def test_what_networks_share_is_loaded_ahead_of_the_first_one(tmp_path):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("qwen3_moe"))
    here, there = LOADED.Pipe()
    process = LOADED.Process(target=send_what_reading_loads, args=(directory, there), daemon=True)
    process.start()
    there.close()  # so that a dead process ends `recv`
    shared = {"transformers.generation.utils", "transformers.modeling_layers", "transformers.processing_utils"}
    assert shared.isdisjoint(here.recv())
    process.join()
