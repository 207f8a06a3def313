"""Grammars of answers that must call a tool, and of answers in which reasoning precedes what a grammar limits.

They are written in llguidance's notation of Lark. The rule `thought` defines what precedes the answer itself.
Clients' JSON schemas are first reduced to what the library enforces; it refuses other keywords, formats and regular
expressions. The API's limits are wider:

1. A `format` that no grammar enforces is an annotation, as JSON Schema defines it.
2. Another keyword that no grammar enforces stays a description, and the caller gets its place.
3. `oneOf` becomes `anyOf`, which is the same where no value matches two of its members.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moestro.core.request import Grammar
from moestro.text.parsing.call_readers import CALL_HEAD, FINAL_HEAD, OPTIONAL_ANALYSIS
from moestro.text.parsing.output_parser import ToolSpec

ENFORCED_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
# Keyword -> whether it limits nothing, by its value and the schema around it.
_UNENFORCED: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "$dynamicAnchor": lambda value, schema: True,
    "$dynamicRef": lambda value, schema: False,
    "$recursiveAnchor": lambda value, schema: True,
    "$recursiveRef": lambda value, schema: False,
    "contains": lambda value, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "dependencies": lambda value, schema: value == {},
    "dependentRequired": lambda value, schema: value == {},
    "dependentSchemas": lambda value, schema: value == {},
    "else": lambda value, schema: True,  # `if` has the name of all three.
    "if": lambda value, schema: "then" not in schema and "else" not in schema,
    "maxContains": lambda value, schema: True,  # `contains` has the name of all three.
    "minContains": lambda value, schema: True,
    "not": lambda value, schema: value is False,
    "propertyNames": lambda value, schema: value in (True, {}, {"type": "string"}),
    "then": lambda value, schema: True,
    "unevaluatedItems": lambda value, schema: value in (True, {}),
    "unevaluatedProperties": lambda value, schema: value in (True, {}),
    "uniqueItems": lambda value, schema: value is False,
}
_MAPS = frozenset({"$defs", "definitions", "patternProperties", "properties"})  # name -> schema
_LISTS = frozenset({"allOf", "anyOf", "items", "prefixItems"})
_SINGLE = frozenset({"additionalItems", "additionalProperties", "items"})
# Parts of a regular expression: an escape, a class of characters, or what only a backtracking engine matches.
_REGEX_PART = re.compile(r"(?P<beyond>\\[1-9bBkcAZzG]|\(\?(?:[=!>#]|<[=!]))|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# Bounds of a search for what schemas have in common; beyond them, a value may fit two of them.
_MAX_DEPTH, _MAX_COMPARISONS = 8, 10_000
_MAX_LEFT_OUT = 64  # places of one schema
_TYPES_OF = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
_ALL_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


@dataclass(frozen=True, slots=True)
class EnforcedSchema:
    """What a grammar enforces of a JSON schema.

    Attributes:
        schema: JSON schema of keywords that the grammar library knows.
        left_out: Places of the keywords that are descriptions only, below the client's schema.
    """

    schema: dict[str, Any]
    left_out: tuple[str, ...] = ()


def enforced_schema(schema: dict[str, Any]) -> EnforcedSchema:
    """Return what a grammar enforces of `schema`; values that fit `schema` fit the result."""
    reduction = _Reduction(schema)
    return EnforcedSchema(reduction.reduced(schema, ""), tuple(reduction.left_out))


def enforced_arguments(parameters: dict[str, Any] | None) -> EnforcedSchema:
    """Return what a grammar enforces of a tool's `parameters`. Arguments are an object, whatever the schema says.

    Args:
        parameters: JSON schema; None or an empty one means no arguments.
    """
    if not parameters:
        return EnforcedSchema(_NO_ARGUMENTS)
    enforced = enforced_schema(parameters)
    types = parameters.get("type", "object")
    is_object = types == "object" or (isinstance(types, list) and "object" in types)
    left_out = enforced.left_out if is_object else ("type", *enforced.left_out)
    return EnforcedSchema(enforced.schema | {"type": "object"}, left_out)


class _Reduction:
    """One walk over a schema.

    Attributes:
        left_out: Places of what no grammar enforces so far.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._has_ids = b'"$id"' in msgspec.json.encode(root)
        self._num_comparisons = 0
        self.left_out: list[str] = []

    def reduced(self, schema: Any, place: str) -> Any:
        """Return the enforced part of the schema at `place`; other values are returned as they are."""
        if not isinstance(schema, dict):
            return schema
        result: dict[str, Any] = {}
        for key, value in schema.items():
            at = f"{place}.{key}" if place else key
            if self._is_enforced(key, value, schema):
                result[key] = self._below(key, value, at)
            elif key != "format" and not (key in _UNENFORCED and _UNENFORCED[key](value, schema)):
                self._leave_out(at)
        return self._without_one_of(result, f"{place}.oneOf" if place else "oneOf")

    def _leave_out(self, place: str) -> None:
        if len(self.left_out) < _MAX_LEFT_OUT:
            self.left_out.append(place)

    def _is_enforced(self, key: str, value: Any, schema: dict[str, Any]) -> bool:
        match key:
            case "format":
                return not isinstance(value, str) or value in ENFORCED_FORMATS
            case "pattern":
                return not isinstance(value, str) or _is_regular(value)
            case "$ref":  # A schema with names of its own is the library's to resolve.
                return not isinstance(value, str) or value.startswith("#") or self._has_ids
        return key not in _UNENFORCED

    def _below(self, key: str, value: Any, place: str) -> Any:
        """Return the value of a keyword with its inner schemas reduced."""
        if isinstance(value, dict) and key in _MAPS:
            kept = {name: inner for name, inner in value.items() if key != "patternProperties" or _is_regular(name)}
            for name in value.keys() - kept.keys():
                self._leave_out(f"{place}.{name}")
            return {name: self.reduced(inner, f"{place}.{name}") for name, inner in kept.items()}
        if isinstance(value, list) and (key in _LISTS or key == "oneOf"):
            return [self.reduced(inner, f"{place}[{i}]") for i, inner in enumerate(value)]
        return self.reduced(value, place) if key in _SINGLE else value

    def _without_one_of(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """Return the schema with `anyOf` in place of `oneOf`."""
        members = schema.get("oneOf")
        if not isinstance(members, list):
            return schema
        pairs = ((a, b) for i, a in enumerate(members) for b in members[:i])
        if not all(self._are_disjoint(a, b, _MAX_DEPTH) for a, b in pairs):
            self._leave_out(place)
        rest = {key: value for key, value in schema.items() if key != "oneOf"}
        if "anyOf" not in rest:
            return rest | {"anyOf": members}
        others = rest.get("allOf")
        return rest | {"allOf": [*(others if isinstance(others, list) else ()), {"anyOf": members}]}

    def _are_disjoint(self, a: Any, b: Any, depth: int) -> bool:
        """Whether it is certain that no value fits both schemas."""
        a, b = self._resolved(a, depth), self._resolved(b, depth)
        self._num_comparisons += 1
        if self._num_comparisons > _MAX_COMPARISONS:
            return False
        if not isinstance(a, dict) or not isinstance(b, dict) or depth == 0:
            return False
        types_a, types_b = _types(a), _types(b)
        if types_a.isdisjoint(types_b):
            return True
        values_a, values_b = _values(a), _values(b)
        if values_a is not None and values_b is not None:
            return values_a.isdisjoint(values_b)
        if types_a & types_b != {"object"}:
            return False
        return self._are_disjoint_objects(a, b, depth)

    def _are_disjoint_objects(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        """Whether a required property of one schema is forbidden by the other, or has no value that fits both."""
        (required_a, inner_a), (required_b, inner_b) = _properties(a), _properties(b)
        if (_is_closed(b) and not required_a <= inner_b.keys()) or (_is_closed(a) and not required_b <= inner_a.keys()):
            return True
        both = required_a & required_b & inner_a.keys() & inner_b.keys()
        return any(self._are_disjoint(inner_a[name], inner_b[name], depth - 1) for name in sorted(both))

    def _resolved(self, schema: Any, depth: int) -> Any:
        """Return the schema behind references within the document; None where there is none."""
        while isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and depth:
            target: Any = self._root
            for part in schema["$ref"].removeprefix("#").removeprefix("/").split("/"):
                if part:
                    target = target.get(part) if isinstance(target, dict) else None
            schema, depth = target, depth - 1
        return schema


def _is_regular(pattern: str) -> bool:
    """Whether a regular expression needs no backtracking: no look-around, no reference, no word boundary."""
    return not any(part["beyond"] for part in _REGEX_PART.finditer(pattern))


def _properties(schema: dict[str, Any]) -> tuple[set[str], dict[str, Any]]:
    """Return the names of required properties, and the schemas of those that are described."""
    required, inner = schema.get("required"), schema.get("properties")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return names, inner if isinstance(inner, dict) else {}


def _is_closed(schema: dict[str, Any]) -> bool:
    """Whether a schema of objects forbids properties that it does not describe."""
    return schema.get("additionalProperties") is False and "patternProperties" not in schema


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that values of a schema may have; integers are numbers too."""
    given = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if given is None and isinstance(values, list):
        given = [_TYPES_OF.get(type(value), "null") for value in values]
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        return _ALL_TYPES
    found = frozenset(listed)
    return found | {"integer", "number"} if found & {"integer", "number"} else found


def _values(schema: dict[str, Any]) -> frozenset[bytes] | None:
    """Return the only values of a schema, as JSON; None means that it does not list them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return frozenset(msgspec.json.encode(_as_integer(value)) for value in values)


def _as_integer(value: Any) -> Any:
    """Return a number without a fraction as an integer: 1 and 1.0 are the same JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# The spacing of Python's JSON, which models have learnt; otherwise one may write spaces for ever.
_SPACING = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,  # The pattern of the compiler's defaults would allow other spaces.
    "item_separator": ", ",
    "key_separator": ": ",
}
_SPACES = r"[ \n\r\t]{0,64}"
HARMONY_THOUGHT = f"thought: {OPTIONAL_ANALYSIS} {FINAL_HEAD}\nANALYSIS: /(?s:.*)/\n"

_HEADER = "%llguidance {}"  # says which of Lark's dialects this is
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def thought_rules(start: str, end: str, *, is_open: bool, is_special: bool) -> str:
    """Return the rule `thought` for reasoning between two tags.

    Args:
        is_open: Whether the reasoning has begun; otherwise the model may begin one, with the start tag.
        is_special: Whether the tags are special tokens, which no text of the grammar matches.
    """
    first = start if is_special else json.dumps(start)
    text = f"THOUGHT {end}" if is_special else "thought_text"
    suffix = "" if is_special else f"\nthought_text[suffix={json.dumps(end)}]: THOUGHT"
    body = f"{text} THOUGHT_GAP" if is_open else f"({first} {text} THOUGHT_GAP)?"
    return f"thought: {body}{suffix}\nTHOUGHT: /(?s:.*)/\nTHOUGHT_GAP: /\\n{{0,2}}/\n"


def required_calls(tools: Sequence[ToolSpec], *, is_parallel: bool, thought: str = "") -> Grammar:
    """Return the grammar of a list of calls; of a single one if not `is_parallel`.

    Args:
        thought: Rule `thought` and those that it needs. Empty means that nothing precedes the list.
    """
    more = '(", " call)*' if is_parallel else ""
    rules = [_HEADER, f'start: {"thought " if thought else ""}"[" call {more} "]"', _any_of("call", len(tools))]
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "parameters": '
        rules.append(f'call_{i}: {json.dumps(head)} arguments_{i} "}}"\narguments_{i}: %json {_schema(tool)}')
    return Grammar("lark", "\n".join([*rules, thought]))


def named_call(tool: ToolSpec, thought: str = "") -> Grammar:
    """Return the grammar of the arguments of `tool`."""
    return after_thought(Grammar("json_schema", _schema(tool)), thought)


def harmony_call(tools: Sequence[ToolSpec]) -> Grammar:
    """Return the grammar of one call of any of `tools` in harmony, perhaps after an analysis."""
    rules = [_HEADER, f"start: {OPTIONAL_ANALYSIS} call\nANALYSIS: /(?s:.*)/", _any_of("call", len(tools))]
    for i, tool in enumerate(tools):
        rules.append(f"call_{i}: {CALL_HEAD.format(json.dumps(tool.name)[1:-1])} %json {_schema(tool)}")
    return Grammar("lark", "\n".join(rules))


def after_thought(grammar: Grammar, thought: str) -> Grammar:
    """Return the grammar of a thought and then a text of `grammar`.

    Args:
        thought: Rule `thought` and those that it needs. Empty means that the answer begins with the text.
    """
    if not thought:
        return grammar
    return Grammar("lark", f"{_HEADER}\nstart: thought answer\nanswer: {_as_rule(grammar)}\n{thought}")


def _as_rule(grammar: Grammar) -> str:
    """Return the body of a rule for `grammar`."""
    match grammar.kind:
        case "json_schema":
            return f"%json {_spaced(grammar.text)}"
        case "json_object":
            return "%json " + _spaced('{"type": "object"}')
        case "regex":
            return "/" + _SLASH.sub(lambda found: found[1] or r"\/", grammar.text).replace("\n", r"\n") + "/"
        case "choice":
            return " | ".join(json.dumps(each) for each in json.loads(grammar.text))
        case _:
            return f"%lark {{\n{grammar.text}\n}}"


def _any_of(name: str, count: int) -> str:
    return f"{name}: " + " | ".join(f"{name}_{i}" for i in range(count))


def _schema(tool: ToolSpec) -> str:
    return json.dumps(enforced_arguments(tool.parameters).schema | {"x-guidance": _SPACING})


def _spaced(schema: str) -> str:
    """Return a JSON schema in which the white space between elements is limited, if the client did not say how."""
    return json.dumps({"x-guidance": {"whitespace_pattern": _SPACES}} | json.loads(schema))
