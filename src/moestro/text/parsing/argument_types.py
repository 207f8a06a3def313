"""Writes arguments as JSON from formats whose values are plain text, by the types in the tool's schema."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from moestro.text.json_text import decoded
from moestro.text.parsing.output_parser import ToolSpec
from moestro.text.parsing.parser_input import Show

_MAX_REFERENCES = 8  # of a schema to another one
_ANY = frozenset({"any"})
_TYPE_OF = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
_WORDS = {"True": "true", "False": "false", "None": "null"}  # models that were trained on Python write these


class ArgumentsWriter:
    """Writes one JSON object, a value at a time.

    A value whose only type is string is written while it comes. Any other value waits for its end; then it is JSON if
    it has one of the types of its schema, and a string otherwise. The text is decoded, never evaluated.

    Args:
        tool: Tool that is called. None means an unknown one, whose values are strings.
        show: Function that takes the pieces of the object.
        is_framed: Whether a newline at the start of a value, and one at its end, belong to the format.
    """

    def __init__(self, tool: ToolSpec | None, show: Show, *, is_framed: bool = False) -> None:
        self._schema = {} if tool is None else tool.parameters
        self._show = show
        self._is_framed = is_framed
        self._is_empty = True
        self._types: frozenset[str] = frozenset()
        self._pieces: list[str] = []
        self._newline = ""  # at the end of a framed value so far; dropped if the value ends there
        self._has_text = self._has_content = False

    def begin(self, key: str) -> None:
        """Begin the value of `key`."""
        self._types = argument_types(self._schema, key)
        self._pieces, self._newline = [], ""
        self._has_text = self._has_content = False
        quote = '"' if self._is_string else ""
        self._show(f"{'{' if self._is_empty else ', '}{_quoted(key)}: {quote}")
        self._is_empty = False

    def add(self, text: str) -> None:
        """Add text to the value."""
        if self._is_framed:
            if not self._has_text:
                self._has_text = True
                text = text.removeprefix("\n")
            text = self._newline + text
            self._newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        self._has_content = self._has_content or bool(text)
        if self._is_string:
            self._show(_quoted(text)[1:-1])
        else:
            self._pieces.append(text)

    @property
    def is_at_line_start(self) -> bool:
        """Whether a framed value is empty so far, or its last character is a newline."""
        return bool(self._newline) or not self._has_content

    def end(self) -> None:
        """End the value."""
        if self._is_string:
            self._show('"')
        else:
            self._show(_as_json("".join(self._pieces), self._types))

    def close(self) -> None:
        """End the object."""
        self._show("{}" if self._is_empty else "}")

    @property
    def _is_string(self) -> bool:
        return self._types == {"string"}


def argument_types(schema: dict[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that the argument `key` may have; one that the schema does not know is a string."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or key not in properties:
        return frozenset({"string"})
    return _types(properties[key], schema, _MAX_REFERENCES)


def _types(schema: Any, root: dict[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth == 0:
        return _ANY
    match schema:
        case {"type": str(given)}:
            return frozenset({given})
        case {"type": [*given]} if given:
            return frozenset(each for each in given if isinstance(each, str))
        case {"const": value}:
            return frozenset({_TYPE_OF.get(type(value), "string")})
        case {"enum": [*values]} if values:
            return frozenset(_TYPE_OF.get(type(value), "string") for value in values)
    members = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else _members(schema)
    found = [_types(_referenced(each, root), root, depth - 1) for each in members]
    return frozenset().union(*found) if found else _ANY


def _members(schema: dict[str, Any]) -> list[Any]:
    """Return the schemas of which a value must follow one or all."""
    return next((schema[word] for word in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(word), list)), [])


def _referenced(schema: Any, root: dict[str, Any]) -> Any:
    """Return the schema at a reference such as `#/$defs/NAME`, None if there is none; any other schema as it is."""
    if not isinstance(schema, str):
        return schema
    found: Any = root
    for part in schema.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _as_json(text: str, types: frozenset[str]) -> str:
    plain = text.strip()
    plain = _WORDS.get(plain, plain)
    value = decoded(plain)
    if value is not msgspec.UNSET and not isinstance(value, str):
        kind = _TYPE_OF[type(value)]
        if kind in types or "any" in types or (kind == "integer" and "number" in types):
            return plain
    if isinstance(value, str) and "string" not in types:
        return plain
    return _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
