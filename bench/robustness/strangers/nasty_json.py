"""JSON that servers stumble over: valid bodies of each path, any part of which is replaced by a nasty value.

Tests draw from it too. A body is a tree of builtin values in which `Text` is JSON as it stands, valid or not.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any


class Text(str):
    """A value as its JSON text."""

    __slots__ = ()


_DEEP = 5000
VALUES: tuple[Text, ...] = tuple(
    Text(text)
    for text in (
        # Numbers beyond 64 bits, beyond a double, beyond 4,300 digits, and with unusual spellings.
        *("9223372036854775808", "-9223372036854775809", "18446744073709551615", "18446744073709551616", "1" * 40),
        *("-" + "9" * 300, "1" * 4300, "1" * 4301, "7" * 20_000, "1e308", "1e309", "1e999", "-1E400", "1e-999"),
        *("-0", "-0.0", "0e0", "1E+2", "1.0", "1e3", "2147483648", "-2147483649", "4294967296", "0.1" + "1" * 5000),
        *("NaN", "Infinity", "-Infinity", "00", "01", "+1", ".5", "1.", "0x10", "1_000", "--1", "1e", "-"),
        # Strings with surrogates, controls, odd escapes, and of every size.
        *(r'"\ud800"', r'"\udc00"', r'"\ud800\ud800"', r'"\ud800x"', r'"\ude00\ud83d"', r'"\ud83d\ude00"'),
        *(r'"\u0000"', r'"\u0000\u0001\u001f\u007f\u0085\u2028"', r'"\uFFFF"', r'"\ufeff"', r'"\x"', r'"\u12"', '"'),
        *('"\x00"', '"\t"', '"\n"', '""', '" "', '"' + "a" * 70_000 + '"', r'"\"\\\/\b\f\n\r\t"', "'a'", '"%s%n{}"'),
        *('"<|im_end|>"', '"{{ 1 / 0 }}"', '"../../etc/passwd"'),
        # JSON within strings.
        *(r'"{\"a\": 99999999999999999999}"', r'"{\"a\": 1e999}"', r'"{\"a\": \"\\ud800\"}"', r'"[[[[[[[["', '"NaN"'),
        json.dumps("[" * _DEEP + "]" * _DEEP),
        json.dumps('{"a":' * 900 + "1" + "}" * 900),
        # Nesting, at and beyond what decoders and encoders bear.
        *("[" * depth + "]" * depth for depth in (20, 100, 300, 500, 700, 900, 960, 980, 990, 1000, _DEEP)),
        *('{"a":' * depth + "1" + "}" * depth for depth in (300, 900, 970, 990, _DEEP)),
        *("[" * _DEEP, '{"a":' * _DEEP, "]", "}", '[{"a":' * 400 + "1" + "}]" * 400),
        # Containers: empty, wide, with odd or repeated keys, and broken.
        *("[]", "{}", "[null]", "[[]]", "[{}]", "{}{}", "[,]", "[1,]", '{"a"}', '{"a":}', '{"a":1,}', "{1:2}", "[1 2]"),
        *('{"":""}', '{"\\u0000":1}', '{"a":1,"a":2}', r'{"\ud800":1}', '{"type":null}', '{"type":"function"}'),
        "{" + ",".join(f'"{i}":{i}' for i in range(3000)) + "}",
        "[" + ",".join("9" * 20 for _ in range(500)) + "]",
        *('{"$ref":"#"}', '{"type":"object","properties":{"a":{"const":99999999999999999999}}}'),
        *('{"type":"string","pattern":"("}', '{"enum":[1e400]}', '{"enum":[18446744073709551616]}', '{"minimum":1e99}'),
        # Other types.
        *("null", "true", "false", "nul", "True", "undefined", "0", "1", "-1", "1.5", '"x"', "", " ", "//", "\ufeff1"),
    )
)
KEYS = ("unknown", "", "\0", "é", "a.b", "$ref", "__class__", "metadata", "k" * 300, "1", "type", "id", "user", "n")
# Fields whose values may hold any JSON.
_FREE = frozenset({"chat_template_kwargs", "parameters", "input_schema", "schema", "guided_json", "json", "metadata"})

_MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "a"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "so",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
    {"role": "user", "content": "go on"},
]
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": _PARAMETERS}}]
_GENERATION: dict[str, Any] = {
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "n": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1},
    "presence_penalty": 0.1,
    "stop_token_ids": [1],
    "bad_words": ["no"],
    "min_tokens": 1,
    "user": "u",
    "cache_salt": "s",
    "session_id": "t",
    "metadata": {"k": "v"},
    "prompt_logprobs": 1,
}
_CHAT: dict[str, Any] = {
    "messages": _MESSAGES,
    "tools": _TOOLS,
    "tool_choice": "auto",
    "chat_template_kwargs": {"enable_thinking": False, "depth": {"of": [1]}},
}
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "2"}]},
]
_COUNT: dict[str, Any] = {
    "messages": _BLOCKS,
    "system": "s",
    "tools": [{"name": "f", "description": "d", "input_schema": _PARAMETERS}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "disabled"},
}
_RESPONSE: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ],
    "max_output_tokens": 2,
    "tools": [{"type": "function", "name": "f", "parameters": _PARAMETERS, "strict": True}],
    "tool_choice": "auto",
    "metadata": {"k": "v"},
    "reasoning": {"effort": None},
    "text": {"verbosity": "medium"},
}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "const": 3}}, "additionalProperties": False}
# Valid bodies by path. A path that reads a body has at least one.
BODIES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        {"prompt": "def f(", **_GENERATION, "logprobs": 2, "echo": True},
        {"prompt": [5, 6, 7], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "max_tokens": 2, "guided_json": _SCHEMA},
        {
            "prompt": "a",
            "max_tokens": 2,
            "structured_outputs": {"json": json.dumps(_SCHEMA), "whitespace_pattern": " "},
        },
        {"prompt": ["a", "b"], "max_tokens": 1, "structured_outputs": {"choice": ["a", "b"]}},
    ),
    "/v1/chat/completions": (
        _CHAT | _GENERATION,
        _CHAT | {"max_completion_tokens": 2, "stream": True},
        _CHAT | {"max_tokens": 2, "tool_choice": "required"},
        {
            "messages": _MESSAGES[:2],
            "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
        },
    ),
    "/v1/chat/completions/batch": (
        _GENERATION | {"messages": [_MESSAGES, _MESSAGES[:2]], "prompt_logprobs": None},
        {
            "messages": [_MESSAGES[:2]],
            "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
        },
    ),
    "/v1/messages": (
        _COUNT | {"max_tokens": 2, "stop_sequences": ["x"], "metadata": {"user_id": "u"}},
        _COUNT | {"max_tokens": 2, "stream": True, "tool_choice": {"type": "any"}},
        {
            "messages": _BLOCKS[:1],
            "max_tokens": 2,
            "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
        },
    ),
    "/v1/messages/count_tokens": (_COUNT,),
    "/v1/responses": (
        _RESPONSE,
        _RESPONSE | {"stream": True, "instructions": "i"},
        {
            "input": "hi",
            "max_output_tokens": 2,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
        },
    ),
    "/tokenize": ({"prompt": "abc", "return_token_strs": True}, _CHAT | {"add_special_tokens": True}),
    "/detokenize": ({"tokens": [5, 6]},),
    "/generate": ({"text": "abc", "sampling_params": {"max_new_tokens": 2}},),
    "/admin/engines": ({"url": "no address"},),
    "/admin/placement/apply": (
        {
            "moestro_placement": 1,
            "num_experts": 8,
            "table": [[[0, 1, 2, 3], [4, 5, 6, 7]]],
            "shares": [[[1, 1], [1, 1]]],
        },
        {"0": [[0, 1], [2, 3]]},
    ),
}


def nasty_body(rng: Random, path: str) -> bytes:
    """Return the text of a body of `path`, as `nasty_text` does."""
    return nasty_text(rng, BODIES.get(path, ({},)))


def nasty_text(rng: Random, valid: Sequence[dict[str, Any]]) -> bytes:
    """Return the JSON text of one of the `valid` bodies with one to three nasty parts, or of a nasty value alone."""
    if rng.randrange(12) == 0:
        return rng.choice(VALUES).encode("utf-8", "surrogatepass")
    body: Any = copy.deepcopy(rng.choice(valid))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        body = _spoilt(rng, body)
    return _written(body).encode("utf-8", "surrogatepass")


def _spoilt(rng: Random, body: Any) -> Any:
    """Return `body` with a nasty value in place of one part, or added to an object or a list."""
    places: list[tuple[Any, Any]] = []
    free: list[tuple[Any, Any]] = []
    _places(body, places, free, is_free=False)
    value = rng.choice(VALUES)
    if free and rng.randrange(2):  # No check refuses the value there, so that it reaches what is behind the checks.
        places = free
    if not places or rng.randrange(20) == 0:
        return value
    holder, key = rng.choice(places)
    if key == "arguments":
        holder[key] = f'{{"a": {value}}}'
    elif isinstance(holder[key], dict) and rng.randrange(2):
        holder[key][rng.choice(KEYS)] = value
    elif isinstance(holder[key], list) and rng.randrange(2):
        holder[key].append(value)
    else:
        holder[key] = value
    return body


def _places(value: Any, places: list[tuple[Any, Any]], free: list[tuple[Any, Any]], *, is_free: bool) -> None:
    """Collect each part of `value`, as its container and its key, and those parts that may be any JSON."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        places.append((value, key))
        if is_free or key == "arguments":
            free.append((value, key))
        _places(value[key], places, free, is_free=is_free or key in _FREE)


def _written(value: Any) -> str:
    if isinstance(value, Text):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value)
