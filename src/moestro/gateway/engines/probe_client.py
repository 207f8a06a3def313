"""HTTP client for the router's own requests to engines: health, models and metrics."""

from __future__ import annotations

import asyncio

from moestro.gateway.clients.http_headers import AnswerHead, Incoming, RequestHead
from moestro.gateway.engines.fleet import RoutedEngine
from moestro.gateway.engines.upstream import EngineConnection


class NoAnswerError(Exception):
    """An engine's missing or unusable answer; the message names the cause."""


class _Whole:
    """Sink that collects an answer of bounded size.

    Attributes:
        is_done: whether the answer is complete and its connection was returned to the pool.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._body = bytearray()
        self._status = 0
        self.is_done = False
        self.answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def head(self, head: AnswerHead, length: int | None) -> None:
        """Implement `Sink.head`."""
        self._status = head.status

    def body(self, data: bytes, *, is_last: bool) -> None:
        """Implement `Sink.body`."""
        if len(self._body) + len(data) > self._max_bytes:
            self.broken(f"its answer has more than {self._max_bytes} bytes")
        else:
            self._body += data

    def done(self) -> None:
        """Implement `Sink.done`."""
        self.is_done = True
        if not self.answer.done():
            self.answer.set_result((self._status, bytes(self._body)))

    def broken(self, cause: str) -> None:
        """Implement `Sink.broken`."""
        if not self.answer.done():
            self.answer.set_exception(NoAnswerError(cause))


async def ask(engine: RoutedEngine, path: str, timeout_s: float, max_bytes: int) -> tuple[int, bytes]:
    """Send `GET path` on a connection of the engine's pool, and return the answer's status and body.

    Raises:
        NoAnswerError: no answer arrived in time, or the answer is too large.
    """
    try:
        async with asyncio.timeout(timeout_s):
            kept = engine.pool.take()
            if kept is not None:
                try:
                    return await _ask_on(kept, engine, path, max_bytes)
                except NoAnswerError:
                    pass  # an idle connection may have been closed; only a new one proves a failure
            return await _ask_on(await engine.pool.connect(), engine, path, max_bytes)
    except TimeoutError:
        raise NoAnswerError(f"nothing within {timeout_s:g} s") from None
    except OSError as error:
        raise NoAnswerError(f"cannot connect: {error}") from None


async def _ask_on(connection: EngineConnection, engine: RoutedEngine, path: str, max_bytes: int) -> tuple[int, bytes]:
    incoming = Incoming(RequestHead(b"GET", path.encode(), [], {}), b"", "127.0.0.1", "moestro-route")
    if not connection.is_open:
        raise NoAnswerError("it closed the connection at once")
    sink = _Whole(max_bytes)
    try:
        connection.send(engine.head.of(incoming), b"", sink, is_bodiless=False)
        return await sink.answer
    finally:
        if not sink.is_done:  # a complete answer has returned the connection to the pool
            connection.close()
