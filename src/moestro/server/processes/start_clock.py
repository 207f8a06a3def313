"""Measures the phases of a start, without gaps."""

from __future__ import annotations

import time
from collections.abc import Sequence

from moestro.web.ports.startup import process_age_s
from moestro.wire.messages import Phase


class StartClock:
    """Records consecutive phases since the process started.

    Attributes:
        phases: Phases so far; their sum is the time from the start of the process to the last mark.
    """

    def __init__(self) -> None:
        self._since = time.monotonic() - process_age_s()
        self.phases: list[Phase] = []

    def mark(self, name: str) -> None:
        """End the phase that began at the last mark, and call it `name`."""
        now = time.monotonic()
        self.phases.append(Phase(name, now - self._since))
        self._since = now

    def mark_engines(self, phases: Sequence[Sequence[Phase]]) -> None:
        """Add the phases of the slowest engine. The next phase includes the time that messages took to arrive."""
        slowest = max(phases, key=lambda own: sum(phase.seconds for phase in own))
        self.phases.extend(slowest)
        self._since += sum(phase.seconds for phase in slowest)
