"""Keys below the top level of a body are enforced, refused by name or named, in each API, directly and routed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.running import call

from moestro.errors import RequestError
from moestro.server.api.request_fields import HARMLESS_BELOW
from moestro.server.api.validation import parse_chat

COMPACT = {"whitespace_flexible": False, "whitespace_pattern": None}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
SCHEMA |= {"x-guidance": COMPACT}
FUNCTION = {"name": "f", "parameters": SCHEMA}
USER = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HISTORY = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "y"}]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "x", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    },
    "/v1/chat/completions": {
        "max_tokens": 2, "messages": [{"role": "system", "content": [{"type": "text", "text": "x"}]}, *HISTORY, USER],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "/v1/messages": {
        "max_tokens": 2, "system": [{"type": "text", "text": "x"}], "metadata": {"user_id": "u"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "y"}]},
            ]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "adaptive"},
    },
    "/v1/responses": {
        "max_output_tokens": 2,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "y"}]},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": SCHEMA},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g", "parameters": SCHEMA}]},
        ],
        "tool_choice": {"type": "function", "name": "f"}, "text": {"verbosity": "medium"},
        "reasoning": {"summary": "auto"},
        "stream_options": {},
    },
}  # fmt: skip
# Objects whose keys are the client's own.
OPEN = ("schema", "parameters", "input_schema", "input", "arguments")


def objects(value: Any, trail: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The trails of all objects below the top level whose keys the API defines."""
    if isinstance(value, dict):
        if trail:
            yield trail
        for key, inner in value.items():
            if not trail or key not in OPEN:
                yield from objects(inner, (*trail, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from objects(inner, (*trail, i))


def with_keys(body: Any, trail: tuple[Any, ...], keys: dict[str, object]) -> dict[str, Any]:
    changed = json.loads(json.dumps(body))
    at = changed
    for step in trail:
        at = at[step]
    at |= keys
    return changed


def spelled(trail: tuple[Any, ...]) -> str:
    first, *rest = trail
    return first + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in rest)


PLACES = [(path, trail) for path, body in BODIES.items() for trail in objects(body)]


def ignored(reply) -> list[str]:
    text = reply.headers.get("warning", "").removeprefix('299 moestro "fields were ignored: ').removesuffix('"')
    return text.split(", ") if text else []


def test_the_bodies_reach_many_places():
    assert len(PLACES) > 35


@pytest.mark.parametrize(
    ("path", "trail"), PLACES, ids=lambda value: value if isinstance(value, str) else spelled(value)
)
def test_an_unknown_key_is_named_at_every_depth(place, path, trail):
    keys = {"zzz": {"deep": 1}, "nothing": None} | dict.fromkeys(sorted(HARMLESS_BELOW - {"id", "data"}), 1)
    reply = call(place, "POST", path, with_keys(BODIES[path], trail, keys))
    assert reply.status == 200, reply.body
    assert ignored(reply) == [f"{spelled(trail)}.zzz"]


@pytest.mark.parametrize("path", BODIES)
def test_a_body_of_known_keys_has_no_warning(place, path):
    reply = call(place, "POST", path, BODIES[path])
    assert (reply.status, ignored(reply)) == (200, []), reply.body


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_message_to_continue_is_refused_with_what_to_send(place, name):
    messages = [USER, {"role": "assistant", "content": "y", name: True}]
    reply = call(place, "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, f"messages[1].{name}")
    assert "continue_final_message" in error["message"]
    messages[1][name] = False
    assert call(place, "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 2}).status == 200


def test_a_field_of_a_message_that_its_role_lacks_is_named(place):
    answer = {"role": "assistant", "content": "y", "reasoning": "Hm.", "tool_call_id": "c"}
    messages = [USER | {"reasoning": "Hm.", "refusal": ""}, answer, USER | {"tool_call_id": "c"}]
    reply = call(place, "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    assert ignored(reply) == ["messages[0].reasoning", "messages[1].tool_call_id", "messages[2].tool_call_id"]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_of_a_response_is_enforced_whatever_the_type(place, kind):
    wanted = {"format": {"type": kind, "name": "s", "schema": SCHEMA}}
    reply = call(place, "POST", "/v1/responses", {"input": "x", "max_output_tokens": 60, "text": wanted})
    assert json.loads(reply.json["output"][0]["content"][0]["text"]) == {"a": "x"}
    wanted = {"format": {"type": "text", "schema": SCHEMA}}
    reply = call(place, "POST", "/v1/responses", {"input": "x", "text": wanted})
    assert (reply.status, reply.json["error"]["param"]) == (400, "text.format.schema")


def test_an_earlier_function_call_is_refused_and_not_dropped():
    messages = [USER, {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}]
    with pytest.raises(RequestError, match="Send tool_calls"):
        parse_chat(json.dumps({"messages": messages}).encode())


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_without_openais_frame_is_enforced(place, kind):
    body = {"messages": [USER], "max_tokens": 60, "response_format": {"type": kind, "schema": SCHEMA}}
    reply = call(place, "POST", "/v1/chat/completions", body)
    assert json.loads(reply.json["choices"][0]["message"]["content"]) == {"a": "x"}
    assert ignored(reply) == []


def test_a_schema_that_contradicts_its_type_is_refused(place):
    for given in ({"type": "text", "schema": SCHEMA}, {"type": "text", "json_schema": {"schema": SCHEMA}}):
        reply = call(place, "POST", "/v1/chat/completions", {"messages": [USER], "response_format": given})
        assert reply.status == 400
        assert reply.json["error"]["param"].endswith("schema")


def test_refusals_of_an_assistant_are_text(place):
    messages = [USER, {"role": "assistant", "content": None, "refusal": "No."}, USER]
    parts = [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER]
    plain = [USER, {"role": "assistant", "content": "No."}, USER]
    counts = {call(place, "POST", "/tokenize", {"messages": each}).json["count"] for each in (messages, parts, plain)}
    assert len(counts) == 1


def test_keys_of_a_tool_that_is_left_out_have_no_names_of_their_own(place):
    body = BODIES["/v1/responses"] | {"tool_choice": "auto"}
    body["tools"] = [*body["tools"], {"type": "web_search", "external_web_access": True, "filters": {}}]
    reply = call(place, "POST", "/v1/responses", body)
    assert (reply.status, ignored(reply)) == (200, ["tools[2] (web_search)"]), reply.body


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0]",
        ),
        (
            "/v1/messages",
            {"max_tokens": 2, "system": [{"type": "text", "text": None}], "messages": [USER]},
            "system[0]",
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
    ],
)
def test_the_error_of_a_text_part_without_a_text_names_what_it_lacks(place, path, body, name):
    reply = call(place, "POST", path, body)
    assert (reply.status, reply.json["error"]["message"]) == (400, f"{name}.text is missing; send a text.")
