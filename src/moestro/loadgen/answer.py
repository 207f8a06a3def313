"""Reads one streamed answer from its bytes. An answer without finish reason and usage counts as failed.

To most clients a stream that breaks off looks like one that ended. Here only an answer that states its end is complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from moestro.workload.run_records import Outcome

# Parses server-sent events from a byte stream.

MAX_EVENT_BYTES = 16 << 20


class StreamSyntaxError(Exception):
    """The stream is not a readable stream of events."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `kind` is empty unless the server named it."""

    kind: str
    data: bytes


class EventReader:
    """Splits a byte stream into events; comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes.

        Raises:
            StreamSyntaxError: an event is longer than MAX_EVENT_BYTES.
        """
        # A trailing \r stays in the rest, to meet its \n in the next piece.
        *blocks, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamSyntaxError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return [event for block in blocks if (event := _event(block)) is not None]


def _event(block: bytes) -> Event | None:
    kind, data = "", []
    for line in block.split(b"\n"):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            kind = line[6:].strip().decode(errors="replace")
    return Event(kind, b"\n".join(data)) if data else None


# Finish reasons with which a server gives up.
_GIVEN_UP = {"abort", "error", "cancelled", "timeout"}
_SHOWN = 300  # characters of a server's message that a report repeats


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the chunk brings tokens. A chat's opening chunk only names the role."""
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls) or self.role is None


class _AnswerChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Chunk(msgspec.Struct):
    choices: list[_AnswerChoice] | None = None
    usage: _Usage | None = None
    error: str | dict[str, msgspec.Raw] | None = None
    object: str | None = None
    message: str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class AnswerReader:
    """Collects the bytes of one streamed answer with the times of their arrival."""

    def __init__(self) -> None:
        self._events = EventReader()
        self._outcome = Outcome()
        self._finish_reason: str | None = None
        self._usage: _Usage | None = None
        self._num_events = 0
        self._is_last_chunk_bare = False  # a finish reason without text: either the last token, or no token at all
        self.is_over = False

    @property
    def num_deliveries(self) -> int:
        """Chunks with tokens so far."""
        return len(self._outcome.delivery_ns)

    def feed(self, data: bytes, now_ns: int) -> None:
        """Add bytes that arrived at `now_ns`; after `is_over` they are ignored."""
        if self.is_over:
            return
        try:
            for event in self._events.feed(data):
                if not self.is_over:
                    self._take(event, now_ns)
        except (StreamSyntaxError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            self.fail("bad_chunk", str(error))

    def fail(self, word: str, message: str) -> None:
        """Record a failure of the transport or a timeout, unless the answer has ended before."""
        if not self.is_over:
            self.is_over = True
            self._outcome = Outcome(failure=word, message=message[:_SHOWN])

    def outcome(self) -> Outcome:
        """Return the outcome, once no more bytes will arrive."""
        if self._outcome.failure is None:
            if missing := self._missing():
                return Outcome(failure=missing[0], message=missing[1])
            self._settle()
        return self._outcome

    def _take(self, event: Event, now_ns: int) -> None:
        if event.data == b"[DONE]":
            self.is_over = True
            return
        self._num_events += 1
        if event.kind == "error":
            self.fail("error_event", error_words(event.data))
            return
        chunk = _decode(event.data)
        if chunk.error is not None or chunk.object == "error":
            self.fail("error_event", error_words(event.data))
            return
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.choices:
            self._take_choice(chunk.choices[0], now_ns)

    def _take_choice(self, choice: _AnswerChoice, now_ns: int) -> None:
        if choice.finish_reason is not None:
            self._finish_reason = choice.finish_reason
        if choice.delta is None:
            text, has_tokens = choice.text, True
        else:
            text, has_tokens = choice.delta.content, choice.delta.has_tokens
        if has_tokens or choice.finish_reason is not None:
            self._outcome.delivery_ns.append(now_ns)
            self._is_last_chunk_bare = choice.finish_reason is not None and not text

    def _missing(self) -> tuple[str, str] | None:
        if not self._num_events:
            return "no_stream", "the answer is not an event stream"
        if self._finish_reason is None:
            return "no_finish_reason", "the stream ended without a finish reason"
        if self._finish_reason in _GIVEN_UP:
            return f"finish_{self._finish_reason}", f"the server ended it with {self._finish_reason!r}"
        if self._usage is None:
            return "no_usage", "the stream ended without usage, so its number of tokens is unknown"
        if self._usage.completion_tokens < 1:
            return "no_tokens", "the server counts no token in its answer"
        return None

    def _settle(self) -> None:
        usage, outcome = self._usage, self._outcome
        assert usage is not None
        # More deliveries than tokens: the bare last chunk brought the finish reason and no token.
        if self._is_last_chunk_bare and len(outcome.delivery_ns) > max(1, usage.completion_tokens):
            outcome.delivery_ns.pop()
        outcome.num_prompt_tokens, outcome.num_output_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            outcome.num_cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


def refusal(status: int, body: bytes) -> Outcome:
    """Return the outcome of an answer with a status other than 200."""
    return Outcome(failure=f"http_{status}", message=error_words(body))


def error_words(body: bytes) -> str:
    """Extract the message of an error body, in any of the forms in use; without one, return the body itself."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        decoded = None
    for key in ("error", "message", "detail"):
        if isinstance(decoded, dict) and decoded.get(key):
            decoded = decoded[key]
    words = decoded if isinstance(decoded, str) else body.decode(errors="replace")
    return " ".join(words.split())[:_SHOWN]
