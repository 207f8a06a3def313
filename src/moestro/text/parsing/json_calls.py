"""Steps that parse calls written as JSON objects: `{"name": "f", "arguments": {...}}`."""

from __future__ import annotations

from moestro.text.json_text import JsonScan, decoded
from moestro.text.parsing.output_parser import ToolParser
from moestro.text.parsing.parser_input import NAME_LIMIT, BrokenCallError, ParserInput, Show, Steps

_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})  # models are trained on either
_NAME_KEY = "name"


class JsonCallReader:
    """Reads call objects from the text of a parser, with their keys in any order."""

    def __init__(self, parser: ToolParser, text: ParserInput) -> None:
        self._parser = parser
        self._input = text
        self._has_begun = False
        self._early: list[str] = []  # arguments before the name

    def array(self) -> Steps[None]:
        """Read `[call, call, ...]`; a single call without brackets is accepted too.

        Raises:
            BrokenCallError: The text is something else.
        """
        if not (yield from self._input.take_if("[")):
            yield from self.call()
            return
        yield from self._input.items(self.call)

    def call(self) -> Steps[None]:
        """Read one call object.

        Raises:
            BrokenCallError: The text is no such object; the call may have begun.
        """
        self._has_begun, self._early = False, []
        has_arguments = False
        yield from self._expect("{")
        while True:
            yield from self._input.skip_space()
            key = yield from self._short_string()
            yield from self._input.skip_space()
            yield from self._expect(":")
            yield from self._input.skip_space()
            if key == _NAME_KEY and not self._has_begun:
                yield from self._name()
            elif key in _ARGUMENT_KEYS and not has_arguments:
                has_arguments = True
                yield from read_value(self._input, self._show)
            else:
                yield from read_value(self._input, _drop)
            yield from self._input.skip_space()
            if not (yield from self._input.take_if(",")):
                break
        yield from self._expect("}")
        if not self._has_begun:
            raise BrokenCallError
        self._parser.end_call()

    def _name(self) -> Steps[None]:
        name = yield from self._short_string()
        self._parser.begin_call(name)
        self._has_begun = True
        for piece in self._early:
            self._parser.add_arguments(piece)

    def _show(self, text: str) -> None:
        if self._has_begun:
            self._parser.add_arguments(text)
        else:
            self._early.append(text)

    def _short_string(self) -> Steps[str]:
        text = ""

        def keep(piece: str) -> None:
            nonlocal text
            text += piece
            if len(text) > NAME_LIMIT:
                raise BrokenCallError

        if (yield from self._input.next_char()) != '"':
            raise BrokenCallError
        yield from read_value(self._input, keep)
        value = decoded(text)
        if not isinstance(value, str):
            raise BrokenCallError
        return value

    def _expect(self, char: str) -> Steps[None]:
        if not (yield from self._input.take_if(char)):
            raise BrokenCallError


def read_value(text: ParserInput, show: Show) -> Steps[None]:
    """Show the characters of the next JSON value as they come.

    Raises:
        BrokenCallError: There is no value, or it ends too early.
    """
    first = yield from text.next_char()
    if not first or first in ",:}]":
        raise BrokenCallError
    yield from text.scanned(JsonScan(first), show)


def _drop(_text: str) -> None:
    """Ignore the text."""
