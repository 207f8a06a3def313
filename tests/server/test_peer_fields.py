"""Fields, paths and flags with the names of vLLM and SGLang, directly and through the router."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from support.running import EXACT, MOESTRO, Running, call, chat, complete

from moestro.config.serve_settings import ServerSettings
from moestro.errors import ConfigError

TEXT = "def read_file(path):\n"
CHATS = [[{"role": "user", "content": text}] for text in ("def f(x):", "import os", "class A:")]
FLAGS = ("--enable-force-include-usage", "--enable-tokenizer-info-endpoint", "--root-path", "/llm/v9")


@pytest.fixture(scope="module")
def direct(real_command, tmp_path_factory) -> Iterator[Running]:
    server = Running((*real_command, *EXACT, *FLAGS), tmp_path_factory.mktemp("serve"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def routed(direct, demo_dir, tmp_path_factory) -> Iterator[Running]:
    flags = ("--tokenizer", str(demo_dir), "--block-size", "16", "--admin-port", "0")
    router = Running((MOESTRO, "route", "--engine", direct.url, *flags), tmp_path_factory.mktemp("route"))
    yield router
    router.kill()


@pytest.fixture(params=["direct", "routed"])
def place(request) -> Running:
    return request.getfixturevalue(request.param)


def error(reply) -> tuple[int, str]:
    return reply.status, reply.json["error"]["param"]


# --- fields


@pytest.mark.parametrize(("name", "value"), [("regex", "[ab]{3}"), ("ebnf", 'root ::= "a" [ab] "b"')])
def test_sglangs_names_of_grammars_shape_the_answer(place, name, value):
    reply = complete(place, prompt="x", max_tokens=9, **{name: value})
    assert re.fullmatch("[ab]{3}", reply.json["choices"][0]["text"]), reply.body
    assert error(complete(place, prompt="x", guided_regex="a", **{name: value})) == (400, name)
    assert error(complete(place, prompt="x", **{name: ""})) == (400, name)


def test_log_probabilities_name_tokens_by_their_ids(place):
    fields = {"prompt": TEXT, "max_tokens": 3, "temperature": 0, "logprobs": 2, "return_token_ids": True}
    named = complete(place, **fields, return_tokens_as_token_ids=True).json["choices"][0]
    plain = complete(place, **fields).json["choices"][0]
    assert named["logprobs"]["tokens"] == [f"token_id:{i}" for i in plain["token_ids"]]
    assert all(len(each) == 2 for each in named["logprobs"]["top_logprobs"])
    assert all(name.startswith("token_id:") for each in named["logprobs"]["top_logprobs"] for name in each)
    assert named["text"] == plain["text"]
    params = {"max_tokens": 2, "temperature": 0, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole = chat(place, TEXT, **params, return_tokens_as_token_ids=True).json["choices"][0]
    entries = whole["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in whole["token_ids"]]
    assert [entry["top_logprobs"][0]["token"] for entry in entries] == [entry["token"] for entry in entries]
    streamed = chat(place, TEXT, **params, return_tokens_as_token_ids=True, stream=True).events
    found = [each["choices"][0]["logprobs"] for each in streamed[:-1] if each["choices"]]
    assert [entry for each in found if each for entry in each["content"]] == entries


def values_of(top: dict[str, float]) -> dict[int, float]:
    return {int(name.removeprefix("token_id:")): value for name, value in top.items()}


def test_log_probabilities_of_listed_tokens_are_those_of_the_whole_distribution(place):
    """The oracle scores the same text as a prompt with all alternatives."""
    listed, prompt = [5, 300, 17, 9], call(place, "POST", "/tokenize", {"prompt": TEXT}).json["tokens"]
    fields = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "return_token_ids": True, "logit_bias": {"7": 50}}
    named = {"return_tokens_as_token_ids": True, "logprob_token_ids": [*listed, listed[0]]}
    plain = complete(place, **fields).json["choices"][0]
    choice = complete(place, **fields, **named).json["choices"][0]
    assert choice["token_ids"] == plain["token_ids"] == [7, 7, 7]
    whole = complete(place, prompt=[*prompt, *plain["token_ids"]], max_tokens=1, prompt_logprobs=-1)
    wanted = whole.json["choices"][0]["prompt_logprobs"][len(prompt) :]
    for own, top, raw in zip(
        choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], wanted, strict=True
    ):
        found = values_of(top)
        assert set(found) == {*listed, 7}, "exactly these tokens and the sampled one"
        for token_id, value in found.items():
            assert value == pytest.approx(raw[str(token_id)]["logprob"], abs=1e-4)
        assert own == found[7]
    streamed = complete(place, **fields, **named, logprobs=2, stream=True).events[:-1]
    tops = [top for each in streamed for part in each["choices"] for top in part["logprobs"]["top_logprobs"]]
    assert tops == choice["logprobs"]["top_logprobs"], "streamed alike, and logprobs adds none"


def test_an_echo_lists_the_same_tokens_for_its_prompt(place):
    listed = [5, 300]
    fields = {"prompt": TEXT, "max_tokens": 0, "echo": True, "return_tokens_as_token_ids": True}
    tops = complete(place, **fields, logprob_token_ids=listed).json["choices"][0]["logprobs"]["top_logprobs"]
    raw = complete(place, prompt=TEXT, max_tokens=1, prompt_logprobs=-1).json["choices"][0]["prompt_logprobs"]
    assert tops[0] is None
    for top, wanted in zip(tops[1:], raw[1:], strict=True):
        found = values_of(top)
        assert {*listed} <= set(found)
        assert len(found) <= len(listed) + 1
        for token_id, value in found.items():
            assert value == pytest.approx(wanted[str(token_id)]["logprob"], abs=1e-4)


def test_a_chat_lists_tokens_in_the_clients_order(place):
    params = {
        "max_tokens": 2,
        "temperature": 0,
        "return_tokens_as_token_ids": True,
        "logprob_token_ids": [300, 5, 17],
    }
    whole = chat(place, TEXT, **params).json["choices"][0]["logprobs"]["content"]
    for entry in whole:
        assert [other["token"] for other in entry["top_logprobs"]] == ["token_id:300", "token_id:5", "token_id:17"]
    assert chat(place, TEXT, **params, logprobs=True, top_logprobs=1).json["choices"][0]["logprobs"]["content"] == whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [10**12]}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(21))}, "logprob_token_ids"),
        ({"logprob_token_ids": [1], "echo": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_lists_of_tokens_that_cannot_be_scored_are_refused_by_name(place, fields, param):
    assert error(complete(place, prompt="x", max_tokens=1, **fields)) == (400, param)
    if "echo" not in fields:
        assert error(chat(place, "x", max_tokens=1, **fields)) == (400, param)
    assert error(chat(place, "x", logprobs=False, logprob_token_ids=[1])) == (400, "logprob_token_ids")


def test_a_prompt_is_truncated_on_the_side_that_the_client_names(place):
    ids = call(place, "POST", "/tokenize", {"prompt": TEXT}).json["tokens"]
    fields = {"prompt": TEXT, "max_tokens": 1, "truncate_prompt_tokens": 3, "return_token_ids": True}
    for side, kept in ((None, ids[-3:]), ("left", ids[-3:]), ("right", ids[:3])):
        choice = complete(place, **fields, truncation_side=side).json["choices"][0]
        assert choice["prompt_token_ids"] == kept
    chatted = chat(place, TEXT, max_tokens=1, return_token_ids=True).json["prompt_token_ids"]
    cut = chat(place, TEXT, max_tokens=1, return_token_ids=True, truncate_prompt_tokens=4, truncation_side="right")
    assert cut.json["prompt_token_ids"] == chatted[:4]
    assert error(complete(place, **fields, truncation_side="middle")) == (400, "truncation_side")


# --- several chats in one request


def test_a_batch_answers_each_chat_as_a_request_of_its_own_does(place):
    fields = {"temperature": 0, "max_tokens": 6, "seed": 1}
    single = [call(place, "POST", "/v1/chat/completions", fields | {"messages": each}).json for each in CHATS]
    reply = call(place, "POST", "/v1/chat/completions/batch", fields | {"messages": CHATS})
    assert reply.status == 200, reply.body
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2]
    contents = [choice["message"]["content"] for choice in reply.json["choices"]]
    assert contents == [each["choices"][0]["message"]["content"] for each in single]
    for name in ("prompt_tokens", "completion_tokens"):
        assert reply.json["usage"][name] == sum(each["usage"][name] for each in single)
    twice = call(place, "POST", "/v1/chat/completions/batch", fields | {"messages": CHATS, "n": 2}).json["choices"]
    assert [choice["message"]["content"] for choice in twice[::2]] == contents
    params = {"messages": CHATS, "regex": "[ab]{2}", "max_tokens": 5}
    limited = call(place, "POST", "/v1/chat/completions/batch", params).json["choices"]
    assert all(re.fullmatch("[ab]{2}", choice["message"]["content"]) for choice in limited)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": CHATS[0]}, "messages[0]"),
        ({"messages": [CHATS[0], []]}, "messages[1]"),
        ({"messages": [CHATS[0], [{"role": "pirate", "content": "x"}]]}, "messages[1][0].role"),
        ({"messages": CHATS * 400}, "messages"),
        ({"messages": CHATS * 4, "n": 128}, "n"),
        ({"messages": CHATS, "stream": True}, "stream"),
        ({"messages": CHATS, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": CHATS, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": [CHATS[0], [{"role": "user", "content": "x " * 5000}]]}, "messages[1]"),
    ],
)
def test_a_batch_that_cannot_be_answered_is_refused_by_name(place, fields, param):
    assert error(call(place, "POST", "/v1/chat/completions/batch", fields)) == (400, param)


def test_unknown_keys_of_a_batch_are_named_once(place):
    body = {"messages": [CHATS[0], [{"role": "user", "content": "x", "zzz": 1}]], "max_tokens": 1}
    reply = call(place, "POST", "/v1/chat/completions/batch", body)
    assert reply.headers["warning"] == '299 moestro "fields were ignored: messages[1][0].zzz"'


# --- flags


def test_every_stream_ends_with_its_usage_if_the_operator_says_so(place):
    for options in ({}, {"stream_options": {"include_usage": False}}):
        fields = {"max_tokens": 2, "ignore_eos": True, "stream": True} | options
        for reply in (complete(place, prompt="x", **fields), chat(place, "x", **fields)):
            *others, last = reply.events[:-1]
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 2
            assert not any(each.get("usage") for each in others)


def test_the_tokenizers_settings_are_shown_if_the_operator_says_so(place, fake, demo_dir):
    reply = call(place, "GET", "/tokenizer_info")
    given = json.loads((demo_dir / "tokenizer_config.json").read_text())
    assert reply.status == 200
    assert reply.json["tokenizer_class"]
    assert reply.json["chat_template"]
    assert reply.json.items() >= {name: value for name, value in given.items() if name != "chat_template"}.items()
    hidden = call(fake, "GET", "/tokenizer_info")
    assert hidden.status == 404
    assert "--enable-tokenizer-info-endpoint" in hidden.json["error"]["message"]


def test_paths_are_answered_below_the_root_path_too(direct):
    body = {"messages": CHATS[0], "max_tokens": 1}
    assert call(direct, "POST", "/llm/v9/v1/chat/completions", body).status == 200
    assert call(direct, "GET", "/llm/v9/statistics?experts=false").status == 200
    assert call(direct, "GET", "/llm/v9/v1/models/moestro-demo").json["id"] == "moestro-demo"
    assert call(direct, "GET", "/llm/v9").body == call(direct, "GET", "/llm/v9/").body == call(direct, "GET", "/").body
    assert call(direct, "GET", "/llm/v9/openapi.json").json["servers"] == [{"url": "/llm/v9"}]
    for path in ("/llm/v99/v1/models", "/llm/v1/models", "/llm/v9/llm/v9/v1/models", "/llm/v9//v1/models"):
        assert call(direct, "GET", path).status == 404, path
    refused = call(direct, "POST", "/llm/v9/v1/messages", {})
    assert refused.json["type"] == "error", "Anthropic's form of errors follows the path below the root"


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a//b", "/a b", "/../x", "/a?b"])
def test_a_root_path_that_is_no_prefix_is_refused_at_the_start(path):
    with pytest.raises(ConfigError, match="--root-path"):
        ServerSettings(root_path=path)
