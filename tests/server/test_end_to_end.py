"""`moestro serve` with the demo model, driven by the real OpenAI client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.running import Running, call, complete, is_idle, open_stream, wait_until

PROMPT = "def fibonacci(n):\n"
MODEL = "moestro-demo"


@pytest.fixture(scope="module")
def client(server, openai) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_completion(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 12


def test_a_streamed_completion_says_the_same(client):
    params = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**params)
    with client.completions.create(**params, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_a_chat_streamed_and_not(client):
    params = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write a Python function `add`."}],
        "temperature": 0,
    }
    whole = client.chat.completions.create(**params, max_completion_tokens=30)
    assert whole.choices[0].message.role == "assistant"
    with client.chat.completions.create(**params, max_completion_tokens=30, stream=True) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len > 0


def test_a_seed_makes_a_sampled_answer_reproducible_and_the_lack_of_one_does_not(client):
    def texts(**seed: int) -> set[str]:
        params = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 1.0} | seed
        return {client.completions.create(**params).choices[0].text for _ in range(2)}

    with_7 = texts(seed=7)
    assert len(with_7) == 1
    assert with_7 != texts(seed=8)
    assert len(texts()) == 2


def test_a_seed_gives_the_same_text_among_other_requests(client):
    params = {"model": MODEL, "max_tokens": 16, "temperature": 1.0, "seed": 3}
    alone = client.completions.create(**params, prompt=PROMPT).choices[0].text
    among = client.completions.create(**params, prompt=["import os", PROMPT, "class Tree:", PROMPT])
    assert [among.choices[i].text for i in (1, 3)] == [alone, alone]


def test_a_stop_string_cuts_the_greedy_text(client):
    params = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**params).choices[0].text
    stop = text[len(text) // 2 :][:3]
    answer = client.completions.create(**params, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_ignore_eos_generates_as_many_tokens_as_requested(client):
    answer = client.completions.create(
        model=MODEL, prompt="x", max_tokens=100, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 100


def test_a_prompt_seen_before_is_taken_from_the_cache_unless_salted(client):
    params = {"model": MODEL, "prompt": "# a prompt of several blocks\n" * 20, "max_tokens": 4, "temperature": 0}
    first = client.completions.create(**params)
    again = client.completions.create(**params)
    salted = client.completions.create(**params, extra_body={"cache_salt": "tenant"})
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, again, salted)]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 100
    assert first.choices[0].text == again.choices[0].text == salted.choices[0].text


def test_generated_logprobs_are_those_that_scoring_the_same_tokens_gives(client, tokenizer):
    ids = tokenizer.encode(PROMPT, add_special_tokens=True)
    params = {"model": MODEL, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    made = client.completions.create(**params, prompt=ids).choices[0]
    scored = client.completions.create(
        model=MODEL, prompt=PROMPT + made.text, max_tokens=0, echo=True, logprobs=2, temperature=0
    )
    [whole] = scored.choices
    assert whole.text == PROMPT + made.text
    assert scored.usage.completion_tokens == 0
    assert whole.logprobs.token_logprobs[0] is None
    assert whole.logprobs.tokens[-12:] == made.logprobs.tokens
    assert whole.logprobs.token_logprobs[-12:] == pytest.approx(made.logprobs.token_logprobs, abs=0.1)  # bfloat16
    for token, top in zip(made.logprobs.tokens, made.logprobs.top_logprobs, strict=True):
        assert max(top, key=top.get) == token, "greedy is the likeliest"
    pairs = zip(whole.logprobs.text_offset, whole.logprobs.tokens, strict=True)
    assert all(whole.text[offset:].startswith(token) for offset, token in pairs)


def test_a_continuation_is_found_greedy_or_not_as_lm_eval_finds_it(client, tokenizer):
    """It sends context and continuation as ids, asks for one token more, and compares each logprob with the largest."""
    context = tokenizer.encode(PROMPT, add_special_tokens=True)
    params = {"model": MODEL, "temperature": 0, "logprobs": 1}
    greedy = client.completions.create(**params, prompt=context, max_tokens=4).choices[0]
    ids = tokenizer.encode(PROMPT + greedy.text, add_special_tokens=True)
    other = [*ids[:-1], ids[-2]]
    answer = client.completions.create(**params, prompt=[ids, other], max_tokens=1, echo=True, seed=1234)
    found = []
    for choice in sorted(answer.choices, key=lambda choice: choice.index):
        own, top = choice.logprobs.token_logprobs[len(context) : -1], choice.logprobs.top_logprobs[len(context) : -1]
        assert len(own) == 4
        found.append((sum(own), all(logprob == max(best.values()) for logprob, best in zip(own, top, strict=True))))
    assert [is_greedy for _, is_greedy in found] == [True, False]
    assert found[0][0] > found[1][0]


def test_a_prompt_is_scored_the_same_whether_or_not_it_was_seen_before(client):
    params = {
        "model": MODEL,
        "prompt": "# a text of several blocks\n" * 9,
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
    }
    first, again = (client.completions.create(**params, temperature=0).choices[0].logprobs for _ in range(2))
    assert first.token_logprobs[0] is None
    assert again.token_logprobs[1:] == pytest.approx(first.token_logprobs[1:], abs=1e-5)


def test_logprobs_of_a_chat_streamed_and_not(client):
    params = {"model": MODEL, "messages": [{"role": "user", "content": "def add"}], "temperature": 0}
    params |= {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 8}
    whole = client.chat.completions.create(**params).choices[0]
    assert len(whole.logprobs.content) <= 8
    assert whole.logprobs.content[0].top_logprobs[0].token == whole.logprobs.content[0].token
    with client.chat.completions.create(**params, stream=True) as stream:
        streamed = [
            entry for chunk in stream if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
        ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs.content]


def test_the_copies_of_a_seeded_request_have_the_next_seeds(client):
    params = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0}
    copies = client.completions.create(**params, n=3, seed=7)
    alone = [client.completions.create(**params, seed=seed).choices[0].text for seed in (7, 8, 9)]
    assert [choice.text for choice in copies.choices] == alone
    assert len(set(alone)) == 3
    greedy = client.completions.create(model=MODEL, prompt=[PROMPT, "import"], max_tokens=5, temperature=0, n=2)
    texts = [choice.text for choice in greedy.choices]
    assert texts == [texts[0], texts[0], texts[2], texts[2]]


def test_a_bias_forces_or_forbids_a_token(client, tokenizer):
    [token_id] = tokenizer.encode("=", add_special_tokens=False)
    params = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    assert client.completions.create(**params, logit_bias={str(token_id): 100}).choices[0].text == "=" * 6
    plain = client.completions.create(**params, logprobs=0).choices[0]
    first = tokenizer.encode(plain.logprobs.tokens[0], add_special_tokens=False)[0]
    without = client.completions.create(**params, logit_bias={str(first): -100}, logprobs=0).choices[0]
    assert plain.logprobs.tokens[0] not in without.logprobs.tokens


def test_penalties_stop_a_text_that_repeats_itself(client, tokenizer):
    params = {"model": MODEL, "prompt": "x = 1\n" * 10, "max_tokens": 40, "temperature": 0}
    params["extra_body"] = {"ignore_eos": True}

    def most_often(**penalty: object) -> int:
        body = params["extra_body"] | penalty
        choice = client.completions.create(**{**params, "extra_body": body}, logprobs=0).choices[0]
        return max(choice.logprobs.tokens.count(token) for token in choice.logprobs.tokens)

    plain = most_often()
    assert plain > 5
    assert most_often(frequency_penalty=2) < plain
    assert most_often(presence_penalty=2) < plain
    assert most_often(repetition_penalty=1.5) < plain


def test_min_tokens_holds_back_the_end(client):
    params = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    text = client.completions.create(**params, logprobs=0).choices[0]
    stop = text.logprobs.tokens[2]
    early = client.completions.create(**params, stop=[stop])
    late = client.completions.create(**params, stop=[stop], extra_body={"min_tokens": 10})
    assert early.usage.completion_tokens <= 3 < 10 < late.usage.completion_tokens


def test_errors_become_the_clients_exceptions(client, openai):
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        client.completions.create(model="x", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as long:
        client.completions.create(model=MODEL, prompt="x", max_tokens=100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="suffix is not supported yet"):
        client.completions.create(model=MODEL, prompt="x", suffix="y")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_sequence_on_the_rank(server, stream):
    connection = open_stream(server, max_tokens=1900, stream=stream)
    wait_until(lambda: call(server, "GET", "/load").json["engines"][0]["num_running"] == 1)
    connection.close()
    wait_until(lambda: is_idle(server))


def test_the_api_server_never_maps_torch_and_the_rank_does(real_command, tmp_path):
    def maps(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    server = Running(real_command, tmp_path, forked=False)
    try:
        [rank] = server.ranks()
        assert complete(server, max_tokens=1).status == 200
        assert "libtorch" not in maps(server.process.pid)
        assert "libtorch" in maps(rank.pid)
        assert server.stop() == 0
    finally:
        server.kill()


def test_a_prompt_of_special_tokens_is_served(server):
    assert complete(server, prompt="<|im_end|><|endoftext|>", max_tokens=2).status == 200


# --- tools: the demo model never learnt any, so a grammar makes it call them

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY | {"required": ["city"]}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
FIELDS = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 120, "seed": 5}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_that_must_be_called_is_called_with_arguments_that_follow_its_schema(client, choice):
    params = FIELDS | {"tools": [WEATHER, CLOCK], "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**params).choices[0]
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    [made] = whole.message.tool_calls
    arguments = json.loads(made.function.arguments)
    if made.function.name == "weather":
        assert arguments["city"] in ("Paris", "Rome")
    else:
        assert (choice, arguments) == ("required", {})
    with client.chat.completions.stream(**params) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls[0].function.arguments == made.function.arguments
    assert streamed.finish_reason == whole.finish_reason


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_tools_need_no_flag_and_an_answer_without_calls_is_text(client, choice):
    answer = client.chat.completions.create(**FIELDS, tools=[WEATHER], tool_choice=choice).choices[0]
    assert answer.message.content
    assert answer.message.tool_calls == []
