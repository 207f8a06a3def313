"""Resumable stream: reads the events of one answer from several engines, and writes one stream for its client."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from moestro.gateway.resume.chunks import (
    END,
    ClientChunks,
    ReceivedChoice,
    ReceivedChunk,
    added_up,
    data_of,
    is_end,
    is_engines_fault,
    is_error,
    read_chunk,
    without_ids,
)
from moestro.gateway.resume.request import COMPLETION_PATH, ResumableRequest
from moestro.gateway.resume.tokens import AnswerTokens, ModelTraits

_MAX_HELD = 16  # Events that wait for a chunk behind which the answer can be continued.
_MAX_EVENT_BYTES = 16 << 20
_BORDER = re.compile(rb"\r?\n\r?\n")


class Continuation(NamedTuple):
    """Request to the engine that continues a stream.

    Attributes:
        num_tokens: Tokens of the answer behind which it continues; 0 means that the answer begins again.
    """

    path: str
    body: bytes
    num_tokens: int


class _AnswerSource(Enum):
    """Answer that an engine gives."""

    FIRST = auto()  # To the client's request, in the client's form.
    AGAIN = auto()  # To the same request, of which the client has a chunk without text.
    CONTINUED = auto()  # To a continuation.


class ResumableStream:
    """One answer for one client, from the events of one engine after another.

    The caller passes the bytes of an engine's body to `feed`. When that engine fails, `resume` returns the request for
    another engine, whose bytes follow. Events wait, 16 at most, until the answer can be continued behind them; so the
    client has exactly the text of the tokens that are continued.

    Attributes:
        failure: Event with which the engine ended the stream because of a fault of its own; empty without one.
        obstacle: Cause for which the stream cannot go on elsewhere; empty while it can.
        is_ahead: Whether the client has text behind which the answer cannot be continued.
        is_finished: Whether the last token has arrived.
        is_complete: Whether the client has the last event.
    """

    def __init__(self, request: ResumableRequest, traits: ModelTraits) -> None:
        self._request = request
        self._traits = traits
        self._tokens = AnswerTokens(traits)
        self._chunks = ClientChunks(wants_ids=request.wants_ids)
        self._source = _AnswerSource.FIRST
        self._buffer = b""
        self._held: list[bytes] = []
        self._holds_text = False  # Whether `_held` has text, or ids for the client.
        self._is_silent = True  # Whether the client has no event.
        self._has_usage = False
        self.is_ahead = self.is_finished = False
        self.failure = b""
        self.obstacle = ""
        self.is_complete = False

    # --- events of the engine

    def feed(self, data: bytes) -> bytes:
        """Return what the client gets for the next bytes of the engine's body; may be empty."""
        self._buffer += data
        out: list[bytes] = []
        begin = 0
        for border in _BORDER.finditer(self._buffer):
            event = self._buffer[begin : border.end()]
            begin = border.end()
            self._take(event, out)
            if self.failure:
                break
        self._buffer = self._buffer[begin:]
        if len(self._buffer) > _MAX_EVENT_BYTES:
            self._lose_track("long event", out)
            out.append(self._buffer)
            self._buffer = b""
        return b"".join(out)

    def _take(self, event: bytes, out: list[bytes]) -> None:
        """Read one event, and add to `out` what the client gets now."""
        if self.obstacle and self._source is _AnswerSource.FIRST:
            out.append(self._in_form(event))
            return
        data = data_of(event)
        if not data:
            out.append(event)  # A comment, which keeps the connection alive.
        elif is_end(data):
            self.is_complete = True
            self._pass(event, out)
        elif is_error(event, data):
            if self.obstacle or self.is_finished or not is_engines_fault(data):
                self._lose_track("error", out)
                out.append(event)
            else:
                self.failure = event
        elif (chunk := read_chunk(data)) is None:
            self._lose_track("unknown event", out)
            out.append(self._in_form(event))
        elif chunk.choices and chunk.choices[0].is_broken_off and not self.obstacle:
            self.failure = event
        elif chunk.choices:
            self._take_choice(chunk, chunk.choices[0], event, data, out)
        else:
            self._has_usage = self._has_usage or chunk.usage is not None
            self._pass(self._closing(event, data), out)

    def _take_choice(
        self, chunk: ReceivedChunk, choice: ReceivedChoice, event: bytes, data: bytes, out: list[bytes]
    ) -> None:
        tokens, text, is_last = self._tokens, choice.new_text, choice.finish_reason is not None
        if tokens.prompt_ids is None:
            tokens.prompt_ids = chunk.prompt_token_ids or choice.prompt_token_ids
        if choice.delta is not None and choice.delta.is_parsed:
            self._traits.parses_reasoning = True
            self._lose_track("reasoning parser", out)
        elif text and (tokens.prompt_ids is None or choice.token_ids is None):
            self._lose_track("no token ids", out)
        new_ids = choice.token_ids or []
        tokens.take(new_ids, text, is_last=is_last)
        self.is_finished = self.is_finished or is_last
        written = self._written(choice, event, data)
        self._chunks.keep(written, has_text=bool(text))
        self._holds_text = self._holds_text or bool(text) or (self._request.wants_ids and bool(new_ids))
        self._pass(written, out)

    def _pass(self, event: bytes, out: list[bytes]) -> None:
        """Add an event to `out`, or hold it back until the answer can be continued behind it."""
        if not event:
            return
        self._held.append(event)
        is_safe = self._tokens.is_safe
        if is_safe:
            self.is_ahead = False
        elif self.is_ahead or len(self._held) > _MAX_HELD:
            self.is_ahead = self.is_ahead or self._holds_text
        elif not self.obstacle:
            return
        self._release(out)

    def _release(self, out: list[bytes]) -> None:
        self._is_silent = self._is_silent and not self._held
        out += self._held
        self._held, self._holds_text = [], False

    def _lose_track(self, obstacle: str, out: list[bytes]) -> None:
        """Pass on everything from now on, because no other engine can continue the answer."""
        self.obstacle = self.obstacle or obstacle
        self._release(out)

    # --- another engine

    @property
    def num_tokens(self) -> int:
        """Number of tokens behind which the answer can be continued."""
        return self._tokens.num_safe

    @property
    def why_not(self) -> str:
        """Cause for which the stream cannot go on elsewhere now; empty if it can."""
        return self.obstacle or ("chunks of several tokens" if self.is_ahead else "")

    @property
    def can_resume(self) -> bool:
        """Whether another engine can continue the answer behind what the client has."""
        return not self.obstacle and not self.is_ahead

    def end(self) -> bytes:
        """Return the last events of an answer that lacks no token; empty for another answer."""
        tokens, request, events = self._tokens, self._request, self._held
        if not self.is_finished:
            is_full = tokens.prompt_ids is not None and request.num_left(len(tokens.prompt_ids), tokens.num_safe) <= 0
            if not (is_full and self._chunks.has_text and self.can_resume):
                return b""
            tokens.cut()
            events = [self._chunks.text("", "length", {}, None)]
        if request.wants_usage and not self._has_usage:
            events = [*events, self._chunks.closing(tokens.usage())]
        self._held, self.is_complete = [], True
        return b"".join([*events, END])

    def give_up(self) -> bytes:
        """Return what the client gets where no other engine continues the answer."""
        left = b"".join([*self._held, self.failure])
        self._held, self.failure = [], b""
        return left

    def resume(self) -> Continuation:
        """Drop what the client has not got, and return the request for another engine."""
        tokens, request = self._tokens, self._request
        tokens.cut()
        self._held, self._holds_text, self._buffer, self.failure = [], False, b"", b""
        if tokens.prompt_ids is not None and tokens.num_safe:
            self._source = _AnswerSource.CONTINUED
            body = request.continuation(tokens.prompt_ids, tokens.ids)
            return Continuation(COMPLETION_PATH, body, tokens.num_safe)
        self._source = _AnswerSource.FIRST if self._is_silent else _AnswerSource.AGAIN
        if self._is_silent:
            self._chunks.forget()
        return Continuation(request.path, request.body, 0)

    # --- events for the client

    def _in_form(self, event: bytes) -> bytes:
        """Return an event of the first engine as the client wants it."""
        return event if self._request.wants_ids else without_ids(event)

    def _written(self, choice: ReceivedChoice, event: bytes, data: bytes) -> bytes:
        """Return the event of a chunk in the client's form; empty for one that the client has already."""
        if self._source is _AnswerSource.FIRST:
            return self._in_form(event)
        fields = msgspec.json.decode(data)
        usage = added_up(fields, self._tokens)
        if self._source is _AnswerSource.AGAIN:
            return self._chunks.again(choice, fields)
        return self._chunks.text(choice.new_text, choice.finish_reason, fields["choices"][0], usage)

    def _closing(self, event: bytes, data: bytes) -> bytes:
        """Return the event of a chunk without choices in the client's form."""
        if self._source is _AnswerSource.FIRST:
            return self._in_form(event)
        return self._chunks.closing(added_up(msgspec.json.decode(data), self._tokens))
