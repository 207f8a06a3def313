"""Fields that shape what an answer shows, and what the server says about itself. The fake rank repeats the prompt."""

from __future__ import annotations

import contextlib
import json

import pytest
from support.fake_rank import INFO
from support.running import Running, call, chat, complete, open_stream

from moestro.server.api.request_builder import ServedModel
from moestro.server.api.routes import API_PATHS, ApiServer, openapi_document
from moestro.web.figures import Exposition

IM_END = 2  # A special token of the demo tokenizer, and an end token of the fake rank.


def choice_of(reply):
    return reply.json["choices"][0]


def test_token_ids_of_prompt_and_answer_are_returned_on_request(fake):
    prompt = [10, 11, 12, 13]
    choice = choice_of(complete(fake, prompt=prompt, max_tokens=3, return_token_ids=True))
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, prompt[:3])
    assert choice_of(complete(fake, prompt=prompt, max_tokens=3))["token_ids"] is None
    answer = chat(fake, max_tokens=3, return_token_ids=True).json
    assert answer["prompt_token_ids"][:3] == answer["choices"][0]["token_ids"]
    events = complete(fake, prompt=prompt, max_tokens=3, return_token_ids=True, stream=True).events[:-1]
    assert [each["choices"][0].get("prompt_token_ids") for each in events] == [prompt, None, None]
    assert [token for each in events for token in each["choices"][0]["token_ids"]] == prompt[:3]
    events = chat(fake, max_tokens=3, return_token_ids=True, stream=True).events[:-1]
    assert [each.get("prompt_token_ids") for each in events] == [
        answer["prompt_token_ids"],
        *[None] * (len(events) - 1),
    ]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [token for each in events[1:] for token in each["choices"][0]["token_ids"]] == answer["choices"][0][
        "token_ids"
    ]


def test_token_ids_end_with_the_token_that_completed_a_stop_string(fake):
    whole = choice_of(complete(fake, max_tokens=5, return_token_ids=True))
    stop = whole["text"][-1]
    choice = choice_of(complete(fake, max_tokens=5, return_token_ids=True, stop=stop))
    assert whole["token_ids"][: len(choice["token_ids"])] == choice["token_ids"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_special_tokens_are_shown_on_request(fake):
    fields = {"prompt": [10, IM_END, 11], "max_tokens": 3, "ignore_eos": True}
    hidden = choice_of(complete(fake, **fields))["text"]
    shown = choice_of(complete(fake, **fields, skip_special_tokens=False))["text"]
    special = call(fake, "POST", "/detokenize", {"tokens": [IM_END]}).json["prompt"]
    assert special not in hidden
    assert shown.replace(special, "") == hidden
    assert special in shown


def test_the_stop_string_or_token_is_shown_on_request(fake):
    text = choice_of(complete(fake, max_tokens=5))["text"]
    fields = {"max_tokens": 5, "stop": text[2:4]}
    assert choice_of(complete(fake, **fields))["text"] == text[:2]
    assert choice_of(complete(fake, **fields, include_stop_str_in_output=True))["text"] == text[:4]
    fields = {"prompt": [10, 11, 12], "max_tokens": 3, "stop_token_ids": [11]}
    hidden = choice_of(complete(fake, **fields))
    shown = choice_of(complete(fake, **fields, include_stop_str_in_output=True))
    assert hidden["stop_reason"] == shown["stop_reason"] == 11
    assert shown["text"] == call(fake, "POST", "/detokenize", {"tokens": [10, 11]}).json["prompt"]
    assert shown["text"].startswith(hidden["text"])
    assert shown["text"] != hidden["text"]


def test_an_end_token_of_the_model_is_no_stop_reason(fake):
    choice = choice_of(complete(fake, prompt=[10, IM_END], max_tokens=4))
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


def test_a_prompt_is_truncated_to_its_last_tokens(fake):
    prompt = list(range(10, 40))
    fields = {"prompt": prompt, "max_tokens": 2, "return_token_ids": True}
    choice = choice_of(complete(fake, **fields, truncate_prompt_tokens=4))
    assert choice["prompt_token_ids"] == prompt[-4:]
    assert choice_of(complete(fake, **fields, truncate_prompt_tokens=99))["prompt_token_ids"] == prompt
    longest = [10, 11] * 2048  # As long as the context.
    reply = complete(fake, prompt=longest, max_tokens=3, return_token_ids=True, truncate_prompt_tokens=-1)
    assert len(choice_of(reply)["prompt_token_ids"]) == 4096 - 3
    assert chat(fake, max_tokens=1, truncate_prompt_tokens=2).json["usage"]["prompt_tokens"] == 2
    echoed = choice_of(complete(fake, prompt="def f(x):", max_tokens=0, echo=True, truncate_prompt_tokens=1))["text"]
    assert "def f(x):".endswith(echoed)
    assert len(echoed) < len("def f(x):")


def test_an_echo_of_token_ids_keeps_special_tokens_and_its_offsets_fit(fake):
    prompt = [10, IM_END, 11]
    choice = choice_of(complete(fake, prompt=prompt, max_tokens=0, echo=True, logprobs=0))
    assert choice["text"] == call(fake, "POST", "/detokenize", {"tokens": prompt}).json["prompt"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert [choice["text"][at:].startswith(token) for at, token in zip(offsets, tokens, strict=True)] == [True] * 3


def test_a_request_id_names_the_answer_and_the_request(fake):
    reply = complete(fake, max_tokens=1, request_id="mine-1")
    assert (reply.json["id"], reply.headers["x-request-id"]) == ("cmpl-mine-1", "mine-1")
    reply = call(
        fake, "POST", "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "request_id": "mine-1"},
        X_Request_Id="of-the-header",
    )  # fmt: skip
    assert (reply.json["id"], reply.headers["x-request-id"]) == ("chatcmpl-mine-1", "of-the-header")
    [event, *_] = complete(fake, max_tokens=1, request_id="mine-2", stream=True).events
    assert event["id"] == "cmpl-mine-2"


def test_two_running_requests_may_have_one_id(fake):
    with contextlib.closing(open_stream(fake, max_tokens=4000, request_id="same")):
        reply = complete(fake, max_tokens=2, request_id="same")
    assert (reply.status, reply.json["id"]) == (200, "cmpl-same")
    assert reply.json["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("ask", [complete, chat])
def test_usage_in_all_chunks_begins_with_the_prompt_alone(fake, ask):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = ask(fake, max_tokens=3, stream=True, stream_options=options).events[:-1]
    counts = [(each["usage"]["prompt_tokens"], each["usage"]["completion_tokens"]) for each in events]
    prompt = counts[0][0]
    expected = [1, 2, 3, 3] if ask is complete else [0, 1, 2, 3, 3]
    assert counts == [(prompt, count) for count in expected]
    assert all(each["usage"]["total_tokens"] == sum(count) for each, count in zip(events, counts, strict=True))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_unknown_fields_are_named_in_a_warning(fake, path):
    least = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [10]},
    }[path]
    known = {} if "token" in path else {"max_tokens": 1}
    reply = call(fake, "POST", path, {"frobnicate": 1} | least | known)
    assert (reply.status, reply.headers["warning"]) == (200, '299 moestro "fields were ignored: frobnicate"')
    assert "warning" not in call(fake, "POST", path, least | known).headers
    if "token" not in path:
        streamed = call(fake, "POST", path, {"frobnicate": 1, "stream": True} | least | known)
        assert streamed.headers["warning"] == reply.headers["warning"]


def test_a_chat_with_fields_that_are_not_supported_is_not_tokenized_without_them(fake):
    reply = call(fake, "POST", "/tokenize", {"messages": [{"role": "user", "content": "x"}], "documents": [{"a": 1}]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "documents")


def test_strict_fields_refuse_the_first_unknown_one(fake_command, tmp_path):
    strict = Running((*fake_command, "--strict-fields", "--api-key", "s3cret"), tmp_path)
    try:
        key = {"Authorization": "Bearer s3cret"}
        body = {"prompt": "x", "max_tokens": 1, "metadata": {"a": "b"}, "zeta": 1, "alpha": 2}
        reply = call(strict, "POST", "/v1/completions", body, **key)
        assert (reply.status, reply.json["error"]["param"]) == (400, "zeta")
        assert reply.json["error"]["code"] == "unknown_parameter"
        assert "--strict-fields" in reply.json["error"]["message"]
        for path, least in (
            ("/tokenize", {"prompt": "x"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
        ):
            assert call(strict, "POST", path, least, **key).status == 200
            assert call(strict, "POST", path, least | {"zeta": 1}, **key).status == 400
        public = ("/docs", "/openapi.json", "/", "/page/page.js")
        for path, status in (
            *((path, 200) for path in public),
            ("/server_info", 401),
            ("/load", 401),
            ("/statistics", 401),
        ):
            assert call(strict, "GET", path).status == status, path
        assert "s3cret" not in call(strict, "GET", "/server_info", **key).body.decode()
    finally:
        strict.kill()


def test_server_info_has_the_settings_and_the_engines(fake):
    info = call(fake, "GET", "/server_info").json
    assert info["served_model_names"] == ["moestro-demo"]
    assert info["settings"]["scheduling_policy"] == "priority"
    assert [engine["max_model_len"] for engine in info["engines"]] == [4096]
    assert info["start_s"]


def test_the_document_names_every_route_and_every_field(fake):
    served = call(fake, "GET", "/openapi.json").json
    assert served == json.loads(json.dumps(openapi_document()))
    assert served["components"]["schemas"]["CompletionFields"]["required"] == ["prompt"]
    assert {"min_p", "return_token_ids"} <= served["components"]["schemas"]["ChatFields"]["properties"].keys()
    schemas = served["components"]["schemas"]
    for reference in _references(served):
        assert reference.removeprefix("#/components/schemas/") in schemas
    page = call(fake, "GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert b"://" not in page.body, "no foreign host"


def _references(node):
    if isinstance(node, dict):
        if isinstance(found := node.get("$ref"), str):
            yield found
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def test_every_route_is_documented(tokenizer):
    model = ServedModel(names=("m",), created=0, fingerprint="fp", info=INFO, tokenizer=tokenizer)
    app = ApiServer(None, model, 1.0).app(Exposition.__new__(Exposition), None, None)
    routes = {(route.method.lower(), route.resource.canonical) for route in app.router.routes()}
    documented = {(each.method, each.path) for each in API_PATHS}
    without = {("head", path) for _, path in documented} | {("post", "/ping"), ("*", "/v1/responses/{rest}")}
    assert routes - without == documented
