"""Checkpoints of quantized weights, and twins that have the same numbers in float32."""

from __future__ import annotations

import json
import re

import torch
from parity import tiny
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from moestro.model.tensors import Float8Weight, ScaleBlock

BLOCK = ScaleBlock(8, 8)
QUANTIZED = re.compile(r"_proj(_with_mqa)?\.weight$")  # as in published checkpoints: attention, experts, dense layers

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def write(directory, tensors: dict, config: dict):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def quantize(weight: Tensor, block: ScaleBlock) -> tuple[Tensor, Tensor]:
    """(float8[out, in], float32[row blocks, column blocks]), a weight and its scales. Last blocks may be smaller."""
    (num_out, num_in), grid = weight.shape, block.grid(*weight.shape)
    wide = functional.pad(weight.float(), (0, grid[1] * block.width - num_in, 0, grid[0] * block.height - num_out))
    blocks = wide.unflatten(0, (-1, block.height)).unflatten(2, (-1, block.width))
    scales = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scales[:, None, :, None]).view(wide.shape)[:num_out, :num_in]
    return numbers.to(torch.float8_e4m3fn).contiguous(), scales


def fp8_twins(tmp_path, family: str = "qwen3_moe", block: ScaleBlock = BLOCK, dtype=torch.float32, **changes):
    """(a checkpoint in blocks of float8, the same numbers in another dtype)."""
    plain, packed = tmp_path / "plain", tmp_path / "fp8"
    packed.mkdir()
    tiny.save_checkpoint(plain, tiny.make_config(family, **changes))
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    quantized, dequantized = {}, {}
    for name, weight in tensors.items():
        if not QUANTIZED.search(name):
            kept = dtype if weight.is_floating_point() and "correction_bias" not in name else weight.dtype
            quantized[name] = dequantized[name] = weight.to(kept)
            continue
        numbers, scales = quantize(weight, block)
        quantized[name], quantized[f"{name}_scale_inv"] = numbers, scales
        dequantized[name] = Float8Weight(numbers, scales, block).dequantised(dtype)
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    if dtype != torch.float32:
        config["dtype"] = str(dtype).removeprefix("torch.")
    write(packed, quantized, {**config, "quantization_config": quantization})
    return packed, write(plain, dequantized, config)


def mxfp4_twins(tmp_path):
    """(GPT-OSS with 4-bit experts, the same numbers in float32)."""
    plain, packed = tmp_path / "plain", tmp_path / "mxfp4"
    packed.mkdir()
    tiny.save_checkpoint(plain, tiny.make_config("gpt_oss", intermediate_size=32))
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    quantized, dequantized = {}, {}
    for name, weight in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantized[name] = dequantized[name] = weight
            continue
        experts, rows, columns = weight.shape  # [experts, in, out]; packed as [experts, out, in / 32, 16]
        blocks = torch.randint(256, (experts, columns, rows // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (experts, columns, rows // 32), dtype=torch.uint8, generator=generator)
        nibbles = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
        values = torch.tensor(FP4)[nibbles] * torch.exp2(scales.float() - 127)[..., None]
        quantized[f"{name}_blocks"], quantized[f"{name}_scales"] = blocks, scales
        dequantized[name] = values.flatten(-2).transpose(1, 2)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    write(packed, quantized, {**config, "quantization_config": quantization})
    return packed, write(plain, dequantized, config)
