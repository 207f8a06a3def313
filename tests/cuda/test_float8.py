"""Products with weights in float8 have the bits of weights dequantised at load, in any batch, segment and tile."""

from __future__ import annotations

import pytest
import torch
from cuda.test_products import joined, rows_of
from support.cuda_cases import NAN, ExpertCase, random
from support.quantized_checkpoints import quantize
from torch import Tensor

from moestro.model.cuda import functions
from moestro.model.cuda.functions import CudaExperts, CudaKernels, ExpertWeightTable
from moestro.model.cuda.tiles import Tile
from moestro.model.tensors import Float8Weight, ScaleBlock

# The tile inside a block, over several rows of blocks, over several columns, and a block of the published size.
BLOCKS = [ScaleBlock(64, 64), ScaleBlock(8, 32), ScaleBlock(24, 40), ScaleBlock(128, 128)]
CASES = [*((block, torch.bfloat16) for block in BLOCKS), (BLOCKS[2], torch.float32)]
TILES = [Tile(16, 32, 64, 4, 2), Tile(32, 128, 128, 8, 1)]
NUM_OUT, NUM_IN = 72, 512  # four segments, and no whole number of tiles
NUM_CHOSEN = 2


def float8_of(weight: Tensor, block: ScaleBlock) -> Float8Weight:
    """A weight [out, in] in float8, whose blocks have scales of very different sizes."""
    sizes = 4 ** random(*block.grid(*weight.shape), seed=7).to(weight)
    wide = sizes.repeat_interleave(block.height, 0).repeat_interleave(block.width, 1)
    return Float8Weight(*quantize(weight * wide[: len(weight), : weight.shape[1]], block), block)


def random_float8(kernels: CudaKernels, num_out: int, num_in: int, block: ScaleBlock, seed: int = 1) -> Float8Weight:
    return float8_of((random(num_out, num_in, seed=seed) * num_in**-0.5).to(kernels.device), block)


def test_a_dequantised_weight_is_each_number_times_the_scale_of_its_block_rounded_once(monkeypatch):
    block = ScaleBlock(8, 16)
    weight = float8_of(random(20, 40, seed=1), block)
    wanted = torch.empty(20, 40)
    for out in range(20):
        for at in range(40):
            wanted[out, at] = weight.numbers[out, at].float() * weight.scales[out // 8, at // 16]
    assert weight.scales.shape == (3, 3)
    for size in (1 << 24, 1):  # in one strip, and in one for each row of blocks
        monkeypatch.setattr("moestro.model.tensors._STRIP_NUMBERS", size)
        assert torch.equal(weight.dequantised(torch.float32), wanted)
        assert torch.equal(weight.dequantised(torch.bfloat16), wanted.to(torch.bfloat16))


@pytest.mark.parametrize(("block", "dtype"), CASES, ids=str)
def test_a_product_has_the_bits_of_the_dequantised_weight_in_any_batch_segment_and_tile(
    block, dtype, device, monkeypatch
):
    kernels = CudaKernels(device, dtype)
    weight, rows = random_float8(kernels, NUM_OUT, NUM_IN, block), rows_of(kernels, 20)
    plain = weight.dequantised(dtype)
    whole = kernels.linear(rows, plain)
    assert torch.equal(kernels.linear(rows, weight), whole)
    for begin, end in ((0, 1), (9, 20)):
        assert torch.equal(kernels.linear(rows[begin:end], weight), whole[begin:end])
        product = kernels.product(rows[begin:end], weight)
        assert product.segments == 4
        assert torch.equal(product.numbers, kernels.product(rows[begin:end], plain).numbers)
        assert torch.equal(joined(product, dtype), whole[begin:end])
    for tile in TILES:
        monkeypatch.setattr(functions, "dense_tile", lambda *_, tile=tile: tile)
        assert torch.equal(kernels.linear(rows, weight), whole), tile
        assert torch.equal(kernels.product(rows[:3], weight).numbers, kernels.product(rows[:3], plain).numbers), tile


@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (5, 40), (200, 96), (72, 384)])
def test_a_product_of_any_size_has_the_bits_of_the_dequantised_weight(num_out, num_in, device):
    """Of 384 inputs, segments begin at odd multiples of 96, so that a tile of 128 crosses blocks."""
    kernels = CudaKernels(device, torch.bfloat16)
    for block in (ScaleBlock(16, 16), ScaleBlock(128, 128)):
        weight, rows = random_float8(kernels, num_out, num_in, block), rows_of(kernels, 3, num_in)
        bias = random(num_out, seed=3).to(device, torch.bfloat16)
        plain = weight.dequantised(torch.bfloat16)
        assert torch.equal(kernels.linear(rows, weight, bias), kernels.linear(rows, plain, bias))
        assert torch.equal(kernels.product(rows, weight).numbers, kernels.product(rows, plain).numbers)


def test_each_number_of_float8_is_widened_as_torch_does(device):
    """All 254 finite ones and both NaN, each alone in a row of the weight, under scales that round."""
    kernels = CudaKernels(device, torch.bfloat16)
    numbers = torch.zeros(256, 32, dtype=torch.uint8)
    numbers[:, 0] = torch.arange(256)
    scales = torch.tensor([0.7, 1.3e-4, 3.1e5, 2.0**-120])[:, None]
    weight = Float8Weight(numbers.to(device).view(torch.float8_e4m3fn), scales.to(device), ScaleBlock(64, 32))
    rows = torch.zeros(1, 32, device=device, dtype=torch.bfloat16)
    rows[0, 0] = 1
    found = kernels.linear(rows, weight)[0]
    wanted = weight.dequantised(torch.bfloat16)[:, 0]
    assert int(found.isnan().sum()) == 2
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


def test_a_scale_that_is_nan_spoils_its_block_alone(device):
    kernels = CudaKernels(device, torch.bfloat16)
    weight, rows = random_float8(kernels, NUM_OUT, 64, ScaleBlock(32, 32)), rows_of(kernels, 3, 64)
    plain = kernels.linear(rows, weight)
    weight.scales[1, 0] = NAN
    found = kernels.linear(rows, weight)
    assert bool(found[:, 32:64].isnan().all())
    assert torch.equal(found[:, :32], plain[:, :32])
    assert torch.equal(found[:, 64:], plain[:, 64:])


class Float8Case(ExpertCase):
    """Experts in float8, beside the same ones dequantised."""

    def __init__(self, kernels: CudaKernels, hidden: int, inner: int, block: ScaleBlock) -> None:
        super().__init__(kernels, 3, hidden, inner)
        ups = [[float8_of(half, block) for half in each.float().chunk(2)] for each in self.up]
        downs = [float8_of(each.float(), block) for each in self.down]
        dtype = kernels.dtype
        self.up = torch.stack([torch.cat([half.dequantised(dtype) for half in each]) for each in ups])
        self.down = torch.stack([each.dequantised(dtype) for each in downs])
        self.experts = CudaExperts(kernels, ExpertWeightTable(self.up, self.down))
        self.packed = CudaExperts(
            kernels,
            ExpertWeightTable(
                torch.stack([torch.cat([half.numbers for half in each]) for each in ups]),
                torch.stack([each.numbers for each in downs]),
                up_scales=torch.stack([torch.cat([half.scales for half in each]) for each in ups]),
                down_scales=torch.stack([each.scales for each in downs]),
                block=block,
            ),
        )


@pytest.mark.parametrize(("block", "dtype"), CASES, ids=str)
def test_experts_have_the_bits_of_dequantised_ones_in_any_batch_and_tile(block, dtype, device, monkeypatch):
    case = Float8Case(CudaKernels(device, dtype), 80, 40, block)
    rows, (ids, weights) = case.rows(12), case.choice(12, NUM_CHOSEN)
    whole = case.weighted_sum(rows, ids, weights)
    assert torch.equal(case.packed.weighted_sum(rows, ids, weights, case.counts()), whole)
    part = case.packed.weighted_sum(rows[11:], ids[11:], weights[11:], case.counts())
    assert torch.equal(part, whole[11:])
    found, wanted = torch.empty_like(rows), torch.empty_like(rows)
    for own, out in ((case.packed, found), (case.experts, wanted)):
        assert own.answers([(2, 5), (0, 7)], rows, out) == 12
    assert torch.equal(found, wanted)
    monkeypatch.setattr(functions, "expert_tile", lambda *_: Tile(16, 128, 16, 8, 2))
    assert torch.equal(case.packed.weighted_sum(rows, ids, weights, case.counts()), whole)


def test_absent_rows_of_experts_in_float8_are_neither_read_nor_written(device):
    case = Float8Case(CudaKernels(device, torch.bfloat16), 80, 40, ScaleBlock(64, 64))
    rows, (ids, weights) = case.rows(20), case.choice(20, NUM_CHOSEN)
    plain = case.weighted_sum(rows[:7], ids[:7], weights[:7])
    rows[7:], weights[7:], ids[7:] = NAN, NAN, 1 << 40
    case.kernels.assume_rows(torch.tensor([7], dtype=torch.int32, device=device), 20)
    found = case.packed.weighted_sum(rows, ids, weights, case.counts())
    assert torch.equal(found[:7], plain)
    assert bool(found[7:].isnan().all())
