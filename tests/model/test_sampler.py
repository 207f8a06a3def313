"""Sampling against a plain twin that does one row at a time, and the laws that a client relies on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity.drive import greedy
from support import plain_sampling
from transformers import MinPLogitsWarper

from moestro.core.rng import stream_state, uniform
from moestro.model import sampler
from moestro.model.sampler import find_peaks, measure_logprobs, sample

VOCAB = 50


def case(num: int, seed: int, vocabulary: int = VOCAB) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = greedy(
        num,
        temperature=rng.choice([0, 0.3, 1, 2.5], size=num),
        top_k=rng.choice([0, 1, 5, 40, 1000], size=num),
        top_p=rng.choice([1, 0.9, 0.5, 0.01], size=num),
        min_p=rng.choice([0, 0, 0.02, 0.3, 1], size=num),
        seed=rng.integers(2**63, size=num),
    )
    return (
        torch.from_numpy(3 * rng.standard_normal((num, vocabulary)).astype(np.float32)),
        rows,
        rng.integers(9000, size=num),
    )


@pytest.mark.parametrize(
    ("seed", "vocabulary"), [*((seed, VOCAB) for seed in range(5)), (5, 512), (6, 1300), (7, 3000)]
)
def test_sampling_equals_its_plain_twin(seed, vocabulary):
    logits, rows, positions = case(200, seed, vocabulary)
    tokens = sample(logits, rows, positions)
    assert tokens.tolist() == [
        plain_sampling.choose(*each) for each in zip(logits.numpy(), rows, positions, strict=True)
    ]


def test_no_other_row_changes_a_rows_token():
    logits, rows, positions = case(64, 9)
    whole = sample(logits, rows, positions)
    order = np.random.default_rng(0).permutation(64)
    for part in np.array_split(order, 11):
        assert sample(logits[part], rows[part], positions[part]).tolist() == whole[part].tolist()


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5]])
    num = 40_000
    rows = greedy(num, temperature=1.3, seed=np.arange(num))
    tokens = sample(logits.expand(num, -1), rows, np.full(num, 17))
    wanted = (logits[0] / 1.3).softmax(-1).numpy()
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / num, wanted, atol=0.008)


def test_tokens_of_a_large_vocabulary_are_drawn_with_their_probabilities():
    num, size = 60_000, 1300  # whole groups, and a part of one
    logits = 3 * torch.randn(size, generator=torch.Generator().manual_seed(0))
    logits[600] = logits.max() + 2
    rows = greedy(num, temperature=1, seed=np.arange(num))
    counts = np.bincount(sample(logits.expand(num, -1), rows, np.full(num, 3)), minlength=size)
    wanted = logits.double().softmax(-1).numpy() * num
    num_likely = (wanted > 5).sum()
    chi_squared = ((counts - wanted) ** 2 / wanted)[wanted > 5].sum()
    assert chi_squared < num_likely + 4 * np.sqrt(2 * num_likely)
    assert abs(counts[wanted <= 5].sum() - wanted[wanted <= 5].sum()) < 5 * np.sqrt(wanted[wanted <= 5].sum())


def test_the_last_places_of_logits_hardly_ever_change_a_token():
    """Another batch rounds otherwise, by some 1e-6; with 1e-3 fewer draws show it.

    The inverse of the cumulative distribution, drawn before, changed 131 of these 20,000 tokens.
    """
    num, size = 20_000, 2000
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(1, size, generator=generator)).expand(num, -1)
    other = logits + 1e-3 * torch.randn(num, size, generator=generator)
    rows, positions = greedy(num, temperature=1, seed=np.arange(num)), np.zeros(num, np.int64)
    assert (sample(logits, rows, positions) != sample(other, rows, positions)).sum() <= 40


def test_one_seed_draws_afresh_at_each_position():
    num = 40_000
    tokens = sample(torch.zeros(num, 4), greedy(num, temperature=1, seed=5), np.arange(num))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / num, 0.25, atol=0.008)


def test_filters_keep_all_that_tie_with_the_last_one_kept():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]]).expand(2_000, -1)
    rows = greedy(2_000, temperature=1, top_k=2, seed=np.arange(2_000))
    assert set(sample(logits, rows, np.zeros(2_000, np.int64)).tolist()) == {0, 1, 2}


def test_a_nucleus_is_the_same_whether_all_tokens_are_sorted_or_the_likeliest():
    """Flat rows reach top_p behind the first look, and steep ones within it."""
    generator = torch.Generator().manual_seed(0)
    scaled = torch.randn(40, 4 * sampler._FIRST_LOOK, generator=generator) * torch.linspace(0.01, 9, 40)[:, None]
    scaled -= scaled.amax(-1, keepdim=True)
    top_p = np.random.default_rng(0).choice([0.3, 0.9, 0.99], size=40).astype(np.float32)
    everything = np.full(40, scaled.shape[1])
    found = sampler._least_in_nucleus(scaled, everything, top_p)
    assert torch.equal(found, sampler._least_kept(scaled, everything, top_p))
    num_kept = (scaled >= found).sum(-1)
    assert num_kept.min() < sampler._FIRST_LOOK < num_kept.max()


def test_min_p_keeps_what_transformers_keeps():
    logits, rows, _ = case(200, 8)
    rows["temperature"], rows["top_k"], rows["top_p"] = 0.7, 0, 1
    rows["min_p"] = np.random.default_rng(0).choice([0.01, 0.1, 0.4, 0.9, 1], size=200)
    pairs = zip(rows["min_p"].tolist(), logits / 0.7, strict=True)
    theirs = torch.cat([MinPLogitsWarper(min_p)(None, scaled[None]) for min_p, scaled in pairs])
    ours = sampler._filter(sampler._scale(logits, rows), rows)
    assert torch.equal(ours.isinf(), theirs.isinf())
    assert 0 < ours.isinf().sum() < ours.numel()


@pytest.mark.parametrize("min_p", [1, 0.999])
def test_the_largest_min_p_is_greedy(min_p):
    logits, rows, positions = case(50, 3)
    rows["min_p"], rows["top_k"], rows["top_p"] = min_p, 0, 1
    assert sample(logits, rows, positions).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("top_p", [0, 1e-9])
def test_the_smallest_top_p_is_greedy(top_p):
    logits, rows, positions = case(50, 3)
    rows["top_p"], rows["top_k"] = top_p, 0
    assert sample(logits, rows, positions).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e30])
def test_no_temperature_breaks_a_row(temperature):
    logits, rows, positions = case(50, 4)
    rows["temperature"], rows["top_p"], rows["top_k"] = temperature, 0.9, 0
    tokens = sample(logits, rows, positions)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    if temperature < 1:
        assert tokens.tolist() == logits.argmax(-1).tolist()


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((3_000, 6), float("-inf"))
    logits[:, [1, 3]] = 0.0
    tokens = sample(logits, greedy(3_000, temperature=1, seed=np.arange(3_000)), np.zeros(3_000, np.int64))
    assert set(tokens.tolist()) == {1, 3}


@pytest.mark.parametrize("noise", [0.0, 1 - 2.0**-53])
def test_noise_at_its_ends_draws_a_token_that_has_a_probability(noise, monkeypatch):
    monkeypatch.setattr(sampler, "uniform", lambda key, counter: np.full(np.broadcast(key, counter).shape, noise))
    for size in range(3, 60):
        logits = torch.randn(1, size, generator=torch.Generator().manual_seed(size))
        logits[0, 0] = logits[0, -1] = float("-inf")
        assert 0 < sample(logits, greedy(1, temperature=1), np.zeros(1, np.int64)).item() < size - 1


SEEDS = np.array(
    [0, 1, 2**63 - 1, 2**63, 2**64 - 1, *np.random.default_rng(0).integers(2**64, size=251, dtype=np.uint64)], np.uint64
)


@pytest.mark.parametrize("count", [1, 3, 809])
def test_torch_draws_the_bits_of_numpy(count):
    noise = sampler.uniform_there(torch.from_numpy(stream_state(SEEDS).view(np.int64)), count)
    assert np.array_equal(noise.numpy(), uniform(SEEDS[:, None], np.arange(count, dtype=np.uint64)))


def test_logprobs_are_of_the_raw_distribution_with_ranks_and_alternatives():
    logits, *_ = case(20, 6)
    chosen = torch.arange(20)
    entries = measure_logprobs(logits, chosen, 5).rows(np.array([0, 5] * 10, np.int32))
    raw = logits.log_softmax(-1)
    for row, entry in enumerate(entries):
        assert entry.token_id == row
        assert entry.logprob == pytest.approx(float(raw[row, row]))
        assert entry.rank == sorted(raw[row].tolist(), reverse=True).index(float(raw[row, row])) + 1
        assert len(entry.top) == (5 if row % 2 else 0)
        assert [token for token, _ in entry.top] == raw[row].argsort(descending=True)[: len(entry.top)].tolist()


@given(seed=st.integers(0, 2**32), num_rows=st.integers(1, 6), size=st.integers(1, 40), count=st.integers(0, 40))
def test_equal_alternatives_come_by_id_however_many_others_of_the_batch_ask_for(seed, num_rows, size, count):
    """In bfloat16 many logits are equal; without an order of them, an answer would depend on its batch."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.choice([-1.0, 0.0, 0.5, -np.inf], (num_rows, size)).astype(np.float32))
    logits[:, rng.integers(size)] = 0.0
    logprobs = logits.log_softmax(-1)
    wanted = np.stack([np.lexsort((np.arange(size), -row)) for row in logprobs.numpy()])[:, :count].tolist()
    own = torch.zeros(num_rows, dtype=torch.int64)
    assert measure_logprobs(logits, own, count).top_ids.tolist() == wanted
    if 0 < count <= size:
        least = logprobs.topk(count).values[:, -1:]
        assert sampler._preferred(logprobs, least, count).tolist() == wanted  # an accelerator's way


def test_logits_that_are_not_numbers_have_alternatives_all_the_same():
    """Its request ends; the other rows of the step do not."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, torch.nan, 1.0]])
    assert measure_logprobs(logits, torch.zeros(2, dtype=torch.int64), 2).top_ids[0].tolist() == [2, 1]


@given(
    lists=st.lists(st.lists(st.integers(0, 39), unique=True, max_size=8), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    count=st.integers(0, 12),
)
def test_listed_alternatives_are_those_of_the_whole_distribution_whatever_others_ask_for(lists, seed, count):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(lists), 40)).astype(np.float32))
    own = torch.zeros(len(lists), dtype=torch.int64)
    width = max(map(len, lists))
    rows = np.full((len(lists), width), -1, np.int64)
    for row, ids in enumerate(lists):
        rows[row, : len(ids)] = ids
    num_top = np.array([len(ids) or count for ids in lists], np.int32)
    listed = torch.from_numpy(rows) if width else None
    entries = measure_logprobs(logits, own, count, listed).rows(num_top)
    plain = measure_logprobs(logits, own, count).rows(np.full(len(lists), count, np.int32))
    raw = logits.log_softmax(-1)
    for row, (ids, entry) in enumerate(zip(lists, entries, strict=True)):
        wanted = [(token_id, float(raw[row, token_id])) for token_id in ids] if ids else list(plain[row].top)
        assert list(entry.top) == wanted
        assert (entry.logprob, entry.rank) == (plain[row].logprob, plain[row].rank)


def test_more_alternatives_than_tokens_are_all_tokens():
    (entry,) = measure_logprobs(torch.zeros(1, 3), torch.tensor([0]), 20).rows(np.array([20], np.int32))
    assert len(entry.top) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_peaks_are_those_of_torch_and_the_lowest_of_equal_ids(dtype):
    logits = torch.randn(40, 130, dtype=dtype).round(decimals=1)  # with ties
    logits[3, 7] = float("nan")
    logits[4, 9] = float("inf")
    logits[5] = float("-inf")
    logits[6, :100] = float("-inf")
    tokens, is_finite = find_peaks(logits)
    assert is_finite.tolist() == logits.amax(-1).isfinite().tolist()
    assert [row for row in range(40) if not is_finite[row]] == [3, 4, 5]
    lowest = [int((row == row.max()).nonzero()[0]) for row in logits[6:]]
    assert tokens[6:].tolist() == lowest
    part = logits[:, ::2]  # not contiguous
    assert find_peaks(part).tokens[6:].tolist() == part.argmax(-1)[6:].tolist()


@pytest.mark.parametrize("kind", ["distinct", "equal", "excluded", "in one group", "one above all", "not a number"])
@pytest.mark.parametrize("vocabulary", [1, 7, 64, 200, 1000])
def test_the_most_likely_tokens_are_those_of_a_sort_with_equal_ones_by_id(vocabulary, kind):
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((9, vocabulary)).astype(np.float32)
    if kind == "equal":
        logits = logits.round()
    elif kind == "excluded":
        logits[:, rng.random(vocabulary) < 0.9] = -np.inf
        logits[:, 0] = 0
    elif kind == "in one group":
        logits[:, ::64] += 10
    elif kind == "one above all":
        logits[3] = 0
    elif kind == "not a number":
        logits[3, vocabulary // 2] = np.nan
    for count in (1, 3, 20, 500):
        found = measure_logprobs(torch.from_numpy(logits), torch.zeros(9, dtype=torch.int64), count)
        for row, ids in enumerate(found.top_ids.tolist()):
            assert len({*ids}) == len(ids) == min(count, vocabulary)
            if not np.isnan(logits[row]).any():
                logprobs = torch.from_numpy(logits).log_softmax(-1)[row].numpy()
                assert ids == np.lexsort((np.arange(vocabulary), -logprobs))[: len(ids)].tolist()
