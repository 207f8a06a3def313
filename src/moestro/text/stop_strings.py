"""Stop strings, found wherever token borders fall."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Lets text through until one of `stops` is complete, and holds back what may be the beginning of one.

    The stop that is complete first wins, and the longer of two that end together: what would be found by looking after
    every character, so the pieces in which the text comes make no difference.

    Args:
        stops: non-empty strings; none: everything goes through at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._num_unseen = 0  # characters at the beginning of `_held` in which a stop may not end
        self.found: str | None = None

    def push(self, text: str, *, look: bool = True) -> str:
        """What of `text`, and of what was held back, can be shown. Once `found` is set, nothing more comes.

        Args:
            look: False: no stop ends in `text`, though one may begin there.
        """
        if self.found is not None:
            return ""
        self._held += text
        if not look:
            self._num_unseen = len(self._held)
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := self._find(stop)) >= 0]
        if matches:
            _, at, self.found = min(matches)
            shown, self._held = self._held[:at], ""
            return shown
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        self._num_unseen = max(0, self._num_unseen - len(shown))
        return shown

    def _find(self, stop: str) -> int:
        """Where the first `stop` that ends behind the unseen begins; -1: nowhere."""
        return self._held.find(stop, max(0, self._num_unseen - len(stop) + 1))

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins; less than `stop` itself."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
