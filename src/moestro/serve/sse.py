"""Answers as a stream of server-sent events, and how such a stream ends when it cannot go on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
from aiohttp import web

from moestro.errors import RequestError
from moestro.serve.answers import AnswerForm
from moestro.serve.generation import Generation, Piece
from moestro.serve.protocol import Answer, Usage
from moestro.serve.refusals import InternalError, error_json

logger = logging.getLogger(__name__)

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class UsageWanted:
    """Where a stream reports tokens: in one last chunk, and in every chunk."""

    at_end: bool
    in_chunks: bool


async def stream(http: web.Request, generation: Generation, form: AnswerForm, usage: UsageWanted) -> web.StreamResponse:
    """Send the pieces of `generation` as they come.

    The headers wait for the engine's first word, so that a refusal keeps its real status.

    Raises:
        RequestError: refused before anything was sent. Later failures end the stream instead.
    """
    piece = await generation.next_piece()
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(http)
    try:
        if opening := form.opening():
            await _send(response, opening)
        while piece is not None:
            await _send_piece(response, form, piece, generation.usage() if usage.in_chunks else None)
            piece = await generation.next_piece()
        if usage.at_end:
            await _send(response, form.closing(generation.usage()))
        await response.write(b"data: [DONE]\n\n")
    except ConnectionError:
        logger.debug("%s: the client left", http["request_id"])
    except RequestError as error:
        await _break_off(http, response, error)
    except Exception:
        logger.exception("%s: failed in mid-stream", http["request_id"])
        await _break_off(http, response, InternalError(http["request_id"]))
    return response


async def _send_piece(response: web.StreamResponse, form: AnswerForm, piece: Piece, usage: Usage | None) -> None:
    """A piece without text (half a character, a held-back stop) is worth a chunk only where every chunk counts."""
    if piece.text or piece.finish_reason or usage:
        chunk = form.chunk(piece)
        chunk.usage = usage
        await _send(response, chunk)


async def _send(response: web.StreamResponse, answer: Answer) -> None:
    await response.write(b"data: " + _encode(answer) + b"\n\n")


async def _break_off(http: web.Request, response: web.StreamResponse, error: RequestError) -> None:
    """Say why, then hang up without the end of the body.

    Of all ways to end a broken stream, only this one both carries the cause and is noticed by every client: some take a
    clean end, even one after an error event, for success.
    """
    try:
        await response.write(b"event: error\ndata: " + error_json(error) + b"\n\n")
    except ConnectionError:
        logger.debug("%s: the client left before it could be told: %s", http["request_id"], error)
    if http.transport is not None:
        http.transport.close()
