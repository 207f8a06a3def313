"""Bounds of request fields in the words of JSON Schema: what `validation.py` refuses beyond a field's type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moestro.core.request import SAMPLING_RANGES, AllowedRange, ServiceClass
from moestro.server.chat_fields import MAX_TOOLS, ROLES, VERBOSITIES
from moestro.server.unsupported import (
    IN_CHAT,
    IN_COMPLETIONS,
    IN_COUNTS,
    IN_MESSAGES,
    IN_RESPONSES,
    WITHOUT_EFFECT,
    Neutral,
)
from moestro.server.validation import (
    ALL_LOGPROBS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_COPIES,
    MAX_ID_CHARS,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_USER_CHARS,
)
from moestro.text.efforts import EFFORTS

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
_BOUNDS: Mapping[str, Mapping[str, Mapping[str, Schema]]] = {
    "CompletionFields": {
        **_OF_BOTH,
        "max_tokens": {"integer": _between(0, 2**31 - 1)},
        "logprobs": {"integer": _between(0, MAX_LOGPROBS)},
        "prompt": {"string": {"minLength": 1}, "array": {"minItems": 1}},
    },
    "ChatFields": {
        **_OF_BOTH,
        "max_completion_tokens": {"integer": _COUNT},
        "top_logprobs": {"integer": _between(0, MAX_LOGPROBS)},
        "messages": {"array": {"minItems": 1}},
        "tools": {"array": {"maxItems": MAX_TOOLS}},
        "tool_choice": {"string": {"enum": ["none", "auto", "required"]}, "object": _NAMED_FUNCTION},
        "reasoning_effort": {"string": {"enum": list(EFFORTS)}},
        "verbosity": {"string": {"enum": list(VERBOSITIES)}},
    },
    "Message": {"role": {"string": {"enum": list(ROLES)}}},
    "ResponseFormat": {"type": {"string": {"enum": ["text", "json_object", "json_schema"]}}},
}
_NEUTRAL: Mapping[str, Neutral] = {
    "CompletionFields": IN_COMPLETIONS,
    "ChatFields": IN_CHAT,
    "MessagesFields": IN_MESSAGES,
    "CountFields": IN_COUNTS,
    "ResponsesFields": IN_RESPONSES,
}
# A completion without new tokens is possible only where the prompt is the answer.
_SCORING = {
    "if": {"not": {"required": ["echo"], "properties": {"echo": {"const": True}}}},
    "then": {"properties": {"max_tokens": {"not": {"const": 0}}}},
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
    for name, neutral in _NEUTRAL.items():
        properties = components[name]["properties"]
        for field, values in neutral.items():
            text = "Not supported: values that request nothing are accepted."
            properties.setdefault(field, {"enum": [None, *values], "description": text})
        if is_strict:
            for field in WITHOUT_EFFECT:
                properties.setdefault(field, {"description": "Accepted without effect."})
            components[name]["additionalProperties"] = False
    components["CompletionFields"]["allOf"] = [_SCORING]


def _bound(schema: Schema, bounds: Mapping[str, Schema]) -> None:
    """Add to each alternative of a field's schema the bounds of its type."""
    for alternative in schema.get("anyOf", [schema]):
        kind = alternative.get("type")
        if kind in bounds:
            alternative.update(bounds[kind])
