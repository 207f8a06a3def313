"""Counts what clients do wrong on the ports of a process, and keeps it out of the log. Bugs of ours stay visible."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prometheus_client.core import CounterMetricFamily

# Limits the rate of log lines that peers cause, so that no peer can fill the log.

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


logger = logging.getLogger(__name__)

_AIOHTTP_TASK = "RequestHandler."  # Begins the qualified names of the coroutines of aiohttp's connections.
_SEND_FAILED = "socket.send() raised exception."  # asyncio's and uvloop's warning about a closed connection.


class Port(StrEnum):
    """A port of a process that clients reach."""

    CLIENTS = "clients"
    OPERATORS = "operators"
    PICKER = "picker"
    PEERS = "peers"
    UNKNOWN = "unknown"  # Only the event loop noticed the fault.


class Fault(StrEnum):
    """Kind of a connection's fault."""

    MALFORMED = "malformed"
    HEAD_TOO_LARGE = "head_too_large"
    CLIENT_LEFT = "client_left"
    UNREAD = "unread"
    TOO_MANY = "too_many_connections"
    TOO_MANY_OF_ADDRESS = "too_many_connections_of_address"
    DISPLACED = "displaced"
    OUT_OF_FILES = "out_of_files"
    HANDSHAKE = "tls_handshake"


_SENTENCES = {
    Fault.MALFORMED: "a client sent bytes that are not valid HTTP",
    Fault.HEAD_TOO_LARGE: "a client sent a head, trailers or chunk extensions above the limit",
    Fault.UNREAD: "a client left its answer unread, and its connection was cut",
    Fault.TOO_MANY: "a connection was refused, because the port has its maximum number",
    Fault.TOO_MANY_OF_ADDRESS: "a connection was refused, because its address has its maximum number",
    Fault.DISPLACED: "the port is full, and a connection without a complete request gave way to a new one",
    Fault.OUT_OF_FILES: "no connection could be accepted, because the limit of open files is reached",
    Fault.HANDSHAKE: "a client left in the TLS handshake, spoke plain HTTP, or had no valid certificate",
}


class Faults:
    """Faults of all ports of one process.

    A fault's line has no byte of a request, and is logged at most once a minute for each kind. Clients that leave are
    counted without a line. A bug is logged with its traceback, once a minute for each place in the code; exceptions'
    texts are left out, because they may repeat a request.

    Attributes:
        counts: Number of faults by port and kind.
    """

    def __init__(self) -> None:
        self._log = LogLimit(logger)
        self.counts: Counter[tuple[Port, Fault]] = Counter()

    def count(self, port: Port, fault: Fault) -> None:
        """Count a fault of a connection, and log it at a bounded rate."""
        self.counts[port, fault] += 1
        if (sentence := _SENTENCES.get(fault)) is not None:
            self._log.warning(fault, f"{port} port: {sentence}; /metrics counts such connections")

    def bug(self, what: str, error: BaseException) -> None:
        """Log the traceback of a bug of ours at a bounded rate."""
        chain = list(_chain(error))
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        parts = [f"Traceback of {type(each).__qualname__}:\n{_frames(each)}" for each in chain]
        self._log.error(f"{type(error).__qualname__} {place}", f"{what}\n{''.join(parts)}".rstrip())

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle what `loop` and asyncio would log about connections."""
        loop.set_exception_handler(self._on_loop_error)
        logging.getLogger("asyncio").addFilter(self._is_logged)

    def family(self, name: str) -> CounterMetricFamily:
        """Return the counts as the metric `name`."""
        text = "Faults of connections that others open, by port (clients, operators, picker, peers) and kind."
        family = CounterMetricFamily(name, text, labels=("port", "kind"))
        for (port, fault), count in sorted(self.counts.items()):
            family.add_metric((port, fault), count)
        return family

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, ConnectionError) and _is_of_client(context):
            self.count(Port.UNKNOWN, Fault.CLIENT_LEFT)
        elif error is not None:
            self.bug(f"event loop: {context.get('message', '')}", error)
        else:
            self._log.error("event loop", f"event loop: {context.get('message', '')}")

    def _is_logged(self, record: logging.LogRecord) -> bool:
        if record.msg != _SEND_FAILED:
            return True
        self.count(Port.UNKNOWN, Fault.CLIENT_LEFT)
        return False


@dataclass(frozen=True, slots=True)
class PortFaults:
    """Faults of one port."""

    of_all: Faults
    port: Port

    def count(self, fault: Fault) -> None:
        """Count a fault of a connection, and log it at a bounded rate."""
        self.of_all.count(self.port, fault)


def _is_of_client(context: dict[str, Any]) -> bool:
    """Return whether an error of the loop belongs to a connection, not to a task of ours."""
    task = context.get("task") or context.get("future")
    if not isinstance(task, asyncio.Task):
        return "transport" in context or "protocol" in context
    return getattr(task.get_coro(), "__qualname__", "").startswith(_AIOHTTP_TASK)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, the first cause last."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _frames(error: BaseException) -> str:
    return "".join(traceback.format_tb(error.__traceback__))
