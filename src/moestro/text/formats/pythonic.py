"""Calls as Llama 3.2, Llama 4 and ToolACE write them: a list of Python calls, `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import ast
import json
from typing import Any

from moestro.text.parsing.output_parser import TOOL_PARSERS, ToolParser
from moestro.text.parsing.parser_input import BrokenCallError, Markers, Steps

_START, _END = "<|python_start|>", "<|python_end|>"
_STARTS = Markers(_START)
_AFTER_NAME = Markers("(")
_MOST_CHARS = 1 << 18  # Of one call's arguments, which are read at once; longer ones are content.


@TOOL_PARSERS.register_function(
    "pythonic",
    "Llama 3.2 and 4, ToolACE: a list of Python calls with keyword arguments that are literals.",
    source="Llama 3.2's prompt format",
)
class PythonicParser(ToolParser):
    """Parses lists of calls at the start of the answer or after `<|python_start|>`.

    The literals are parsed and never evaluated. A call is sent when it is complete.
    """

    MARKERS = (_START, _END)
    TEMPLATE = ("[func_name1(params_name1=params_value1",)
    STARTS = (_START,)

    def steps(self) -> Steps[None]:
        """Parse content and lists of calls in turn."""
        yield from self.lists_of_calls(_STARTS, self._calls)

    def _calls(self) -> Steps[None]:
        yield from self._input.skip_space()
        if not (yield from self._input.take_if("[")):
            raise BrokenCallError
        yield from self._input.items(self._call)
        yield from self._input.skip_space()
        yield from self._input.take_if(_END)

    def _call(self) -> Steps[None]:
        name, _ = yield from self._input.short_until(_AFTER_NAME)
        if name.strip() not in self.tools:
            raise BrokenCallError
        pieces: list[str] = []
        yield from self._input.scanned(_ArgumentsScan(), pieces.append)
        arguments = _keyword_arguments("".join(pieces)[:-1])
        self.begin_call(name)
        self.add_arguments(json.dumps(arguments, ensure_ascii=False))
        self.end_call()


class _ArgumentsScan:
    """Finds the bracket that closes the arguments of a call, whose opening bracket was taken.

    Attributes:
        is_complete: Whether it was found.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 1
        self._quote = ""
        self._is_escaped = False
        self._num_chars = 0

    def end_in(self, text: str, start: int) -> int:
        """Return the index behind the characters from `start` on that belong to the arguments."""
        for at in range(start, len(text)):
            if self.is_complete:
                return at
            self._num_chars += 1
            if self._num_chars > _MOST_CHARS:
                return at
            self._take(text[at])
        return len(text)

    def _take(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            self.is_complete = self._depth == 0


def _keyword_arguments(text: str) -> dict[str, Any]:
    """Return the values of the keyword arguments; of two with one name the first.

    Raises:
        BrokenCallError: The text is something else than keyword arguments with literals that JSON has.
    """
    try:
        # A string of several lines has its line breaks escaped; models often write them as they are.
        call = ast.parse(f"f({_escaped_lines(text)}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise BrokenCallError
        found: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise BrokenCallError
            found.setdefault(keyword.arg, _value(keyword.value))
        json.dumps(found, allow_nan=False).encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, OverflowError):
        raise BrokenCallError from None
    return found


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, in which the words of JSON stand for those of Python."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and each.id in ("true", "false", "null"):
            return ast.literal_eval(_Words().visit(node))
    return ast.literal_eval(node)


class _Words(ast.NodeTransformer):
    """Replaces the words of JSON by the constants that they name."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _escaped_lines(text: str) -> str:
    """Return the text with line breaks within quotes as escapes."""
    made: list[str] = []
    quote, is_escaped = "", False
    for char in text:
        if quote and char in "\r\n\0":
            made.append(("" if is_escaped else "\\") + {"\r": "r", "\n": "n", "\0": "x00"}[char])
            is_escaped = False
            continue
        if is_escaped:
            is_escaped = False
        elif quote:
            is_escaped = char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        made.append(char)
    return "".join(made)
