"""Limits the rate of log lines that peers cause, so that no peer can fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

INTERVAL_S = 60.0  # Interval of one kind's lines: short enough to notice, long enough for a log kept for years.


@dataclass(slots=True)
class _Kind:
    """State of one kind of lines.

    Attributes:
        due_s: Time from which the next line may be written.
        num_left_out: Number of lines left out since the last one.
    """

    due_s: float = 0.0
    num_left_out: int = 0


class LogLimit:
    """Writes at most one line per kind and interval, and reports the number of omitted lines in the next one.

    Only the event loop's thread may use it. The first line of a kind is written at once.

    Args:
        logger: Destination of the lines.
        interval_s: Seconds between two lines of one kind.
        clock: Callable that returns monotonic seconds.
    """

    def __init__(
        self, logger: logging.Logger, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def warning(self, kind: str, text: str) -> None:
        """Log `text`, unless a line of this kind was logged less than an interval ago.

        Args:
            kind: Name of the lines that limit each other: a constant, never a peer's text, as kinds are never removed.
            text: The line. A peer's text in it must be short and printable.
        """
        self._log(logging.WARNING, kind, text)

    def info(self, kind: str, text: str) -> None:
        """Log `text` like `warning`, with level INFO."""
        self._log(logging.INFO, kind, text)

    def error(self, kind: str, text: str) -> None:
        """Log `text` like `warning`, with level ERROR."""
        self._log(logging.ERROR, kind, text)

    def _log(self, level: int, kind: str, text: str) -> None:
        now_s = self._clock()
        state = self._kinds.get(kind)
        if state is None:
            state = self._kinds[kind] = _Kind(due_s=now_s)
        if now_s < state.due_s:
            state.num_left_out += 1
            return
        left_out = f" (and {state.num_left_out:,} more since the last such line)" if state.num_left_out else ""
        self._kinds[kind] = _Kind(due_s=now_s + self._interval_s)
        self._logger.log(level, "%s%s", text, left_out)
