"""JSON texts of models and clients, valid or not: decodes them, and finds the end of a value that comes in pieces."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from moestro.core.clients import is_too_deep

# Decodes JSON texts of models and clients, valid or not.


def decoded(text: str) -> Any:
    """Return the value of a JSON text; `msgspec.UNSET` if it is not valid, or nested too deeply to be passed on."""
    try:
        data = text.encode()
        return msgspec.UNSET if is_too_deep(data) else msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return msgspec.UNSET


# Finds the end of a JSON value while its text comes in pieces, without building the value.

_PLAIN = re.compile(r"[\s0-9A-Za-z+\-.:,]*")  # between strings and brackets
_IN_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]*")


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
            end = _end(_SCALAR, text, start)
            self.is_complete = end < len(text)
            return end
        at = start
        while at < len(text) and not self.is_complete:
            if self._in_string:
                at = self._through_string(text, at)
            else:
                at = _end(_PLAIN, text, at)
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
        at = _end(_IN_STRING, text, at)
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
