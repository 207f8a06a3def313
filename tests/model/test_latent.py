"""Latent attention: bytes of a token's KV, and modules that look like DeepSeek's but compute something else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from support.quantized_checkpoints import fp8_twins

from moestro.cost.networks import network_from_config
from moestro.model.attention import LATENT, PAGED, PLAIN, compress_attention
from moestro.model.check import check_against_reference
from moestro.model.device import open_device

pytestmark = pytest.mark.transformers

BLOCK_SIZE = 16
PUBLISHED = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# Published attentions around small layers: family, heads, layers, and bytes of KV a token in all of these in bfloat16.
SHAPES = {
    "DeepSeek-V2-Lite": ("deepseek_v2-lite", 16, 27, 31_104, 276_480),
    "DeepSeek-V3": ("deepseek_v3", 128, 61, 70_272, 4_997_120),
}


@pytest.mark.parametrize(("family", "heads", "num_layers", "compressed", "expanded"), SHAPES.values(), ids=SHAPES)
def test_a_token_takes_one_row_for_all_heads(family, heads, num_layers, compressed, expanded, tmp_path):
    shape = {**PUBLISHED, "num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 2}
    tiny.make_config(family, **shape).save_pretrained(tmp_path)
    given = {"load_format": "dummy", "dtype": "bfloat16", "kernels": "eager", "block_size": BLOCK_SIZE}
    device, _ = open_device(tiny.settings_of(tmp_path, **given))
    per_layer = device.pools.bytes_per_block // BLOCK_SIZE // 2
    assert per_layer * num_layers == compressed
    assert heads * (128 + 64 + 128) * 2 * num_layers == expanded
    keys, values = device.pools.find(0)
    assert (keys.shape[1:], values.shape[1:]) == ((1, 576), (1, 512))
    priced = network_from_config(family, device.network.config.to_dict()).attention
    assert priced.kv_bytes_per_token == per_layer, "the simulator and paced devices count the same"


def _sequences(network) -> list[drive.Driven]:
    """Prompts in chunks, and decodes in batches."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, tiny.VOCAB, size=size).tolist() for size in (17, 5, 30)]
    return drive.drive(drive.make_device(drive.recording(network)), prompts, 6, rng)


def scaled(key, value, rotated_size):
    """An up-projection that scales its values."""
    return key, 1.5 * value


def rotated_first(key, value, rotated_size):
    """An up-projection whose keys begin with the rotated part."""
    return key.roll(rotated_size, -1), value


def of_unlike_heads(key, value, rotated_size):
    """An up-projection whose heads get unlike rotated parts."""
    key = key.clone()
    key[:, 1, :, -rotated_size:] *= 1.2
    return key, value


@pytest.mark.parametrize("change", [scaled, rotated_first, of_unlike_heads])
def test_a_module_that_expands_otherwise_keeps_k_and_v_expanded(change, tmp_path, monkeypatch):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("deepseek_v3"))
    attention = type(tiny.load_oracle(directory).model.layers[0].self_attn)
    original = attention.expand_kv

    def expand_kv(module, latents, rotated):
        return change(*original(module, latents, rotated), module.qk_rope_head_dim)

    monkeypatch.setattr(attention, "expand_kv", expand_kv)
    device, info = open_device(tiny.settings_of(directory))
    assert info.notes[0].startswith("3 of 3 modules of latent attention keep K and V expanded")
    assert device.pools.bytes_per_block == 4 * 4 * (24 + 12) * 3 * 4
    monkeypatch.setattr("moestro.model.check.TESTED_FAMILIES", frozenset())
    check_against_reference(tiny.load(directory), 256)


def test_an_up_projection_with_a_bias_keeps_k_and_v_expanded(tmp_path):
    model = tiny.load_oracle(tiny.save_checkpoint(tmp_path, tiny.make_config("deepseek_v3")))
    model.model.layers[1].self_attn.kv_b_proj.bias = torch.nn.Parameter(torch.ones(4 * 28))
    assert compress_attention(model).startswith("1 of 3 modules")
    assert [LATENT in layer.self_attn.__dict__ for layer in model.model.layers] == [True, False, True]


@pytest.mark.parametrize("attention", [PAGED, PLAIN])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v2-lite", "deepseek_v3"])
def test_compressed_and_expanded_networks_agree_to_the_last_digits(family, attention, tmp_path, monkeypatch):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config(family))
    compressed = tiny.load(directory, dtype="float64")
    monkeypatch.setattr("moestro.model.load.compress_attention", lambda model: "")
    expanded = tiny.load(directory, dtype="float64")
    compressed.model.set_attn_implementation(attention)
    for one, other in zip(_sequences(compressed), _sequences(expanded), strict=True):
        assert one.tokens == other.tokens
        for position, logits in one.logits.items():
            torch.testing.assert_close(logits, other.logits[position], rtol=1e-12, atol=1e-12)


def test_fp8_weights_of_the_up_projection_are_dequantized_and_compressed(tmp_path):
    networks = [tiny.load(directory) for directory in fp8_twins(tmp_path, "deepseek_v3")]
    for network in networks:
        assert all(LATENT in layer.self_attn.__dict__ for layer in network.model.model.layers)
    packed, plain = (_sequences(network) for network in networks)
    assert [each.tokens for each in packed] == [each.tokens for each in plain]


# Families of transformers that have DeepSeek's attention and are not tested ones.
RELATIVES = {
    "glm4_moe_lite": {},
    "youtu": {},
    "minicpm3": {},
    "axk1": {"n_group": 1, "topk_group": 1},
}


@pytest.mark.parametrize("name", RELATIVES)
def test_a_relative_of_deepseek_keeps_one_row_too_and_answers_as_transformers_do(name, tmp_path):
    config = tiny.make_config(name, **{**tiny.FAMILIES["deepseek_v3"][1], "rope_parameters": None, **RELATIVES[name]})
    directory = tiny.save_checkpoint(tmp_path, config)
    device, info = open_device(tiny.settings_of(directory, dtype="float64"))
    assert "passed a comparison with transformers" in info.notes[0]
    assert device.pools.bytes_per_block == 4 * (16 + 8) * 3 * 8
    oracle = tiny.load_oracle(directory, torch.float64, "sdpa")
    for sequence in _sequences(tiny.load(directory, dtype="float64")):
        with torch.inference_mode():
            wanted = oracle(input_ids=torch.tensor([sequence.tokens]), use_cache=False).logits[0].argmax(-1)
        assert sequence.tokens[-6:] == wanted[-7:-1].tolist()
