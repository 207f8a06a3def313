"""Blocks, roles and fields that agents' histories bring from Anthropic's API, and vLLM's further fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.interrupted_answers import running
from support.parroting_server import FLAGS
from support.running import Running, call, routing

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def direct(fake_command, tmp_path_factory) -> Iterator[Running]:
    with running((*fake_command, *FLAGS, "hermes"), tmp_path_factory.mktemp("blocks")) as server:
        yield server


@pytest.fixture(scope="module")
def routed(direct, demo_dir, tmp_path_factory) -> Iterator[Running]:
    with routing(direct, tmp_path_factory.mktemp("route"), "--tokenizer", str(demo_dir)) as router:
        yield router


@pytest.fixture(params=["direct", "routed"])
def place(request, direct) -> Running:
    return direct if request.param == "direct" else request.getfixturevalue("routed")


def answer(place: Running, *messages: dict[str, Any], **fields: Any) -> str:
    """The model's text, which is that of the last message."""
    reply = call(place, "POST", "/v1/messages", {"max_tokens": 200, "messages": [*messages]} | fields)
    assert (reply.status, reply.headers.get("warning")) == (200, None), reply.body
    return "".join(block["text"] for block in reply.json["content"])


DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "The sky is blue."}}
PARTS = {"type": "content", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (DOCUMENT, "The sky is blue."),
        (DOCUMENT | {"title": "Sky", "context": "A note.", "citations": {"enabled": False}}, "Sky\nA note.\nThe sky"),
        ({"type": "document", "source": PARTS}, "one\ntwo"),
        (
            {"type": "search_result", "source": "https://a.b", "title": "T", "content": PARTS["content"]},
            "T\nhttps://a.b\none\ntwo",
        ),
    ],
)
def test_texts_of_documents_and_search_results_reach_the_model(place, block, text):
    assert answer(place, {"role": "user", "content": [block]}).startswith(text)
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    assert answer(place, USER, use, {"role": "user", "content": [result]}).startswith(f"The tool says {text}")


def test_found_tools_are_named(place):
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}]}
    found = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "Write"}]}
    tools = [{"name": "Write", "input_schema": {"type": "object"}, "defer_loading": True}]
    text = answer(place, USER, use, {"role": "user", "content": [found]}, tools=tools)
    assert text == "The tool says The tool Write can be called.."


@pytest.mark.parametrize(
    ("tool", "content"),
    [
        ("web_search", [{"type": "web_search_result", "title": "T", "url": "u", "page_age": "1 d"}]),
        ("web_search", {"type": "web_search_tool_result_error", "error_code": "unavailable"}),
        ("web_search", []),
        ("web_fetch", {"type": "web_fetch_result", "url": "u", "retrieved_at": "2026-01-01", "content": DOCUMENT}),
        ("web_fetch", {"type": "web_fetch_tool_result_error", "error_code": "unavailable"}),
    ],
)
def test_what_anthropics_servers_found_is_read_in_histories(place, tool, content):
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": tool, "input": {"query": "q"}},
        {"type": f"{tool}_tool_result", "tool_use_id": "s", "content": content},
        {"type": "text", "text": "So it is."},
    ]
    assert answer(place, USER, {"role": "assistant", "content": blocks}, USER) == "hi"


@pytest.mark.parametrize("role", ["ctx", "msg"])
def test_claude_codes_own_roles_are_the_users(place, role):
    assert answer(place, {"role": role, "content": "from ctx"}) == "from ctx"
    assert answer(place, {"role": role, "content": [{"type": "text", "text": "a"}]}) == "a"


def test_an_image_in_a_document_is_refused_by_its_place(place):
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
    ]}]}  # fmt: skip
    reply = call(place, "POST", "/v1/messages", body)
    assert reply.status == 400
    assert reply.json["error"]["message"] == (
        "messages[0].content[0].source: only text is supported here, got a document of type base64."
    )


def test_variables_of_the_template_come_with_messages_and_responses(place):
    """The parrot opens its reasoning where the variable says so."""
    variables = {"chat_template_kwargs": {"enable_thinking": True}}
    for path, body in (
        ("/v1/messages/count_tokens", {"messages": [USER]}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
    ):
        plain, thinking = (call(place, "POST", path, each) for each in (body, body | variables))
        assert thinking.json["input_tokens"] > plain.json["input_tokens"]
        assert "warning" not in thinking.headers


def test_vllms_further_fields_of_a_response_have_an_effect(place):
    fields = {
        "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "ignore_eos": False,
        "skip_special_tokens": False, "logit_bias": {"5": 1}, "stop": ["c"], "include_stop_str_in_output": True,
    }  # fmt: skip
    reply = call(place, "POST", "/v1/responses", {"input": "a b c d"} | fields)
    assert (reply.status, reply.headers.get("warning")) == (200, None)
    assert reply.json["output"][0]["content"][0]["text"] == "a b c"
    refused = call(place, "POST", "/v1/responses", {"input": "a", "repetition_penalty": 0})
    assert (refused.status, refused.json["error"]["param"]) == (400, "repetition_penalty")
    refused = call(place, "POST", "/v1/responses", {"input": "a", "structured_outputs": {"jsn": {}}})
    assert refused.status == 400
