"""The OpenAPI document of `moestro serve`, made from the structs that decode bodies and encode answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from moestro.core.request import MAX_LISTED_TOKENS, SAMPLING_RANGES, AllowedRange, ServiceClass
from moestro.server.api.agent_api import InputTokenCount, TokenCount
from moestro.server.api.fields.chat_fields import MAX_TOOLS, ROLES, VERBOSITIES
from moestro.server.api.fields.protocol import (
    Answer,
    BatchChatFields,
    ChatChoice,
    ChatFields,
    CompletionFields,
    ModelCard,
    ModelList,
    TextChoice,
)
from moestro.server.api.fields.unsupported import (
    IN_CHAT,
    IN_COMPLETIONS,
    IN_COUNTS,
    IN_MESSAGES,
    IN_RESPONSES,
    WITHOUT_EFFECT,
    Neutral,
)
from moestro.server.api.fields.validation import (
    ALL_LOGPROBS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_COPIES,
    MAX_ID_CHARS,
    MAX_LOGPROBS,
    MAX_PROMPTS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_USER_CHARS,
)
from moestro.server.api.server_info import ServerInfo
from moestro.server.api.text_api import Detokenized, DetokenizeFields, TokenizeChatFields, Tokenized, TokenizeFields
from moestro.text.chats.chat_history import EFFORTS
from moestro.web.adapters.messages_request import MAX_BUDGET, THINKING_TYPES, CountFields, MessagesFields
from moestro.web.adapters.messages_request import ROLES as MESSAGE_ROLES
from moestro.web.adapters.responses_request import INCLUDED, ResponsesFields
from moestro.web.errors import AnthropicErrorBody
from moestro.web.openapi import EMPTY, ApiPath, document_of
from moestro.web.statistics import LiveStatistics

Schema = dict[str, Any]

_TYPES = ("integer", "number", "string", "array", "object")


def _between(low: float, high: float) -> Schema:
    return {"minimum": low, "maximum": high}


def _range(allowed: AllowedRange) -> Schema:
    low = "exclusiveMinimum" if allowed.is_above_low else "minimum"
    bounds: Schema = {low: allowed.low} if allowed.low > -float("inf") else {}
    return bounds | ({"maximum": allowed.high} if allowed.high < float("inf") else {})


def _chars(low: int, high: int) -> Schema:
    return {"minLength": low, "maxLength": high}


_COUNT = _between(1, 2**31 - 1)
_NAMED_FUNCTION: Schema = {
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
# By field, and by the type of its value.
_OF_BOTH: Mapping[str, Mapping[str, Schema]] = {
    **{name: dict.fromkeys(("integer", "number"), _range(allowed)) for name, allowed in SAMPLING_RANGES.items()},
    "max_tokens": {"integer": _COUNT},
    "min_tokens": {"integer": _between(0, 2**31 - 1)},
    "n": {"integer": _between(1, MAX_COPIES)},
    "best_of": {"integer": _between(1, MAX_COPIES)},
    "seed": {"integer": _between(-(2**63), 2**63 - 1)},
    "priority": {"integer": _between(-(2**31), 2**31 - 1)},
    "prompt_logprobs": {"integer": _between(ALL_LOGPROBS, MAX_LOGPROBS)},
    "logprob_token_ids": {"array": {"maxItems": MAX_LISTED_TOKENS}},
    "truncate_prompt_tokens": {"integer": _between(-1, 2**31 - 1) | {"not": {"const": 0}}},
    "stop": {
        "string": _chars(1, MAX_STOP_CHARS),
        "array": {"maxItems": MAX_STOPS, "items": {"type": "string", **_chars(1, MAX_STOP_CHARS)}},
    },
    "stop_token_ids": {"array": {"maxItems": MAX_STOP_TOKEN_IDS}},
    "allowed_token_ids": {"array": {"minItems": 1}},
    "bad_words": {
        "array": {
            "maxItems": MAX_BAD_WORDS,
            "items": {"type": "string", "pattern": rf"^\s*\S[\s\S]{{0,{MAX_BAD_WORD_CHARS - 1}}}$"},
        }
    },
    "logit_bias": {
        "object": {
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"},
            "additionalProperties": {"type": "number", **_between(-100, 100)},
        }
    },
    "cache_salt": {"string": _chars(1, MAX_SALT_CHARS)},
    "user": {"string": {"maxLength": MAX_USER_CHARS}},
    "request_id": {"string": {"pattern": rf"^[!-~]{{1,{MAX_ID_CHARS}}}$"}},
    "truncation_side": {"string": {"enum": ["left", "right"]}},
    "service_class": {"string": {"enum": [each.value for each in ServiceClass]}},
}
_OF_CHATS: Mapping[str, Mapping[str, Schema]] = {
    **_OF_BOTH,
    "max_completion_tokens": {"integer": _COUNT},
    "top_logprobs": {"integer": _between(0, MAX_LOGPROBS)},
    "messages": {"array": {"minItems": 1}},
    "tools": {"array": {"maxItems": MAX_TOOLS}},
    "tool_choice": {"string": {"enum": ["none", "auto", "required"]}, "object": _NAMED_FUNCTION},
    "reasoning_effort": {"string": {"enum": list(EFFORTS)}},
    "verbosity": {"string": {"enum": list(VERBOSITIES)}},
    "thinking_token_budget": {"integer": _between(-1, 2**31 - 1)},
}
_HAS_NAME: Schema = {"required": ["name"], "properties": {"name": {"type": "string"}}}
_OWN = ("cache_salt", "priority", "service_class")  # Fields of Moestro alone in the APIs of agents.
_OF_COUNTS: Mapping[str, Mapping[str, Schema]] = {
    "messages": {"array": {"minItems": 1}},
    "tools": {"array": {"maxItems": MAX_TOOLS}},
}
_BOUNDS: Mapping[str, Mapping[str, Mapping[str, Schema]]] = {
    "CompletionFields": {
        **_OF_BOTH,
        "max_tokens": {"integer": _between(0, 2**31 - 1)},
        "logprobs": {"integer": _between(0, MAX_LOGPROBS)},
        "prompt": {"string": {"minLength": 1}, "array": {"minItems": 1}},
    },
    "ChatFields": _OF_CHATS,
    "BatchChatFields": {**_OF_CHATS, "messages": {"array": {"minItems": 1, "maxItems": MAX_PROMPTS}}},
    "CountFields": _OF_COUNTS,
    "MessagesFields": {
        **_OF_COUNTS,
        **{name: _OF_BOTH[name] for name in ("temperature", "top_p", "top_k", *_OWN)},
        "max_tokens": {"integer": _COUNT},
        "stop_sequences": _OF_BOTH["stop"],
    },
    "ConversationTurn": {"role": {"string": {"enum": list(MESSAGE_ROLES)}}},
    "SenderMetadata": {"user_id": _OF_BOTH["user"]},
    "Thinking": {
        "type": {"string": {"enum": list(THINKING_TYPES)}},
        "budget_tokens": {"integer": _between(1, MAX_BUDGET)},
    },
    "ToolChoice": {"type": {"string": {"enum": ["auto", "any", "tool", "none"]}}},
    "ResponsesFields": {
        **{name: _OF_BOTH[name] for name in (*SAMPLING_RANGES, "logit_bias", "seed", "stop", "user", *_OWN)},
        "input": {"string": {"minLength": 1}, "array": {"minItems": 1}},
        "max_output_tokens": {"integer": _COUNT},
        "top_logprobs": {"integer": _between(0, MAX_LOGPROBS)},
        "include": {"array": {"items": {"enum": list(INCLUDED)}}},
        "tools": {"array": {"maxItems": MAX_TOOLS, "items": {"type": "object", "required": ["type"]}}},
        "tool_choice": {"string": {"enum": ["none", "auto", "required"]}},
        "truncation": {"string": {"enum": ["auto", "disabled"]}},
    },
    "ChoiceField": {"type": {"string": {"enum": ["function", "custom", "allowed_tools"]}}},
    "TextConfig": {"verbosity": {"string": {"enum": list(VERBOSITIES)}}},
    "TextFormat": {"type": {"string": {"enum": ["text", "json_object", "json_schema"]}}},
    "ReasoningConfig": {"effort": {"string": {"enum": list(EFFORTS)}}},
    "Message": {"role": {"string": {"enum": list(ROLES)}}},
    "ResponseFormat": {"type": {"string": {"enum": ["text", "json_object", "json_schema"]}}},
}
_NEUTRAL: Mapping[str, Neutral] = {
    "CompletionFields": IN_COMPLETIONS,
    "ChatFields": IN_CHAT,
    "BatchChatFields": IN_CHAT,
    "MessagesFields": IN_MESSAGES,
    "CountFields": IN_COUNTS,
    "ResponsesFields": IN_RESPONSES,
}
# A batch of chats is not possible with other values of these.
_ONLY: Mapping[str, Mapping[str, list[object]]] = {
    "BatchChatFields": {
        "prompt_logprobs": [None],
        "return_token_ids": [None, False],
        "stream": [None, False],
        "tool_choice": [None, "none", "auto"],
        "tools": [None, []],
    }
}


def _if_given(field: str, values: list[str], then: Schema) -> Schema:
    return {"if": {"required": [field], "properties": {field: {"enum": values}}}, "then": then}


# What one field of a struct demands of its others.
_TOGETHER: Mapping[str, Schema] = {
    # A completion without new tokens is possible only where the prompt is the answer.
    "CompletionFields": {
        "if": {"not": {"required": ["echo"], "properties": {"echo": {"const": True}}}},
        "then": {"properties": {"max_tokens": {"not": {"const": 0}}}},
    },
    "ToolChoice": _if_given("type", ["tool"], _HAS_NAME),
    "ChoiceField": _if_given("type", ["function", "custom"], _HAS_NAME),
}


def add_bounds(components: dict[str, Schema], *, is_strict: bool) -> None:
    """Add to the schemas of request bodies the bounds, choices and neutral values that the server enforces.

    Args:
        components: Schemas by the name of their struct.
        is_strict: Whether unknown fields are refused. Otherwise they are allowed, and named in a `Warning` header.
    """
    for name, fields in _BOUNDS.items():
        for field, bounds in fields.items():
            _bound(components[name]["properties"][field], bounds)
    for name, allowed in _ONLY.items():
        for field, only in allowed.items():
            components[name]["properties"][field] = {"enum": only, "description": "Not possible for several chats."}
    for name, together in _TOGETHER.items():
        components[name]["allOf"] = [together]
    for name, neutral in _NEUTRAL.items():
        properties = components[name]["properties"]
        for field, values in neutral.items():
            text = "Not supported: values that request nothing are accepted."
            properties.setdefault(field, {"enum": [None, *values], "description": text})
        if is_strict:
            for field in WITHOUT_EFFECT:
                properties.setdefault(field, {"description": "Accepted without effect."})
            components[name]["additionalProperties"] = False


def _bound(schema: Schema, bounds: Mapping[str, Schema]) -> None:
    """Add to each alternative of a field's schema the bounds of its type."""
    for alternative in schema.get("anyOf", [schema]):
        kind = alternative.get("type")
        if kind in bounds:
            alternative.update(bounds[kind])


def _answer_struct(name: str, choice: type) -> type[msgspec.Struct]:
    """Return the struct of an answer with choices of one kind; `Answer` serves all kinds."""
    hints: dict[str, Any] = get_type_hints(Answer) | {"choices": list[choice]}  # type: ignore[valid-type]
    required = [(field.name, hints[field.name]) for field in msgspec.structs.fields(Answer) if field.required]
    optional = [
        (field.name, hints[field.name], field.default) for field in msgspec.structs.fields(Answer) if not field.required
    ]
    return msgspec.defstruct(name, [*required, *optional])


_ChatCompletion = _answer_struct("ChatCompletion", ChatChoice)
API_PATHS: tuple[ApiPath, ...] = (
    ApiPath(
        path="/v1/chat/completions", method="post", summary="Answer a chat.", says="A chat completion, or its chunks.",
        bodies=(ChatFields,), answer=_ChatCompletion, is_streamed=True,
    ),
    ApiPath(
        path="/v1/chat/completions/batch", method="post", summary="Answer several chats.",
        says="A chat completion with the choices of all chats, in order.", bodies=(BatchChatFields,),
        answer=_ChatCompletion,
    ),
    ApiPath(
        path="/v1/completions", method="post", summary="Continue a prompt.", says="A completion, or its chunks.",
        bodies=(CompletionFields,), answer=_answer_struct("Completion", TextChoice), is_streamed=True,
    ),
    ApiPath(
        path="/v1/messages", method="post", summary="Answer a conversation (Anthropic's API).",
        says="A message of Anthropic's API, or its events.", bodies=(MessagesFields,), is_streamed=True,
        error=AnthropicErrorBody,
    ),
    ApiPath(
        path="/v1/messages/count_tokens", method="post", summary="Count the tokens of a conversation.",
        says="The number of tokens.", bodies=(CountFields,), answer=TokenCount, error=AnthropicErrorBody,
    ),
    ApiPath(
        path="/v1/responses", method="post", summary="Answer a conversation (OpenAI's responses, without storage).",
        says="A response of OpenAI's API, or its events.", bodies=(ResponsesFields,), is_streamed=True,
    ),
    ApiPath(
        path="/v1/responses/input_tokens", method="post", summary="Count the tokens of a response's request.",
        says="The number of tokens.", bodies=(ResponsesFields,), answer=InputTokenCount,
    ),
    ApiPath(path="/v1/models", summary="List the models.", says="All models.", answer=ModelList),
    ApiPath(path="/v1/models/{name}", summary="Describe one model.", says="The model.", answer=ModelCard),
    ApiPath(
        path="/tokenize", method="post", summary="Return the tokens of a prompt or a chat.", says="The tokens.",
        bodies=(TokenizeFields, TokenizeChatFields), answer=Tokenized,
    ),
    ApiPath(
        path="/detokenize", method="post", summary="Return the text of tokens.", says="The text.",
        bodies=(DetokenizeFields,), answer=Detokenized,
    ),
    ApiPath(
        path="/tokenizer_info", summary="Describe the tokenizer, with --enable-tokenizer-info-endpoint.",
        says="The fields of tokenizer_config.json, and the chat template in use.",
    ),
    ApiPath(path="/health", summary="200 while any engine takes requests.", says=EMPTY, is_public=True),
    ApiPath(path="/ping", summary="The same as /health.", says=EMPTY, is_public=True),
    ApiPath(path="/ready", summary="200 while the server takes new requests.", says=EMPTY, is_public=True),
    ApiPath(path="/readyz", summary="The same as /ready.", says=EMPTY, is_public=True),
    ApiPath(path="/load", summary="Requests under way, and each engine's load.", says="Counts by name."),
    ApiPath(
        path="/metrics", summary="All metrics.", says="Prometheus' text format.", media_type="text/plain",
    ),
    ApiPath(path="/version", summary="The version.", says="The version by name."),
    ApiPath(path="/server_info", summary="Settings and engines.", says="Settings and engines.", answer=ServerInfo),
    ApiPath(path="/openapi.json", summary="This document.", says="An OpenAPI document.", is_public=True),
    ApiPath(
        path="/docs", summary="This document as a page.", says="A page.", media_type="text/html", is_public=True,
    ),
    ApiPath(
        path="/statistics", summary="Figures of the page at /, with ?experts=true the load of experts.",
        says="The present figures.", answer=LiveStatistics,
    ),
    ApiPath(path="/", summary="The page.", says="The page.", media_type="text/html", is_public=True),
    ApiPath(path="/page/{name}", summary="A file of the page.", says="The file.", media_type="*/*", is_public=True),
)  # fmt: skip


def openapi_document(*, is_strict: bool = False) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the server.

    Args:
        is_strict: Whether the server refuses unknown fields (--strict-fields).
    """
    return document_of(API_PATHS, lambda components: add_bounds(components, is_strict=is_strict))
