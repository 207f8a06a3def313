"""Dense products, norms, heads and gates: close to float64, and the same bits in any batch, tile and segment."""

from __future__ import annotations

import pytest
import torch
from support.cuda_cases import NAN, bound_of, error_of, make_form, random
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV3Config, Ernie4_5_MoeConfig, MiniMaxM2Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter

from moestro.model.cuda import functions
from moestro.model.cuda.exchange import exchange_gate
from moestro.model.cuda.functions import CudaKernels, GateForm, HeadNorms, Norm, Product
from moestro.model.cuda.tiles import MOST_PARTS_ROWS, Tile

DTYPES = [torch.float32, torch.bfloat16]
NUM_OUT, NUM_IN = 72, 512  # four segments, and no whole number of tiles
TILES = [Tile(16, 32, 64, 4, 2), Tile(64, 64, 32, 4, 2), Tile(32, 128, 128, 8, 1)]


def weight_of(kernels: CudaKernels, num_out: int = NUM_OUT, num_in: int = NUM_IN) -> Tensor:
    return (random(num_out, num_in, seed=1) * num_in**-0.5).to(kernels.device, kernels.dtype)


def rows_of(kernels: CudaKernels, num_rows: int, size: int = NUM_IN, seed: int = 2) -> Tensor:
    return random(num_rows, size, seed=seed).to(kernels.device, kernels.dtype)


def joined(product: Product, dtype: torch.dtype) -> Tensor:
    """The product that a reader of segments adds."""
    total = product.numbers if product.segments == 1 else product.numbers[0].clone()
    for part in product.numbers[1:] if product.segments > 1 else ():
        total += part
    return total.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 20, 130])
def test_a_product_is_close_to_float64(num_rows, has_bias, dtype, device):
    kernels = CudaKernels(device, dtype)
    weight, rows = weight_of(kernels), rows_of(kernels, num_rows)
    bias = random(NUM_OUT, seed=3).to(device, dtype) if has_bias else None
    wanted = functional.linear(rows.double(), weight.double(), None if bias is None else bias.double()).cpu()
    assert error_of(kernels.linear(rows, weight, bias), wanted) < bound_of(dtype)
    product = kernels.product(rows, weight, bias)
    assert (product.segments == 4) == (num_rows <= MOST_PARTS_ROWS and not has_bias)
    assert error_of(joined(product, dtype), wanted) < bound_of(dtype)


@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (5, 40), (64, 24), (200, 96)])
def test_a_product_of_any_size_is_close_to_float64(num_out, num_in, device):
    kernels = CudaKernels(device, torch.float32)
    weight, rows = weight_of(kernels, num_out, num_in), rows_of(kernels, 3, 2 * num_in)[:, ::2]
    wanted = functional.linear(rows.double(), weight.double()).cpu()
    assert error_of(kernels.linear(rows, weight), wanted) < bound_of(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_has_the_same_bits_in_any_batch_segment_and_tile(dtype, device, monkeypatch):
    kernels = CudaKernels(device, dtype)
    weight, rows = weight_of(kernels), rows_of(kernels, 70)
    whole = kernels.linear(rows, weight)
    for begin, end in ((0, 1), (7, 9), (40, 70), (3, 67)):
        assert torch.equal(kernels.linear(rows[begin:end], weight), whole[begin:end])
        assert torch.equal(joined(kernels.product(rows[begin:end], weight), dtype), whole[begin:end])
    for tile in TILES:
        monkeypatch.setattr(functions, "dense_tile", lambda *_, tile=tile: tile)
        assert torch.equal(kernels.linear(rows, weight), whole), tile


def test_segments_have_the_same_bits_in_any_tile(device, monkeypatch):
    kernels = CudaKernels(device, torch.bfloat16)
    weight, rows = weight_of(kernels), rows_of(kernels, 20)
    parts = kernels.product(rows, weight).numbers
    for tile in TILES:
        monkeypatch.setattr(functions, "dense_tile", lambda *_, tile=tile: tile)
        assert torch.equal(kernels.product(rows, weight).numbers, parts), tile


def test_absent_rows_of_a_product_stay_unread_and_unwritten(device):
    kernels = CudaKernels(device, torch.float32)
    weight, rows = weight_of(kernels), rows_of(kernels, 20)
    plain = kernels.linear(rows[:17], weight)
    rows[17:] = NAN
    kernels.assume_rows(torch.tensor([17], dtype=torch.int32, device=device), 20)
    for found in (kernels.linear(rows, weight), joined(kernels.product(rows, weight), torch.float32)):
        assert torch.equal(found[:17], plain)
        assert bool(found[17:].isnan().all())


def normed(rows: Tensor, norm: Norm) -> Tensor:
    rows = rows.double()
    return norm.weight.double() * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + norm.epsilon)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 96, 2048, 2880])
def test_norms_are_close_to_float64_and_have_the_same_bits_in_any_batch(size, dtype, device):
    kernels = CudaKernels(device, dtype)
    norm = Norm(1 + rows_of(kernels, 1, size)[0], 1e-3)
    rows = rows_of(kernels, 6, size, seed=4) * 3
    found = kernels.rms_norm(rows.view(2, 3, size), norm)
    assert found.shape == (2, 3, size)
    assert error_of(found.view(6, size), normed(rows, norm).cpu()) < bound_of(dtype)
    assert torch.equal(kernels.rms_norm(rows[2:3], norm), found.view(6, size)[2:3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_with_a_product_is_that_of_its_numbers_and_of_its_segments(dtype, device):
    kernels = CudaKernels(device, dtype)
    weight, rows = weight_of(kernels), rows_of(kernels, 9)
    stream, norm = rows_of(kernels, 9, NUM_OUT, seed=5), Norm(1 + rows_of(kernels, 1, NUM_OUT)[0], 1e-6)
    product = kernels.product(rows, weight)
    whole = Product(kernels.linear(rows, weight), 1)
    assert product.segments == 4
    found = kernels.add_norm(stream, product, norm)
    for mine, theirs in zip(found, kernels.add_norm(stream, whole, norm), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(found[0], stream + whole.numbers)
    assert error_of(found[1], normed(found[0], norm).cpu()) < bound_of(dtype)
    kernels.assume_rows(torch.tensor([7], dtype=torch.int32, device=device), 9)
    for mine, theirs in zip(kernels.add_norm(stream, product, norm), found, strict=True):
        assert torch.equal(mine[:7], theirs[:7])
        assert bool(mine[7:].isnan().all())


def rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = rows.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("size", [8, 24, 128])
def test_heads_are_normed_rotated_and_stored_as_in_float64(size, has_norm, dtype, device):
    kernels, form = CudaKernels(device, dtype), make_form(4, 2, size)
    qkv = rows_of(kernels, 5, 8 * size)
    angles = random(5, size // 2, seed=3)
    cos, sin = (each.repeat(1, 2).to(device, dtype) for each in (angles.cos(), angles.sin()))
    query_weight, key_weight = (1 + rows_of(kernels, 1, size, seed)[0] for seed in (6, 7))
    norms = HeadNorms(query_weight, key_weight, 1e-2) if has_norm else None
    slots = torch.tensor([3, 19, 0, 7, 8], device=device)

    def compute(qkv: Product) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (torch.full((20, 2, size), NAN, dtype=dtype, device=device) for _ in range(2))
        return kernels.heads(qkv, (cos, sin), norms, (keys, values, slots), form), keys, values

    query, keys, values = compute(Product(qkv, 1))
    first, second, third = qkv.view(5, 8, size).double().split([4, 2, 2], 1)
    if norms is not None:
        first = normed(first, Norm(norms.query, norms.epsilon))
        second = normed(second, Norm(norms.key, norms.epsilon))
    half_cos, half_sin = (each[:, None, : size // 2].double() for each in (cos, sin))
    assert error_of(query, rotated(first, half_cos, half_sin).cpu()) < bound_of(dtype)
    assert error_of(keys[slots], rotated(second, half_cos, half_sin).cpu()) < bound_of(dtype)
    assert torch.equal(values[slots], third.to(dtype))
    unused = torch.ones(20, dtype=torch.bool, device=device).index_fill(0, slots, value=False)
    assert bool(keys[unused].isnan().all())
    assert bool(values[unused].isnan().all())
    # Segments that add up to the same numbers, and a step that has only three of the rows.
    kernels.assume_rows(torch.tensor([3], dtype=torch.int32, device=device), len(qkv))
    segments = Product(torch.stack([qkv.float(), torch.zeros_like(qkv, dtype=torch.float32)]), 2)
    for mine, theirs in zip(compute(segments), (query, keys, values), strict=True):
        used = range(3) if theirs is query else slots[:3].tolist()
        for row in range(len(mine)):
            assert torch.equal(mine[row], theirs[row]) if row in used else bool(mine[row].isnan().all())


def wanted_choice(logits: Tensor, gate: GateForm) -> tuple[Tensor, Tensor]:
    logits = logits.double().cpu()
    if gate.bias is not None:
        logits = (logits + gate.bias.double().cpu()).to(gate.dtype).double()
    scores = logits.sigmoid() if gate.is_sigmoid else logits.softmax(-1)
    ids = (scores if gate.correction is None else scores + gate.correction.double().cpu()).topk(gate.num_chosen).indices
    weights = scores.gather(1, ids)
    return ids, gate.factor * (weights / weights.sum(1, keepdim=True) if gate.normalizes else weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("kind", ["softmax", "softmax with bias", "sigmoid with correction"])
def test_gates_choose_and_weigh_as_in_float64(kind, normalizes, dtype, device):
    num_experts = 24
    bias = random(num_experts, seed=3).to(device, dtype) if "bias" in kind else None
    correction = random(num_experts, seed=4).to(device) if "correction" in kind else None
    gate = GateForm(5, dtype, "sigmoid" in kind, normalizes, 2.5, bias, correction)
    kernels = CudaKernels(device, dtype)
    logits = rows_of(kernels, 9, num_experts)
    ids, weights = kernels.choose(Product(logits, 1), gate)
    wanted_ids, wanted = wanted_choice(logits, gate)
    assert torch.equal(ids.cpu().sort(1).values, wanted_ids.sort(1).values)
    order, wanted_order = ids.cpu().argsort(1), wanted_ids.argsort(1)
    assert error_of(weights.cpu().gather(1, order), wanted.gather(1, wanted_order)) < bound_of(dtype)
    alone = kernels.choose(Product(logits[4:5], 1), gate)
    assert torch.equal(alone[0], ids[4:5])
    assert torch.equal(alone[1], weights[4:5])


def test_of_equal_scores_the_lowest_ids_are_chosen_and_nan_chooses_distinct_experts(device):
    kernels = CudaKernels(device, torch.float32)
    logits = torch.zeros(2, 12, device=device)
    logits[1] = NAN
    ids, weights = kernels.choose(Product(logits, 1), GateForm(4, torch.float32, is_sigmoid=False, normalizes=True))
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights[0].tolist() == [0.25] * 4
    assert bool(weights[1].isnan().all())


def test_a_gate_reads_segments_and_leaves_absent_rows(device):
    kernels = CudaKernels(device, torch.float32)
    gate = GateForm(3, torch.float32, is_sigmoid=False, normalizes=True)
    weight, rows = weight_of(kernels), rows_of(kernels, 9)
    whole = kernels.choose(Product(kernels.linear(rows, weight), 1), gate)
    product = kernels.product(rows, weight)
    assert product.segments == 4
    kernels.assume_rows(torch.tensor([6], dtype=torch.int32, device=device), 9)
    ids, weights = kernels.choose(product, gate)
    assert torch.equal(ids[:6], whole[0][:6])
    assert torch.equal(weights[:6], whole[1][:6])
    assert bool(weights[6:].isnan().all())
    assert set(ids[6:].flatten().tolist()) == {torch.iinfo(torch.int64).max}


@pytest.mark.parametrize("num_rows", [1, 7])
@torch.inference_mode()
def test_a_gate_with_groups_and_a_correction_chooses_as_deepseek_v3_does(num_rows, device):
    config = DeepseekV3Config(
        hidden_size=48, num_local_experts=24, n_group=6, topk_group=3, num_experts_per_tok=5, routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    gate = DeepseekV3TopkRouter(config).to(device)
    gate.weight.data.normal_()
    gate.e_score_correction_bias.normal_()
    rows = torch.randn(num_rows, 48).to(device)
    _, weights, ids = gate(rows)
    assert exchange_gate(gate, CudaKernels(device, torch.float32))
    _, own_weights, own_ids = gate(rows)
    order, own_order = ids.argsort(1), own_ids.argsort(1)
    assert torch.equal(ids.gather(1, order), own_ids.gather(1, own_order))
    torch.testing.assert_close(own_weights.gather(1, own_order), weights.gather(1, order))


def ernie_gate(device: torch.device) -> tuple[torch.nn.Module, list[Tensor]]:
    """ERNIE's gate in a network of bfloat16, and its arguments behind the rows."""
    gate = Ernie4_5_MoeTopKRouter(Ernie4_5_MoeConfig(hidden_size=64, moe_num_experts=24, moe_k=5)).to(device)
    gate.moe_statics.e_score_correction_bias.data.normal_().mul_(0.1)
    return gate, []


def minimax_gate(device: torch.device) -> tuple[torch.nn.Module, list[Tensor]]:
    """MiniMax-M2's gate, as `ernie_gate`."""
    config = MiniMaxM2Config(hidden_size=64, num_local_experts=24, num_experts_per_tok=5)
    return MiniMaxM2TopKRouter(config).to(device, torch.bfloat16), [torch.randn(24).to(device, torch.bfloat16)]


@pytest.mark.parametrize("make", [ernie_gate, minimax_gate])
@torch.inference_mode()
def test_a_gate_in_float32_or_with_a_correction_in_its_call_has_the_same_bits_in_any_batch(make, device):
    torch.manual_seed(0)
    gate, others = make(device)
    gate.weight.data.normal_()
    rows = torch.randn(9, 64).to(device, torch.bfloat16)
    _, weights, ids = gate(rows, *others)
    assert exchange_gate(gate, CudaKernels(device, torch.bfloat16))
    _, own_weights, own_ids = gate(rows, *others)
    order, own_order = ids.argsort(1), own_ids.argsort(1)
    is_same = (ids.gather(1, order) == own_ids.gather(1, own_order)).all(1)
    assert int(is_same.sum()) >= 8, "two experts may tie in bfloat16"
    wanted, found = weights.float().gather(1, order), own_weights.gather(1, own_order)
    torch.testing.assert_close(found[is_same], wanted[is_same], atol=1e-2, rtol=1e-2)
    for row in range(9):
        _, alone, alone_ids = gate(rows[row : row + 1], *others)
        assert torch.equal(alone[0], own_weights[row])
        assert torch.equal(alone_ids[0], own_ids[row])


@torch.inference_mode()
def test_more_rows_than_have_a_number_on_the_device_are_computed(device, monkeypatch):
    monkeypatch.setattr(functions, "_MOST_ROWS", 4)
    kernels = CudaKernels(device, torch.float32)
    weight, rows = weight_of(kernels), rows_of(kernels, 9)
    alone = [kernels.linear(rows[row : row + 1], weight) for row in range(9)]
    assert torch.equal(kernels.linear(rows, weight), torch.cat(alone))
