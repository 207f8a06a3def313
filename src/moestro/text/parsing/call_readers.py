"""Readers of calls that several parsers share: JSON objects with name and arguments, and messages of harmony.

Harmony is the format of gpt-oss: messages in channels between special tokens. `openai-harmony` parses it too, but from
token ids of one vocabulary, which it loads from the network.
"""

from __future__ import annotations

from contextlib import suppress

from moestro.text.json_text import JsonScan, decoded
from moestro.text.parsing.output_parser import OutputParser, ToolParser
from moestro.text.parsing.parser_input import NAME_LIMIT, BrokenCallError, Markers, ParserInput, Show, Steps

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


# Harmony: its special tokens, and the rules that grammars have of them.

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
HARMONY_MARKERS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
FUNCTIONS = "functions."

# Rules of grammars, in which special tokens stand in angle brackets.
OPTIONAL_ANALYSIS = f'({CHANNEL} "analysis" {MESSAGE} ANALYSIS {END} {START} "assistant")?'
FINAL_HEAD = f'{CHANNEL} "final" {MESSAGE}'
CALL_HEAD = f'{CHANNEL} "commentary to={FUNCTIONS}{{}} " {CONSTRAIN} "json" {MESSAGE}'

_HEADS = Markers(START, CHANNEL)
_HEAD_ENDS = Markers(MESSAGE, END, CALL, RETURN)
_BODY_ENDS = Markers(END, CALL, RETURN, START, CHANNEL)
_TO = "to="
_ROLE_ENDS = (f" {_TO}", _TO)


class HarmonyReader:
    """Reads the messages of an answer; the prompt ends with `<|start|>assistant`.

    Args:
        calls: The parser, if it takes messages to tools of the request as calls. All others are content.
    """

    def __init__(self, parser: OutputParser, text: ParserInput, calls: ToolParser | None = None) -> None:
        self._parser = parser
        self._input = text
        self._calls = calls
        self._ending = ""
        self._kinds: set[bool] = set()  # of the texts so far

    def messages(self) -> Steps[None]:
        """Read all messages. Text outside of them is content."""
        marker = yield from self._input.take_if(*_ROLE_ENDS)  # The prompt has begun the first head.
        if not marker:
            marker = yield from self._input.until(_HEADS, self._parser.show)
        while marker:
            self._ending = ""
            yield from self._parser.or_content(self._message(marker), marker)
            marker = self._ending
            if marker not in (START, CHANNEL):
                marker = yield from self._input.until(_HEADS, self._parser.show)

    def _message(self, beginning: str) -> Steps[None]:
        """Read one message, whose head begins with `beginning`. An answer that ends within a head shows none of it.

        Raises:
            BrokenCallError: It has no body.
        """
        try:
            head, marker = yield from self._input.short_until(_HEAD_ENDS)
        except BrokenCallError:
            if self._input.has_ended:
                self._input.all_at_hand()
                self._input.forget()
            raise
        if marker != MESSAGE:
            raise BrokenCallError
        name, channel = _recipient(beginning + head).removeprefix(FUNCTIONS), _channel(beginning + head)
        self._input.forget()
        if self._calls is not None and name in self._calls.tools:
            yield from self._call(self._calls, name)
        else:
            self._begin_text(is_reasoning=channel == "analysis")
            self._ending = yield from self._input.until(_BODY_ENDS, self._parser.show)
        self._parser.begin_text(is_reasoning=False)

    def _call(self, calls: ToolParser, name: str) -> Steps[None]:
        calls.begin_call(name)
        with suppress(BrokenCallError):  # A string in the arguments may hold markers as text.
            yield from read_value(self._input, calls.add_arguments)
        self._ending = yield from self._input.until(_BODY_ENDS, calls.add_arguments)
        if not self._ending:
            raise BrokenCallError

    def _begin_text(self, *, is_reasoning: bool) -> None:
        """Begin a text in a new line if it is not the first one of its kind."""
        self._parser.begin_text(is_reasoning=is_reasoning, joint="\n" if is_reasoning in self._kinds else "")
        self._kinds.add(is_reasoning)


def _recipient(head: str) -> str:
    """Return the recipient in `assistant to=functions.f<|channel|>commentary`; it may also stand at the end."""
    return _first_word(head.partition(_TO)[2])


def _channel(head: str) -> str:
    return _first_word(head.rpartition(CHANNEL)[2])


def _first_word(text: str) -> str:
    words = text.replace("<", " ").split()
    return words[0] if words else ""
