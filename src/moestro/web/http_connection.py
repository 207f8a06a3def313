"""One connection to an aiohttp server, with three additions to aiohttp's own.

Parser errors get OpenAI's form. Requests before such an error are answered. A request whose body breaks off is refused
at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from aiohttp import web
from aiohttp.http import HttpRequestParser, RawRequestMessage
from aiohttp.http_exceptions import (
    BadStatusLine,
    HttpProcessingError,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
    TransferEncodingError,
)
from aiohttp.streams import StreamReader

from moestro.errors import RequestError
from moestro.web.errors import HttpError, InternalError, error_json
from moestro.web.log_limit import LogLimit

logger = logging.getLogger(__name__)

# Also the time limit for the headers of a connection's first request. Pools of common clients and proxies keep idle
# connections for less time, so that their side closes first.
IDLE_S = 75.0
LINGER_S = 3.0  # Time for a client that is refused in the middle of its body to notice the refusal.
MAX_LINE_BYTES = 8190  # Limit of the request line, and of each header.
MAX_HEADERS = 128
_READ_BYTES = 1 << 16  # Unread bytes of a body after which the connection stops reading.
# Fixed texts, because the parser's own messages repeat the client's data.
_FAULTS: tuple[tuple[type[HttpProcessingError], str], ...] = (
    (InvalidURLError, "the path is not valid"),
    (BadStatusLine, "the request line is not valid"),
    (InvalidHeader, "the value of a header is not valid"),
    (TransferEncodingError, "a chunk of the body is not valid"),
    (HttpProcessingError, "a header or the body's framing is not valid, or Host is missing or repeated"),
)


class HttpConnection(web.RequestHandler):
    """Serves one connection of `server`.

    aiohttp offers no hook for the parser's errors. This class alone uses its private names `_parser`, `_messages`,
    `_max_msg_queue_size` and `_request_count`. `tests/web/test_http_edges.py` fails when their meaning changes.

    Args:
        refusals: Counter of unreadable requests, under `bad_request` and `head_too_large`.
        log: Limit of the log lines about them.
    """

    def __init__(self, server: web.Server, refusals: Counter[str], log: LogLimit) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, keepalive_timeout=IDLE_S, lingering_time=LINGER_S, access_log=None)  # type: ignore[arg-type]
        self._refusals = refusals
        self._log = log
        self._body: StreamReader | None = None  # Body of the newest request.
        self._is_unreadable = False  # Whether the data that arrives is no longer HTTP.
        # With a queue of one request, the parser never reads invalid data together with a request before it. aiohttp
        # would drop that request.
        self._parser = HttpRequestParser(
            self,
            loop,
            _READ_BYTES,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            payload_exception=web.RequestPayloadError,
            max_msg_queue_size=1,
            auto_decompress=False,  # `Bodies` unpacks a body when a handler reads it.
        )

    def data_received(self, data: bytes) -> None:
        """Parse `data` request by request, until the queue is full or no further request begins.

        The parser pauses behind each request, also where a handler already reads it; nothing else would wake it.
        """
        if self._is_unreadable:
            return  # The data is dropped, because nothing marks where a request begins.
        is_more_likely = True
        while is_more_likely:
            num_before, body = self._request_count, self._body
            had_open_body = body is not None and not body.is_eof()
            super().data_received(data)
            self._look_at_newest()
            has_room = len(self._messages) < self._max_msg_queue_size
            has_ended = had_open_body and body is not None and body.is_eof()
            has_moved = has_ended or self._request_count > num_before
            is_more_likely, data = has_moved and has_room and not self._is_unreadable, b""

    def _look_at_newest(self) -> None:
        """Fail a request whose body cannot be parsed; aiohttp would wait for the rest of the body."""
        body = self._body
        if self._messages:
            newest, newest_body = self._messages[-1]
            if isinstance(newest, RawRequestMessage):
                self._body = newest_body
            elif not self._is_unreadable:
                self._is_unreadable = True
                self._messages[-1] = newest, _Unreadable(self)
                if body is not None and not body.is_eof():
                    body.set_exception(web.RequestPayloadError("its framing is not valid"))
        if body is not None and body.exception() is not None and not body.is_eof():
            body.feed_eof()  # No further data can arrive for this body.

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to a parser error, and close the connection after it."""
        if request.writer.output_size > 0:
            raise ConnectionError("a response is already under way")
        if isinstance(exc, HttpProcessingError):
            error = _refusal_of(exc)
            self._refusals[error.code or ""] += 1
            self._log.warning("malformed HTTP", f"{request.remote} sent an invalid request: {error.message}")
        else:
            logger.error("a request failed outside of its handler", exc_info=exc)
            error = InternalError("-")
        response = web.Response(status=error.http_status, body=error_json(error), content_type="application/json")
        response.headers["Server"] = "moestro"
        response.force_close()
        return response


class _Unreadable(StreamReader):
    """Body that stands for the data after a parser error.

    aiohttp reads the rest of a body for at most `LINGER_S` before it closes a connection. An immediate close would
    reset the connection of a client that is still sending, and the response would be lost.
    """

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(connection, _READ_BYTES, loop=asyncio.get_running_loop())
        self._connection = connection

    async def readany(self) -> bytes:
        """Close the server's side after the response, then wait until the client closes its own."""
        if self._connection.transport is not None:
            self._connection.transport.write_eof()
        return await super().readany()


def _refusal_of(error: HttpProcessingError) -> RequestError:
    if isinstance(error, LineTooLong):
        text = f"The request line and each header may have at most {MAX_LINE_BYTES} bytes."
        return HttpError(431, text, "head_too_large")
    fault = next(text for kind, text in _FAULTS if isinstance(error, kind))
    return HttpError(400, f"Malformed HTTP: {fault}.", "bad_request")
