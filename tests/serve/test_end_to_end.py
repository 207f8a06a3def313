"""`moestro serve` with the demo model, driven by the real OpenAI client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from serve.running import call, complete, open_stream, wait_until

PROMPT = "def fibonacci(n):\n"
MODEL = "moestro-demo"


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_completion(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 12


def test_a_streamed_completion_says_the_same(client):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**asked)
    with client.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_a_chat_streamed_and_not(client):
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write a Python function `add`."}],
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked, max_completion_tokens=30)
    assert whole.choices[0].message.role == "assistant"
    with client.chat.completions.create(**asked, max_completion_tokens=30, stream=True) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len > 0


def test_a_seed_makes_a_sampled_answer_reproducible_and_the_lack_of_one_does_not(client):
    def texts(**seed: int) -> set[str]:
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 1.0} | seed
        return {client.completions.create(**asked).choices[0].text for _ in range(3)}

    assert len(texts(seed=7)) == 1
    assert texts(seed=7) != texts(seed=8)
    assert len(texts()) == 3


def test_a_seed_gives_the_same_text_among_other_requests(client):
    asked = {"model": MODEL, "max_tokens": 16, "temperature": 1.0, "seed": 3}
    alone = client.completions.create(**asked, prompt=PROMPT).choices[0].text
    among = client.completions.create(**asked, prompt=["import os", PROMPT, "class Tree:", PROMPT])
    assert [among.choices[i].text for i in (1, 3)] == [alone, alone]


def test_a_stop_string_cuts_the_greedy_text(client):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[len(text) // 2 :][:3]
    answer = client.completions.create(**asked, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_ignore_eos_generates_as_many_tokens_as_asked(client):
    answer = client.completions.create(
        model=MODEL, prompt="x", max_tokens=100, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 100


def test_a_prompt_seen_before_is_taken_from_the_cache_unless_salted(client):
    asked = {"model": MODEL, "prompt": "# a prompt of several blocks\n" * 20, "max_tokens": 4, "temperature": 0}
    first = client.completions.create(**asked)
    again = client.completions.create(**asked)
    salted = client.completions.create(**asked, extra_body={"cache_salt": "tenant"})
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, again, salted)]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 100
    assert first.choices[0].text == again.choices[0].text == salted.choices[0].text


def test_errors_become_the_clients_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        client.completions.create(model="x", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as long:
        client.completions.create(model=MODEL, prompt="x", max_tokens=100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="echo is not supported yet"):
        client.completions.create(model=MODEL, prompt="x", echo=True)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_sequence_on_the_rank(server, stream):
    connection = open_stream(server, max_tokens=1900, stream=stream)
    wait_until(lambda: call(server, "GET", "/load").json["engines"][0]["num_running"] == 1)
    connection.close()
    idle = [{"num_running": 0, "num_waiting": 0, "kv_usage": 0.0}]
    wait_until(lambda: call(server, "GET", "/load").json == {"server_load": 0, "engines": idle})


def test_the_front_door_never_maps_torch_and_the_rank_does(server):
    def maps(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    [rank] = server.ranks()
    assert "libtorch" not in maps(server.process.pid)
    assert "libtorch" in maps(rank.pid)


def test_a_prompt_of_special_tokens_is_served(server):
    assert complete(server, prompt="<|im_end|><|endoftext|>", max_tokens=2).status == 200
