"""What the server enforces of request bodies beside their types, as JSON schemas for its OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from moestro.core.request import MAX_LISTED_TOKENS, SAMPLING_RANGES, AllowedRange, ServiceClass
from moestro.server.api.chat_fields import MAX_GRAMMAR_CHOICES, MAX_TOOLS, RESERVED, ROLES, VERBOSITIES
from moestro.server.api.request_fields import (
    CHAT_SHAPES,
    HARMLESS_BELOW,
    IN_CHAT,
    IN_COMPLETIONS,
    IN_COUNTS,
    IN_MESSAGES,
    IN_RESPONSES,
    REFUSED_BELOW,
    WITHOUT_EFFECT,
    Neutral,
)
from moestro.server.api.request_runner import RESPONSE_SHAPES
from moestro.server.api.validation import (
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
from moestro.text.chats.chat_template import EFFORTS
from moestro.text.parsing.parser_input import NAME_LIMIT
from moestro.web.adapters.messages import ASSISTANT_BLOCKS, HOSTED, MAX_BUDGET, TEXT_BLOCKS, THINKING_TYPES
from moestro.web.adapters.messages import ROLES as MESSAGE_ROLES
from moestro.web.adapters.responses_request import CALLS, INCLUDED, ITEMS, OUTPUTS
from moestro.web.adapters.responses_request import HOSTED as HOSTED_BY_OPENAI

Schema = dict[str, Any]
Bounds = Mapping[str, Mapping[str, Mapping[str, Schema]]]  # By struct, by field, and by the type of its value.

# Types of what a body keeps as JSON until it is read.
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "ChatFields": CHAT_SHAPES,
    "TokenizeChatFields": CHAT_SHAPES,
    "ResponsesFields": RESPONSE_SHAPES,
}
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
_TOOL_NAME = {**_chars(1, NAME_LIMIT), "pattern": r"^(?=\S)[^\x00-\x1f\x7f]*\S$"}


def _fields(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {"required": list(required), "properties": {**required, **optional}}


def _where(field: str, values: Sequence[object], then: Schema, *, default: bool = False) -> Schema:
    """Return the rule that `then` holds where a field has one of `values`; `default`: also where it is absent."""
    condition: Schema = {"properties": {field: {"enum": list(values)}}}
    return {"if": condition if default else condition | {"required": [field]}, "then": then}


_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_GIVEN: Schema = {"not": {"type": "null"}}
_HAS_NAME = _fields({"name": _TEXT})
_TRUE_OR_OBJECT: Schema = {"anyOf": [_OBJECT, {"const": True}, {"type": "null"}]}  # The schema of a tool's arguments.
_SOME_TOOLS = _fields({"tools": {"type": "array", "minItems": 1}})
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
    "guided_choice": {"array": {"minItems": 1, "maxItems": MAX_GRAMMAR_CHOICES}},
    **{name: {"string": {"minLength": 1}} for name in ("guided_regex", "guided_grammar", "regex", "ebnf")},
}
_OF_CHATS: Mapping[str, Mapping[str, Schema]] = {
    **_OF_BOTH,
    "max_completion_tokens": {"integer": _COUNT},
    "top_logprobs": {"integer": _between(0, MAX_LOGPROBS)},
    "messages": {"array": {"minItems": 1}},
    "tools": {"array": {"maxItems": MAX_TOOLS}},
    "tool_choice": {"string": {"enum": ["none", "auto", "required"]}},
    "reasoning_effort": {"string": {"enum": list(EFFORTS)}},
    "verbosity": {"string": {"enum": list(VERBOSITIES)}},
    "thinking_token_budget": {"integer": _between(-1, 2**31 - 1)},
    "chat_template_kwargs": {"object": {"propertyNames": {"not": {"enum": sorted(RESERVED)}}}},
}
_OWN = ("cache_salt", "priority", "service_class")  # Fields of Moestro alone in the APIs of agents.
_TEXTS: Schema = {"properties": {"type": {"enum": list(TEXT_BLOCKS)}}}
_OF_COUNTS: Mapping[str, Mapping[str, Schema]] = {
    "messages": {"array": {"minItems": 1}},
    "tools": {"array": {"maxItems": MAX_TOOLS}},
    "system": {"array": {"items": {"allOf": [{"$ref": "#/components/schemas/Block"}, _TEXTS]}}},
    "chat_template_kwargs": _OF_CHATS["chat_template_kwargs"],
}
_BOUNDS: Bounds = {
    "CompletionFields": {
        **_OF_BOTH,
        "max_tokens": {"integer": _between(0, 2**31 - 1)},
        "logprobs": {"integer": _between(0, MAX_LOGPROBS)},
        "prompt": {"string": {"minLength": 1}, "array": {"minItems": 1}},
    },
    "ChatFields": _OF_CHATS,
    "TokenizeChatFields": _OF_CHATS,
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
        "tools": {"array": {"maxItems": MAX_TOOLS}},
        "tool_choice": {"string": {"enum": ["none", "auto", "required"]}},
        "truncation": {"string": {"enum": ["auto", "disabled"]}},
        "chat_template_kwargs": _OF_CHATS["chat_template_kwargs"],
    },
    "FunctionTool": {
        "type": {"string": {"pattern": f"^(function$|custom$|namespace$|{'|'.join(HOSTED_BY_OPENAI)})"}},
    },
    "InputItem": {"type": {"string": {"enum": list(ITEMS)}}},
    "ToolDefinition": {"type": {"string": {"pattern": f"^(custom$|{'|'.join(HOSTED)})"}}},
    "DocumentSource": {"type": {"string": {"enum": ["text", "content"]}}},
    "OutputConfig": {"effort": {"string": {"enum": list(EFFORTS)}}},
    "OutputFormat": {"type": {"string": {"enum": ["json_schema"]}}},
    "ToolField": {"type": {"string": {"enum": ["function"]}}},
    "ToolFunction": {"name": {"string": _TOOL_NAME}, "parameters": {"boolean": {"const": True}}},
    "AllowedTools": {"mode": {"string": {"enum": ["auto", "required"]}}, "tools": {"array": {"minItems": 1}}},
    "FunctionChoice": {"type": {"string": {"enum": ["function"]}}},
    "CallField": {"type": {"string": {"enum": ["function"]}}},
    "ContentPart": {"type": {"string": {"enum": ["text", "refusal"]}}},
    "StructuredOutputs": {
        "choice": _OF_BOTH["guided_choice"],
        **dict.fromkeys(("regex", "grammar"), _OF_BOTH["guided_regex"]),
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
    "TokenizeChatFields": {name: values for name, values in IN_CHAT.items() if name != "add_special_tokens"},
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


_BLOCKS_OF: Mapping[str, list[str]] = {
    "assistant": [*TEXT_BLOCKS, *ASSISTANT_BLOCKS],
    "others": [*TEXT_BLOCKS, "tool_result"],
}
_BLOCKS_WITH_TEXTS = ("tool_result", "search_result", "web_search_result", "web_fetch_result", *ASSISTANT_BLOCKS[-2:])
_PART_OF_ITEM: Schema = {
    "if": {"properties": {"type": {"const": "refusal"}}},
    "then": _fields({"refusal": _TEXT}),
    "else": _fields({"text": _TEXT}),
}
_STREAMED: Schema = {
    "if": {"required": ["stream_options"], "properties": {"stream_options": _OBJECT}},
    "then": _fields({"stream": {"const": True}}),
}
_NAMED_OR_HOSTED: Schema = {
    "anyOf": [_HAS_NAME, {"properties": {"type": {"pattern": f"^({'|'.join(HOSTED_BY_OPENAI)})"}}}]
}
_CHOSEN_OF_MESSAGES: Schema = {
    "if": _fields({"tool_choice": _fields({"type": {"enum": ["any", "tool"]}})}),
    "then": _SOME_TOOLS,
}
_RULES_OF_CHATS: tuple[Schema, ...] = (
    _STREAMED,
    _where("tool_choice", ["required"], _SOME_TOOLS),
    {"if": _fields({"tool_choice": _OBJECT}), "then": _SOME_TOOLS},
    {"if": _fields({"top_logprobs": {"minimum": 1}}), "then": _fields({"logprobs": {"const": True}})},
    _where("continue_final_message", [True], {"properties": {"add_generation_prompt": {"enum": [None, False]}}}),
)


_ITEM_ROLES: Schema = {"enum": [None, *ROLES]}


def _content(part: Schema) -> Schema:
    return {**_GIVEN, "items": part}


def _blocks(types: Sequence[str]) -> Schema:
    """Return the rule that a content of blocks has these types alone."""
    return {"properties": {"content": {"items": {"properties": {"type": {"enum": list(types)}}}}}}


# What one field of a struct demands of its others.
_RULES: Mapping[str, Sequence[Schema]] = {
    # A completion without new tokens is possible only where the prompt is the answer.
    "CompletionFields": (
        {
            "if": {"not": {"required": ["echo"], "properties": {"echo": {"const": True}}}},
            "then": {"properties": {"max_tokens": {"not": {"const": 0}}}},
        },
        _STREAMED,
    ),
    "ChatFields": _RULES_OF_CHATS,
    "TokenizeChatFields": _RULES_OF_CHATS,
    "Message": (
        _where(
            "role",
            [role for role in ROLES if role != "assistant"],
            _fields({"content": _GIVEN}, tool_calls={"maxItems": 0}),
        ),
    ),
    "ContentPart": tuple(_where("type", [kind], _fields({kind: _TEXT})) for kind in ("text", "refusal")),
    "ResponseFormat": (
        _where(
            "type",
            ["json_schema"],
            {
                "anyOf": [
                    _fields({"schema": _OBJECT}),
                    _fields({"json_schema": {**_OBJECT, **_fields({"schema": _OBJECT})}}),
                ]
            },
        ),
        _where(
            "type",
            ["text"],
            {"properties": {"schema": {"type": "null"}, "json_schema": {"properties": {"schema": {"type": "null"}}}}},
        ),
        {"not": _fields({"schema": _OBJECT, "json_schema": _OBJECT})},
    ),
    "StructuredOutputs": (
        {
            "oneOf": [
                *(_fields({name: _GIVEN}) for name in ("json", "regex", "choice", "grammar")),
                _fields({"json_object": {"const": True}}),
            ]
        },
    ),
    "ToolChoiceField": (
        {
            "oneOf": [
                _fields({"type": {"const": "function"}, "function": {**_OBJECT, **_HAS_NAME}}),
                _fields({"type": {"const": "allowed_tools"}, "allowed_tools": _OBJECT}),
            ]
        },
    ),
    "ToolChoice": (_where("type", ["tool"], _HAS_NAME),),
    **dict.fromkeys(("CountFields", "MessagesFields"), (_CHOSEN_OF_MESSAGES,)),
    "ResponsesFields": (
        _where("tool_choice", ["required"], _SOME_TOOLS),
        {"if": _fields({"tool_choice": _OBJECT}), "then": _SOME_TOOLS},
    ),
    "ConversationTurn": (
        _where("role", ["assistant"], _blocks(_BLOCKS_OF["assistant"])),
        _where("role", [role for role in MESSAGE_ROLES if role != "assistant"], _blocks(_BLOCKS_OF["others"])),
    ),
    "Block": (
        _where("type", ["text"], _fields({"text": _TEXT})),
        _where("type", ["document"], _fields({"source": _OBJECT})),
        _where("type", ["search_result"], _fields({"source": _TEXT})),
        _where("type", ["tool_reference"], _fields({"tool_name": _TEXT})),
        _where("type", ["tool_use"], _HAS_NAME),
        _where("type", _BLOCKS_WITH_TEXTS, {"properties": {"content": {"items": _TEXTS, **_TEXTS}}}),
    ),
    "ToolDefinition": (
        _where("type", [None, "custom"], _fields({"name": _TOOL_NAME}, input_schema=_TRUE_OR_OBJECT), default=True),
    ),
    "OutputFormat": ({"properties": {"schema": _OBJECT}},),
    "ChoiceField": (
        _where("type", ["function", "custom"], _HAS_NAME),
        _where(
            "type",
            ["allowed_tools"],
            _fields(
                {"tools": {"type": "array", "minItems": 1, "items": _NAMED_OR_HOSTED}},
                mode={"enum": [None, "auto", "required"]},
            ),
        ),
    ),
    "FunctionTool": (
        _where("type", ["function", "custom"], _fields({"name": {**_TEXT, **_TOOL_NAME}})),
        _where("type", ["function"], {"properties": {"parameters": _TRUE_OR_OBJECT}}),
        _where(
            "type",
            ["namespace"],
            {"properties": {"tools": {"items": {"properties": {"type": {"not": {"const": "namespace"}}}}}}},
        ),
    ),
    "InputItem": (
        _where("type", ["message"], _fields({"content": _content(_PART_OF_ITEM)}, role=_ITEM_ROLES), default=True),
        _where("type", CALLS[:2], _HAS_NAME),
        _where("type", OUTPUTS, _fields({"output": _content(_PART_OF_ITEM)})),
    ),
    "TextFormat": (
        _where("type", ["json_schema"], _fields({"schema": _OBJECT})),
        _where("type", ["text"], {"properties": {"schema": {"type": "null"}}}),
        _where("type", ["json_object"], {"properties": {"schema": {"type": ["object", "null"]}}}),
    ),
}


def add_bounds(components: dict[str, Schema], *, is_strict: bool) -> None:
    """Add to the schemas of request bodies the bounds, choices and neutral values that the server enforces.

    Args:
        components: Schemas by the name of their struct.
        is_strict: Whether unknown fields are refused. Otherwise they are allowed, and named in a `Warning` header.
    """
    _add_shapes(components)
    for name, fields in _BOUNDS.items():
        for field, bounds in fields.items():
            _bound(components[name]["properties"][field], bounds)
    for name, allowed in _ONLY.items():
        for field, only in allowed.items():
            components[name]["properties"][field] = {"enum": only, "description": "Not possible for several chats."}
    for name, rules in _RULES.items():
        components[name]["allOf"] = list(rules)
    for struct, refused in REFUSED_BELOW.items():
        _add_neutral(components[struct.__name__], refused)
    for name, neutral in _NEUTRAL.items():
        _add_neutral(components[name], neutral)
    if is_strict:
        _refuse_unknown(components)


def _refuse_unknown(components: dict[str, Schema]) -> None:
    """Let bodies have no keys but those that are known or harmless; below the top level, others may be null."""
    for name in _NEUTRAL:
        for inner in _structs_below(components, name):
            _refuse_further(components[inner], HARMLESS_BELOW, {"type": "null"})
    for name in _NEUTRAL:
        _refuse_further(components[name], WITHOUT_EFFECT, further=False)


def _add_shapes(components: dict[str, Schema]) -> None:
    """Give the fields that a body keeps as JSON the types by which they are read."""
    for name, shapes in _SHAPES.items():
        for field, shape in shapes.items():
            [schema], further = msgspec.json.schema_components([shape], ref_template="#/components/schemas/{name}")
            for struct, found in further.items():
                components.setdefault(struct, found)
            text = [{"type": "string"}] if field == "tool_choice" else []  # It may be a text too.
            components[name]["properties"][field] = {"anyOf": [schema, *text, {"type": "null"}]}


def _add_neutral(schema: Schema, neutral: Neutral) -> None:
    for field, values in neutral.items():
        text = "Not supported: values that request nothing are accepted."
        schema["properties"].setdefault(field, {"enum": [None, *values], "description": text})


def _refuse_further(schema: Schema, harmless: Iterable[str], further: Schema | bool) -> None:  # noqa: FBT001
    """Let a schema allow the keys without effect, and of any others the values of the schema `further`."""
    for field in harmless:
        schema["properties"].setdefault(field, {"description": "Accepted without effect."})
    schema.setdefault("additionalProperties", further)


def _structs_below(components: dict[str, Schema], name: str) -> set[str]:
    """Return the names of the structs that a struct holds at any depth."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = set(_references(components[waiting.pop()])) - found
        found |= new
        waiting += new
    return found


def _references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(reference := node.get("$ref"), str):
            yield reference.rpartition("/")[2]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _bound(schema: Schema, bounds: Mapping[str, Schema]) -> None:
    """Add to each alternative of a field's schema the bounds of its type."""
    for alternative in schema.get("anyOf", [schema]):
        kind = alternative.get("type")
        if kind in bounds:
            alternative.update(bounds[kind])
