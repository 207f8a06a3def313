"""A grammar that cannot be followed ends its own request, and the prefix cache keeps what that one computed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from parity import drive, tiny
from parity.test_non_finite import CLEAN, SETTINGS
from parity.test_stages import BLOCK_SIZE, staged_device
from support.fake_device import make_request
from support.plain_grammar import LETTERS, backend, light, token_texts

from moestro.core.request import FinishReason
from moestro.engine.rank import build_preemptive_rank, build_rank
from moestro.errors import RequestError
from moestro.flow.policies.one_queue import in_order


def make_rank(network, mode: str):
    if mode == "fused":
        rank = build_rank(SETTINGS, drive.make_device(network, 64))
    else:
        rank = build_preemptive_rank(SETTINGS, staged_device(network), in_order)
    rank.scheduler.use_grammars(backend(tiny.VOCAB))
    return rank


def run(rank, *requests) -> dict[str, tuple[list[int], FinishReason | None]]:
    found = {request.request_id: [] for request in requests}
    for request in requests:
        rank.add(request, 0)
    while rank.has_work:
        for output in rank.step(0):
            found[output.request_id].append(output)
    return {
        name: ([token for output in outputs for token in output.token_ids], outputs[-1].finish_reason)
        for name, outputs in found.items()
    }


def request_of(name: str, prompt, grammar: str = "", resumed: str = ""):
    request = make_request(
        name,
        prompt,
        block_size=BLOCK_SIZE,
        max_tokens=6,
        grammar=light(grammar) if grammar else None,
    )
    ids = np.array([token_texts(tiny.VOCAB).index(letter) for letter in resumed], np.int32)
    return msgspec.structs.replace(request, resumed_token_ids=ids.tobytes())


@pytest.mark.parametrize("mode", ["fused", "preemptive"])
def test_a_grammar_that_fails_ends_its_request_alone(mode, checkpoint):
    network = tiny.load(checkpoint("qwen3_moe"))
    good = [request_of("0", CLEAN[0]), request_of("1", CLEAN[1], "[a-z]{4,6}")]
    alone = run(make_rank(network, mode), *good)
    rank = make_rank(network, mode)
    prompt = list(range(3, 3 + 4 * BLOCK_SIZE))
    together = run(rank, *good, request_of("2", prompt, "[a-z]{4,6}", resumed="9"))
    assert together.pop("2") == ([], FinishReason.GRAMMAR)
    assert together == alone
    assert all(letter in LETTERS for token in alone["1"][0] for letter in token_texts(tiny.VOCAB)[token])
    hits = rank.stats().num_hit_tokens
    run(rank, request_of("3", [*prompt, 9]))
    assert rank.stats().num_hit_tokens > hits, "a failed grammar says nothing against the logits"


def test_a_rank_without_a_backend_refuses_a_grammar(checkpoint):
    rank = build_rank(SETTINGS, drive.make_device(tiny.load(checkpoint("qwen3_moe")), 64))
    with pytest.raises(RequestError, match="cannot follow a grammar"):
        rank.add(request_of("0", CLEAN[0], "a"), 0)
    assert not rank.has_work
