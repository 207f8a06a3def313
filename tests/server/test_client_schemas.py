"""JSON schemas of clients whose keywords no grammar enforces, directly and through the router."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from support.running import call, chat, complete

WIDE = {
    "type": "object",
    "properties": {
        "a": {"enum": ["x", "y"], "format": "password"},
        "b": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
COMPACT = {"whitespace_flexible": False, "whitespace_pattern": None}
USER = [{"role": "user", "content": "x"}]
FORCED = {"type": "function", "function": {"name": "f"}}


def ignored(reply) -> str:
    return reply.headers.get("warning", "").removeprefix('299 moestro "fields were ignored: ').removesuffix('"')


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "t", "schema": copy.deepcopy(schema) | {"x-guidance": COMPACT}},
    }


def tool(**fields: object) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f"} | fields}]


def test_an_answer_follows_the_rest_of_a_schema_and_the_keyword_is_named(place):
    for strict in ({}, {"strict": False}):
        params = schema_format(WIDE)
        params["json_schema"] |= strict
        reply = chat(place, "x", max_tokens=60, temperature=0, response_format=params)
        answer = json.loads(reply.json["choices"][0]["message"]["content"])
        assert answer.keys() == {"a", "b"}
        assert ignored(reply) == "response_format.json_schema.schema.properties.b.uniqueItems"
    reply = complete(
        place, prompt="x", max_tokens=60, structured_outputs={"json": WIDE, "disable_any_whitespace": True}
    )
    assert ignored(reply) == "structured_outputs.json.properties.b.uniqueItems"
    reply = complete(place, prompt="x", max_tokens=60, guided_json=json.dumps(WIDE), stream=True)
    assert reply.status == 200, reply.body
    assert ignored(reply) == "guided_json.properties.b.uniqueItems"


def test_a_strict_schema_is_refused_by_keyword_and_place(place):
    params = schema_format(WIDE)
    params["json_schema"]["strict"] = True
    reply = chat(place, "x", response_format=params)
    error = reply.json["error"]
    assert (reply.status, error["code"]) == (400, "unsupported_schema")
    assert error["param"] == "response_format.json_schema.schema.properties.b.uniqueItems"
    del params["json_schema"]["schema"]["properties"]["b"]["uniqueItems"]
    assert chat(place, "x", max_tokens=60, response_format=params).status == 200, "a format is an annotation"


def test_schemas_of_messages_and_responses_name_their_own_places(place):
    body = {"model": "moestro-demo", "max_tokens": 60, "messages": USER}
    wanted = {"format": {"type": "json_schema", "schema": WIDE | {"x-guidance": COMPACT}}}
    reply = call(place, "POST", "/v1/messages", body | {"output_config": wanted})
    assert reply.status == 200, reply.body
    assert ignored(reply) == "output_config.format.schema.properties.b.uniqueItems"
    text = {"format": {"type": "json_schema", "name": "t", "schema": WIDE | {"x-guidance": COMPACT}}}
    body = {"model": "moestro-demo", "max_output_tokens": 60, "input": "x", "text": text}
    reply = call(place, "POST", "/v1/responses", body)
    assert reply.status == 200, reply.body
    assert ignored(reply) == "text.format.schema.properties.b.uniqueItems"
    text["format"]["strict"] = True
    reply = call(place, "POST", "/v1/responses", body)
    assert reply.status == 400
    assert reply.json["error"]["param"] == "text.format.schema.properties.b.uniqueItems"


ENDING = {"properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
SCHEMAS = [
    {}, {"parameters": None}, {"parameters": {}}, {"parameters": ENDING}, {"parameters": {"type": "string"} | ENDING},
    {"parameters": {"anyOf": [{"type": "null"}, ENDING]}}, {"parameters": {"type": ["object", "null"]} | ENDING},
]  # fmt: skip


@pytest.mark.parametrize("function", SCHEMAS, ids=json.dumps)
def test_forced_arguments_are_an_object_whatever_the_schema_says(place, function):
    for choice in ("required", FORCED):
        reply = chat(place, "x", max_tokens=60, tools=tool(**function), tool_choice=choice, parallel_tool_calls=False)
        assert reply.status == 200, reply.body
        [made] = reply.json["choices"][0]["message"]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) in ({}, {"a": "x"})
        is_string = function.get("parameters", {}) and function["parameters"].get("type") == "string"
        assert ignored(reply) == ("tools[0].function.parameters.type" if is_string else "")


def test_a_schema_of_true_allows_any_object(place):
    reply = chat(place, "x", max_tokens=4, tools=tool(parameters=True), tool_choice=FORCED)
    assert reply.status == 200, reply.body
    [made] = reply.json["choices"][0]["message"]["tool_calls"]
    assert made["function"]["arguments"].startswith("{")
    reply = chat(place, "x", tools=tool(parameters=False), tool_choice=FORCED)
    assert (reply.status, reply.json["error"]["param"]) == (400, "tools[0].function.parameters")


def test_keywords_of_forced_tools_are_named_or_refused(place):
    given = tool(parameters=WIDE)
    reply = chat(place, "x", max_tokens=60, tools=given, tool_choice="required", parallel_tool_calls=False)
    assert reply.status == 200, reply.body
    assert ignored(reply) == "tools[0].function.parameters.properties.b.uniqueItems"
    reply = chat(place, "x", max_tokens=60, tools=tool(parameters=WIDE, strict=True), tool_choice="required")
    assert reply.status == 400
    assert reply.json["error"]["param"] == "tools[0].function.parameters.properties.b.uniqueItems"
    body = {"model": "moestro-demo", "max_tokens": 60, "messages": USER, "tool_choice": {"type": "any"}}
    given = [{"name": "f", "input_schema": WIDE, "strict": True}]
    reply = call(place, "POST", "/v1/messages", body | {"tools": given})
    assert reply.status == 400
    assert "tools[0].input_schema.properties.b.uniqueItems" in reply.json["error"]["message"]
    free = chat(place, "x", max_tokens=2, tools=tool(parameters=WIDE, strict=True))
    assert ignored(free) == "tools[0].function.strict", "a call of the model's choice follows no grammar"
