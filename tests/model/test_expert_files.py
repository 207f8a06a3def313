"""Single experts from a checkpoint: bit for bit those of the whole network, in whatever form they are stored."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from parity import tiny
from safetensors.torch import load_file, save_file
from support.expert_tables import scatter
from support.quantized_checkpoints import fp8_twins, mxfp4_twins
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel

from moestro.core.experts.expert_table import EMPTY
from moestro.errors import UnsupportedModelError
from moestro.model.experts.expert_open import ExpertReader, TorchSlots
from moestro.model.experts.expert_slots import read_expert
from moestro.model.experts.routed import tag_of
from moestro.model.network import WorkerShare
from moestro.model.settings import ModelSettings

pytestmark = pytest.mark.transformers

CPU = torch.device("cpu")


def check(settings: ModelSettings) -> None:
    network, reader = tiny.load_settings(settings), ExpertReader(settings, CPU)
    for layer, module in network.experts:
        found = reader.read(layer, [4, 0, 5])
        for expert, weights in zip([4, 0, 5], found, strict=True):
            for ours, theirs in zip(weights, read_expert(module, expert), strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))


@pytest.mark.parametrize("name", tiny.SPARSE)
def test_an_expert_is_that_of_the_whole_network(name, checkpoint):
    check(tiny.settings_of(checkpoint(name), dtype="float64" if name == "mixtral" else "auto"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make_twins", [fp8_twins, mxfp4_twins])
def test_a_quantized_expert_is_dequantized_in_the_same_way(make_twins, dtype, tmp_path):
    check(tiny.settings_of(make_twins(tmp_path)[0], dtype=dtype))


def test_shards_without_a_dtype_in_their_config(tmp_path):
    whole = tiny.save_checkpoint(tmp_path / "whole", tiny.make_config("qwen3_moe"))
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    config = json.loads((tmp_path / "shards" / "config.json").read_text())
    (tmp_path / "shards" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    check(tiny.settings_of(tmp_path / "shards", dtype="auto"))


def test_a_further_read_builds_one_network_and_a_layer_that_went_missing_meanwhile_is_refused(tmp_path, monkeypatch):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("qwen3_moe"))
    reader = ExpertReader(tiny.settings_of(directory), CPU)
    reader.read(0, [1])
    built: list[object] = []
    make = Qwen3MoeModel.__init__
    monkeypatch.setattr(Qwen3MoeModel, "__init__", lambda self, config: (built.append(config), make(self, config))[1])
    reader.read(1, [1])
    assert len(built) == 1
    tensors = load_file(directory / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if ".1.mlp." not in name}
    save_file(left, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="layer 1 has no experts"):
        reader.read(1, [0])


def test_random_weights_are_drawn_again(checkpoint):
    check(tiny.settings_of(checkpoint("qwen3_moe"), load_format="dummy", seed=5))


def test_slots_take_experts_of_the_checkpoint(checkpoint):
    settings = tiny.settings_of(checkpoint("gpt_oss"))
    whole, cut = tiny.load_settings(settings), tiny.load_settings(settings)
    table = scatter(np.random.default_rng(2), (whole.num_layers, whole.num_experts), [0, 1], 2)
    WorkerShare(worker=0, make_table=lambda *_: table).cut(cut)
    cut.pack_experts()
    (layer, module), (_, source) = cut.experts[1], whole.experts[1]
    slots = [int(np.flatnonzero(table.logical_of[0, layer] == EMPTY)[0]), 0]
    memory = TorchSlots(cut, settings)
    for slot, logical, weights in zip(slots, [3, 1], memory.read(layer, [3, 1]), strict=True):
        memory.write(layer, slot, logical, weights)
    assert memory.expert_bytes == sum(each.nbytes for each in memory.read(layer, [3])[0] if each is not None)
    assert tag_of(module).logical_of[slots].tolist() == [3, 1]
    for slot, logical in zip(slots, [3, 1], strict=True):
        for ours, theirs in zip(read_expert(module, slot), read_expert(source, logical), strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)


def test_an_expert_that_a_layer_does_not_have_needs_no_weights(checkpoint):
    settings = tiny.settings_of(checkpoint("gpt_oss"))
    memory = TorchSlots(tiny.load_settings(settings), settings)
    weights, none = memory.read(1, [3, 99])
    assert weights is not None
    memory.write(1, 0, 99, none)


def test_a_layer_that_went_missing_is_refused(tmp_path):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("qwen3_moe"))
    tensors = load_file(directory / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if ".1.mlp." not in name}
    save_file(left, directory / "model.safetensors", {"format": "pt"})
    settings = tiny.settings_of(directory)
    with pytest.raises(UnsupportedModelError, match=r"lack model\.layers\.1\.mlp\.gate\.weight"):
        ExpertReader(settings, CPU).read(1, [0])
