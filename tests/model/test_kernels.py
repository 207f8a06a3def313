"""Each CPU kernel against torch in float32, and alone against many rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.own_kernels import kernels
from torch.nn import functional

from moestro.model.attention import AttentionForm, Scoring, attend_paged
from moestro.model.experts.routed import combine
from moestro.model.kernels.exchange import KernelExperts
from moestro.model.kernels.library import KernelBuild, KernelLibrary, KernelPacking, usable_sets
from moestro.model.kernels.matching import is_close, random_rows
from moestro.model.kernels.paged import KernelAttention
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep
from moestro.native.compiler import CompilerError

BLOCK_SIZES = [4, 16]  # less than a group of keys, and a whole one


@pytest.fixture(scope="module", params=usable_sets(), ids=lambda each: each.name)
def library(request) -> KernelLibrary:
    """The kernels of each instruction set that this machine has, in the user's cache afterwards."""
    best = kernels()
    if request.param.name == best.instruction_set:
        return best
    build = KernelBuild(request.param)
    found = build.wait()
    assert found is not None, CompilerError(build.failure)
    return found


@pytest.mark.parametrize(("num_out", "num_in"), [(64, 64), (100, 38), (7, 2), (256, 130), (70, 1030)])
def test_a_packed_product_is_that_of_torch_and_no_row_knows_the_others(library, num_out, num_in):
    packing = KernelPacking(library)
    weight, bias = random_rows(num_out, num_in) * num_in**-0.5, random_rows(num_out, seed=1)
    rows, packed = random_rows(33, num_in, seed=2), packing.pack(weight)
    assert torch.equal(packing.unpack(packed), weight)
    whole = packing.linear(rows, packed, bias)
    assert is_close(whole, functional.linear(rows, weight, bias))
    exact = functional.linear(rows.double(), weight.double(), bias.double())
    assert (whole - exact).abs().max() <= (exact.abs() / 250 + 1e-5).max()
    for first, end in ((0, 1), (1, 7), (5, 17), (32, 33)):
        assert torch.equal(packing.linear(rows[first:end], packed, bias), whole[first:end])


@pytest.mark.parametrize(("num_heads", "num_out", "num_in"), [(1, 64, 64), (5, 100, 38), (16, 32, 160)])
def test_a_product_by_heads_is_that_of_torch_and_no_row_knows_the_others(library, num_heads, num_out, num_in):
    weights = random_rows(num_heads, num_out, num_in) * num_in**-0.5
    packed = KernelPacking(library).pack_heads(weights.transpose(1, 2).contiguous().transpose(1, 2))
    rows = random_rows(1, 33, num_heads, num_in + 8, seed=2).transpose(1, 2)[..., :num_in]
    whole = library.linear_heads(rows, packed, num_out)
    assert is_close(whole, rows @ weights.transpose(1, 2))
    for first, end in ((0, 1), (1, 7), (5, 17), (32, 33)):
        assert torch.equal(library.linear_heads(rows[:, :, first:end], packed, num_out), whole[:, :, first:end])
    for head, weight in enumerate(weights):
        alone = library.linear(rows[0, head], KernelPacking(library).pack(weight))
        assert torch.equal(alone, whole[0, head])


@pytest.mark.parametrize("num_in", [3, 64, 200])
def test_a_float32_product_is_that_of_torch_and_no_row_knows_the_others(library, num_in):
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, num_in, generator=generator) for n in (33, 24))
    whole = library.linear_float(rows, weight)
    torch.testing.assert_close(whole, rows @ weight.T, atol=1e-4, rtol=1e-5)
    assert torch.equal(torch.cat([library.linear_float(row[None], weight) for row in rows]), whole)


def test_a_sigmoid_is_that_of_torch_and_no_entry_knows_the_others(library):
    edges = torch.tensor([-1e4, -89.0, 0.0, 89.0, 1e4, torch.inf, -torch.inf])
    values = torch.cat([torch.linspace(-30, 30, 1001), edges])
    whole = library.sigmoid(values)
    torch.testing.assert_close(whole, values.double().sigmoid().float(), rtol=1e-6, atol=1e-37)
    assert library.sigmoid(torch.tensor([torch.nan])).isnan().all()
    for size in (1, 3, 16, 33):
        assert torch.equal(torch.cat([library.sigmoid(part) for part in values.split(size)]), whole)


def test_a_norm_is_that_of_transformers(library):
    rows, weight = 3 * random_rows(2, 9, 48), 1 + random_rows(48, seed=1)
    wide = rows.float()
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(torch.bfloat16)
    assert is_close(library.rms_norm(rows, weight, 1e-5), weight * scaled)


def test_rotation_gives_the_bits_of_torch(library):
    heads, angles = random_rows(1, 11, 3, 64).transpose(1, 2), random_rows(1, 11, 64, seed=1).float()
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    turned = torch.cat((-heads[..., 32:], heads[..., :32]), dim=-1)
    assert torch.equal(library.rotate(heads, cos, sin), heads * cos[:, None] + turned * sin[:, None])


@pytest.mark.parametrize(("num_tokens", "num_chosen"), [(1, 2), (5, 1), (23, 4)])
def test_the_weighted_sum_is_that_of_single_answers_bit_for_bit(library, num_tokens, num_chosen):
    """Answers of ranges of experts, rounded and added by `combine`, as they are where experts are elsewhere."""
    num_experts, hidden, inner = 6, 48, 80
    packing, generator = KernelPacking(library), torch.Generator().manual_seed(3)
    weights = [
        (random_rows(2 * inner, hidden, seed=e) * hidden**-0.5, random_rows(hidden, inner, seed=-e - 1) * inner**-0.5)
        for e in range(num_experts)
    ]
    experts = KernelExperts(
        library, (hidden, inner), tuple((packing.pack(up), packing.pack(down)) for up, down in weights)
    )
    tokens = random_rows(num_tokens, hidden, seed=9)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :num_chosen]
    chosen_weights = torch.rand(num_tokens, num_chosen, generator=generator)
    counts = torch.ones(num_experts + 2, dtype=torch.int64)
    found = experts.weighted_sum(tokens, ids, chosen_weights, counts)
    by_expert = ids.reshape(-1).argsort(stable=True)
    rows, by_id = tokens[by_expert // num_chosen], ids.reshape(-1).bincount(minlength=num_experts).tolist()
    assert counts.tolist() == [*(1 + n for n in by_id), 1, 1]
    answers, end = torch.empty_like(rows), 0
    for batch in ([(e, n) for e, n in enumerate(by_id) if n][part] for part in (slice(0, 2), slice(2, None))):
        end = experts.answers(batch, rows, answers, end)
    assert end == len(rows)
    assert torch.equal(found, combine(answers, by_expert, chosen_weights).to(torch.bfloat16))
    parts, counts, begin = tokens.new_empty(num_tokens, num_chosen, hidden), torch.zeros_like(counts), 0
    ends = []
    while begin < num_experts:
        begin = experts.chosen_answers(tokens, ids.contiguous(), parts, counts, begin, 2)
        ends.append(begin)
        assert counts.tolist() == [*by_id[:begin], *[0] * (num_experts - begin), 0, 0]
    assert len(ends) == max(-(-np.count_nonzero(by_id) // 2), 1), "two experts with tokens at once"
    assert torch.equal(parts.flatten(0, 1)[by_expert], answers)
    assert torch.equal(experts.add_answers(parts, ids.contiguous(), chosen_weights), found)
    for place, expert in enumerate(ids.reshape(-1)[by_expert].tolist()):
        up, down = (weight.float() for weight in weights[expert])
        gate, linear = (rows[place].float() @ up.T).chunk(2)
        assert is_close(answers[place], ((functional.silu(gate) * linear) @ down.T).to(torch.bfloat16))


FORMS = {
    "grouped": AttentionForm(4, 2, 64, 64, Scoring(None, None, None)),
    "window and sinks": AttentionForm(8, 2, 32, 96, Scoring(0.2, 7, random_rows(8))),
    "a window within a block": AttentionForm(2, 2, 32, 32, Scoring(None, 1, None)),
    "many to one": AttentionForm(40, 1, 192, 128, Scoring(None, 20, None)),
    "values in keys": AttentionForm(16, 1, 96, 64, Scoring(0.1, 9, random_rows(16), values_in_keys=True)),
    "DeepSeek-V3": AttentionForm(128, 1, 576, 512, Scoring(192**-0.5, None, None, values_in_keys=True)),
}


def make_step(
    units: list[tuple[int, int]], form: AttentionForm, dtype: torch.dtype, block_size: int
) -> tuple[PagedStep, KVPools]:
    """Units (first position, tokens) of sequences of 40, over random K and V in blocks in any order."""
    from parity import drive  # noqa: PLC0415 - it loads the sampler

    num_blocks = -(-40 // block_size) * len(units)
    pools = KVPools(num_blocks, block_size)
    heads = torch.empty(1, form.num_kv_heads, 1, dtype=dtype)
    shapes = (heads.expand(1, -1, size) for size in (form.key_size, form.value_size))
    joint = form.scoring.values_in_keys
    for seed, pool in enumerate(pools.of_layer(0, *shapes, values_in_keys=joint)):
        pool[: pools.scratch_slot] = random_rows(*pool[: pools.scratch_slot].shape, seed=seed).to(dtype)
    tables = np.random.default_rng(1).permutation(num_blocks).astype(np.int32).reshape(len(units), -1)
    return PagedStep(drive.make_units([(at, [0] * n) for at, n in units], tables), pools, torch.device("cpu")), pools


def make_rows(form: AttentionForm, num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    sizes = (form.num_heads, form.key_size), (form.num_kv_heads, form.key_size), (form.num_kv_heads, form.value_size)
    rows = [random_rows(1, n, num_tokens, size, seed=7 + i).to(dtype) for i, (n, size) in enumerate(sizes)]
    return [*rows[:2], rows[1][..., : form.value_size]] if form.scoring.values_in_keys else rows


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_attention_is_that_of_torch_in_float32(library, form, block_size):
    units = [(0, 40), (39, 1), (0, 1), (5, 17), (20, 1)]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        step, pools = make_step(units, form, dtype, block_size)
        sinks = None if form.scoring.sinks is None else form.scoring.sinks.to(dtype)
        scoring = replace(form.scoring, sinks=sinks)
        attend = KernelAttention(library, sinks) if dtype is torch.bfloat16 else attend_paged
        out = attend(step, 0, *make_rows(form, 60, dtype), scoring)
        results.append((out.to(torch.bfloat16), pools.find(0)))
    assert is_close(results[0][0], results[1][0])
    for mine, wanted in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(mine.float(), wanted)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_chunks_and_neighbours_change_no_bit_of_attention(library, form, block_size):
    rows, attend = make_rows(form, 40, torch.bfloat16), KernelAttention(library, form.scoring.sinks)
    step, _ = make_step([(0, 40)], form, torch.bfloat16, block_size)
    whole = attend(step, 0, *rows, form.scoring)
    for sizes in ([1] * 40, [7, 1, 22, 10], [39, 1]):
        _, pools = make_step([(0, 40)], form, torch.bfloat16, block_size)
        at = 0
        for size in sizes:
            step, _ = make_step([(at, size)], form, torch.bfloat16, block_size)
            step.pools = pools
            part = attend(step, 0, *(each[:, :, at : at + size] for each in rows), form.scoring)
            assert torch.equal(part, whole[:, at : at + size])
            at += size


def test_threads_change_no_bit(library):
    packing = KernelPacking(library)
    weight, rows = random_rows(512, 256), random_rows(9, 256, seed=1)
    packed = packing.pack(weight)
    results = []
    for count in (1, 3):
        library.function["set_threads"](count)
        results.append(packing.linear(rows, packed))
    library.function["set_threads"](torch.get_num_threads())
    assert torch.equal(*results)
