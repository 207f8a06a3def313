"""An asyncio event loop on virtual time: where it would wait for a timer, its clock jumps to the timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.SelectSelector):
    """Looks for events without waiting, and passes the time of the wait on."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0

    def select(self, timeout: float | None = None) -> list:
        events = super().select(0)
        if not events:
            assert timeout is not None, "nothing will ever happen"
            self.now_ns += round(timeout * 1e9)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at time 0."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_ns / 1e9

    def now_ns(self) -> int:
        return self._clock.now_ns


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
