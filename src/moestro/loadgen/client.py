"""The HTTP side: sends one request, timestamps the bytes of its streamed answer, and reads them.

An answer without finish reason and usage counts as failed. To most clients a stream that breaks off looks like one that
ended. Here only an answer that states its end is complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import aiohttp
import msgspec

from moestro.errors import ConfigError
from moestro.loadgen.settings import EndpointSettings
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

    @property
    def rest(self) -> bytes:
        """Bytes that are no complete event yet."""
        return self._rest

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
            words = error_words(self._events.rest)
            return "no_stream", "the answer is not an event stream" + (f": {words}" if words else "")
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


# Sending.

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# Below uvicorn's 5 s, so that no request uses a connection that the server is about to close.
_KEEPALIVE_S = 4.0
_ERROR_BYTES = 1 << 16


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    device: str = ""  # Moestro's servers send it, and the dilation of paced ones
    pace_dilation: float = 1.0


class _Cards(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model to measure.

    Attributes:
        max_model_len: most tokens of prompt and answer, where the server tells.
        is_paced: whether the server's steps take a modelled time, so that its figures are not measured ones.
        pace_dilation: factor on these times.
    """

    url: str
    model: str
    max_model_len: int | None
    is_paced: bool = False
    pace_dilation: float = 1.0


def unlimited_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Open a session of any number of connections that no timeout ends. `headers` accompany each request."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class BenchClient:
    """Connections to one server, open during an `async with`."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._headers = {"Content-Type": "application/json"}
        if settings.api_key:
            self._headers["Authorization"] = f"Bearer {settings.api_key}"

    async def __aenter__(self) -> BenchClient:
        self._session = unlimited_session(self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ask(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        timeout_s: float | None = None,
        on_delivery: Callable[[int], None] = lambda _: None,
    ) -> Outcome:
        """Send `body` to `url` and read the whole answer. Every error becomes the outcome's `failure`.

        Args:
            timeout_s: seconds for the whole answer. None means those of the settings.
            on_delivery: called with the number of deliveries so far whenever bytes arrive.
        """
        reader, timeout_s = AnswerReader(), timeout_s or self._settings.timeout
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.post(url, data=body, headers=headers) as response:
                    if response.status != 200:
                        return refusal(response.status, await response.content.read(_ERROR_BYTES))
                    # Read past [DONE] to the end of the body: only then can another request use the connection.
                    while data := await response.content.readany():
                        reader.feed(data, time.monotonic_ns())
                        on_delivery(reader.num_deliveries)
        except TimeoutError:
            reader.fail("timeout", f"no complete answer within {timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            reader.fail("connection", f"{type(error).__name__}: {error}")
        return reader.outcome()

    async def find_endpoint(self, model_flag: str = "--model") -> Endpoint:
        """Find the model to measure: the named one, or the first that the server lists.

        Args:
            model_flag: flag that names the model, for the error.

        Raises:
            ConfigError: no server answers, the answer is no list of models, or the list lacks the model.
        """
        cards = await self._models()
        model, names = self._settings.model, [card.id for card in cards]
        if not names or (model is not None and model not in names):
            raise ConfigError(
                f"{self._settings.root} serves {', '.join(names) or 'no model'}: give one as {model_flag}"
            )
        card = cards[0] if model is None else cards[names.index(model)]
        url = self._settings.root + _PATHS[self._settings.endpoint_type]
        return Endpoint(url, card.id, card.max_model_len, card.device.startswith("paced"), card.pace_dilation)

    async def read(self, path: str, *, timeout_s: float | None = None) -> bytes | None:
        """Return the body of a path of the server; None: it has none there, or does not answer.

        Args:
            timeout_s: seconds for the answer. None means those of the settings.
        """
        try:
            async with (
                asyncio.timeout(timeout_s or self._settings.timeout),
                self._session.get(self._settings.root + path) as answer,
            ):
                return await answer.read() if answer.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None

    async def _models(self) -> list[_Card]:
        url = f"{self._settings.root}/v1/models"
        try:
            async with asyncio.timeout(self._settings.timeout), self._session.get(url) as response:
                body = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ConfigError(
                f"no server answers at {url} ({error or type(error).__name__}):"
                " start one, for instance with moestro serve, or give its --base-url"
            ) from error
        if response.status == 401:
            raise ConfigError(f"{url} needs a key: set MOESTRO_API_KEY, or give --api-key")
        try:
            if response.status == 200:
                return msgspec.json.decode(body, type=_Cards, strict=False).data
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        text = f"{url} answers {response.status} and no list of models ({error_words(body)}): check --base-url"
        raise ConfigError(text)
