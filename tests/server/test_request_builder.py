"""From an ask to requests: what the engines see."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import numpy as np
import pytest
from support.fake_rank import INFO

from moestro.core.hashing import hash_blocks, hash_key
from moestro.core.request import SamplingDefaults, ServiceClass
from moestro.errors import PromptTooLongError, RequestError
from moestro.server.api.request_builder import Arrival, ServedModel, completion_jobs, prepare_chat_ask
from moestro.server.api.validation import parse_chat, parse_completion
from moestro.text.tokenizer import Tokenizer

ARRIVAL = Arrival("cmpl-1", 42)


@pytest.fixture
def model(tokenizer) -> ServedModel:
    return ServedModel(
        names=("m", "n"), created=0, fingerprint="fp", info=INFO, tokenizer=tokenizer, has_priorities=True
    )


def jobs(model, **fields):
    ask = parse_completion(json.dumps({"prompt": list(range(10, 50))} | fields).encode())
    return completion_jobs(ask, model, ARRIVAL)


def requests(model, **fields):
    return [job.request for job in jobs(model, **fields)]


def test_a_request_carries_its_tokens_its_hashes_and_when_it_came(model):
    [request] = requests(model, max_tokens=7, priority=3, seed=5, top_k=9, top_p=0.5, temperature=0.3)
    ids = np.arange(10, 50, dtype=np.int32)
    assert request.request_id == "cmpl-1-0"
    assert request.arrival_ns == 42
    assert request.priority == 3
    assert (request.user, requests(model, user="ann")[0].user, requests(model, user="")[0].user) == (None, "ann", None)
    assert request.token_array().tolist() == ids.tolist()
    assert request.hash_key == hash_key("fake", None, None)
    assert request.block_hashes == hash_blocks(request.hash_key, ids, 16)
    assert len(request.block_hashes) == 2 * 16
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_k, sampling.top_p) == (7, 5, 9, 0.5)
    assert request.service_class is ServiceClass.LS


def test_every_sampling_field_reaches_the_engine(model):
    fields = {
        "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "min_tokens": 2,
        "max_tokens": 9, "temperature": 0.2, "top_k": 3, "top_p": 0.3, "seed": 4, "logprobs": 5, "prompt_logprobs": 6,
    }  # fmt: skip
    [request] = requests(model, **fields, logit_bias={"7": -100, "0": 1.5, "9": 0}, service_class="be")
    for name, value in fields.items():
        assert getattr(request.sampling, name) == value, name
    assert request.sampling.logit_bias == ((7, -100), (0, 1.5))
    assert request.service_class is ServiceClass.BE


def test_what_a_client_leaves_open_is_the_checkpoints_default(model):
    recommended = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.05)
    info = msgspec.structs.replace(INFO, sampling_defaults=recommended)
    advised = dataclasses.replace(model, info=info)
    [request] = requests(advised)
    assert all(getattr(request.sampling, name) == getattr(recommended, name) for name in recommended.__struct_fields__)
    [request] = requests(advised, temperature=0, top_k=0, top_p=1, repetition_penalty=1)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (0, 0, 1, 1)
    assert sampling.min_p == 0.01


def test_choices_are_prompt_major_and_copies_share_their_prompt_but_not_its_seed(model):
    found = jobs(model, prompt=[[10, 11], [12]], n=3, seed=2**63 - 1, stop="x")
    assert [job.request.request_id for job in found] == [f"cmpl-1-{i}" for i in range(6)]
    assert [job.request.num_prompt_tokens for job in found] == [2, 2, 2, 1, 1, 1]
    assert [job.request.sampling.seed - 2**63 for job in found] == [-1, 0, 1, -1, 0, 1]
    assert [job.is_copy for job in found] == [False, True, True] * 2
    assert {job.stop for job in found} == {("x",)}
    assert jobs(model, n=2, seed=-1)[1].request.sampling.seed == 0
    assert len({request.sampling.seed for request in requests(model, n=9)}) == 9


def test_an_echo_is_the_text_as_sent_or_that_of_the_ids(model, tokenizer):
    assert [job.echo for job in jobs(model, prompt=["a  b", "c"])] == [None, None]
    assert [job.echo for job in jobs(model, prompt=["a  b", "c"], echo=True)] == ["a  b", "c"]
    ids = tokenizer.encode("a  b", add_special_tokens=True)
    assert jobs(model, prompt=ids, echo=True)[0].echo == "a  b"


def test_a_prompt_is_scored_for_an_echo_with_logprobs_or_on_request(model):
    def scored(**fields: object) -> tuple[int | None, int | None]:
        [job] = jobs(model, **fields)
        return job.request.sampling.prompt_logprobs, job.prompt_logprobs

    assert scored(echo=True) == (None, None)
    assert scored(logprobs=2) == (None, None)
    assert scored(echo=True, logprobs=2) == (2, None)
    assert scored(prompt_logprobs=0) == (0, 0)
    assert scored(echo=True, logprobs=2, prompt_logprobs=1) == (2, 1)


def test_too_many_scores_of_prompts_are_refused_before_the_work(model):
    with pytest.raises(
        RequestError, match=r"90000 prompt tokens with 20 alternatives .* the limit of one request is 1000000"
    ) as refused:
        jobs(model, prompt=[[5] * 3000] * 30, echo=True, logprobs=20, max_tokens=0)
    assert refused.value.param == "logprobs"
    assert len(jobs(model, prompt=[[5] * 3000] * 30, echo=True, logprobs=1, max_tokens=0)) == 30


def test_a_prompt_that_fills_the_context_can_be_scored(model):
    [job] = jobs(model, prompt=[5] * 4096, echo=True, logprobs=1, max_tokens=0)
    assert job.request.num_total_tokens == 4096
    with pytest.raises(PromptTooLongError):
        jobs(model, prompt=[5] * 4096, echo=True, logprobs=1, max_tokens=1)


def test_biased_tokens_must_exist(model):
    with pytest.raises(RequestError, match="logit_bias: token id out of range"):
        requests(model, logit_bias={"4096": 1})


def test_min_tokens_must_have_room_and_leave_a_token_to_come(model):
    body = b'{"messages": [{"role": "user", "content": "hi"}], "min_tokens": 4090}'
    with pytest.raises(RequestError, match=r"min_tokens must not exceed the 40.. tokens that fit into the context"):
        prepare_chat_ask(parse_chat(body), model, ARRIVAL)
    small = dataclasses.replace(model, info=msgspec.structs.replace(INFO, vocab_size=60))
    with pytest.raises(RequestError, match="lists every token of the vocabulary"):
        requests(small, stop_token_ids=list(range(60)), min_tokens=1)
    assert requests(small, stop_token_ids=list(range(59)), min_tokens=1)


def test_a_salt_makes_other_hashes(model):
    assert requests(model, cache_salt="a")[0].block_hashes != requests(model)[0].block_hashes


def test_every_request_without_a_seed_draws_its_own(model):
    seeds = {request.sampling.seed for request in requests(model, prompt=[[1], [1], [1]])}
    assert len(seeds) == 3


def test_the_models_end_tokens_come_first_unless_ignored(model):
    assert requests(model, stop_token_ids=[9, 2])[0].sampling.stop_token_ids == (0, 2, 9)
    assert requests(model, stop_token_ids=[9], ignore_eos=True)[0].sampling.stop_token_ids == (9,)


def test_a_default_limit_shrinks_to_the_room_that_there_is(model):
    assert [requests(model, prompt=[5] * n)[0].sampling.max_tokens for n in (4079, 4090, 4095)] == [16, 6, 1]
    with pytest.raises(PromptTooLongError):
        requests(model, prompt=[5] * 4096)
    with pytest.raises(PromptTooLongError):
        requests(model, prompt=[5] * 4090, max_tokens=16)


def test_a_priority_is_refused_where_it_has_no_effect(model):
    first_come = dataclasses.replace(model, has_priorities=False)
    assert requests(first_come, priority=0, service_class="be")
    with pytest.raises(RequestError, match="--scheduling-policy priority") as refused:
        requests(first_come, priority=-1)
    assert (refused.value.http_status, refused.value.param) == (400, "priority")


def test_prompt_and_answer_may_fill_the_context_and_not_one_token_more(model):
    assert requests(model, max_tokens=4096 - 40)[0].num_total_tokens == 4096
    with pytest.raises(PromptTooLongError):
        requests(model, max_tokens=4096 - 39)


def test_a_chat_without_a_limit_may_fill_the_context(model):
    [job] = prepare_chat_ask(parse_chat(b'{"messages": [{"role": "user", "content": "hi"}]}'), model, ARRIVAL).jobs
    assert job.request.num_total_tokens == 4096
    full = json.dumps({"messages": [{"role": "user", "content": "a b" * 4000}]}).encode()
    with pytest.raises(PromptTooLongError):
        prepare_chat_ask(parse_chat(full), model, ARRIVAL)


def test_a_tokenizer_with_more_tokens_than_the_network_is_caught(model):
    small = ServedModel(
        names=("m",), created=0, fingerprint="fp", tokenizer=model.tokenizer,
        info=msgspec.structs.replace(INFO, vocab_size=10),
    )  # fmt: skip
    with pytest.raises(RequestError, match="token id out of range"):
        requests(small, prompt="hello")


def test_a_client_that_names_no_model_gets_the_first_name(model):
    assert [model.name_for(name) for name in (None, "m", "n")] == ["m", "m", "n"]


def test_a_message_that_the_template_drops_is_refused_by_its_place(model, demo_dir):
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim | upper }}{% endif %}{% endfor %}"
    dropping = dataclasses.replace(model, tokenizer=Tokenizer(demo_dir, template))
    try:
        body = {"messages": [{"role": "user", "content": " hi "}, {"role": "system", "content": "be brief"}]}
        with pytest.raises(RequestError, match="no place for a message of role system") as caught:
            prepare_chat_ask(parse_chat(json.dumps(body).encode()), dropping, ARRIVAL)
        assert caught.value.param == "messages[1]"
        body["messages"].pop()
        assert prepare_chat_ask(parse_chat(json.dumps(body).encode()), dropping, ARRIVAL).jobs
    finally:
        dropping.tokenizer.close()


def test_wishes_that_the_template_does_not_read_are_named(model):
    body = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "high", "verbosity": "low"}
    prepared = prepare_chat_ask(parse_chat(json.dumps(body).encode()), model, ARRIVAL)
    assert prepared.options.unknown_fields == ("reasoning_effort", "verbosity")
    body |= {"reasoning_effort": "medium", "verbosity": "medium"}
    assert prepare_chat_ask(parse_chat(json.dumps(body).encode()), model, ARRIVAL).options.unknown_fields == ()
