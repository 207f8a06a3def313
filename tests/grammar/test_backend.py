"""Masks of a rank: what is allowed after which tokens, in any batch, and matchers that fail."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from support import plain_grammar
from support.plain_grammar import ENDS, PATTERNS, backend, token_texts

from moestro.core.grammar import Grammar, MaskRequest
from moestro.core.request import SamplingParams
from moestro.grammar import backend as backend_module
from moestro.grammar.backend import MaskBackend
from moestro.grammar.compiler import VocabularySource

VOCABULARY = 50
NONE = np.empty(0, np.int32)


def ids(text: str) -> list[int]:
    return [token_texts(VOCABULARY).index(letter) for letter in text]


def asked(matcher, generated, unwanted=NONE) -> MaskRequest:
    return MaskRequest(matcher, np.array(generated, np.int32), np.array(unwanted, np.int32))


def tokens_of(mask) -> list[int]:
    bits = np.unpackbits(mask.words().view(np.uint8), bitorder="little", count=VOCABULARY)
    return np.flatnonzero(bits).tolist()


def following(pattern: str, text: str, **wishes) -> list[int]:
    masks = backend(VOCABULARY)
    mask = masks.mask(asked(masks.matcher(Grammar("regex", pattern)), ids(text), **wishes))
    return tokens_of(mask)


def test_only_end_tokens_follow_a_complete_text():
    assert following("ab|c", "") == [*ids("ac"), token_texts(VOCABULARY).index("ab")]
    assert following("ab", "a") == ids("b")
    assert following("ab", "ab") == list(ENDS)
    assert following("ab?", "a") == [*ENDS, *ids("b")]


def test_an_answer_that_passed_the_end_is_free_as_in_vllm():
    masks = backend(VOCABULARY)
    matcher = masks.matcher(Grammar("regex", "a"))
    texts = [ids("a"), [*ids("a"), 0], [*ids("a"), 0, 7, 9]]
    counts = [len(tokens_of(masks.mask(asked(matcher, text)))) for text in texts]
    assert counts == [2, VOCABULARY, VOCABULARY]


def test_unwanted_tokens_stay_only_where_there_are_no_others():
    assert following("ab?", "a", unwanted=ENDS) == ids("b")
    assert following("ab?", "ab", unwanted=ENDS) == list(ENDS)


@pytest.mark.parametrize("seed", range(5))
def test_masks_equal_their_plain_twin_in_any_batch_and_any_order(seed):
    rng, masks = np.random.default_rng(seed), backend(VOCABULARY)
    answers = [(Grammar("regex", str(rng.choice(PATTERNS))), [], None) for _ in range(8)]
    answers = [(grammar, generated, masks.matcher(grammar)) for grammar, generated, _ in answers]
    for _ in range(12):
        chosen = [answers[i] for i in rng.permutation(8)[: rng.integers(1, 9)]]
        # A matcher that was not asked for some tokens, or is new as on another engine, reads them now.
        requests = [
            asked(masks.matcher(grammar) if rng.random() < 0.3 else matcher, generated)
            for grammar, generated, matcher in chosen
        ]
        for (grammar, generated, _), mask in zip(chosen, map(masks.mask, requests), strict=True):
            sampling = SamplingParams(max_tokens=99, grammar=grammar)
            allowed = np.flatnonzero(plain_grammar.allowed(generated, sampling, VOCABULARY)).tolist()
            assert tokens_of(mask) == allowed
            if not set(generated) & set(ENDS):
                generated.append(int(rng.choice(allowed)))


def test_a_token_that_the_grammar_excludes_fails_the_matcher_and_no_other():
    masks = backend(VOCABULARY)
    wrong, right = (masks.matcher(Grammar("regex", "ab")) for _ in range(2))
    first, second = masks.mask(asked(wrong, ids("z"))), masks.mask(asked(right, ids("a")))
    assert (tokens_of(first), tokens_of(second)) == ([], ids("b"))
    assert masks.failure(wrong) is not None
    assert masks.failure(right) is None


def test_a_grammar_that_does_not_compile_fails_its_matcher():
    masks = backend(VOCABULARY)
    matcher = masks.matcher(Grammar("regex", "(a"))
    mask = masks.mask(asked(matcher, []))
    assert tokens_of(mask) == []
    assert "unclosed" in masks.failure(matcher)


def test_compiled_grammars_are_shared_and_bounded(monkeypatch):
    monkeypatch.setattr(backend_module, "MAX_COMPILED", 2)
    masks = MaskBackend(VocabularySource(plain_grammar.tokenizer_directory(VOCABULARY), VOCABULARY, ENDS))
    first, second, third = (Grammar("regex", text) for text in "abc")
    held = masks.prepare(first)
    assert masks.prepare(first) is held
    for grammar in (second, third):
        masks.prepare(grammar).result()
    assert masks.prepare(first) is held, "someone holds it"
    assert len(masks._kept) == 2
    del held
    for grammar in (second, third):
        masks.prepare(grammar).result()
    gc.collect()
    assert first not in masks._compiled, "the oldest one was dropped"
    masks.close()


def test_an_error_of_the_library_ends_its_request_and_neither_others_nor_the_rank(monkeypatch, caplog):
    masks = MaskBackend(VocabularySource(plain_grammar.tokenizer_directory(VOCABULARY), VOCABULARY, ENDS))

    class Broken:
        def unsafe_compute_mask_ptr(self, *_: object) -> None:
            raise BaseException("a panic")  # as the library's panics are

    broken, healthy = (masks.matcher(Grammar("regex", text)) for text in ("ab", "ba"))
    monkeypatch.setattr(broken, "follow", lambda generated: Broken())
    refused, mask = masks.mask(asked(broken, [])), masks.mask(asked(healthy, []))
    assert tokens_of(refused) == []
    assert "a panic" in masks.failure(broken)
    assert tokens_of(mask), "the other request goes on"
    assert masks.failure(healthy) is None
    masks.close()
