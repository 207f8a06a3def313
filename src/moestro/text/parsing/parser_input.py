"""Text that arrives in pieces of any size, for parsers that are written as generators.

A step of a parser is a generator that yields where it needs more text. Each character is looked at a bounded number of
times, so that the time is linear in the length of the answer, however it is split.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Show = Callable[[str], None]

NAME_LIMIT = 256  # characters of a tool's name, a key or a header; longer ones are broken output


class BrokenCallError(Exception):
    """The text is no call of a tool, or the answer ended within one."""


_SPACE = re.compile(r"\s*")


class Markers:
    """Strings that end a stretch of text. None of them begins with another one.

    Attributes:
        longest: Length of the longest one, in characters.
    """

    def __init__(self, *markers: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self.longest = max(map(len, markers))
        self._beginnings = frozenset(marker[:n] for marker in markers for n in range(1, len(marker)))

    def find(self, text: str, start: int, end: int = sys.maxsize) -> re.Match[str] | None:
        """Return the first marker in `text` from `start` on, up to `end`."""
        return self._pattern.search(text, start, end)

    def num_held(self, text: str, start: int) -> int:
        """Return the length of the longest end of `text`, from `start` on, with which a marker may begin."""
        most = min(len(text) - start, self.longest - 1)
        return next((n for n in range(most, 0, -1) if text[-n:] in self._beginnings), 0)


class Scan(Protocol):
    """Finds the end of something in text that comes in pieces."""

    is_complete: bool

    def end_in(self, text: str, start: int) -> int:
        """Return the index behind the characters from `start` on that belong to it."""
        ...


class ParserInput:
    """Text of an answer that a parser has not taken yet.

    Attributes:
        has_ended: Whether no more text follows; then no step yields.
        was_cut: Whether a limit ended the answer, and not the model.
    """

    def __init__(self) -> None:
        self.has_ended = self.was_cut = False
        self._text = ""
        self._at = 0
        self._record: list[str] | None = None
        self._mark: int | None = None  # where the record begins, if all of it is still in the text

    def push(self, text: str) -> None:
        """Append the next piece."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self._mark = None

    def end(self, *, is_cut: bool = False) -> None:
        """End the text. What a step of a cut text still holds back is the beginning of a tag, and is dropped."""
        self.has_ended, self.was_cut = True, is_cut
        if is_cut:
            self._text = self._text[: self._at]

    @property
    def num_waiting(self) -> int:
        """Characters that have come and are not certain yet: not taken, or kept because they may come back."""
        return len(self._text) - self._at + sum(map(len, self._record or ()))

    # --- taken text, which comes back if it turns out to be no call

    def record(self) -> None:
        """Begin to keep the text that is taken."""
        self._record, self._mark = [], self._at

    def forget(self) -> None:
        """Drop the kept text, and keep no more."""
        self._record = None

    @property
    def is_recording(self) -> bool:
        """Whether taken text is kept."""
        return self._record is not None

    @property
    def has_text(self) -> bool:
        """Whether the kept text, or text that was not taken yet, has more than white space."""
        return any(map(str.strip, self._record or ())) or bool(self._text[self._at :].strip())

    def restore(self) -> None:
        """Put the kept text back, so that it is taken again, and keep no more."""
        if self._mark is not None:  # A copy for each marker would take a time that grows with the square.
            self._at = self._mark
        elif self._record:
            self._text = "".join(self._record) + self._text[self._at :]
            self._at = 0
        self._record = None

    def recorded(self) -> str:
        """Return the kept text, and keep no more."""
        pieces, self._record = self._record, None
        return "".join(pieces or ())

    # --- steps

    def next_char(self) -> Steps[str]:
        """Return the next character without taking it; "" at the end of the answer."""
        while self._at == len(self._text) and not self.has_ended:
            yield
        return self._text[self._at : self._at + 1]

    def all_at_hand(self) -> str:
        """Take all text that has come."""
        return self._take(len(self._text))

    def skip_space(self) -> Steps[str]:
        """Take white space, and return it."""
        pieces: list[str] = []
        while (yield from self.next_char()).isspace():
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            pieces.append(self._take(found.end()))
        return "".join(pieces)

    def items(self, item: Callable[[], Steps[None]]) -> Steps[None]:
        """Take the rest of a list, `item, item, ...]`, whose items `item` takes.

        Raises:
            BrokenCallError: The list does not end with a bracket.
        """
        while True:
            yield from self.skip_space()
            yield from item()
            self.record()  # What follows may be no call.
            yield from self.skip_space()
            if not (yield from self.take_if(",")):
                break
        if not (yield from self.take_if("]")):
            raise BrokenCallError

    def take_if(self, *literals: str) -> Steps[str]:
        """Take the literal that follows, as soon as it is certain; "" if none does. None may begin with another one."""
        while True:
            for literal in literals:
                if self._text.startswith(literal, self._at):
                    return self._take(self._at + len(literal))
            num_chars = len(self._text) - self._at
            rest = self._text[self._at :] if num_chars < max(map(len, literals)) else None
            if self.has_ended or rest is None or not any(literal.startswith(rest) for literal in literals):
                return ""
            yield

    def until(self, markers: Markers, show: Show) -> Steps[str]:
        """Show the text before the next marker as it comes, and take the marker; "" at the end of the answer."""
        while True:
            if found := markers.find(self._text, self._at):
                if found.start() > self._at:
                    show(self._take(found.start()))
                return self._take(found.end())
            held = 0 if self.has_ended else markers.num_held(self._text, self._at)
            if len(self._text) - held > self._at:
                show(self._take(len(self._text) - held))
            if self.has_ended:
                return ""
            yield

    def short_until(self, markers: Markers) -> Steps[tuple[str, str]]:
        """Return a short text and the marker after it. Nothing is taken of any other text.

        Raises:
            BrokenCallError: The text is longer than `NAME_LIMIT`, or the answer ends before a marker.
        """
        while True:
            limit = self._at + NAME_LIMIT + markers.longest
            if found := markers.find(self._text, self._at, limit):
                if found.start() - self._at > NAME_LIMIT:
                    raise BrokenCallError
                text = self._text[self._at : found.start()]
                self._take(found.end())
                return text, found.group()
            if self.has_ended or len(self._text) >= limit:
                raise BrokenCallError
            yield

    def scanned(self, scan: Scan, show: Show) -> Steps[None]:
        """Show and take what `scan` accepts, until it is complete.

        Raises:
            BrokenCallError: A character does not belong to it, or the answer ends within it.
        """
        while not scan.is_complete:
            if not (yield from self.next_char()):
                raise BrokenCallError
            end = scan.end_in(self._text, self._at)
            is_broken = end < len(self._text) and not scan.is_complete
            if end > self._at:
                show(self._take(end))
            if is_broken:
                raise BrokenCallError

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(text)
        return text
