"""Heads seen before. Clients and engines begin their messages alike again and again, but for the length: such a head is
parsed once, by llhttp as every other, and then only compared.

What is not exactly as it was, whole and in one read, is parsed. So nothing here judges HTTP.
"""

from __future__ import annotations

import re
from typing import Generic, TypeVar

_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?(\d{1,9})(?=\r\n)")
_END = b"\r\n\r\n"
_BLANK = (b"\r", b"\n")  # which a parser passes over before a message: the head does not end at the first `_END`
_MAX_KEY_BYTES = 4096  # a longer head is not remembered

Head = TypeVar("Head")


class HeaderCache(Generic[Head]):
    """Heads by their bytes, without the digits of their length.

    Those with a length and those without are kept apart: nothing else tells an empty length from one that was cut out.

    Args:
        max_known: so many of each are remembered.
    """

    def __init__(self, max_known: int) -> None:
        self._max_known = max_known
        self._with_length: dict[bytes, Head] = {}
        self._without: dict[bytes, Head] = {}

    def find(self, data: bytes) -> tuple[Head, int, int | None] | None:
        """The head that `data` begins with, where its body begins, and the length that it tells; None: not known."""
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
        """`data` begins with a whole head, which the parser has read as `head`, with a length in it or without."""
        if data.startswith(_BLANK):
            return
        end = data.find(_END) + len(_END)
        found = _LENGTH.search(data, 0, end)
        if not len(_END) <= end <= _MAX_KEY_BYTES or (found is not None) != has_length:
            return  # it is long, or spells its length in its own way
        if found is None:
            heads, key = self._without, data[:end]
        else:
            heads, key = self._with_length, data[: found.start(1)] + data[found.end(1) : end]
        if len(heads) >= self._max_known:
            heads.clear()  # those in use come back at once
        heads[key] = head
