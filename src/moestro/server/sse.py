"""Answers as a stream of server-sent events, and how such a stream ends when it cannot go on."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from dataclasses import dataclass

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
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class UsageWanted:
    """Where a stream reports tokens: in one last chunk, and in every chunk."""

    at_end: bool
    in_chunks: bool


class EventStream:
    """The connection on which one answer is streamed.

    What a client leaves unread is held in bounded buffers (aiohttp's and the kernel's), and then holds up the answer.

    Args:
        write_timeout_s: how long it may do so.
    """

    def __init__(self, http: web.Request, write_timeout_s: float) -> None:
        self.request_id: str = http[REQUEST_ID]
        self._http = http
        self._response = web.StreamResponse(headers=_HEADERS)
        self._write_timeout_s = write_timeout_s

    async def open(self) -> web.StreamResponse:
        """Send the headers."""
        await self._response.prepare(self._http)
        return self._response

    async def send(self, data: bytes) -> None:
        """Send one event.

        Raises:
            ConnectionError: the client has left.
            TimeoutError: it has not read for too long.
        """
        async with asyncio.timeout(self._write_timeout_s):
            await self._response.write(data)

    async def send_answer(self, answer: Answer) -> None:
        """Send an answer, or a chunk of one."""
        await self.send(b"data: " + _encode(answer) + b"\n\n")

    async def break_off(self, error: RequestError) -> None:
        """Say why, then hang up without the end of the body.

        Of all ways to end a broken stream, only this one both carries the cause and is noticed by every client: some
        take a clean end, even one after an error event, for success.
        """
        try:
            await self.send(b"event: error\ndata: " + error_json(error) + b"\n\n")
        except (ConnectionError, TimeoutError):
            logger.debug("%s: the error could not be sent to the client: %s", self.request_id, error)
        if self._http.transport is not None:
            self._http.transport.close()

    def cut(self) -> None:
        """Hang up at once, and drop what is unread, also what the kernel holds."""
        if self._http.transport is not None:
            connection = self._http.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._http.transport.abort()


async def stream(
    events: EventStream, generation: Generation, form: AnswerForm, usage: UsageWanted
) -> web.StreamResponse:
    """Send the pieces of `generation` as they come.

    The headers wait for the engine's first word, so that a refusal keeps its real status.

    Raises:
        RequestError: refused before anything was sent. Later failures end the stream instead.
    """
    piece = await generation.next_piece()
    generation.has_begun = True  # before the headers leave: from now on the client may have a part of the answer
    response = await events.open()
    try:
        for opening in form.openings():
            await events.send_answer(opening)
        while piece is not None:
            await _send_piece(events, form, piece, generation.usage() if usage.in_chunks else None)
            piece = await generation.next_piece()
        if usage.at_end:
            await events.send_answer(form.closing(generation.usage()))
        await events.send(b"data: [DONE]\n\n")
    except ConnectionError:
        logger.debug("%s: the client left", events.request_id)
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
    """One chunk for the tokens of a step, also where these show nothing yet (half a character, a held-back stop): a
    client sees that its answer has begun, and when. vLLM does the same.
    """
    chunk = form.chunk(piece)
    chunk.usage = usage
    await events.send_answer(chunk)
