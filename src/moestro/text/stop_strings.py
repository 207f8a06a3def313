"""Finds stop strings, wherever token borders fall."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Passes text on until one of `stops` is complete, and holds back a possible beginning of one.

    The stop that completes first wins; of two that complete together, the longer. The result equals a search after
    every character, so the split of the text into pieces makes no difference.

    Args:
        stops: non-empty strings; without any, all text passes at once.
        keeps_stop: whether the stop string itself is shown.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._held = ""
        self._num_unseen = 0  # leading characters of `_held` in which no stop may end
        self.found: str | None = None

    def push(self, text: str, *, look: bool = True) -> str:
        """Return the part of the held-back text and `text` that can be shown; "" once `found` is set.

        Args:
            look: whether a stop may end in `text`; one may begin there in any case.
        """
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        self._held += text
        if not look:
            self._num_unseen = len(self._held)
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := self._find(stop)) >= 0]
        if matches:
            end, at, self.found = min(matches)
            shown, self._held = self._held[: end if self._keeps_stop else at], ""
            return shown
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        self._num_unseen = max(0, self._num_unseen - len(shown))
        return shown

    def _find(self, stop: str) -> int:
        """Index of the first `stop` that ends behind the unseen characters; -1 if there is none."""
        return self._held.find(stop, max(0, self._num_unseen - len(stop) + 1))

    def flush(self) -> str:
        """Return the held-back text at the end of the answer."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
