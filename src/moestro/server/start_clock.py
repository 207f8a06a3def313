"""Where the time of a start went, every second of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from moestro.web.startup import process_age_s
from moestro.wire.messages import Phase


class StartClock:
    """Phases of the start, one after the other since the process began.

    Attributes:
        phases: so far; their sum is the time from the start of the process to the last mark.
    """

    def __init__(self) -> None:
        self._since = time.monotonic() - process_age_s()
        self.phases: list[Phase] = []

    def mark(self, name: str) -> None:
        """What began at the last mark is over, and is called `name`."""
        now = time.monotonic()
        self.phases.append(Phase(name, now - self._since))
        self._since = now

    def mark_engines(self, phases: Sequence[Sequence[Phase]]) -> None:
        """Every engine is ready: the phases of the slowest one, and what is left for messages to arrive."""
        slowest = max(phases, key=lambda own: sum(phase.seconds for phase in own))
        self.phases.extend(slowest)
        self._since += sum(phase.seconds for phase in slowest)
