"""/tokenize and /detokenize, as load generators use them."""

from __future__ import annotations

import pytest
from support.running import call, complete


def post(server, path: str, **fields: object):
    return call(server, "POST", path, fields)


def test_a_prompt_has_the_tokens_that_a_completion_of_it_counts(fake):
    answer = post(fake, "/tokenize", model="moestro-demo", prompt="def f(x):").json
    assert answer["count"] == len(answer["tokens"]) == complete(fake, max_tokens=1).json["usage"]["prompt_tokens"]
    assert (answer["max_model_len"], answer["token_strs"]) == (4096, None)


@pytest.mark.parametrize("text", ["def f(x):", "naïve 😀\x00\u202e \ufffd", " two  spaces\n"])
def test_text_comes_back_from_its_tokens(fake, text):
    tokens = post(fake, "/tokenize", prompt=text, add_special_tokens=False).json["tokens"]
    assert post(fake, "/detokenize", tokens=tokens).json == {"prompt": text}


def test_a_chat_is_tokenized_as_it_would_be_served(fake):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    whole = post(fake, "/tokenize", messages=messages, return_token_strs=True).json
    served = call(fake, "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json
    assert whole["count"] == served["usage"]["prompt_tokens"] == len(whole["token_strs"])
    assert all(isinstance(name, str) for name in whole["token_strs"])
    open_end = post(fake, "/tokenize", messages=messages, add_generation_prompt=False).json
    assert open_end["tokens"] == whole["tokens"][: open_end["count"]]
    assert open_end["count"] < whole["count"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x" * 1_000_000}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 5000}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_cannot_be_turned_is_refused_with_the_field_at_fault(fake, path, fields, param):
    reply = post(fake, path, **fields)
    assert reply.status == (404 if param == "model" else 400)
    assert reply.json["error"]["param"] == param
