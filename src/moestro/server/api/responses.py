"""Responses in OpenAI's forms, whole and as streams of server-sent events, which may end before they are complete."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from moestro.errors import RequestError
from moestro.server.api.generation import Generation
from moestro.server.api.protocol import (
    Answer,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TextChoice,
    TopLogprob,
    Usage,
)
from moestro.server.api.validation import Options
from moestro.server.engines.request_state import Piece, Score
from moestro.text.parsing.answer_parser import merged
from moestro.text.tokenizer_library import TokenText
from moestro.web.errors import InternalError, error_json
from moestro.web.middleware import REQUEST_ID
from moestro.web.ports.http_connection import HttpConnection

logger = logging.getLogger(__name__)


def chat_message(piece: Piece) -> ChatMessage:
    """Return the message of a complete choice. Its content is null where it has only reasoning or calls."""
    if piece.parts is None:
        return ChatMessage(piece.text)
    delta = merged(piece.parts)
    has_more = bool(delta.reasoning or delta.calls)
    return ChatMessage(
        delta.content or (None if has_more else ""),
        reasoning=delta.reasoning or None,
        reasoning_content=delta.reasoning or None,
        tool_calls=[
            ChatToolCall(CalledFunction(call.arguments, call.name), call.id, "function") for call in delta.calls
        ],
    )


def chat_delta(piece: Piece) -> ChatDelta:
    """Return the addition of one piece. As in vLLM, a token without any text yet has empty content."""
    delta = None if piece.parts is None else merged(piece.parts)
    content = piece.text if delta is None else delta.content
    shown: str | UnsetType
    if not content and (piece.finish_reason is not None or (delta is not None and (delta.reasoning or delta.calls))):
        shown = UNSET
    else:
        shown = content
    if delta is None:
        return ChatDelta(content=shown)
    calls = [
        ChatToolCall(CalledFunction(call.arguments, call.name), call.id, "function" if call.id else None, call.index)
        for call in delta.calls
    ]
    return ChatDelta(
        content=shown,
        reasoning=delta.reasoning or None,
        reasoning_content=delta.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields that every chunk of a response repeats."""

    answer_id: str
    created: int  # Seconds since 1970.
    model: str
    fingerprint: str


class AnswerForm(Protocol):
    """Builds the response bodies of one kind of completion."""

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        """Return the complete response."""
        ...

    def openings(self, first: Piece | None) -> Sequence[Answer]:
        """Return the chunks that precede any text.

        Args:
            first: First piece, of which `chunk` returns the rest; None means that there is none.
        """
        ...

    def chunk(self, piece: Piece) -> Answer:
        """Return the chunk for a new piece of one choice."""
        ...

    def closing(self, usage: Usage) -> Answer:
        """Return the last chunk, with the usage and no choices."""
        ...


class CompletionForm:
    """Builds responses of type `text_completion`."""

    def __init__(self, heading: Heading, options: Options) -> None:
        self._heading = heading
        self._options = options

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        """Return the complete response."""
        answer = _answer(self._heading, "text_completion", [self._choice(piece) for piece in choices], usage)
        answer.service_tier = answer.kv_transfer_params = None
        return answer

    def openings(self, first: Piece | None) -> Sequence[Answer]:
        """Return no chunks, because a completion begins with its text."""
        return ()

    def chunk(self, piece: Piece) -> Answer:
        """Return the chunk for a new piece of one choice."""
        return _answer(self._heading, "text_completion", [self._choice(piece)], None)

    def closing(self, usage: Usage) -> Answer:
        """Return the last chunk, with the usage and no choices."""
        return _answer(self._heading, "text_completion", [], usage)

    def _choice(self, piece: Piece) -> TextChoice:
        choice = TextChoice(piece.index, piece.text, piece.finish_reason, stop_reason=piece.stop_reason)
        if piece.scores is not None:
            choice.logprobs = _completion_logprobs(piece.scores, self._options)
            if piece.token_ids is not None:
                num_top, is_ranked = self._options.logprobs or 0, not self._options.logprob_token_ids
                choice.logprobs.by_token_id = _logprobs_by_id(piece.scores, num_top, is_ranked=is_ranked)
        if piece.prompt_scores is not None:
            choice.prompt_logprobs = _logprobs_by_id(piece.prompt_scores, self._options.prompt_logprobs or 0)
        choice.token_ids = _ids(piece.token_ids)
        choice.prompt_token_ids = _ids(piece.prompt_token_ids)
        return choice


class ChatForm:
    """Builds responses of types `chat.completion` and `chat.completion.chunk`."""

    def __init__(self, heading: Heading, options: Options) -> None:
        self._heading = heading
        self._options = options

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        """Return the complete response."""
        messages = [
            ChatChoice(
                piece.index,
                chat_message(piece),
                piece.finish_reason,
                _chat_logprobs(piece.scores, self._options),
                piece.stop_reason,
                _ids(piece.token_ids),
            )
            for piece in choices
        ]
        answer = _answer(self._heading, "chat.completion", messages, usage)
        answer.service_tier = answer.prompt_logprobs = answer.prompt_token_ids = answer.kv_transfer_params = None
        if choices[0].prompt_scores is not None:
            answer.prompt_logprobs = _logprobs_by_id(choices[0].prompt_scores, self._options.prompt_logprobs or 0)
        if choices[0].prompt_token_ids is not None:
            answer.prompt_token_ids = list(choices[0].prompt_token_ids)
        return answer

    def openings(self, first: Piece | None) -> Sequence[Answer]:
        """Return one chunk with the role for each choice; as in vLLM, the first has the tokens of the prompt."""
        delta = ChatDelta(role="assistant", content="")
        chunks = [self._chunk([ChatChunkChoice(index, delta, None)]) for index in range(self._options.n)]
        if first is not None and first.prompt_token_ids is not None:
            chunks[0].prompt_token_ids = list(first.prompt_token_ids)
        return chunks

    def chunk(self, piece: Piece) -> Answer:
        """Return the chunk for a new piece of one choice."""
        choice = ChatChunkChoice(
            piece.index,
            chat_delta(piece),
            piece.finish_reason,
            _chat_logprobs(piece.scores, self._options),
            piece.stop_reason,
            _ids(piece.token_ids),
        )
        return self._chunk([choice])

    def closing(self, usage: Usage) -> Answer:
        """Return the last chunk, with the usage and no choices."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> Answer:
        return _answer(self._heading, "chat.completion.chunk", choices, usage)


def _ids(token_ids: Sequence[int] | None) -> list[int] | None:
    return None if token_ids is None else list(token_ids)


def heading(answer_id: str, model: str, fingerprint: str) -> Heading:
    """Return the heading of a response that is created now."""
    return Heading(answer_id, int(time.time()), model, fingerprint)


def _name(token_id: int, token: TokenText, options: Options) -> str:
    """Return what a token is called in log probabilities: its text, or, as in vLLM, its id."""
    return f"token_id:{token_id}" if options.names_tokens_by_id else token.text


def _completion_logprobs(scores: Sequence[Score], options: Options) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_name(score.token_id, score.token, options) for score in scores],
        token_logprobs=[score.logprob for score in scores],
        top_logprobs=[_by_name(score, options) for score in scores],
        text_offset=[score.offset for score in scores],
    )


def _by_name(score: Score, options: Options) -> dict[str, float] | None:
    """Return log probabilities by name, always with the token itself. Equal texts keep the most likely token."""
    if score.logprob is None:
        return None
    found: dict[str, float] = {}
    for alternative in score.top[: options.logprobs or 0]:
        found.setdefault(_name(alternative.token_id, alternative.token, options), alternative.logprob)
    found.setdefault(_name(score.token_id, score.token, options), score.logprob)
    return found


def _chat_logprobs(scores: Sequence[Score] | None, options: Options) -> ChatLogprobs | None:
    return None if scores is None else ChatLogprobs([_chat_logprob(score, options) for score in scores])


def _chat_logprob(score: Score, options: Options) -> ChatLogprob:
    assert score.logprob is not None, "a chat shows no prompt"
    top = [
        TopLogprob(_name(other.token_id, other.token, options), other.logprob, list(other.token.raw))
        for other in score.top
    ]
    return ChatLogprob(_name(score.token_id, score.token, options), score.logprob, list(score.token.raw), top)


def _logprobs_by_id(scores: Sequence[Score], num_top: int, *, is_ranked: bool = True) -> PromptLogprobs:
    return [_by_id(score, num_top, is_ranked=is_ranked) for score in scores]


def _by_id(score: Score, num_top: int, *, is_ranked: bool) -> dict[str, PromptLogprob] | None:
    """Return log probabilities by token id in vLLM's order: the token itself, then its alternatives.

    Args:
        is_ranked: Whether the alternatives are the most likely tokens.
    """
    if score.logprob is None:
        return None
    found = {str(score.token_id): PromptLogprob(score.logprob, score.rank, score.token.text)}
    for rank, (token_id, token, logprob) in enumerate(score.top[:num_top], 1):
        found.setdefault(str(token_id), PromptLogprob(logprob, rank if is_ranked else None, token.text))
    return found


def _answer(
    head: Heading,
    kind: str,
    choices: list[TextChoice] | list[ChatChoice] | list[ChatChunkChoice],
    usage: Usage | None,
) -> Answer:
    return Answer(
        id=head.answer_id,
        object=kind,
        created=head.created,
        model=head.model,
        choices=choices,
        system_fingerprint=head.fingerprint,
        usage=msgspec.UNSET if usage is None else usage,
    )


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
