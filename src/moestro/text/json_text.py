"""JSON that models and clients write, valid or not: decodes it, finds its end while it comes, and mends arguments."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from moestro.core.clients import is_too_deep
from moestro.text.parsing.parser_input import BrokenCallError, Markers, ParserInput, Show, Steps


def decoded(text: str) -> Any:
    """Return the value of a JSON text; `msgspec.UNSET` if it is not valid, or nested too deeply to be passed on."""
    try:
        data = text.encode()
        return msgspec.UNSET if is_too_deep(data) else msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return msgspec.UNSET


# Finds the end of a JSON value while its text comes in pieces, without building the value.

_BETWEEN = re.compile(r"[\s0-9A-Za-z+\-.:,]*")  # between strings and brackets
_STRING_CHARS = re.compile(r'[^"\\]*')
_SCALAR_CHARS = re.compile(r"[0-9A-Za-z+\-.]*")


class JsonScan:
    """Scans one value, whose first character decides its kind.

    Brackets are counted and not matched by kind: what a model writes is passed on as it is, valid or not.

    Attributes:
        is_complete: Whether the value has ended. A number or a word ends before the first character behind it.
    """

    def __init__(self, first: str) -> None:
        self.is_complete = False
        self._is_scalar = first not in '"{['
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def end_in(self, text: str, start: int) -> int:
        """Return the index behind the characters from `start` on that belong to the value."""
        if self._is_scalar:
            end = _end(_SCALAR_CHARS, text, start)
            self.is_complete = end < len(text)
            return end
        at = start
        while at < len(text) and not self.is_complete:
            if self._in_string:
                at = self._through_string(text, at)
            else:
                at = _end(_BETWEEN, text, at)
                if at == len(text):
                    break
                if text[at] not in '"{}[]':
                    return at
                self._bracket_or_quote(text[at])
                at += 1
        return at

    def _through_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        at = _end(_STRING_CHARS, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            self.is_complete = self._depth == 0
        return at + 1

    def _bracket_or_quote(self, char: str) -> None:
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.is_complete = self._depth == 0


def opened_object() -> JsonScan:
    """Return a scan of an object whose first brace was taken already."""
    scan = JsonScan("{")
    scan.end_in("{", 0)
    return scan


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    assert found is not None  # every pattern matches the empty text
    return found.end()


# Rewrites the arguments of a call, while they come, to the text of one JSON object.

MAX_ARGUMENT_DEPTH = 128  # Open brackets; half of what the server takes back in a body.
_CONTROLS = tuple(map(chr, range(32)))
_IN_STRING = Markers('"', "\\", *_CONTROLS)
_SCALAR = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-._")
_JSON_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Models that were trained on Python write these.
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]"}
_UNKNOWN = "\\ufffd"  # Stands for half of a surrogate pair.


@dataclass(slots=True)
class _Level:
    """An open object or list, with the keys so far; a list has none."""

    closing: str
    names: set[str]
    has_elements: bool = False


class ObjectText:
    """Passes valid JSON on as it is written, and mends the rest.

    - Control characters in strings are escaped, escapes that JSON lacks lose their meaning, and words of Python become
      those of JSON.
    - Of two values with one key the first counts, because a stream has sent it.
    - A string that holds an object counts as that object, and any other value as an object without keys.
    - Text after the object, or after a fault in it, is dropped.

    All text so far is the beginning of one object, whichever way the arguments go on.

    Attributes:
        is_complete: Whether the object has ended.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._input = ParserInput()
        self._shown: list[str] = []
        self._open: list[_Level] = []
        self._in_string = False
        self._muted_at = 0  # Depth of the element that is dropped; 0 means none.
        self._other: list[str] = []  # Arguments that are no object.
        self._run = self._steps()

    @property
    def is_open(self) -> bool:
        """Whether the object has begun and not ended."""
        return bool(self._open)

    def feed(self, text: str) -> str:
        """Return the text that is certain after the next piece of the arguments."""
        self._input.push(text)
        next(self._run, None)
        return self._given()

    def close(self) -> str:
        """Return the text that completes the object."""
        if self.is_complete:
            return ""
        self._input.end()
        next(self._run, None)
        if not self.is_complete:
            self._shown.append(self._ending())
            self.is_complete = True
        return self._given()

    def _ending(self) -> str:
        if not self._open:
            value = decoded("".join(self._other))
            return _inner_object(value) if isinstance(value, str) else "{}"
        kept = self._open[: self._muted_at] if self._muted_at else self._open
        quote = '"' if self._in_string and not self._muted_at else ""
        return quote + "".join(level.closing for level in reversed(kept))

    def _given(self) -> str:
        text = "".join(self._shown)
        self._shown.clear()
        return text

    def _show(self, text: str) -> None:
        if not self._muted_at:
            self._shown.append(text)

    # --- steps

    def _steps(self) -> Steps[None]:
        yield from self._input.skip_space()
        if (yield from self._input.take_if("{")):
            try:
                self._push("{")
                while self._open:
                    yield from self._element()
                self.is_complete = True
            except BrokenCallError:
                pass  # `close` ends what is open.
        else:
            while (yield from self._input.next_char()):
                self._other.append(self._input.all_at_hand())
        while (yield from self._input.next_char()):
            self._input.all_at_hand()

    def _element(self) -> Steps[None]:
        """Read the next element of the innermost object or list, or its end."""
        level = self._open[-1]
        lead = yield from self._input.skip_space()
        if level.has_elements and (yield from self._input.take_if(",")):
            lead += "," + (yield from self._input.skip_space())
        elif level.has_elements and (yield from self._input.next_char()) != level.closing:
            raise BrokenCallError
        if (yield from self._input.take_if(level.closing)):
            self._pop(lead.replace(",", ""))
            return
        if level.closing == "}":
            key = yield from self._key()
            lead += key
            if (name := json.loads(key.rpartition(":")[0])) in level.names:
                self._muted_at = self._muted_at or len(self._open)
            level.names.add(name)
        yield from self._value(lead)

    def _key(self) -> Steps[str]:
        """Return the text up to a value: its key, and the colon with the space around it."""
        pieces = ['"']
        yield from self._expect('"')
        yield from self._string(pieces.append)
        pieces.append((yield from self._input.skip_space()))
        yield from self._expect(":")
        pieces.append(":" + (yield from self._input.skip_space()))
        if not (yield from self._input.next_char()):
            raise BrokenCallError
        return "".join(pieces)

    def _value(self, lead: str) -> Steps[None]:
        level = self._open[-1]
        if opening := (yield from self._input.take_if("{", "[")):
            if len(self._open) == MAX_ARGUMENT_DEPTH:
                raise BrokenCallError
            level.has_elements = True
            self._show(lead)
            self._push(opening)
            return
        if (yield from self._input.take_if('"')):
            self._show(lead + '"')
            self._in_string = True
            yield from self._string(self._show)
            self._in_string = False
        else:
            self._show(lead + (yield from self._scalar()))
        level.has_elements = True
        self._unmute()

    def _push(self, opening: str) -> None:
        self._show(opening)
        self._open.append(_Level(_CLOSING[opening], set()))

    def _pop(self, lead: str) -> None:
        self._show(lead + self._open.pop().closing)
        self._unmute()

    def _unmute(self) -> None:
        if self._muted_at == len(self._open):
            self._muted_at = 0

    def _scalar(self) -> Steps[str]:
        text = ""
        while (char := (yield from self._input.next_char())) and char in _SCALAR:
            text += yield from self._input.take_if(char)
        if not text:
            raise BrokenCallError
        text = _WORDS.get(text, text)
        return text if _JSON_SCALAR.fullmatch(text) else json.dumps(text)

    def _string(self, show: Show) -> Steps[None]:
        """Show the rest of a string, with its closing quote."""
        while (mark := (yield from self._input.until(_IN_STRING, show))) != '"':
            if not mark:
                raise BrokenCallError
            if mark == "\\":
                yield from self._escape(show)
            else:
                show(json.dumps(mark)[1:-1])
        show(mark)

    def _escape(self, show: Show) -> Steps[None]:
        char = yield from self._input.next_char()
        if not char:
            raise BrokenCallError
        yield from self._input.take_if(char)
        if char == "u":
            yield from self._unicode(show)
        elif char in '"\\/bfnrt':
            show("\\" + char)
        elif char == "'":
            show(char)
        else:
            show("\\\\" + json.dumps(char, ensure_ascii=False)[1:-1])

    def _unicode(self, show: Show) -> Steps[None]:
        code = yield from self._hex()
        while _is_half(code, 0xD800) and (yield from self._input.take_if("\\u")):
            second = yield from self._hex()
            if _is_half(second, 0xDC00):
                show(f"\\u{code}\\u{second}")
                return
            show(_UNKNOWN)
            code = second
        if len(code) < 4:
            show(f"\\\\u{code}")
        else:
            show(_UNKNOWN if _is_half(code, 0xD800) or _is_half(code, 0xDC00) else f"\\u{code}")

    def _hex(self) -> Steps[str]:
        code = ""
        while len(code) < 4 and (char := (yield from self._input.next_char())) and char in _HEX:
            code += yield from self._input.take_if(char)
        return code

    def _expect(self, char: str) -> Steps[None]:
        if not (yield from self._input.take_if(char)):
            raise BrokenCallError


def _inner_object(text: str) -> str:
    inner = ObjectText()
    shown = inner.feed(text)
    return (shown + inner.close()) if text.lstrip().startswith("{") else "{}"


def _is_half(code: str, first: int) -> bool:
    """Whether a code of four digits is one of the 1,024 halves of surrogate pairs from `first` on."""
    return len(code) == 4 and first <= int(code, 16) < first + 0x400
