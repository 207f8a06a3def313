"""The document of the API refuses what the server refuses, and allows what it allows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from msgspec.json import encode

from moestro.errors import RequestError
from moestro.server.api.agent_api import _decode_message, _decode_response
from moestro.server.api.fields.unsupported import IN_CHAT, IN_COMPLETIONS
from moestro.server.api.fields.validation import parse_chat, parse_chats, parse_completion
from moestro.server.api.openapi import openapi_document
from moestro.web.adapters.messages_request import chat_of_message
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


def checker(struct: str, *, is_strict: bool = False) -> jsonschema.Draft202012Validator:
    components = openapi_document(is_strict=is_strict)["components"]["schemas"]
    return jsonschema.Draft202012Validator(inlined(components[struct], components))


def inlined(node: Any, components: dict[str, Any], around: tuple[str, ...] = ()) -> Any:
    """The schema with its references replaced, because to resolve them takes most of the time of a check.

    A struct within itself may hold anything.
    """
    if isinstance(node, list):
        return [inlined(each, components, around) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return {} if name in around else inlined(components[name], components, (*around, name))
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
