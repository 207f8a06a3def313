"""Sampler, edits and log probabilities on an accelerator: the choices of the CPU for the same logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive
from support.fake_device import make_request
from support.plain_grammar import PATTERNS, backend, light
from support.plain_sampling import random_wishes

from moestro.core.request import MaskRequest
from moestro.core.rng import stream_state, uniform
from moestro.core.work import LogitEdits
from moestro.engine.logit_edits import SequenceEdits, join_edits
from moestro.engine.sequences import sampling_row
from moestro.model import sampler
from moestro.model.sampler import edit_logits, find_peaks, measure_logprobs, sample
from moestro.model.tensors import upload

ROWS = 48
NOTHING = np.empty(0, np.int32)
VOCABULARIES = (101, 4096, 151_936)


def random_logits(vocabulary: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(seed))


def random_rows(rng: np.random.Generator) -> np.ndarray:
    return drive.greedy(
        ROWS,
        temperature=rng.choice([0.0, 0.5, 1.0, 1.7], ROWS),
        top_k=rng.choice([0, 1, 5, 50, 2000], ROWS),
        top_p=rng.choice([1.0, 0.99, 0.5], ROWS),
        min_p=rng.choice([0.0, 0.0, 0.05], ROWS),
        seed=rng.integers(2**63, size=ROWS),
        repetition_penalty=rng.choice([1.0, 1.4], ROWS),
        presence_penalty=rng.uniform(-1, 1, ROWS),
        frequency_penalty=rng.uniform(-1, 1, ROWS),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_seed_draws_the_token_of_the_cpu(vocabulary, seed, accelerator):
    rng, logits = np.random.default_rng(seed), random_logits(vocabulary, seed)
    rows, positions = random_rows(rng), rng.integers(5000, size=ROWS)
    with torch.inference_mode():
        near, far = logits.clone(), logits.to(accelerator.device)
        with accelerator.forbid_waits():
            tokens = sample(far, rows, positions)
        assert tokens.tolist() == sample(near, rows, positions).tolist()


def test_noise_has_the_bits_of_the_cpu(accelerator):
    extremes = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
    seeds = np.array([*extremes, *np.random.default_rng(0).integers(2**64, size=100, dtype=np.uint64)], np.uint64)
    streams = torch.from_numpy(stream_state(seeds).view(np.int64)).to(accelerator.device)
    with accelerator.forbid_waits():
        noise = sampler.uniform_there(streams, 809)
    assert np.array_equal(noise.cpu().numpy(), uniform(seeds[:, None], np.arange(809, dtype=np.uint64)))


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64 - 1])
def test_the_largest_seeds_and_positions_draw_the_token_of_the_cpu(seed, accelerator):
    logits, positions = random_logits(4096), np.linspace(1, 2**31 - 1, ROWS).astype(np.int64)
    rows = drive.greedy(ROWS, temperature=1.0, seed=np.uint64(seed))
    with torch.inference_mode():
        near, far = logits.clone(), logits.to(accelerator.device)
        assert sample(far, rows, positions).tolist() == sample(near, rows, positions).tolist()


def test_a_random_token_uploads_a_few_bytes_a_row_and_sorts_nothing_without_a_filter(accelerator, monkeypatch):
    num_bytes = []

    def counting(array, device):
        num_bytes.append(array.nbytes)
        return upload(array, device)

    def forbidden(*_args, **_kwargs):
        raise AssertionError("the vocabulary is sorted")

    monkeypatch.setattr(sampler, "upload", counting)
    monkeypatch.setattr(torch.Tensor, "topk", forbidden)
    monkeypatch.setattr(torch.Tensor, "sort", forbidden)
    logits = random_logits(151_936).to(accelerator.device)
    with torch.inference_mode(), accelerator.forbid_waits():
        sample(logits, drive.greedy(ROWS, temperature=0.7, min_p=0.1, seed=np.arange(ROWS)), np.arange(ROWS))
    assert sum(num_bytes) <= 40 * ROWS


def test_peaks_of_numbers_that_are_not_finite_and_of_equal_ones(accelerator):
    logits = torch.zeros(7, 3000)
    logits[0, 2000:] = logits[1, [7, 2999]] = 5.0
    logits[2, 100], logits[3, 5], logits[4] = float("nan"), float("inf"), float("-inf")
    logits[5, 1:], logits[6, [3, 4]] = float("-inf"), torch.tensor([float("inf"), float("nan")])
    tokens, is_finite = find_peaks(logits.to(accelerator.device))
    assert is_finite.tolist() == [True, True, False, False, False, True, False]
    assert tokens.tolist()[:2] == [2000, 7]
    assert tokens.tolist()[5] == 0


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("count", [0, 1, 20])
def test_log_probabilities_and_ranks_are_those_of_the_cpu(vocabulary, count, accelerator):
    logits = random_logits(vocabulary).round()  # many equals
    ids = torch.arange(ROWS) * 2
    with torch.inference_mode():
        near = measure_logprobs(logits, ids, count)
        far = measure_logprobs(logits.to(accelerator.device), ids.to(accelerator.device), count)
        assert torch.equal(near.top_ids, far.top_ids.cpu())
        assert torch.equal(near.ranks, far.ranks.cpu())
        torch.testing.assert_close(near.logprobs, far.logprobs.cpu(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_listed_log_probabilities_are_those_of_the_cpu(vocabulary, accelerator):
    logits, rng = random_logits(vocabulary), np.random.default_rng(vocabulary)
    ids, listed = torch.arange(ROWS), torch.from_numpy(rng.integers(vocabulary, size=(ROWS, 7)))
    listed[::2] = -1
    with torch.inference_mode():
        near = measure_logprobs(logits, ids, 3, listed)
        there = [tensor.to(accelerator.device) for tensor in (logits, ids, listed)]
        far = measure_logprobs(there[0], there[1], 3, there[2])
        assert torch.equal(near.top_ids[1::2], listed[1::2])
        assert torch.equal(near.top_ids, far.top_ids.cpu())
        torch.testing.assert_close(near.top_logprobs, far.top_logprobs.cpu(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_edited_logits_are_those_of_the_cpu(vocabulary, accelerator):
    rng, logits = np.random.default_rng(vocabulary), random_logits(vocabulary)
    rows, units = random_rows(rng), np.arange(ROWS)
    counted = np.stack([rng.integers(ROWS, size=300), rng.integers(vocabulary, size=300)]).astype(np.int32)
    counted = np.unique(counted, axis=1)  # each pair once, by row
    known = backend(101)
    biased = np.stack([np.arange(ROWS), rng.integers(vocabulary, size=ROWS)]).astype(np.int32)
    edits = LogitEdits(
        counted=counted,
        num_generated=rng.integers(4, size=counted.shape[1]).astype(np.int32),
        biased=biased,
        bias=rng.uniform(-3, 3, ROWS).astype(np.float32),
        banned=np.stack([np.arange(ROWS), rng.integers(vocabulary, size=ROWS)]).astype(np.int32),
        masks=tuple(
            (
                unit,
                known.masks([MaskRequest(known.matcher(light(PATTERNS[unit % 3])), NOTHING, NOTHING)])[0],
            )
            for unit in range(0, ROWS, 5)
        ),
    )
    near = edit_logits(logits, edits, units, rows)
    there = logits.to(accelerator.device)
    with accelerator.forbid_waits():
        far = edit_logits(there, edits, units, rows)
    torch.testing.assert_close(near, far.cpu(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(6))
def test_edits_with_a_token_of_the_step_before_have_the_bits_of_the_hosts(seed, dtype, accelerator):
    """Prompts, answers that are empty, new and repeated tokens, and rows whose tokens the host has."""
    rng, vocabulary = np.random.default_rng(seed), (37, 500)[seed % 2]
    requests, known, lack_last = [], [], []
    for i in range(ROWS):
        prompt = rng.integers(0, vocabulary, rng.integers(1, 60))
        wishes = random_wishes(rng, vocabulary, 30)
        requests.append(make_request(f"r{i}", prompt, max_tokens=30, stop_token_ids=(3, 4), **wishes))
        answer = rng.integers(0, min(vocabulary, 20), rng.integers(1, 25))
        known.append(np.concatenate([prompt, answer]).astype(np.int32))
        lack_last.append(bool(rng.random() < 0.8))
    rows = np.array([sampling_row(request.sampling) for request in requests])
    units, logits = np.arange(ROWS) * 2, random_logits(vocabulary, seed).to(dtype)
    whole = join_edits(units.tolist(), [SequenceEdits(each) for each in requests], known, [False] * ROWS)
    host = [tokens[:-1] if lacks else tokens for tokens, lacks in zip(known, lack_last, strict=True)]
    ahead = join_edits(units.tolist(), [SequenceEdits(each) for each in requests], host, lack_last)
    assert ahead.uncounted.size
    assert ahead.banned_after.size
    near = edit_logits(logits, whole, units, rows)
    last = torch.tensor([t[-1] if lacks else -1 for t, lacks in zip(known, lack_last, strict=True)])
    there, last = logits.to(accelerator.device), last.to(accelerator.device)
    with accelerator.forbid_waits():
        far = edit_logits(there, ahead, units, rows, last)
    assert torch.equal(near, far.cpu())
