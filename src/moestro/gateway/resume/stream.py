"""Resumable streams: read the events of one answer from several engines, and write one stream for its client.

A detokenizer sends text only up to a whole character, and one token may end within a character. The router has no
tokenizer, so it continues an answer only behind a chunk after which the engine holds no text back:

1. The chunk has text without a replacement character, and
2. it has one token, or its last token is known to end with a whole character.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

from moestro.gateway.clients.http_headers import Incoming, RequestHead
from moestro.gateway.resume.request import COMPLETION_PATH, ResumableRequest, resumable

_UNFINISHED = "\ufffd"  # A decoder's replacement for bytes that are no character.
_MAX_WHOLE = 1 << 18  # Token ids kept of one model.


@dataclass(slots=True)
class ModelTraits:
    """What the streams of one model have shown.

    Attributes:
        parses_reasoning: Whether engines have sent reasoning apart from content, so that their chats are no raw text.
        whole: Ids of tokens that end with a whole character.
    """

    parses_reasoning: bool = False
    whole: set[int] = field(default_factory=set)

    def learn_whole(self, token_id: int) -> None:
        """Keep a token that ends with a whole character."""
        if len(self.whole) < _MAX_WHOLE:
            self.whole.add(token_id)


class AnswerTokens:
    """Tokens of one answer, from all of its engines.

    Attributes:
        prompt_ids: Tokens of the prompt; None until an engine has sent them.
        ids: Tokens of the answer that have arrived.
        num_safe: Number of those behind which the answer can be continued.
        num_before: Number of those of earlier engines.
    """

    __slots__ = ("_traits", "ids", "num_before", "num_safe", "prompt_ids")

    def __init__(self, traits: ModelTraits) -> None:
        self._traits = traits
        self.prompt_ids: Sequence[int] | None = None
        self.ids = array("q")
        self.num_safe = self.num_before = 0

    @property
    def is_safe(self) -> bool:
        """Whether the engine has sent all text of all tokens."""
        return self.num_safe == len(self.ids)

    def take(self, new_ids: Sequence[int], text: str, *, is_last: bool) -> None:
        """Add the tokens of a chunk with its text."""
        was_safe = self.is_safe
        self.ids.extend(new_ids)
        if is_last:
            self.num_safe = len(self.ids)
        elif text and new_ids and _UNFINISHED not in text:
            is_single = len(new_ids) == 1
            if is_single and was_safe:
                self._traits.learn_whole(new_ids[0])
            if is_single or new_ids[-1] in self._traits.whole:
                self.num_safe = len(self.ids)

    def cut(self) -> None:
        """Drop the tokens that are not continued; another engine generates them anew."""
        del self.ids[self.num_safe :]
        self.num_before = self.num_safe

    def add_up(self, usage: dict[str, Any]) -> None:
        """Turn the usage of a continuation into that of the whole answer, in place."""
        num_prompt = len(self.prompt_ids or ())
        if not self.num_before or not num_prompt:
            return
        usage |= self._counts(self.num_before + int(usage.get("completion_tokens") or 0))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], num_prompt)

    def usage(self) -> dict[str, int]:
        """Return the usage of the whole answer so far."""
        return self._counts(len(self.ids))

    def _counts(self, num_tokens: int) -> dict[str, int]:
        num_prompt = len(self.prompt_ids or ())
        return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}


# Strings in JSON have no bare quotation mark, so generated text cannot contain these.
_IDS = re.compile(rb'("(?:prompt_)?token_ids": ?)\[[-0-9, ]*\]')
_LINE = re.compile(rb"(?:\A|\n)data: ?([^\r\n]*)")
_ERROR = re.compile(rb'\{\s*"(?:error"|object": ?"error")')
_DONE = b"[DONE]"
END = b"data: [DONE]\n\n"
# Fields by which the stream of each engine names itself.
_HEADING = ("id", "created", "model", "system_fingerprint")
_FIRST_FAULT_OF_SERVERS = 500
_ENGINES_ENDS = frozenset({"abort", "error"})  # vLLM's finish reasons of requests that it gave up.
_FAULTS_OF_CLIENTS = frozenset({"invalid_request_error", "BadRequestError"})


class ReceivedDelta(msgspec.Struct):
    """Addition of a chat's chunk to its message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None

    @property
    def is_parsed(self) -> bool:
        """Whether a parser of the engine has found more than content."""
        return bool(self.reasoning or self.reasoning_content or self.tool_calls or self.function_call)


class ReceivedChoice(msgspec.Struct):
    """One choice of a chunk."""

    text: str | None = None
    delta: ReceivedDelta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def new_text(self) -> str:
        """Text that the chunk adds; may be empty."""
        return (self.text if self.delta is None else self.delta.content) or ""

    @property
    def is_broken_off(self) -> bool:
        """Whether the engine has given the answer up, as vLLM does at its end."""
        return self.finish_reason in _ENGINES_ENDS

    @property
    def is_role_alone(self) -> bool:
        """Whether the chunk only opens a message."""
        delta = self.delta
        return delta is not None and delta.role is not None and not (self.new_text or self.finish_reason)


class ReceivedChunk(msgspec.Struct):
    """One chunk of a stream."""

    choices: list[ReceivedChoice]
    prompt_token_ids: list[int] | None = None
    usage: dict[str, Any] | None = None


class _ErrorFields(msgspec.Struct):
    code: int | str | None = None
    type: str | None = None


class _ErrorData(msgspec.Struct):
    error: _ErrorFields


_decode_chunk = msgspec.json.Decoder(ReceivedChunk).decode
_decode_failure = msgspec.json.Decoder(_ErrorData).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def data_of(event: bytes) -> bytes:
    """Return the data of an event; empty for a comment."""
    found = _LINE.search(event)
    return b"" if found is None else found[1].strip()


def is_end(data: bytes) -> bool:
    """Return whether `data` is the mark after the last chunk."""
    return data == _DONE


def is_error(event: bytes, data: bytes) -> bool:
    """Return whether an event ends its stream with an error."""
    return event.startswith(b"event: error") or _ERROR.match(data) is not None


def is_engines_fault(data: bytes) -> bool:
    """Return whether an error is about the engine, so that another one may do better."""
    try:
        fault = _decode_failure(data).error
    except _UNREADABLE:
        return True
    if isinstance(fault.code, int):
        return fault.code >= _FIRST_FAULT_OF_SERVERS
    return fault.type not in _FAULTS_OF_CLIENTS


def read_chunk(data: bytes) -> ReceivedChunk | None:
    """Return a chunk; None for data in another form."""
    try:
        return _decode_chunk(data)
    except _UNREADABLE:
        return None


def without_ids(event: bytes) -> bytes:
    """Return an event whose token ids are null."""
    return _IDS.sub(rb"\1null", event)


class ClientChunks:
    """Writes the chunks of later engines in the form of the first engine's.

    Attributes:
        is_empty: Whether no chunk has been kept yet.
    """

    __slots__ = ("_has_text", "_sample", "_wants_ids")

    def __init__(self, *, wants_ids: bool) -> None:
        self._wants_ids = wants_ids
        self._sample = b""  # The first chunk with text, or else the first one.
        self._has_text = False

    @property
    def has_text(self) -> bool:
        """Whether a chunk with text has been kept, whose form others can have."""
        return self._has_text

    def keep(self, event: bytes, *, has_text: bool) -> None:
        """Keep a chunk as a sample, if it is better than the one before."""
        if event and (not self._sample or (has_text and not self._has_text)):
            self._sample, self._has_text = data_of(event), has_text

    def forget(self) -> None:
        """Drop the sample, because the client has no chunk."""
        self._sample, self._has_text = b"", False

    def text(self, text: str, finish: str | None, choice: dict[str, Any], usage: dict[str, Any] | None) -> bytes:
        """Return the event of a chunk with `text`, whose other values are those of `choice`.

        Args:
            usage: Usage so far; None for a chunk without one.
        """
        fields = self._heading()
        made = dict(fields["choices"][0])
        if "delta" in made:
            made["delta"] = {name: value for name, value in made["delta"].items() if name != "role"} | {"content": text}
            if finish is not None and not text:
                del made["delta"]["content"]
        else:
            made["text"] = text
        made["finish_reason"] = finish
        for name in ("stop_reason", "matched_stop"):
            if name in made or choice.get(name) is not None:
                made[name] = choice.get(name)
        fields["choices"] = [self._trimmed(made | {"token_ids": choice.get("token_ids")}, has_ids="token_ids" in made)]
        if usage is not None:
            fields["usage"] = usage
        elif fields.get("usage") is not None:
            del fields["usage"]  # Of another chunk.
        return _event(fields)

    def again(self, choice: ReceivedChoice, fields: dict[str, Any]) -> bytes:
        """Return the event of a chunk whose answer begins again; empty if the client has the chunk already."""
        if choice.is_role_alone:
            return b""
        fields |= {name: value for name, value in self._heading().items() if name in _HEADING}
        fields.pop("prompt_token_ids", None)
        made = self._trimmed(fields["choices"][0], has_ids=True)
        if choice.delta is not None:
            made["delta"].pop("role", None)
        return _event(fields)

    def closing(self, usage: dict[str, Any] | None) -> bytes:
        """Return the event of a chunk without choices."""
        return _event(self._heading() | {"choices": [], "usage": usage})

    def _heading(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.json.decode(self._sample)
        fields.pop("prompt_token_ids", None)
        return fields

    def _trimmed(self, made: dict[str, Any], *, has_ids: bool) -> dict[str, Any]:
        """Remove the ids that the client does not want, and those of the prompt, which it has already."""
        if not has_ids:
            made.pop("token_ids", None)
        elif not self._wants_ids and "token_ids" in made:
            made["token_ids"] = None
        if "prompt_token_ids" in made:
            made["prompt_token_ids"] = None
        return made


def added_up(fields: dict[str, Any], tokens: AnswerTokens) -> dict[str, Any] | None:
    """Return the usage of a continuation's chunk, added to that of earlier engines; None without one."""
    usage = fields.get("usage")
    if not isinstance(usage, dict):
        return None
    tokens.add_up(usage)
    return usage


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(fields)


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


_MAX_MODELS = 64  # Of which traits are kept, the latest ones.


class Resumption:
    """Makes resumable streams of requests.

    Args:
        context_of: Returns the longest sequence of a model, tokens; None means unknown.
    """

    def __init__(self, context_of: Callable[[str | None], int | None]) -> None:
        self._context_of = context_of
        self._traits: OrderedDict[str | None, ModelTraits] = OrderedDict()

    def request_for(self, incoming: Incoming) -> ResumableRequest | str | None:
        """Return the request in resumable form, or the obstacle to that; None for a request without a stream."""
        if b"content-encoding" in incoming.head.named:
            return "packed body"
        found = resumable(incoming.head.path, incoming.body, self._context_of)
        if not isinstance(found, ResumableRequest):
            return found
        traits = self._traits.get(found.model)
        return "reasoning parser" if found.is_chat and traits is not None and traits.parses_reasoning else found

    def stream_of(self, request: ResumableRequest) -> ResumableStream:
        """Return the stream of a request's answer."""
        traits = self._traits.get(request.model)
        if traits is None:
            traits = self._traits[request.model] = ModelTraits()
            if len(self._traits) > _MAX_MODELS:
                self._traits.popitem(last=False)
        self._traits.move_to_end(request.model)
        return ResumableStream(request, traits)


def continued(incoming: Incoming, continuation: Continuation) -> Incoming:
    """Return the request that continues the answer to `incoming`, with its headers."""
    head = incoming.head
    if continuation.path != head.path:
        head = RequestHead(head.method, continuation.path.encode(), head.headers, head.named)
    return replace(incoming, head=head, body=continuation.body)
