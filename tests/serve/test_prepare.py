"""From an ask to requests: what the engines see."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from serve.fake_rank import INFO

from moestro.core.hashing import hash_blocks, hash_key
from moestro.errors import PromptTooLongError, RequestError
from moestro.serve.prepare import Arrival, ServedModel, chat_requests, completion_requests
from moestro.serve.validation import parse_chat, parse_completion

ARRIVAL = Arrival("cmpl-1", 42)


@pytest.fixture
def model(tokenizer) -> ServedModel:
    return ServedModel(names=("m", "n"), root="r", created=0, fingerprint="fp", info=INFO, tokenizer=tokenizer)


def requests(model, **fields):
    ask = parse_completion(json.dumps({"prompt": list(range(10, 50))} | fields).encode())
    return completion_requests(ask, model, ARRIVAL)


def test_a_request_carries_its_tokens_its_hashes_and_when_it_came(model):
    [request] = requests(model, max_tokens=7, priority=3, seed=5, top_k=9, top_p=0.5, temperature=0.3)
    ids = np.arange(10, 50, dtype=np.int32)
    assert request.request_id == "cmpl-1-0"
    assert request.arrival_ns == 42
    assert request.priority == 3
    assert request.token_array().tolist() == ids.tolist()
    assert request.hash_key == hash_key("fake", None, None)
    assert request.block_hashes == hash_blocks(request.hash_key, ids, 16)
    assert len(request.block_hashes) == 2 * 16
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_k, sampling.top_p) == (7, 5, 9, 0.5)


def test_a_salt_makes_other_hashes(model):
    assert requests(model, cache_salt="a")[0].block_hashes != requests(model)[0].block_hashes


def test_every_request_without_a_seed_draws_its_own(model):
    seeds = {request.sampling.seed for request in requests(model, prompt=[[1], [1], [1]])}
    assert len(seeds) == 3


def test_the_models_end_tokens_come_first_unless_ignored(model):
    assert requests(model, stop_token_ids=[9, 2])[0].sampling.stop_token_ids == (0, 2, 9)
    assert requests(model, stop_token_ids=[9], ignore_eos=True)[0].sampling.stop_token_ids == (9,)


def test_prompt_and_answer_may_fill_the_context_and_not_one_token_more(model):
    assert requests(model, max_tokens=4096 - 40)[0].num_total_tokens == 4096
    with pytest.raises(PromptTooLongError):
        requests(model, max_tokens=4096 - 39)


def test_a_chat_without_a_limit_may_fill_the_context(model):
    [request] = chat_requests(parse_chat(b'{"messages": [{"role": "user", "content": "hi"}]}'), model, ARRIVAL)
    assert request.num_total_tokens == 4096
    full = json.dumps({"messages": [{"role": "user", "content": "a b" * 4000}]}).encode()
    with pytest.raises(PromptTooLongError):
        chat_requests(parse_chat(full), model, ARRIVAL)


def test_a_tokenizer_with_more_tokens_than_the_network_is_caught(model):
    small = ServedModel(
        names=("m",), root="r", created=0, fingerprint="fp", tokenizer=model.tokenizer,
        info=msgspec.structs.replace(INFO, vocab_size=10),
    )  # fmt: skip
    with pytest.raises(RequestError, match="token id out of range"):
        requests(small, prompt="hello")


def test_a_client_that_names_no_model_gets_the_first_name(model):
    assert [model.name_for(name) for name in (None, "m", "n")] == ["m", "m", "n"]
