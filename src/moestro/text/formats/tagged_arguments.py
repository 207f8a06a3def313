"""Calls with a tag for each argument, whose value is plain text: GLM-4.5 and Qwen3-Coder.

The tool's schema decides how a value is written as JSON.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from moestro.text.json_text import decoded
from moestro.text.parsing.output_parser import TOOL_PARSERS, ToolParser, ToolSpec
from moestro.text.parsing.parser_input import BrokenCallError, Markers, Show, Steps

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


_GLM_START, _GLM_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_GLM_STARTS = Markers(_GLM_START)
_AFTER_GLM_NAME = Markers("\n", _KEY, _GLM_END)
_AFTER_GLM_VALUE = Markers(_KEY, _GLM_END)
_KEY_ENDS = Markers(_KEY_END)
_GLM_VALUE_ENDS = Markers(_VALUE_END)


@TOOL_PARSERS.register_function(
    "glm45", "GLM-4.5 to 4.7: `<arg_key>` and `<arg_value>` tags for each argument.", source="GLM-4.5's chat template"
)
class Glm45Parser(ToolParser):
    """Parses a name and tagged arguments."""

    MARKERS = (_GLM_START, _GLM_END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    TEMPLATE = (_GLM_START, _KEY, _VALUE)
    STARTS = (_GLM_START,)

    def steps(self) -> Steps[None]:
        """Parse content and calls in turn."""
        while (yield from self._input.until(_GLM_STARTS, self.show)):
            yield from self.or_content(self._call(), _GLM_START)

    def _call(self) -> Steps[None]:
        yield from self._input.skip_space()
        name, marker = yield from self._input.short_until(_AFTER_GLM_NAME)
        if marker == "\n":
            yield from self._input.skip_space()
            marker = yield from self._input.take_if(_KEY, _GLM_END)
            if not marker:
                raise BrokenCallError
        self.begin_call(name)
        writer = ArgumentsWriter(self.tools.get(name.strip()), self.add_arguments)
        while marker == _KEY:
            key, _ = yield from self._input.short_until(_KEY_ENDS)
            yield from self._input.skip_space()
            if not (yield from self._input.take_if(_VALUE)):
                raise BrokenCallError
            writer.begin(key.strip())
            if not (yield from self._input.until(_GLM_VALUE_ENDS, writer.add)):
                raise BrokenCallError
            writer.end()
            marker = yield from self._input.until(_AFTER_GLM_VALUE, self.show)
        if not marker:
            raise BrokenCallError
        writer.close()


_QWEN_START, _QWEN_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_QWEN_STARTS = Markers(_QWEN_START, _FUNCTION)
_CLOSING = Markers(">", "\n")
_AFTER_QWEN_VALUE = Markers(_PARAMETER, _FUNCTION_END, _QWEN_END)
_QWEN_VALUE_ENDS = Markers(_PARAMETER_END, _PARAMETER, _FUNCTION_END)


@TOOL_PARSERS.register_function(
    "qwen3_coder",
    "Qwen3-Coder, Qwen 3.5: `<function=...>` with a `<parameter=...>` tag for each argument.",
    source="Qwen3-Coder's chat template",
)
class Qwen3CoderParser(ToolParser):
    """Parses calls in tags. The outer tag may be missing."""

    MARKERS = (_QWEN_START, _QWEN_END)
    TEMPLATE = (_QWEN_START, _FUNCTION, _PARAMETER)
    STARTS = (_QWEN_START, _FUNCTION)

    def steps(self) -> Steps[None]:
        """Parse content and calls in turn."""
        while marker := (yield from self._input.until(_QWEN_STARTS, self.show)):
            yield from self.or_content(self._call(marker), marker)

    def _call(self, marker: str) -> Steps[None]:
        if marker == _QWEN_START:
            yield from self._input.skip_space()
            if not (yield from self._input.take_if(_FUNCTION)):
                raise BrokenCallError
        name, closing = yield from self._input.short_until(_CLOSING)
        if closing != ">":
            raise BrokenCallError
        self.begin_call(name)
        writer = ArgumentsWriter(self.tools.get(name.strip()), self.add_arguments, is_framed=True)
        marker = yield from self._parameters(writer)
        if not marker:
            raise BrokenCallError
        if marker == _FUNCTION_END:
            yield from self._input.skip_space()
            yield from self._input.take_if(_QWEN_END)

    def _parameters(self, writer: ArgumentsWriter) -> Steps[str]:
        """Write the arguments, and return the tag that ended them; "" if the answer ended first."""
        marker = yield from self._input.until(_AFTER_QWEN_VALUE, self.show)
        while marker == _PARAMETER:
            key, closing = yield from self._input.short_until(_CLOSING)
            if closing != ">":
                raise BrokenCallError
            writer.begin(key.strip())
            marker = yield from self._value(writer)
        if marker:
            writer.close()
        return marker

    def _value(self, writer: ArgumentsWriter) -> Steps[str]:
        """Write one value, and return the tag after it; "" if the answer ended within it.

        A tag ends the value at the start of a line; the end tag may be missing there. Within a line, only an end tag
        that another tag follows does: values may be code with such tags.
        """
        while ending := (yield from self._input.until(_QWEN_VALUE_ENDS, writer.add)):
            if ending != _PARAMETER_END and writer.is_at_line_start:
                writer.end()
                return ending
            if ending == _PARAMETER_END:
                is_end, space = writer.is_at_line_start, (yield from self._input.skip_space())
                following = yield from self._input.take_if(_PARAMETER, _FUNCTION_END, _QWEN_END)
                if following or is_end:
                    writer.end()
                    return following or (yield from self._input.until(_AFTER_QWEN_VALUE, self.show))
                ending += space
            writer.add(ending)
        return ""
