"""Attention over paged K and V: decodes, chunks and both, and bits that depend on a query's own sequence alone."""

from __future__ import annotations

import pytest
import torch
from support.cuda_cases import AttentionCase, Part, bound_of, error_of, make_form, random

from moestro.model.cuda import tiles
from moestro.model.cuda.functions import CudaKernels

DTYPES = [torch.float32, torch.bfloat16]


def mixed(split: int) -> list[Part]:
    """Decodes over two splits, one and three; chunks of wide and narrow tiles; first tokens."""
    lengths = [(split + 11, 1), (20, 20), (split - 9, 9), (split, 1), (1, 1), (2, 2), (2 * split + 1, 1)]
    return [Part(length, new, seed) for seed, (length, new) in enumerate(lengths)]


# Query heads, KV heads, key size, value size.
FORMS = {
    "one query head a KV head, of 16": (2, 2, 16, 16),
    "five, of 64": (10, 2, 64, 64),
    "eight, of 128": (8, 1, 128, 128),
    "sixteen, of 80": (16, 1, 80, 80),
    "twenty, of 32": (20, 1, 32, 32),
    "128, of 96": (128, 1, 96, 96),
    "one of 12, as a tiny network": (2, 2, 24, 12),
    "one of 192 and 128, as DeepSeek": (2, 2, 192, 128),
    "four of 256": (4, 1, 256, 256),
    "sixteen of 576 and 512, as compressed": (16, 1, 576, 512),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_attention_is_close_to_float64_for_heads_of_each_kind(form, dtype, device, split):
    parts = mixed(split) if FORMS[form][0] < 100 else [Part(split + 11, 1), Part(17, 17, 1)]
    case = AttentionCase(CudaKernels(device, dtype), make_form(*FORMS[form]), parts)
    assert error_of(case.found(), case.wanted()) < bound_of(dtype)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 24, 70])
def test_windows_and_sinks_are_close_to_float64(window, has_sinks, device, split):
    dtype = torch.bfloat16 if window == 24 else torch.float32
    sinks = random(4, seed=5).to(device, dtype) if has_sinks else None
    form = make_form(4, 1, 32, window=window, sinks=sinks, scaling=0.4)
    case = AttentionCase(CudaKernels(device, dtype), form, mixed(split))
    assert error_of(case.found(), case.wanted()) < bound_of(dtype)


@pytest.mark.parametrize("block_size", [1, 4, 32, 128])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_block_size_and_each_kind_of_step_is_close_to_float64(which, block_size, device, split):
    parts = mixed(split)[which : which + 1]
    case = AttentionCase(CudaKernels(device, torch.float32), make_form(4, 2, 32), parts, block_size)
    assert error_of(case.found(), case.wanted()) < bound_of(torch.float32)


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_ends_of_splits_are_close_to_float64(num_splits, extra, device, split):
    length = num_splits * split + extra
    parts = [Part(length, 1), Part(length, 17, 1)]
    case = AttentionCase(CudaKernels(device, torch.float32), make_form(2, 1, 16), parts)
    assert error_of(case.found(), case.wanted()) < bound_of(torch.float32)


def surroundings(last: int) -> dict[str, list[Part]]:
    """Steps that compute the newest of `last` tokens of the same sequence as their first unit."""
    return {
        "alone, in other blocks": [Part(last, 1)],
        "among others": [Part(last, 1), Part(40, 1, 1), Part(9, 9, 2), Part(2 * last, 1, 3), Part(17, 17, 4)],
        **{f"end of a chunk of {new}": [Part(last, new)] for new in (2, 15, 16, last)},
        "end of a chunk among others": [Part(last, 34), Part(last + 20, 20, 3), Part(last - 8, 1, 3)],
    }


@pytest.mark.parametrize(
    ("shape", "window"), [((8, 1, 32), None), ((3, 3, 16), 24), ((20, 1, 16), 66), ((2, 2, 24, 12), None)]
)
def test_a_query_has_the_same_bits_in_any_batch_chunk_and_block(shape, window, device, split):
    kernels, last = CudaKernels(device, torch.float32), split + 11
    form = make_form(*shape, window=window, sinks=random(shape[0], seed=8).to(device))
    alone = AttentionCase(kernels, form, [Part(last, 1)]).last_row()
    for seed, (name, parts) in enumerate(surroundings(last).items()):
        case = AttentionCase(kernels, form, parts, block_size=(16, 4)[seed % 2], seed=seed)
        assert torch.equal(case.last_row(), alone), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "value_size"), [(128, 128), (192, 128), (64, 64)])
def test_tiles_of_any_rows_give_the_same_bits(size, value_size, dtype, device, split, monkeypatch):
    kernels, form = CudaKernels(device, dtype), make_form(8, 1, size, value_size)
    chunk = [Part(split + 4, 20)]
    plain = AttentionCase(kernels, form, chunk).found()
    for rows in (16, 32):
        monkeypatch.setattr(tiles, "WIDE_ROWS", rows)
        assert torch.equal(AttentionCase(kernels, form, chunk).found(), plain)


def test_no_arrival_of_a_split_remains(device, split):
    """Steps of several layers count in the same memory."""
    kernels = CudaKernels(device, torch.float32)
    cases = [AttentionCase(kernels, make_form(*FORMS["twenty, of 32"]), mixed(split)[:count]) for count in (7, 1, 7)]
    first, _, again = (case.found() for case in cases)
    assert torch.equal(first, again)
    assert not any(bool(memory.any()) for memory in kernels._arrived)


def test_rows_of_no_unit_are_neither_read_nor_written(device, split):
    kernels, form = CudaKernels(device, torch.float32), make_form(4, 2, 16)
    case = AttentionCase(kernels, form, mixed(split))
    case.query = torch.cat([case.query, torch.full_like(case.query[:3], float("nan"))])
    found = case.found()
    assert error_of(found[:-3], case.wanted()) < bound_of(torch.float32)
    assert bool(found[-3:].isnan().all())
