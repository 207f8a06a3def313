"""Finds stop strings, wherever token borders fall."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_KEPT_TABLES = 64  # stop strings whose tables are kept for further choices of the same request; some kB each


class StopFinder:
    """Passes text on until one of `stops` is complete, and holds back a possible beginning of one.

    The stop that completes first wins; of two that complete together, the longer. The result equals a search after
    every character, so the split of the text into pieces makes no difference. Each character is looked at a bounded
    number of times for each stop, whatever the stops are.

    Args:
        stops: non-empty strings; without any, all text passes at once.
        keeps_stop: whether the stop string itself is shown.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._searches = [_StopSearch(stop) for stop in stops]
        self._keeps_stop = keeps_stop
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, look: bool = True) -> str:
        """Return the part of the held-back text and `text` that can be shown; "" once `found` is set.

        Args:
            look: whether a stop may end in `text`; one may begin there in any case.
        """
        if not self._searches:
            return text
        if self.found is not None:
            return ""
        ends = [(end, search.stop) for search in self._searches if (end := search.feed(text, look=look))]
        num_held, self._held = len(self._held), self._held + text
        if ends:
            end, self.found = min(ends, key=_first_and_longest)
            end += num_held
            shown, self._held = self._held[: end if self._keeps_stop else end - len(self.found)], ""
            return shown
        certain = len(self._held) - max(search.num_matched for search in self._searches)
        shown, self._held = self._held[:certain], self._held[certain:]
        return shown

    def completes(self, early: str, late: str) -> bool:
        """Return whether a stop would end in `late`, if `early` and then `late` came next; nothing is taken."""
        return any(search.would_end(early, late) for search in self._searches)

    def flush(self) -> str:
        """Return the held-back text at the end of a stretch of text, within which alone a stop may lie."""
        shown, self._held = self._held, ""
        for search in self._searches:
            search.num_matched = 0
        return shown


class _StopSearch:
    """Search for one stop in text that comes in pieces: Knuth, Morris and Pratt's.

    Attributes:
        num_matched: length of the longest end of the text with which the stop may begin.
    """

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def feed(self, text: str, *, look: bool) -> int:
        """Return the index in `text` behind the first complete stop; 0 if there is none.

        Args:
            look: as for `StopFinder.push`.
        """
        stop, borders, matched, at = self.stop, self._borders, self.num_matched, 0
        while at < len(text):
            if not matched:  # most text
                at = text.find(stop[0], at)
                if at < 0:
                    break
            char = text[at]
            while matched and stop[matched] != char:
                matched = borders[matched]
            matched += stop[matched] == char
            at += 1
            if matched == len(stop):
                if look:
                    return at
                matched = borders[matched]
        self.num_matched = matched
        return 0

    def would_end(self, early: str, late: str) -> bool:
        """Return whether the stop would end in `late`, behind `early`."""
        before = self.num_matched
        self.feed(early, look=False)
        ends = self.feed(late, look=True) > 0
        self.num_matched = before
        return ends


def _first_and_longest(found: tuple[int, str]) -> tuple[int, int]:
    end, stop = found
    return end, -len(stop)


@lru_cache(_KEPT_TABLES)
def _borders(stop: str) -> tuple[int, ...]:
    """For each n, the length of the longest proper beginning of stop[:n] that is also its end; 0 for n = 0."""
    borders = [0, 0]
    for char in stop[1:]:
        border = borders[-1]
        while border and stop[border] != char:
            border = borders[border]
        borders.append(border + (stop[border] == char))
    return tuple(borders)
