"""Routed experts: close to float64, and the same bits in any batch, tile, padding and order of expert batches."""

from __future__ import annotations

import pytest
import torch
from support.cuda_cases import NAN, ExpertCase, bound_of, error_of, random
from torch import Tensor

from moestro.model.cuda import functions
from moestro.model.cuda.functions import CudaKernels
from moestro.model.cuda.tiles import Tile

DTYPES = [torch.float32, torch.bfloat16]
NUM_EXPERTS, NUM_CHOSEN, HIDDEN, INNER = 4, 3, 80, 40  # no whole number of tiles
CLAMPS = {"silu": None, "clamped, with biases": (1.5, 1.702)}
TILES = [Tile(16, 64, 64, 4, 2), Tile(64, 128, 16, 8, 2)]


@pytest.fixture(params=CLAMPS)
def clamp(request):
    return CLAMPS[request.param]


def make_case(device: torch.device, dtype: torch.dtype, clamp=None) -> ExpertCase:
    return ExpertCase(CudaKernels(device, dtype), NUM_EXPERTS, HIDDEN, INNER, clamp)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_the_sum_of_experts_is_close_to_float64_and_pairs_are_counted(num_rows, dtype, clamp, device):
    case = make_case(device, dtype, clamp)
    rows, (ids, weights), counts = case.rows(num_rows), case.choice(num_rows, NUM_CHOSEN), case.counts()
    found = case.experts.weighted_sum(rows, ids, weights, counts)
    assert error_of(found, case.wanted(rows, ids, weights)) < bound_of(dtype)
    assert torch.equal(counts.cpu() - 1, torch.bincount(ids.cpu().flatten(), minlength=NUM_EXPERTS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_stream_is_added_to_the_rounded_sum(dtype, device):
    case = make_case(device, dtype)
    rows, (ids, weights) = case.rows(7), case.choice(7, NUM_CHOSEN)
    stream = random(7, HIDDEN, seed=4).to(device, dtype)
    found = case.experts.weighted_sum(rows, ids, weights, case.counts(), stream)
    assert torch.equal(found, stream + case.weighted_sum(rows, ids, weights))


def test_more_pairs_than_one_program_sorts_at_once_are_close_to_float64(device, monkeypatch):
    monkeypatch.setattr(functions, "_MOST_SORTED", 32)
    case = ExpertCase(CudaKernels(device, torch.float32), 3, 16, 16)
    rows, (ids, weights) = case.rows(70), case.choice(70, 2)
    assert error_of(case.weighted_sum(rows, ids, weights), case.wanted(rows, ids, weights)) < 2e-6


@pytest.mark.parametrize("num_experts", [1, 3, 20])
def test_any_number_of_experts_gives_sums_close_to_float64(num_experts, device):
    case = ExpertCase(CudaKernels(device, torch.float32), num_experts, 32, 24)
    rows, (ids, weights) = case.rows(9), case.choice(9, 1)
    assert error_of(case.weighted_sum(rows, ids, weights), case.wanted(rows, ids, weights)) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch_and_tile(dtype, clamp, device, monkeypatch):
    case = make_case(device, dtype, clamp)
    rows, (ids, weights) = case.rows(40), case.choice(40, NUM_CHOSEN)
    whole = case.weighted_sum(rows, ids, weights)
    for begin, end in ((0, 1), (39, 40), (0, 17)):
        part = case.weighted_sum(rows[begin:end], ids[begin:end], weights[begin:end])
        assert torch.equal(part, whole[begin:end])
    for tile in TILES:
        monkeypatch.setattr(functions, "expert_tile", lambda *_, tile=tile: tile)
        assert torch.equal(case.weighted_sum(rows, ids, weights), whole), tile


def test_absent_rows_are_neither_read_nor_counted_nor_written(device):
    case = make_case(device, torch.float32)
    rows, (ids, weights), counts = case.rows(20), case.choice(20, NUM_CHOSEN), case.counts()
    plain = case.weighted_sum(rows[:7], ids[:7], weights[:7])
    rows[7:], weights[7:], ids[7:] = NAN, NAN, 1 << 40
    case.kernels.assume_rows(torch.tensor([7], dtype=torch.int32, device=device), 20)
    found = case.experts.weighted_sum(rows, ids, weights, counts)
    assert torch.equal(found[:7], plain)
    assert bool(found[7:].isnan().all())
    assert int(counts.sum()) == NUM_EXPERTS + 7 * NUM_CHOSEN


def add_plainly(answers: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Sum of weighted answers [rows, k, size] in ascending expert id, one after another."""
    order = ids.argsort(1)
    total = torch.zeros(len(ids), answers.shape[2], device=answers.device)
    row = torch.arange(len(ids), device=ids.device)
    for choice in order.T:
        total += weights[row, choice, None] * answers[row, choice].float()
    return total.to(answers.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_batches_in_any_grouping_have_the_bits_of_the_whole_layer(dtype, clamp, device):
    case = make_case(device, dtype, clamp)
    rows, (ids, weights) = case.rows(40), case.choice(40, NUM_CHOSEN)
    whole = case.weighted_sum(rows, ids, weights)
    pairs = ids.flatten()
    order = pairs.argsort(stable=True)
    inputs = rows[order // NUM_CHOSEN]
    batches = [(expert, int((pairs == expert).sum())) for expert in range(NUM_EXPERTS)]
    # By themselves, all at once, cut within an expert, and with batches of no rows.
    one_by_one = [[batch] for batch in batches]
    cut = [[(0, 5)], [(0, batches[0][1] - 5), batches[1]], [(2, 0)], [], batches[2:]]
    for groups in (one_by_one, [batches], cut) if dtype == torch.float32 else (cut,):
        answers, sorted_answers, start = inputs.new_empty(len(pairs), HIDDEN), inputs.new_empty(len(pairs), HIDDEN), 0
        for group in groups:
            start = case.experts.answers(group, inputs, sorted_answers, start)
        assert start == len(pairs)
        answers[order] = sorted_answers
        assert torch.equal(add_plainly(answers.view(40, NUM_CHOSEN, HIDDEN), ids, weights), whole)


def test_answers_write_only_their_rows(device):
    case = make_case(device, torch.float32)
    inputs, out = case.rows(9), torch.full((9, HIDDEN), NAN, device=device)
    inputs[:2] = NAN
    inputs[7:] = NAN
    assert case.experts.answers([(3, 2), (1, 3)], inputs, out, 2) == 7
    wanted = torch.cat([case.answer(3, inputs[2:4].double().cpu()), case.answer(1, inputs[4:7].double().cpu())])
    assert error_of(out[2:7], wanted) < bound_of(torch.float32)
    assert bool(out[:2].isnan().all())
    assert bool(out[7:].isnan().all())
