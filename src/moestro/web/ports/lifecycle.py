"""The life of a server process: signals, the drain of running requests, and an end within a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvloop

from moestro.errors import ConfigError
from moestro.web.ports.faults import Faults

# First steps of a server process: sets up the log, and finds out when the process started.


def set_up_logging(level: str) -> None:
    """Log lines of `level` and above to stderr, each with its time.

    Args:
        level: Name of a level of `logging`, in any case.
    """
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")


def process_age_s() -> float:
    """Return the seconds since this process started, imports included, or its CPU time if the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # Since boot. The name in field 2 may hold anything.
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, ValueError, IndexError):
        return time.process_time()


logger = logging.getLogger(__name__)

EXIT_S = 10.0  # Time beyond the grace period: responses reach clients, engines exit, files are closed.
RESPONSE_FLUSH_S = 1.0  # Time for complete responses to reach their clients.
_ALARM_S = 5.0  # Time beyond that, after which the kernel ends the process if the interpreter itself hangs.
_JOIN_S = 1.0  # Time for threads to end once the event loop has ended.
_POLL_S = 0.01
# The event loop waits so long for a thread that prepares a request, at each turn; Python's 5 ms are many decode steps.
_SWITCH_S = 0.0005
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STDERR = 2


def run_server(
    server: Callable[[Lifecycle], Coroutine[Any, Any, None]], *, log_level: str, shutdown_timeout_s: float
) -> None:
    """Set up logging and run `server` until SIGTERM or SIGINT; a second signal ends the wait for running requests.

    Raises:
        ConfigError: The settings cannot be honoured; the text says what to do.
    """
    set_up_logging(log_level)
    sys.setswitchinterval(_SWITCH_S)
    lifecycle = Lifecycle(shutdown_timeout_s)
    lifecycle.run(server(lifecycle))


class Lifecycle:
    """Runs a server until SIGTERM or SIGINT, and then ends the process even if a thread hangs.

    The first signal while the server serves sets `stop_requested`: running requests have `shutdown_timeout_s` to
    finish. A second signal, or one during the start, cancels the server. The process has `EXIT_S` beyond that. Then it
    exits at once, with the status that it would have had. A thread that hangs, a blocked event loop or a full stderr
    pipe cannot delay this.

    Args:
        shutdown_timeout_s: Seconds that running requests have to finish.
        faults: Faults of the process's connections; None makes new ones.

    Attributes:
        faults: Faults of the process's connections, also those that only the event loop notices.
        stop_requested: Set when the server must stop serving.
        is_serving: Set by the server once it takes requests.
        before_exit: Called on a separate thread before the process is ended by force.
    """

    def __init__(self, shutdown_timeout_s: float, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self._shutdown_timeout_s = shutdown_timeout_s
        self._num_signals = 0
        self._error: BaseException | None = None
        self._timers: list[threading.Timer] = []
        self._ends_at_s = float("inf")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Task[None] | None = None
        self.stop_requested = asyncio.Event()
        self.is_serving = False
        self.before_exit: list[Callable[[], None]] = []

    def run(self, server: Coroutine[Any, Any, None]) -> None:
        """Run `server` to its end on a new event loop, and raise what it raises, except for a cancellation."""
        before, alarm = set(threading.enumerate()), signal.getitimer(signal.ITIMER_REAL)
        # The event loop's signal handlers would not run while the loop is blocked; these do.
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

    @contextlib.contextmanager
    def ended_by_kernel(self) -> Iterator[None]:
        """Let the kernel end the process at a signal while the block lasts, for native code that holds the interpreter.

        Python's handlers would run only after that code. The status is that of the signal, nothing is cleaned up, and
        other processes notice the end as they notice a crash. Call it on the main thread.
        """
        handlers = {number: signal.signal(number, signal.SIG_DFL) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    async def drain(self, num_running: Callable[[], int]) -> None:
        """Wait until no request is running, or until the shutdown timeout."""
        if num := num_running():
            logger.info("stopping: %d requests have %g s to finish", num, self._shutdown_timeout_s)
        await wait_until(lambda: not num_running(), self._shutdown_timeout_s)

    def begin_exit(self) -> None:
        """Limit the process to `EXIT_S` from now on. An exception in flight becomes the cause of the exit."""
        self._error = self._error or sys.exception()
        self._end_within(EXIT_S)

    async def _run(self, server: Coroutine[Any, Any, None]) -> None:
        self._loop, self._server = asyncio.get_running_loop(), asyncio.current_task()
        self.faults.watch(self._loop)
        try:
            await server
        finally:
            self.begin_exit()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Record the signal and notify the event loop. Runs between any two instructions of the main thread."""
        self._num_signals += 1
        is_graceful = self.is_serving and self._num_signals == 1
        self._end_within(EXIT_S + (self._shutdown_timeout_s if is_graceful else 0.0))
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: the process is about to end.
                self._loop.call_soon_threadsafe(self._stop_gracefully if is_graceful else self._stop)

    def _stop_gracefully(self) -> None:
        self.stop_requested.set()

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
        timer = threading.Timer(seconds, self._exit_now)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _join(self, threads: set[threading.Thread]) -> bool:
        """Wait for the threads that the interpreter would wait for. If one hangs, the process ends without it.

        Returns:
            Whether all threads have ended, so that no forced exit is needed.
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

    def _exit_now(self) -> None:
        names = ", ".join(sorted(thread.name for thread in threading.enumerate() if not thread.daemon))
        _say(f"moestro: ended without waiting any longer for its threads: {names}")
        if isinstance(self._error, Exception):
            _say(f"moestro: {self._error}")
        for each in self.before_exit:
            with contextlib.suppress(Exception):
                each()
        os._exit(_exit_status(self._error))


def stop_with(lifeline: int) -> None:
    """Stop this process like SIGTERM once the other end of a pipe is closed.

    Args:
        lifeline: End of the pipe for reading.
    """
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(lifeline)
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(lifeline, stop)


async def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Return once `condition` holds, or after `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - the conditions are plain state of many objects
                await asyncio.sleep(_POLL_S)


def _exit_status(error: BaseException | None) -> int:
    """Return the exit status that the command line would return; a cancellation is the response to a signal."""
    if isinstance(error, ConfigError):
        return 2
    return 1 if isinstance(error, Exception) else 0


def _say(text: str) -> None:
    """Write a short line to stderr, unless that would block."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [_STDERR], [], 0)[1]:
            os.write(_STDERR, text.encode()[:511] + b"\n")  # A pipe that is writable takes this much at once.


# Measures how long this process did not run. Has no clock: callers pass the time.


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES = 64 << 20
_MAPPED_BYTES = 4 << 20


def keep_freed_memory() -> None:
    """Have glibc keep up to 64 MiB of freed memory, for a process that copies bodies of some hundred kB.

    By default it returns the memory of each such body to the system, and the next body has a page fault for each 4 KiB:
    some 500 in a request of 400 kB. Blocks above 4 MiB are still returned at once. What lies below a block in use stays
    until `return_freed_memory`. Another C library stays as it is.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def return_freed_memory() -> None:
    """Have glibc return all freed memory, which takes some 20 ms for 100 MB."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class PauseMeter:
    """Measures how long a periodic task's process was stopped: by a signal, a suspension, or a blocked event loop.

    A task that judges other processes by their silence must exclude that time: their messages have not been read.

    Args:
        now_ns: Present time.
        longest_ns: Longest interval between two ticks that is not a pause.
    """

    def __init__(self, now_ns: int, longest_ns: int) -> None:
        self._last_ns = now_ns
        self._longest_ns = longest_ns

    def tick(self, now_ns: int) -> int:
        """Return the nanoseconds since the last tick beyond `longest_ns`; 0 means no pause."""
        pause_ns = now_ns - self._last_ns - self._longest_ns
        self._last_ns = now_ns
        return max(pause_ns, 0)
