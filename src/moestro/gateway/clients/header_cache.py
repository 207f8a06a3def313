"""Cache of parsed message heads.

Clients and engines send the same heads again and again, apart from the length. Such a head is parsed once by llhttp and
later only compared. Messages that differ, or arrive in several reads, are parsed. So the cache never interprets HTTP.
"""

from __future__ import annotations

import re
from typing import Generic, TypeVar

_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?(\d{1,9})(?=\r\n)")
_END = b"\r\n\r\n"
_BLANK = (b"\r", b"\n")  # a parser skips these before a message, so the first `_END` may not end the head
_MAX_KEY_BYTES = 4096  # longer heads are not cached

Head = TypeVar("Head")


class HeaderCache(Generic[Head]):
    """Parsed heads by their bytes, without the digits of their length.

    Heads with and without a length have separate tables, because the key alone cannot tell an empty length from a
    removed one.

    Args:
        max_known: limit of cached heads in each table.
    """

    def __init__(self, max_known: int) -> None:
        self._max_known = max_known
        self._with_length: dict[bytes, Head] = {}
        self._without: dict[bytes, Head] = {}

    def find(self, data: bytes) -> tuple[Head, int, int | None] | None:
        """Return the cached head of `data`, the start of its body, and its length if given; None means unknown."""
        if data.startswith(_BLANK):
            return None
        end = data.find(_END) + len(_END)
        found = _LENGTH.search(data, 0, end)
        if found is None:
            head = self._without.get(data[:end])
            return None if head is None else (head, end, None)
        start, stop = found.span(1)
        head = self._with_length.get(data[:start] + data[stop:end])
        return None if head is None else (head, end, int(data[start:stop]))

    def learn(self, data: bytes, head: Head, *, has_length: bool) -> None:
        """Cache `head`, which the parser has read from the complete head at the start of `data`."""
        if data.startswith(_BLANK):
            return
        end = data.find(_END) + len(_END)
        found = _LENGTH.search(data, 0, end)
        if not len(_END) <= end <= _MAX_KEY_BYTES or (found is not None) != has_length:
            return  # the head is too long, or writes its length in an unusual form
        if found is None:
            heads, key = self._without, data[:end]
        else:
            heads, key = self._with_length, data[: found.start(1)] + data[found.end(1) : end]
        if len(heads) >= self._max_known:
            heads.clear()  # heads in use return at once
        heads[key] = head
