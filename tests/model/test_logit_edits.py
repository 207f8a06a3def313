"""Edited logits, all units at once, against the plain twin and against transformers' own processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from support import plain_sampling
from support.fake_device import make_request
from support.plain_grammar import backend, light
from transformers import RepetitionPenaltyLogitsProcessor

from moestro.core.request import packed_tokens
from moestro.core.work import LOGITS_LAST, LOGITS_NONE, LogitEdits
from moestro.engine.logit_edits import SequenceEdits, join_edits
from moestro.engine.sequences import sampling_row
from moestro.model.sampler import _forbidden, edit_logits

VOCAB = 60


def case(num: int, seed: int, dtype=np.float32, **wishes):
    """Requests, the tokens known of each, and raw logits."""
    rng = np.random.default_rng(seed)
    requests, known = [], []
    for i in range(num):
        own = wishes or plain_sampling.random_wishes(rng, VOCAB, 30)
        prompt = rng.integers(0, VOCAB, rng.integers(1, 40))
        requests.append(make_request(f"r{i}", prompt, max_tokens=30, stop_token_ids=(3, 4), **own))
        known.append(np.concatenate([prompt, rng.integers(0, VOCAB, rng.integers(0, 25))]).astype(np.int32))
    return requests, known, (4 * rng.standard_normal((num, VOCAB))).astype(dtype)


def edits_of(requests, known, rows=None) -> LogitEdits | None:
    rows = range(len(requests)) if rows is None else rows
    return join_edits(list(rows), [SequenceEdits(request) for request in requests], known, [False] * len(known))


def edited(requests, known, logits) -> np.ndarray:
    sampling = np.array([sampling_row(request.sampling) for request in requests])
    edits = edits_of(requests, known)
    return edit_logits(torch.from_numpy(logits), edits, np.arange(len(requests)), sampling).numpy()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", range(4))
def test_edits_equal_their_plain_twin(seed, dtype):
    requests, known, logits = case(40, seed, dtype)
    before = logits.copy()
    ours = edited(requests, known, logits)
    assert (logits == before).all(), "the raw logits are still wanted"
    for request, tokens, row, raw in zip(requests, known, ours, logits, strict=True):
        plain = plain_sampling.edited(raw, tokens.tolist(), request.num_prompt_tokens, request.sampling)
        assert (np.isinf(row) == np.isinf(plain)).all()
        np.testing.assert_allclose(row, plain, rtol=1e-6 if dtype == np.float32 else 1e-14)


def test_each_wish_changes_what_it_names_and_nothing_else():
    prompt, generated = [1, 2, 2, 3], [5, 5, 5, 2]
    tokens = [np.array(prompt + generated, np.int32)]
    logits = np.array([[2.0, 2.0, -2.0, 2.0, 2.0, 2.0, 2.0, 2.0]], np.float32)

    def changed(**wishes: object) -> dict[int, float]:
        (row,) = edited([make_request("r", prompt, max_tokens=30, **wishes)], tokens, logits)
        return {i: float(row[i]) for i in np.flatnonzero(row != logits[0]).tolist()}

    assert changed(presence_penalty=0.5) == {2: -2.5, 5: 1.5}
    assert changed(frequency_penalty=0.5) == {2: -2.5, 5: 0.5}
    assert changed(repetition_penalty=2) == {1: 1, 2: -4, 3: 1, 5: 1}
    assert changed(logit_bias=((0, 1), (2, -100))) == {0: 3, 2: -102}
    assert changed(min_tokens=5, stop_token_ids=(6, 7)) == {6: -np.inf, 7: -np.inf}
    # Biases come before the repetition penalty, and that before the others.
    assert changed(logit_bias=((5, 1),), repetition_penalty=2, presence_penalty=0.25)[5] == (2 + 1) / 2 - 0.25


def test_a_ban_outlives_bias_and_penalties():
    wishes = {"min_tokens": 30, "stop_token_ids": (2,), "logit_bias": ((2, 100),), "repetition_penalty": 0.5}
    request = make_request("r", [2, 2], max_tokens=30, **wishes)
    ours = edited([request], [np.array([2, 2], np.int32)], np.ones((1, 5), np.float32))
    assert ours[0].tolist() == [1, 1, -np.inf, 1, 1]


def masked(request, known: list[int], vocabulary: int = 40) -> list[int]:
    """Tokens that are possible after `known`, which the request's prompt begins."""
    matcher = None if request.sampling.grammar is None else backend(vocabulary).matcher(request.sampling.grammar)
    edits = join_edits(
        [0], [SequenceEdits(request, matcher)], [np.array(known, np.int32)], [False], backend(vocabulary)
    )
    sampling = np.array([sampling_row(request.sampling)])
    (row,) = edit_logits(torch.zeros(1, vocabulary), edits, np.arange(1), sampling).numpy()
    return np.flatnonzero(np.isfinite(row)).tolist()


def test_only_listed_tokens_remain():
    request = make_request("r", [9], max_tokens=5, allowed_tokens=packed_tokens((3, 31, 32, 39)))
    assert masked(request, [9]) == [3, 31, 32, 39]


def test_the_last_token_of_a_bad_word_is_banned_where_the_others_stand_before_it():
    request = make_request("r", [4, 5], max_tokens=9, bad_words=((7,), (4, 5, 6), (8, 8)))
    assert set(range(40)) - set(masked(request, [4, 5])) == {7}, "a prompt completes no word"
    assert set(range(40)) - set(masked(request, [4, 5, 4, 5])) == {6, 7}
    assert set(range(40)) - set(masked(request, [4, 5, 8, 8])) == {7, 8}


def test_a_grammar_and_listed_tokens_both_hold():
    grammar = light("[a-d]{2}")
    request = make_request("r", [9], max_tokens=5, grammar=grammar, allowed_tokens=packed_tokens((3, 5, 7, 0)))
    assert masked(request, [9]) == [3, 5]  # b and d
    assert masked(request, [9, 3, 3]) == [0]


def test_a_complete_text_ends_before_min_tokens_and_any_other_does_not():
    wishes = {"grammar": light("ab?"), "min_tokens": 5, "stop_token_ids": (0, 1)}
    request = make_request("r", [9], max_tokens=9, **wishes)
    assert masked(request, [9, 2]) == [3]
    assert masked(request, [9, 2, 3]) == [0, 1]


def test_a_mask_covers_fewer_tokens_than_the_logits():
    request = make_request("r", [9], max_tokens=5, grammar=light("[0-9a-z]"))
    matcher = backend(40).matcher(request.sampling.grammar)
    edits = join_edits([0], [SequenceEdits(request, matcher)], [np.array([9], np.int32)], [False], backend(40))
    (row,) = edit_logits(torch.zeros(1, 90), edits, np.arange(1), np.array([sampling_row(request.sampling)])).numpy()
    assert np.flatnonzero(np.isfinite(row)).tolist() == list(range(2, 38))


def test_the_repetition_penalty_is_that_of_transformers():
    requests, known, logits = case(30, 1, repetition_penalty=1.3)
    processor = RepetitionPenaltyLogitsProcessor(float(np.float32(1.3)))
    for row, tokens, raw in zip(edited(requests, known, logits), known, logits, strict=True):
        theirs = processor(torch.from_numpy(tokens.astype(np.int64))[None], torch.from_numpy(raw)[None])
        np.testing.assert_allclose(row, theirs[0].numpy(), rtol=1e-6)


def test_no_other_row_changes_a_row():
    requests, known, logits = case(40, 5)
    whole = edited(requests, known, logits)
    for part in np.array_split(np.random.default_rng(0).permutation(40), 7):
        chosen = [requests[i] for i in part], [known[i] for i in part]
        if edits_of(*chosen) is not None:
            assert (edited(*chosen, logits[part]) == whole[part]).all()


def test_nothing_to_edit_is_no_edits():
    requests, known, _ = case(3, 0, min_tokens=2)
    assert edits_of(requests, [np.append(tokens, [1, 2]) for tokens in known]) is None
    assert edits_of(requests, [request.token_array() for request in requests]) is not None


def test_edits_name_units_and_the_device_finds_their_rows(checkpoint):
    """Units that sample nothing lie between those that do."""
    network = drive.recording(tiny.load(checkpoint("qwen3_moe")))
    device = drive.make_device(network)
    request = make_request("r", [9], max_tokens=5, logit_bias=((77, 100),))
    edits = edits_of([request], [np.array([9], np.int32)], rows=[2])
    units = drive.make_units(
        [(0, [5, 6]), (0, [7]), (0, [9])],
        [[0], [1], [2]],
        logits=np.array([LOGITS_NONE, LOGITS_LAST, LOGITS_LAST], np.uint8),
        edits=edits,
    )
    tokens = drive.run(device, units).token_ids.tolist()
    assert tokens[0] == -1
    assert tokens[1] == int(network.last_logits[0].argmax()) != 77
    assert tokens[2] == 77


def test_logprobs_are_of_the_raw_distribution_also_where_logits_are_edited(checkpoint):
    network = drive.recording(tiny.load(checkpoint("qwen3_moe")))
    request = make_request("r", [9], max_tokens=5, logit_bias=((77, 100),))
    units = drive.make_units(
        [(0, [9])], [[0]], sampling=drive.greedy(num_logprobs=3), edits=edits_of([request], [np.array([9], np.int32)])
    )
    entry = drive.run(drive.make_device(network), units).logprobs[0]
    raw = network.last_logits[0].log_softmax(-1)
    assert entry.token_id == 77
    assert entry.logprob == pytest.approx(float(raw[77]))
    assert entry.rank == 1 + int((raw > raw[77]).sum()) > 1
    assert [token for token, _ in entry.top] == raw.topk(3).indices.tolist()


def test_masks_are_unpacked_on_an_accelerator_as_on_a_cpu():
    packed = np.random.default_rng(0).integers(-(2**31), 2**31, (5, 4), np.int32)
    forbidden = _forbidden(packed, torch.zeros(5, 99)).numpy()
    assert np.array_equal(~forbidden, np.unpackbits(packed.view(np.uint8), axis=1, count=99, bitorder="little") > 0)
