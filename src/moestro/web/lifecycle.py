"""How a server process ends: in order where it can, and in any case."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvloop

from moestro.errors import ConfigError

FAREWELL_S = 10.0  # beyond the grace period: answers reach their clients, engines leave, files are closed
_ALARM_S = 5.0  # beyond that the kernel ends the process, if the interpreter itself hangs
_JOIN_S = 1.0  # for threads to end once the event loop has
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STDERR = 2


class Ending:
    """Runs a server until SIGTERM or SIGINT, and sees to it that the process ends then, whatever its threads do.

    The first signal while the server serves sets `wanted`: running requests have `grace_s` to finish. A second one,
    or one during the start, cancels the server. The process has `FAREWELL_S` beyond that. Then it ends at once, with
    the status that it would have had: neither a thread that hangs, nor a blocked event loop, nor a stderr that nobody
    reads keeps it.

    Args:
        grace_s: seconds that running requests have to finish.

    Attributes:
        wanted: set when the server is to stop serving.
        is_serving: set by the server once it takes requests.
        before_exit: called, on a thread of its own, before the process is ended by force.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._num_signals = 0
        self._error: BaseException | None = None
        self._timers: list[threading.Timer] = []
        self._ends_at_s = float("inf")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Task[None] | None = None
        self.wanted = asyncio.Event()
        self.is_serving = False
        self.before_exit: list[Callable[[], None]] = []

    def run(self, server: Coroutine[Any, Any, None]) -> None:
        """Run `server` to its end on an event loop of its own; what it raises, but for a cancellation, is raised."""
        before, alarm = set(threading.enumerate()), signal.getitimer(signal.ITIMER_REAL)
        # Not the event loop's signal handlers: these are called even while it is blocked.
        handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            with (
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
                contextlib.suppress(asyncio.CancelledError),
            ):
                runner.run(self._run(server))
        finally:
            if self._join(set(threading.enumerate()) - before):
                signal.setitimer(signal.ITIMER_REAL, *alarm)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def farewell(self) -> None:
        """Nothing is served any more: the process has `FAREWELL_S` from now on. An exception in flight is its cause."""
        self._error = self._error or sys.exception()
        self._end_within(FAREWELL_S)

    async def _run(self, server: Coroutine[Any, Any, None]) -> None:
        self._loop, self._server = asyncio.get_running_loop(), asyncio.current_task()
        try:
            await server
        finally:
            self.farewell()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Called between any two instructions of the main thread: the event loop does the rest."""
        self._num_signals += 1
        is_patient = self.is_serving and self._num_signals == 1
        self._end_within(FAREWELL_S + (self._grace_s if is_patient else 0.0))
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: the process is about to end
                self._loop.call_soon_threadsafe(self._stop_patiently if is_patient else self._stop)

    def _stop_patiently(self) -> None:
        self.wanted.set()

    def _stop(self) -> None:
        if self._server is not None:
            self._server.cancel()

    def _end_within(self, seconds: float) -> None:
        """End the process after `seconds` unless it is to end sooner."""
        ends_at_s = time.monotonic() + seconds
        if ends_at_s >= self._ends_at_s:
            return
        self._ends_at_s = ends_at_s
        signal.setitimer(signal.ITIMER_REAL, seconds + _ALARM_S)
        timer = threading.Timer(seconds, self._leave)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _join(self, threads: set[threading.Thread]) -> bool:
        """Wait for the threads that the interpreter would wait for. If one hangs, the process ends without it.

        Returns:
            Whether all have ended, so that nothing need be ended by force.
        """
        ends_at_s = time.monotonic() + _JOIN_S
        waited_for = [thread for thread in threads if not thread.daemon]
        for thread in waited_for:
            thread.join(max(0.0, ends_at_s - time.monotonic()))
        if any(thread.is_alive() for thread in waited_for):
            self._end_within(_JOIN_S)
            return False
        for timer in self._timers:
            timer.cancel()
        return True

    def _leave(self) -> None:
        """End the process now."""
        names = ", ".join(sorted(thread.name for thread in threading.enumerate() if not thread.daemon))
        _say(f"moestro: ended without waiting any longer for its threads: {names}")
        if isinstance(self._error, Exception):
            _say(f"moestro: {self._error}")
        for each in self.before_exit:
            with contextlib.suppress(Exception):
                each()
        os._exit(_status(self._error))


def _status(error: BaseException | None) -> int:
    """The exit status, as the command has it; a cancellation is the answer to a signal."""
    if isinstance(error, ConfigError):
        return 2
    return 1 if isinstance(error, Exception) else 0


def _say(text: str) -> None:
    """Write a short line to stderr, unless that would block."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [_STDERR], [], 0)[1]:
            os.write(_STDERR, text.encode()[:511] + b"\n")  # a pipe that is writable takes so much at once
