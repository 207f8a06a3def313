"""The document of the API refuses what the server refuses, and allows what it allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jsonschema
import pytest
from msgspec.json import encode
from server.test_nested_fields import BODIES, CALL, OPEN, PLACES, SCHEMA, USER, spelled, with_keys

from moestro.errors import RequestError
from moestro.server.api.request_fields import HARMLESS_BELOW, IN_CHAT, IN_COMPLETIONS
from moestro.server.api.request_runner import _decode_message, _decode_response
from moestro.server.api.routes import openapi_document
from moestro.server.api.validation import parse_chat, parse_chats, parse_completion
from moestro.web.adapters.messages import chat_of_message
from moestro.web.adapters.responses_request import chat_of_response

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
BASES: dict[str, dict[str, Any]] = {
    "CompletionFields": {"prompt": "hi"},
    "ChatFields": {"messages": MESSAGES},
    "BatchChatFields": {"messages": [MESSAGES]},
    "MessagesFields": {"messages": MESSAGES, "max_tokens": 8},
    "ResponsesFields": {"input": "hi"},
}
NUMBERS = (-(2**63) - 1, -(2**63), -(2**31) - 1, -(2**31), -101, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 20, 21, 128, 129,
           2**31 - 1, 2**31, 2**63 - 1, 2**63)  # fmt: skip
TEXTS = ("", "x", "x" * 128, "x" * 129, "x" * 1024, "x" * 1025, "two words", "\u00e9", "ls", "be", "auto", "required",
         "none", "text", "json_object", "user", "developer", "low", "xhigh")  # fmt: skip
LISTS = ([], [1], [1] * 1024, [1] * 1025, ["x"], [""], [" "], [" x"], ["x" * 257], ["x"] * 4, ["x"] * 5, ["x"] * 257)
OBJECTS = ({}, {"1": 100}, {"1": 101}, {"01": 1}, {"a": 1}, {str(at): 1 for at in range(301)}, {"type": "text"},
           {"type": "x"}, {"type": "function", "function": {"name": "f"}}, {"type": "function"},
           {"type": "function", "function": {}})  # fmt: skip
FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "max_tokens", "min_tokens", "n", "seed", "priority", "prompt_logprobs", "truncate_prompt_tokens", "stop",
    "stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias", "cache_salt", "user", "request_id",
    "service_class", "response_format", "stream", "model",
)  # fmt: skip
_CHAT_FIELDS = (
    *FIELDS, "top_logprobs", "max_completion_tokens", "tool_choice", "tools", "messages", "verbosity",
    "reasoning_effort", "thinking_token_budget",
)  # fmt: skip
FIELDS_OF = {
    "CompletionFields": (*FIELDS, "logprobs", "echo"),
    "ChatFields": _CHAT_FIELDS,
    "BatchChatFields": tuple(name for name in _CHAT_FIELDS if name != "messages"),
    "MessagesFields": (
        "messages", "system", "tools", "tool_choice", "thinking", "max_tokens", "stop_sequences", "temperature",
        "top_p", "top_k", "metadata", "cache_salt", "priority", "service_class",
    ),
    "ResponsesFields": (
        "input", "max_output_tokens", "temperature", "top_p", "top_logprobs", "include", "tools", "tool_choice",
        "text", "reasoning", "user", "truncation", "seed", "stop", "top_k", "cache_salt", "priority", "service_class",
        "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos",
    ),
}  # fmt: skip
# What another field has to be, so that a field is judged alone.
CONTEXT: dict[str, dict[str, Any]] = {
    "min_tokens": {"max_tokens": 2**31 - 1},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
}
OTHER_CONTEXT: dict[str, dict[str, dict[str, Any]]] = {
    "BatchChatFields": {"tool_choice": {}},
    "MessagesFields": {"tool_choice": {"tools": [{"name": "f"}]}},
    "ResponsesFields": {"tool_choice": {"tools": [{"type": "function", "name": "f"}]}, "top_logprobs": {}},
}
MORE_VALUES: dict[str, tuple[Any, ...]] = {
    "thinking": (
        *({"type": kind} for kind in ("enabled", "disabled", "adaptive", "between_tools", "x")),
        *({"type": "enabled", "budget_tokens": number} for number in NUMBERS),
    ),
    "metadata": ({"user_id": "x" * 128}, {"user_id": "x" * 1025}),
    "tool_choice": (
        *({"type": kind} for kind in ("auto", "any", "none", "tool", "function", "custom", "x")),
        *({"type": kind, "name": "f"} for kind in ("tool", "function")),
    ),
    "text": ({"verbosity": "low"}, {"verbosity": "x"}, {"format": {"type": "text"}}, {"format": {"type": "x"}}),
    "reasoning": ({"effort": "low"}, {"effort": "x"}),
    "include": (["reasoning.encrypted_content"], ["message.output_text.logprobs"]),
    "truncation": ("auto", "disabled"),
}


@cache  # the document and its references take longer than a check
def checker(struct: str, *, is_strict: bool = False) -> jsonschema.Draft202012Validator:
    components = openapi_document(is_strict=is_strict)["components"]["schemas"]
    return jsonschema.Draft202012Validator(inlined(components[struct], components))


def inlined(node: Any, components: dict[str, Any], around: tuple[str, ...] = ()) -> Any:
    """The schema with its references replaced, because to resolve them takes most of the time of a check.

    A struct within itself holds itself twice, and anything below.
    """
    if isinstance(node, list):
        return [inlined(each, components, around) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return {} if around.count(name) > 2 else inlined(components[name], components, (*around, name))
    return {name: inlined(value, components, around) for name, value in node.items()}


READERS: dict[str, Callable[[bytes], object]] = {
    "CompletionFields": parse_completion,
    "ChatFields": parse_chat,
    "BatchChatFields": parse_chats,
    "MessagesFields": lambda body: parse_chat(encode(chat_of_message(_decode_message(body).fields).fields)),
    "ResponsesFields": lambda body: parse_chat(encode(chat_of_response(_decode_response(body).fields).chat.fields)),
}


def is_accepted(struct: str, body: dict[str, Any]) -> bool:
    try:
        READERS[struct](json.dumps(body).encode())
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("struct", list(BASES))
def test_each_value_of_a_field_is_allowed_where_the_server_accepts_it(struct):
    document, num_refused, num_allowed, wrong = checker(struct), 0, 0, []
    context = CONTEXT | OTHER_CONTEXT.get(struct, {})
    for field in FIELDS_OF[struct]:
        for value in (None, True, False, *NUMBERS, *TEXTS, *LISTS, *OBJECTS, *MORE_VALUES.get(field, ())):
            body = BASES[struct] | context.get(field, {}) | {field: value}
            accepted = is_accepted(struct, body)
            num_refused, num_allowed = num_refused + (not accepted), num_allowed + accepted
            if document.is_valid(body) != accepted:
                wrong.append((field, str(value)[:40], accepted))
    assert wrong == []
    assert min(num_refused, num_allowed) > 100


@pytest.mark.parametrize(("struct", "neutral"), [("ChatFields", IN_CHAT), ("CompletionFields", IN_COMPLETIONS)])
def test_fields_without_support_are_allowed_with_values_that_request_nothing(struct, neutral):
    document = checker(struct)
    for field, values in neutral.items():
        if field in BASES[struct]:
            continue
        for value in (None, *values, "something", 7.5, ["x"]):
            body = BASES[struct] | {field: value}
            assert document.is_valid(body) == is_accepted(struct, body), (field, value)


@pytest.mark.parametrize("struct", list(BASES))
def test_unknown_fields_are_refused_by_a_strict_document_alone(struct):
    body = BASES[struct] | {"no_such_field": 1}
    assert checker(struct).is_valid(body)
    assert not checker(struct, is_strict=True).is_valid(body)
    for field in ("metadata", "store", "service_tier"):
        assert checker(struct, is_strict=True).is_valid(BASES[struct] | {field: None}), field


def test_a_completion_without_new_tokens_needs_its_prompt_as_answer():
    document = checker("CompletionFields")
    for echo in (True, False, None):
        body = {"prompt": "x", "max_tokens": 0, "echo": echo}
        assert document.is_valid(body) == is_accepted("CompletionFields", body) == (echo is True)


STRUCT_OF = {
    "/v1/completions": "CompletionFields",
    "/v1/chat/completions": "ChatFields",
    "/v1/messages": "MessagesFields",
    "/v1/responses": "ResponsesFields",
}
FUNCTION_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "x"}, "title": "t"}
FOUND = [{"type": "web_search_result", "title": "t", "url": "u"}]
FETCHED = {"type": "web_fetch_result", "url": "u", "content": DOCUMENT}
FURTHER_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("ChatFields", {
        "messages": [
            {"role": "developer", "content": "x"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "n"}], "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "y"},
        ],
        "tools": [FUNCTION_TOOL, TOOL], "logprobs": True, "top_logprobs": 2,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL, TOOL]}},
    }),
    ("ChatFields", {
        "messages": MESSAGES, "response_format": {"type": "json_object", "schema": SCHEMA}, "stream": True,
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"a": 1},
    }),
    ("ChatFields", {"messages": MESSAGES, "structured_outputs": {"regex": "a"}}),
    ("ChatFields", {"messages": MESSAGES, "structured_outputs": {"json_object": True, "disable_any_whitespace": True}}),
    ("ChatFields", {"messages": [USER, USER], "continue_final_message": True, "add_generation_prompt": False}),
    ("MessagesFields", {
        "max_tokens": 8, "system": [DOCUMENT, {"type": "text", "text": "x"}], "chat_template_kwargs": {"a": 1},
        "messages": [
            {"role": "user", "content": [{"type": "search_result", "source": "s", "title": "t", "content": FOUND}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "x"}, {"type": "redacted_thinking"},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": FOUND},
                {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": FETCHED},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ]},
            {"role": "ctx", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "f"}]},
            ]},
        ],
        "tools": [{"name": "f"}, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    }),
    ("MessagesFields", {"max_tokens": 8, "messages": MESSAGES, "output_format": {"type": "json_schema", "schema": {}}}),
    ("ResponsesFields", {
        "input": [
            {"type": "message", "role": "developer", "content": "x"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "content": None},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "n"}]},
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
            {"type": "local_shell_call", "call_id": "l", "action": {"type": "exec"}},
            {"type": "local_shell_call_output", "call_id": "l", "output": [{"type": "input_text", "text": "y"}]},
            {"type": "web_search_call", "action": {}},
        ],
        "tools": [{"type": "custom", "name": "f", "format": {"type": "text"}}, {"type": "web_search"}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, "structured_outputs": None,
    }),
    ("ResponsesFields", {"input": "x", "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}}),
    ("ResponsesFields", {"input": "x", "structured_outputs": {"choice": ["a"]}}),
]  # fmt: skip
GONE = object()
INNER_VALUES = (
    GONE,
    None,
    True,
    False,
    0,
    1.5,
    "",
    "x",
    "text",
    "assistant",
    "tool",
    [],
    ["x"],
    {},
    {"type": "x"},
    {"a": 1},
)


def inner(value: Any, trail: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The trails of all values whose form the API defines."""
    if trail:
        yield trail
    if isinstance(value, dict) and not (trail and trail[-1] in OPEN):
        for key, each in value.items():
            yield from inner(each, (*trail, key))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from inner(each, (*trail, i))


def changed(body: dict[str, Any], trail: tuple[Any, ...], value: object) -> dict[str, Any]:
    made = json.loads(json.dumps(body))
    at = made
    for step in trail[:-1]:
        at = at[step]
    if value is GONE:
        del at[trail[-1]]
    else:
        at[trail[-1]] = value
    return made


ALL_BODIES = [(STRUCT_OF[path], body) for path, body in BODIES.items()] + FURTHER_BODIES


@pytest.mark.parametrize(
    ("struct", "body"), ALL_BODIES, ids=[f"{struct}-{i}" for i, (struct, _) in enumerate(ALL_BODIES)]
)
def test_each_value_at_each_depth_is_allowed_where_the_server_accepts_it(struct, body):
    document, wrong, num_refused = checker(struct), [], 0
    assert document.is_valid(body)
    assert is_accepted(struct, body)
    for trail in inner(body):
        for value in INNER_VALUES:
            if is_relation(trail, value):
                continue
            mutated = changed(body, trail, value)
            accepted = is_accepted(struct, mutated)
            num_refused += not accepted
            if document.is_valid(mutated) != accepted:
                wrong.append((spelled(trail), value, accepted))
    assert wrong == []
    assert num_refused > 5


def is_relation(trail: tuple[Any, ...], value: object) -> bool:
    """Whether a change breaks what joins two distant fields, and what no schema says: a choice names a tool."""
    is_tool = trail[0] in ("tools", "tool_choice")
    return is_tool and ((trail[-1] == "name" and isinstance(value, str)) or (len(trail) == 2 and value is GONE))


@pytest.mark.parametrize(("path", "trail"), PLACES, ids=[f"{path}-{spelled(trail)}" for path, trail in PLACES])
def test_unknown_keys_at_each_depth_are_refused_by_a_strict_document(path, trail):
    strict, lenient = checker(STRUCT_OF[path], is_strict=True), checker(STRUCT_OF[path])
    unknown = with_keys(BODIES[path], trail, {"zzz": 1})
    assert (strict.is_valid(unknown), lenient.is_valid(unknown)) == (False, True)
    harmless = {"nothing": None} | dict.fromkeys(HARMLESS_BELOW - {"id", "data"}, 1)
    assert strict.is_valid(with_keys(BODIES[path], trail, harmless))
