"""Streams responses as server-sent events, and ends streams that cannot continue."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
from aiohttp import web

from moestro.errors import RequestError
from moestro.server.generation import Generation, Piece
from moestro.server.protocol import Answer, Usage
from moestro.server.responses import AnswerForm
from moestro.web.errors import InternalError, error_json
from moestro.web.middleware import REQUEST_ID

logger = logging.getLogger(__name__)

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# With so many bytes or fewer in its buffer, a transport does not stop a stream, and lets a stopped one go on; these are
# the limits of asyncio and uvloop.
_FREE_BYTES = 1 << 14
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class UsageWanted:
    """Chunks of a stream that report token counts: one last chunk, all chunks, both or none."""

    at_end: bool
    in_chunks: bool


class AnswerEncoding(Protocol):
    """Bytes of an answer on one path."""

    def whole(self, answer: Answer) -> bytes:
        """Return the body of a complete answer."""
        ...

    def chunk(self, answer: Answer) -> bytes:
        """Return the events of a chunk of a stream; may be empty."""
        ...

    def end(self) -> bytes:
        """Return the events that end a complete stream; may be empty."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """Return the event that ends a stream with an error."""
        ...


class OpenAIEncoding:
    """Answers of `/v1/completions` and `/v1/chat/completions`, which need no translation."""

    def whole(self, answer: Answer) -> bytes:
        """Return the answer as JSON."""
        return _encode(answer)

    def chunk(self, answer: Answer) -> bytes:
        """Return the chunk as one event."""
        return b"data: " + _encode(answer) + b"\n\n"

    def end(self) -> bytes:
        """Return the mark for which clients wait."""
        return b"data: [DONE]\n\n"

    def failure(self, error: RequestError) -> bytes:
        """Return the event that all clients take for an error."""
        return b"event: error\ndata: " + error_json(error) + b"\n\n"


class EventStream:
    """Connection that streams one response.

    Bounded buffers of aiohttp and the kernel hold the data that a client has not read. Full buffers stop the stream.

    Args:
        write_timeout_s: Time for which full buffers may stop the stream, in seconds.
        encoding: Form of the events.
        headers: Further headers of the response.
    """

    def __init__(
        self, http: web.Request, write_timeout_s: float, encoding: AnswerEncoding, headers: Mapping[str, str]
    ) -> None:
        self.request_id: str = http[REQUEST_ID]
        self._http = http
        self._response = web.StreamResponse(headers={**_HEADERS, **headers})
        self._write_timeout_s = write_timeout_s
        self._encoding = encoding

    async def open(self) -> web.StreamResponse:
        """Send the headers."""
        await self._response.prepare(self._http)
        return self._response

    async def send(self, chunk: Answer) -> None:
        """Send a chunk of the answer.

        Raises:
            ConnectionError: The client has disconnected.
            TimeoutError: The client has not read for too long.
        """
        await self._send(self._encoding.chunk(chunk))

    async def finish(self) -> None:
        """Send the end of a complete answer; raises as `send` does."""
        await self._send(self._encoding.end())

    async def break_off(self, error: RequestError) -> None:
        """Send `error` as an event, then close the connection without the end of the body.

        No other end of a broken stream both carries the cause and is noticed by every client. Some clients take a clean
        end for success, even after an error event.
        """
        try:
            await self._send(self._encoding.failure(error))
        except (ConnectionError, TimeoutError):
            logger.debug("%s: the error could not be sent to the client: %s", self.request_id, error)
        if self._http.transport is not None:
            self._http.transport.close()

    def cut(self) -> None:
        """Close the connection at once, and drop unread data, including the kernel's."""
        if self._http.transport is not None:
            connection = self._http.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._http.transport.abort()

    async def _send(self, data: bytes) -> None:
        if not data:
            return
        transport = self._http.transport
        if transport is not None and transport.get_write_buffer_size() + len(data) <= _FREE_BYTES:
            await self._response.write(data)  # It does not wait, and a timer would cost more than the write.
            return
        async with asyncio.timeout(self._write_timeout_s):
            await self._response.write(data)


async def stream(
    events: EventStream, generation: Generation, form: AnswerForm, usage: UsageWanted
) -> web.StreamResponse:
    """Send the pieces of `generation` as they arrive.

    The headers wait for the first piece, so that a refusal keeps its own status.

    Raises:
        RequestError: The request failed before anything was sent. Later failures end the stream instead.
    """
    piece = await generation.next_piece()
    generation.has_begun = True  # Set before the headers leave: from now on the client may have a part of the answer.
    response = await events.open()
    try:
        for opening in form.openings():
            opening.usage = _of_prompt(generation.usage()) if usage.in_chunks else None
            await events.send(opening)
        while piece is not None:
            await _send_piece(events, form, piece, generation.usage() if usage.in_chunks else None)
            piece = await generation.next_piece()
        if usage.at_end:
            await events.send(form.closing(generation.usage()))
        await events.finish()
    except ConnectionError:
        logger.debug("%s: the client disconnected", events.request_id)
    except TimeoutError:
        logger.warning("%s: disconnected, because the client does not read its answer", events.request_id)
        events.cut()
    except RequestError as error:
        await events.break_off(error)
    except Exception:
        logger.exception("%s: failed within a stream", events.request_id)
        await events.break_off(InternalError(events.request_id))
    return response


async def _send_piece(events: EventStream, form: AnswerForm, piece: Piece, usage: Usage | None) -> None:
    """Send one chunk for a step output, even without text (half a character, a held-back stop string).

    As in vLLM, the client thus sees when its answer begins.
    """
    chunk = form.chunk(piece)
    chunk.usage = usage
    await events.send(chunk)


def _of_prompt(usage: Usage) -> Usage:
    """Return the usage before the first token of the answer."""
    return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
