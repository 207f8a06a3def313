"""Streams responses as server-sent events, and ends streams that cannot continue."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from aiohttp import web

from moestro.errors import RequestError
from moestro.server.api.answers.generation import Generation
from moestro.server.api.answers.responses import AnswerForm
from moestro.server.api.fields.protocol import Answer, Usage
from moestro.server.engines.piece import Piece
from moestro.web.errors import InternalError, error_json
from moestro.web.middleware import REQUEST_ID
from moestro.web.ports.http_connection import HttpConnection

logger = logging.getLogger(__name__)

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# With so many bytes or fewer in its buffer, a transport does not stop a stream, and lets a stopped one go on; these are
# the limits of asyncio and uvloop.
_FREE_BYTES = 1 << 14
_MARK = secrets.token_hex()  # Stands for a text; no client can put it elsewhere into a chunk.
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class UsageWanted:
    """Chunks of a stream that report token counts: one last chunk, all chunks, both or none."""

    at_end: bool
    in_chunks: bool


class AnswerEncoding(Protocol):
    """Bytes of an answer on one path.

    Attributes:
        repeats: Whether the events of two chunks differ only where the chunks do.
    """

    repeats: bool

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

    repeats = True

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


class ChunkEncoder:
    """Encodes the pieces of a stream, one chunk each, even without text (half a character, a held-back stop string).

    As in vLLM, the client thus sees when its answer begins. Most pieces have new text and nothing else. Their chunks
    have the bytes of the choice's first such chunk, with other text: a fifth of the time to build and encode one.

    Args:
        usage: Callable that returns the token counts so far, which every chunk reports; None means that none does.
    """

    def __init__(self, form: AnswerForm, encoding: AnswerEncoding, usage: Callable[[], Usage] | None) -> None:
        self._form = form
        self._encoding = encoding
        self._usage = usage
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # What is before and behind the text, by choice.

    def encode(self, piece: Piece) -> bytes:
        """Return the events of a piece's chunk; may be empty."""
        if self._usage is None and piece.has_only_text and self._encoding.repeats:
            before, behind = self._frames.get(piece.index) or self._frame(piece.index)
            return b"%b%b%b" % (before, _encode(piece.text), behind)
        chunk = self._form.chunk(piece)
        if self._usage is not None:
            chunk.usage = self._usage()
        return self._encoding.chunk(chunk)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        before, _, behind = self._encoding.chunk(self._form.chunk(Piece(index, _MARK, None))).partition(_encode(_MARK))
        self._frames[index] = before, behind
        return before, behind


class EventStream:
    """Connection that streams one response.

    Bounded buffers of aiohttp and the kernel hold the data that a client has not read. Full buffers stop the stream.
    What these buffers take at once goes straight to the connection, as a chunk of the body: aiohttp's way there, which
    may wait, takes longer than the kernel's.

    Args:
        write_timeout_s: Time for which full buffers may stop the stream, in seconds.
        encoding: Form of the events.
        headers: Further headers of the response, made as it begins.

    Attributes:
        encoding: Form of the events.
    """

    def __init__(
        self,
        http: web.Request,
        write_timeout_s: float,
        encoding: AnswerEncoding,
        headers: Callable[[], Mapping[str, str]],
    ) -> None:
        self.request_id: str = http[REQUEST_ID]
        self._http = http
        self._response = web.StreamResponse(headers=_HEADERS)
        self._headers = headers
        self._write_timeout_s = write_timeout_s
        self.encoding = encoding
        self._is_chunked = False
        self._transport: asyncio.Transport | None = None  # once the headers have been sent

    async def open(self) -> web.StreamResponse:
        """Send the headers."""
        self._response.headers.update(self._headers())
        await self._response.prepare(self._http)
        self._is_chunked = "Transfer-Encoding" in self._response.headers
        self._transport = self._http.transport
        return self._response

    def has_room(self, num_bytes: int = 0) -> bool:
        """Whether `put` may send `num_bytes` without waiting for the client."""
        transport = self._transport  # kept after it closes: `is_closing` tells
        return (
            transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() + num_bytes <= _FREE_BYTES
        )

    def put(self, events: bytes) -> None:
        """Send events of the answer, for which there is room."""
        if events:  # An empty chunk would end the body.
            assert self._transport is not None, "there was room"
            self._transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)

    async def send(self, events: bytes) -> None:
        """Send events of the answer.

        Raises:
            ConnectionError: The client has disconnected.
            TimeoutError: The client has not read for too long.
        """
        if self.has_room(len(events)):
            self.put(events)
            return
        async with asyncio.timeout(self._write_timeout_s):
            await self._response.write(events)

    async def finish(self) -> None:
        """Send the end of a complete answer; raises as `send` does."""
        await self.send(self.encoding.end())

    async def break_off(self, error: RequestError) -> None:
        """Send `error` as an event, then close the connection without the end of the body.

        No other end of a broken stream both carries the cause and is noticed by every client. Some clients take a clean
        end for success, even after an error event.
        """
        try:
            await self.send(self.encoding.failure(error))
        except (ConnectionError, TimeoutError):
            logger.debug("%s: the error could not be sent to the client: %s", self.request_id, error)
        if self._http.transport is not None:
            self._http.transport.close()

    def cut(self) -> None:
        """Close the connection at once, and drop unread data, including the kernel's."""
        transport, protocol = self._http.transport, self._http.protocol
        if transport is not None and isinstance(protocol, HttpConnection):
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            protocol.cut_unread()


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
        for opening in form.openings(piece):
            if usage.in_chunks:
                opening.usage = _of_prompt(generation.usage())
            await events.send(events.encoding.chunk(opening))
        chunks = ChunkEncoder(form, events.encoding, generation.usage if usage.in_chunks else None)
        generation.pass_on_with(partial(_pass_on, events, chunks))
        while piece is not None:
            await events.send(chunks.encode(piece))
            piece = await generation.next_piece()
        if usage.at_end:
            await events.send(events.encoding.chunk(form.closing(generation.usage())))
        await events.finish()
    except ConnectionError:
        logger.debug("%s: the client disconnected", events.request_id)
    except TimeoutError:
        events.cut()  # The connection counts it.
    except RequestError as error:
        await events.break_off(error)
    except Exception:
        logger.exception("%s: failed within a stream", events.request_id)
        await events.break_off(InternalError(events.request_id))
    return response


def _pass_on(events: EventStream, chunks: ChunkEncoder, piece: Piece) -> bool:
    """Send a piece if its client is not behind; else it is encoded later, because encodings may count their chunks."""
    if not events.has_room():
        return False
    events.put(chunks.encode(piece))
    return True


def _of_prompt(usage: Usage) -> Usage:
    """Return the usage before the first token of the answer."""
    return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
