"""Hits are whole blocks of the engine, which may be larger than those by which the router compares prompts."""

from __future__ import annotations

import pytest
from support.routers import BLOCK_SIZE, request, router

from moestro.routing.settings import EngineSpec

LARGE = EngineSpec(block_size=10 * BLOCK_SIZE)


def hit(it, name, prompt) -> int:
    decision = it.submit(request(name, prompt=prompt), 0)
    it.ended(name, 0)
    return decision.hit_tokens


@pytest.mark.parametrize(
    ("num_shared", "expected"), [(9, 0), (10, 10), (19, 10), (20, 20)], ids=lambda blocks: f"{blocks} blocks"
)
def test_an_engine_with_larger_blocks_finds_whole_ones_only(num_shared, expected):
    it = router(1, "lmetric", spec=LARGE)
    shared = list(range(num_shared * BLOCK_SIZE))
    hit(it, "a", shared + [-1] * 16 * BLOCK_SIZE)
    assert hit(it, "b", shared + [-2] * 16 * BLOCK_SIZE) == expected * BLOCK_SIZE


def test_the_size_is_the_engines_and_otherwise_the_one_set():
    it = router(2, "lmetric", engine_block_size=4 * BLOCK_SIZE)
    shared = list(range(6 * BLOCK_SIZE))
    for engine in range(2):
        it.sent_elsewhere(engine, request(prompt=shared).block_hashes, 0)
    it.keeps_candidates = True
    fields = request("a", prompt=[*shared, -1])
    assert it.submit(fields, 0).candidates.hit_tokens.tolist() == [4 * BLOCK_SIZE] * 2
    it.ended("a", 0)
    it.set_spec(0, LARGE)
    it.set_spec(1, EngineSpec(block_size=BLOCK_SIZE))
    found = it.submit(fields, 0).candidates
    assert dict(zip(found.rows.tolist(), found.hit_tokens.tolist(), strict=True)) == {0: 0, 1: 6 * BLOCK_SIZE}


def test_an_answer_that_differs_by_less_than_an_engines_block_teaches_nothing():
    it = router(1, "lmetric", spec=LARGE)
    prompt = list(range(30 * BLOCK_SIZE))
    hit(it, "a", prompt)
    for i in range(20):
        it.submit(request(f"b{i}", prompt=prompt), 0)
        it.ended(f"b{i}", 0, 1, cached_share=21 / 30)
    assert hit(it, "c", prompt) == 30 * BLOCK_SIZE, "no block was forgotten"
    it.submit(request("d", prompt=prompt), 0)
    it.ended("d", 0, 1, cached_share=0.0)
    assert hit(it, "e", [-5] * 20 * BLOCK_SIZE) == 0
    assert hit(it, "f", prompt) == 0, "the cache is smaller than both prompts"
