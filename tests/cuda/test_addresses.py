"""Kernels that find weights and pools by their addresses compute the bits of those that get the tensors."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from support.cuda_cases import AttentionCase, ExpertCase, Part, make_form, random

from moestro.model.cuda.functions import CudaKernels, GateForm, HeadNorms, Norm
from moestro.model.cuda.source.launches import FOUND
from moestro.model.cuda.tiles import replace_launcher

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


@contextmanager
def by_address(used: set[str]):
    """Let launches get the addresses of their arguments, wherever a kernel may find them."""
    kept = []

    def launcher(kernel, grid, args, options):
        found = list(args)
        for place, (name, each) in enumerate(zip(kernel.arg_names, args, strict=False)):
            names = FOUND.get(kernel.fn.__name__, {})
            if name in names and each.data_ptr() % 16 == 0 and each.numel():
                place_of = torch.tensor([each.data_ptr()], dtype=torch.int64, device=each.device)
                found[place] = place_of.view(torch.uint64)
                kept.append((place_of, each))  # until the device is done
                used.add(f"{kernel.fn.__name__} {name}")
        before(kernel, grid, tuple(found), options)

    before = replace_launcher(launcher)
    try:
        yield
    finally:
        replace_launcher(before)


def check(compute, arguments: set[str]) -> None:
    """Compare both ways, of which the second finds these arguments of kernels by their addresses."""
    wanted, used = compute(), set()
    with by_address(used):
        found = compute()
    assert arguments <= used
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@DTYPES
def test_norms_products_and_heads(dtype, device):
    kernels = CudaKernels(device, dtype)
    form = make_form(4, 2, 16)
    pools = tuple(torch.zeros(8, 2, 16, device=device, dtype=dtype) for _ in range(2))
    slots = torch.tensor([3, 0, 5], device=device)

    def of(*shape: int, seed: int):
        return random(*shape, seed=seed).to(device, dtype)

    rows, weight, bias, norm = of(3, 256, seed=1), of(128, 256, seed=2), of(128, seed=3), Norm(of(256, seed=4), 1e-6)
    norms, angles = HeadNorms(of(16, seed=5), of(16, seed=6), 1e-6), (of(3, 8, seed=7), of(3, 8, seed=8))

    def compute():
        normed = kernels.rms_norm(rows, norm)
        whole, parts = kernels.product(normed, weight, bias), kernels.product(normed, weight)
        query = kernels.heads(parts, angles, norms, (*pools, slots), form)
        return normed, whole.numbers, query, *(pool.clone() for pool in pools)

    check(compute, {"add_norm weight", "linear weight", "linear bias", "heads q_weight", "heads keys", "heads values"})


@DTYPES
def test_attention_with_sinks(dtype, device, split):
    sinks = random(4, seed=1).to(device, dtype)
    parts = [Part(split + 9, 1), Part(20, 5, seed=1)]
    case = AttentionCase(CudaKernels(device, dtype), make_form(4, 2, 16, sinks=sinks), parts)
    check(lambda: [case.found()], {"attend keys", "attend values", "attend sinks"})


@DTYPES
def test_gates(dtype, device):
    kernels = CudaKernels(device, dtype)
    rows, weight = (random(size, 32, seed=size).to(device, dtype) for size in (5, 16))
    bias, correction = random(16, seed=3).to(device, dtype), random(16, seed=4).to(device)
    gate = GateForm(4, dtype, is_sigmoid=True, normalizes=True, bias=bias, correction=correction)
    check(lambda: kernels.choose(kernels.product(rows, weight), gate), {"choose bias", "choose correction"})


@DTYPES
@pytest.mark.parametrize("clamp", [None, (7.0, 1.702)], ids=["silu", "clamped"])
def test_experts(clamp, dtype, device):
    case = ExpertCase(CudaKernels(device, dtype), 8, 32, 16, clamp)
    rows, chosen = case.rows(5), case.choice(5, 3)
    names = {"sort_pairs counts", "expert_up weights", "expert_down weights"} | ({"expert_up bias"} if clamp else set())
    check(lambda: [case.weighted_sum(rows, *chosen)], names)
