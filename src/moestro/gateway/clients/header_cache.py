"""Cache of parsed message heads.

Clients and engines send the same heads again and again, apart from the length. Such a head is parsed once by llhttp and
later only compared. Messages that differ, or arrive in several reads, are parsed. So the cache never interprets HTTP.
"""

from __future__ import annotations

import re
from typing import Generic, NamedTuple, TypeVar

_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?(\d{1,9})(?=\r\n)")
_VARYING = rb"\r\n%b: ([\x20-\x7e]{0,1024})(?=\r\n)"  # other bytes are left to the parser
_END = b"\r\n\r\n"
_BLANK = (b"\r", b"\n")  # a parser skips these before a message, so the first `_END` may not end the head
_MAX_KEY_BYTES = 4096  # longer heads are not cached

Head = TypeVar("Head")


class KnownHead(NamedTuple, Generic[Head]):
    """A message whose head is cached.

    Attributes:
        head: the cached head.
        begin: start of the body.
        length: length of the body. None means that the head gives none.
        varying: value of the varying header. Empty without it.
    """

    head: Head
    begin: int
    length: int | None
    varying: bytes


class HeaderCache(Generic[Head]):
    """Parsed heads by their bytes, without the digits of their length and without the value of one varying header.

    Heads with and without a length have separate tables, because the key alone cannot tell an empty length from a
    removed one.

    Args:
        max_known: limit of cached heads in each table.
        varying: name of a header whose value differs from message to message, in the letters in which it is sent. None
            means no header.
    """

    def __init__(self, max_known: int, varying: str | None = None) -> None:
        self._max_known = max_known
        self._varying = None if varying is None else re.compile(_VARYING % varying.encode())
        self._with_length: dict[bytes, Head] = {}
        self._without: dict[bytes, Head] = {}

    def find(self, data: bytes) -> KnownHead[Head] | None:
        """Return the cached head of `data`, with what varies; None means unknown."""
        if data.startswith(_BLANK):
            return None
        end = data.find(_END) + len(_END)
        text, varying = data[:end], b""
        if self._varying is not None:
            text, varying = self._cut(text)
        if (head := self._without.get(text)) is not None:
            return KnownHead(head, end, None, varying)
        found = _LENGTH.search(text)
        if found is None:
            return None
        start, stop = found.span(1)
        head = self._with_length.get(text[:start] + text[stop:])
        return None if head is None else KnownHead(head, end, int(text[start:stop]), varying)

    def _cut(self, text: bytes) -> tuple[bytes, bytes]:
        """Return a head without the value of the varying header, and the value."""
        found = None if self._varying is None else self._varying.search(text)
        return (text, b"") if found is None else (text[: found.start(1)] + text[found.end(1) :], found[1])

    def learn(self, data: bytes, head: Head, *, has_length: bool) -> None:
        """Cache `head`, which the parser has read from the complete head at the start of `data`."""
        if data.startswith(_BLANK):
            return
        end = data.find(_END) + len(_END)
        text, _ = self._cut(data[:end])
        found = _LENGTH.search(text)
        if not len(_END) <= end <= _MAX_KEY_BYTES or (found is not None) != has_length:
            return  # the head is too long, or writes its length in an unusual form
        if found is None:
            heads, key = self._without, text
        else:
            heads, key = self._with_length, text[: found.start(1)] + text[found.end(1) :]
        if len(heads) >= self._max_known:
            heads.clear()  # heads in use return at once
        heads[key] = head
