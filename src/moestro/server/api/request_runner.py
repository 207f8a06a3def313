"""Runs generation requests of all APIs, and adapts those of agents, `/v1/messages` and `/v1/responses`, to chats."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from moestro.core.load_figures import LoadFigures
from moestro.errors import RequestError
from moestro.grammar.compiler import VocabularySource
from moestro.grammar.host import GrammarChecker
from moestro.server.api.chat_fields import GrammarGate
from moestro.server.api.generation import SCORE_BYTES, Generation, join_pieces
from moestro.server.api.protocol import Answer, StructuredOutputs
from moestro.server.api.request_builder import Arrival, Prepared, ServedModel, chat_prompt, following, prepare_chat
from moestro.server.api.request_fields import (
    IN_COUNTS,
    IN_MESSAGES,
    IN_RESPONSES,
    BodyDecoder,
    ignored_warning,
    refuse_unknown,
)
from moestro.server.api.responses import AnswerEncoding, AnswerForm, ChatForm, EventStream, UsageWanted, heading, stream
from moestro.server.api.validation import Options, parse_chat
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.request_state import Piece, Traffic, UnreadMemory, UnreadStream
from moestro.text.thread_pool import PrepareThreads
from moestro.web.adapters.field_places import FieldPlaces, TranslatedChat
from moestro.web.adapters.messages import (
    CountFields,
    MessagesFields,
    MessageStream,
    chat_of_count,
    chat_of_message,
    message_of_chat,
)
from moestro.web.adapters.paths import COUNT_TOKENS, INPUT_TOKENS, MESSAGES, RESPONSES
from moestro.web.adapters.responses_answer import ResponseStream, response_of_chat, settings_of
from moestro.web.adapters.responses_request import FunctionTool, OfferedTools, ResponsesFields, chat_of_response
from moestro.web.bodies import Bodies, client_of, tenant_of
from moestro.web.errors import HttpError, anthropic_error_json, error_json
from moestro.web.middleware import REQUEST_ID
from moestro.web.ports.heads import session_in
from moestro.web.tracing import TRACEPARENT
from moestro.wire.load_report import LOAD_REPORT_HEADER, written

FORMAT_HEADER = "endpoint-load-metrics-format"
LOAD_HEADER = "endpoint-load-metrics"


def load_headers(wanted: str | None, loads: Sequence[LoadFigures]) -> dict[str, str]:
    """Return the header for an answer; none without `wanted`, or for a format that vLLM does not know either.

    Args:
        wanted: Value of the request's `endpoint-load-metrics-format`: TEXT or JSON, in any case.
        loads: Last report of each engine behind the port.
    """
    form = (wanted or "").strip().upper()
    if form not in {"TEXT", "JSON"}:
        return {}
    usages = [load.kv_usage or 0.0 for load in loads]
    figures = {
        "kv_cache_usage_perc": sum(usages) / len(usages),
        "num_requests_waiting": float(sum(load.num_waiting or 0 for load in loads)),
    }
    if form == "TEXT":
        return {LOAD_HEADER: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())}
    return {LOAD_HEADER: f"JSON {msgspec.json.encode({'named_metrics': figures}).decode()}"}


T = TypeVar("T")

_TOKEN_BYTES = 8  # of a token in an answer
_INLINE_BYTES = 32 << 10  # of an answer that the event loop builds itself, in about a millisecond


class RequestRunner:
    """Answers generation requests with the outputs of the engines.

    Args:
        write_timeout_s: Time for which a client may leave its stream unread, in seconds.

    Attributes:
        bodies: Reader of all bodies.
        threads: Threads that prepare completions.
        chat_threads: Threads that prepare chats. A chat template may take seconds; completions do not wait for it.
        traffic: Generation requests without a complete response.
        unread: Memory of what streams have for clients that do not read.
    """

    def __init__(self, engines: EngineClient, model: ServedModel, write_timeout_s: float) -> None:
        self._engines = engines
        self._model = model
        self._write_timeout_s = write_timeout_s
        self.bodies = Bodies()
        self.threads = PrepareThreads()
        self.chat_threads = PrepareThreads()
        self.traffic = Traffic()
        self.unread = UnreadMemory()
        self._answer_threads = PrepareThreads(num_threads=1)
        self._grammars = GrammarGate(grammar_checker(model))

    def close(self) -> None:
        """Stop the threads, and the processes that check grammars."""
        self.threads.close()
        self.chat_threads.close()
        self._answer_threads.close()
        self._grammars.close()

    async def prepare(
        self,
        http: web.Request,
        kind: str,
        prepare: Callable[[bytes, ServedModel, Arrival], T],
        threads: PrepareThreads,
    ) -> T:
        """Return what `prepare` makes of the body, on one of `threads`.

        Args:
            kind: Beginning of the answer's id, with its separator.

        Raises:
            RequestError: No engine takes requests, or the body is refused.
        """
        client = client_of(http)
        answer_id, session_id = f"{kind}{uuid.uuid4().hex}", session_in(http.headers.get)
        traceparent = http.headers.get(TRACEPARENT) if self._model.is_traced else None
        arrival = Arrival(answer_id, time.monotonic_ns(), session_id, str(client), tenant_of(http), traceparent)
        self.traffic.check_open()
        # Before the body is decoded and tokenized, so that a refusal is cheap.
        self._engines.check_room(arrival.client)
        async with self.bodies.reading(http) as body:
            with self._engines.preparing(arrival.client):
                return await threads.run(lambda: prepare(body, self._model, arrival), len(body), client)

    async def answer(
        self, http: web.Request, prepared: Prepared, form: AnswerForm, encoding: AnswerEncoding
    ) -> web.StreamResponse:
        """Generate and send the answer.

        Raises:
            RequestError: The request failed before anything was sent.
        """
        options = prepared.options
        if options.request_id is not None and "X-Request-Id" not in http.headers:
            http[REQUEST_ID] = options.request_id
        jobs = prepared.jobs
        if options.grammar is not None:
            jobs = following(await self._grammars.check(options.grammar, client_of(http)), jobs)
        with self.traffic.answering():
            return await self._generate(http, replace(prepared, jobs=jobs), form, encoding)

    async def _generate(
        self, http: web.Request, prepared: Prepared, form: AnswerForm, encoding: AnswerEncoding
    ) -> web.StreamResponse:
        options = prepared.options

        def headers() -> dict[str, str]:
            """Headers with the load at the beginning of the answer."""
            return ignored_warning(options.unknown_fields) | self._load_headers(http)

        async with Generation(self._engines, self._model, prepared.jobs, self._answer_threads) as generation:
            if options.stream:
                wanted = UsageWanted(options.include_usage, options.continuous_usage)
                events = EventStream(http, self._write_timeout_s, encoding, headers)
                with UnreadStream(self.unread, client_of(http), events.cut) as unread:
                    generation.count_unread_with(unread)
                    return await stream(events, generation, form, wanted)
            pieces, usage = await generation.all_pieces(), generation.usage()

            def build() -> bytes:
                return encoding.whole(form.whole([join_pieces(parts) for parts in pieces], usage))

            num_bytes = _size_of(pieces, options)
            is_small = num_bytes <= _INLINE_BYTES
            body = build() if is_small else await self._answer_threads.run(build, num_bytes, client_of(http))
            return web.Response(body=body, content_type="application/json", headers=headers())

    def _load_headers(self, http: web.Request) -> dict[str, str]:
        headers = load_headers(http.headers.get(FORMAT_HEADER), self._engines.loads)
        if LOAD_REPORT_HEADER in http.headers:
            headers[LOAD_REPORT_HEADER] = written(self._engines.load_report())
        return headers


def _size_of(pieces: Sequence[Sequence[Piece]], options: Options) -> int:
    """Return the approximate size of an answer, in bytes, without a look at all of it."""
    num_tokens, num_scores = sum(map(len, pieces)), 0
    if options.logprobs is not None:
        num_scores += num_tokens * (1 + options.logprobs)
    for parts in pieces:  # The first one has what is of the prompt.
        first = parts[0]
        num_tokens += len(first.text) // _TOKEN_BYTES + len(first.prompt_token_ids or ())
        if options.echo and options.logprobs is not None:
            num_scores += len(first.scores or ()) * (1 + options.logprobs)
        if options.prompt_logprobs is not None:
            num_scores += len(first.prompt_scores or ()) * (1 + options.prompt_logprobs)
    return _TOKEN_BYTES * num_tokens + SCORE_BYTES * num_scores


def grammar_checker(model: ServedModel) -> GrammarChecker | None:
    """Return what checks the grammars of clients; None means that the model's engines compute no logits."""
    info = model.info
    if not info.has_logits:
        return None
    return GrammarChecker(VocabularySource(model.tokenizer.path, info.vocab_size, info.eos_token_ids))


_decode_message = BodyDecoder(MessagesFields, IN_MESSAGES)
_decode_count = BodyDecoder(CountFields, IN_COUNTS)
RESPONSE_SHAPES: Mapping[str, Any] = {"tools": list[FunctionTool], "structured_outputs": StructuredOutputs}
_decode_response = BodyDecoder(ResponsesFields, IN_RESPONSES, shapes=RESPONSE_SHAPES)
_encode = msgspec.json.Encoder().encode


class TokenCount(msgspec.Struct):
    """Response of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class InputTokenCount(msgspec.Struct):
    """Response of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"


class MessageEncoding:
    """Answers of `/v1/messages`."""

    repeats = False  # It opens and closes blocks of content.

    def __init__(self) -> None:
        self._stream = MessageStream()

    def whole(self, answer: Answer) -> bytes:
        """Return the message as JSON."""
        return _encode(message_of_chat(msgspec.to_builtins(answer)))

    def chunk(self, answer: Answer) -> bytes:
        """Return the events of a chunk."""
        return _events(self._stream.take(msgspec.to_builtins(answer)))

    def end(self) -> bytes:
        """Return the events that end the message."""
        return _events(self._stream.end())

    def failure(self, error: RequestError) -> bytes:
        """Return Anthropic's error event."""
        return b"event: error\ndata: " + anthropic_error_json(error) + b"\n\n"


class ResponseEncoding:
    """Answers of `/v1/responses`.

    Args:
        settings: Fields of the request that its response repeats.
        tools: Tools that the request offered.
    """

    repeats = False  # It numbers its events.

    def __init__(self, settings: dict[str, Any], tools: OfferedTools) -> None:
        self._settings, self._tools = settings, tools
        self._stream = ResponseStream(settings, tools)

    def whole(self, answer: Answer) -> bytes:
        """Return the response as JSON."""
        return _encode(response_of_chat(msgspec.to_builtins(answer), self._settings, self._tools))

    def chunk(self, answer: Answer) -> bytes:
        """Return the events of a chunk."""
        return _events(self._stream.take(msgspec.to_builtins(answer)))

    def end(self) -> bytes:
        """Return the events that end the response."""
        return _events(self._stream.end())

    def failure(self, error: RequestError) -> bytes:
        """Return an event with the error in two forms: the API's own, and the one at which clients stop reading."""
        event = self._stream.failure(error.code, error.message, error.param)
        return _events([event | msgspec.json.decode(error_json(error))])


def _events(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event)) for event in events)


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A prepared chat, the form in which its client reads the answer, and its fields' places in the client's body."""

    prepared: Prepared
    encoding: AnswerEncoding
    places: FieldPlaces


class AgentApi:
    """Translates requests to chat completions, and their answers back."""

    def __init__(self, runner: RequestRunner, model: ServedModel) -> None:
        self._runner = runner
        self._model = model

    def routes(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [
            web.post(MESSAGES, self.messages),
            web.post(COUNT_TOKENS, self.count_tokens),
            web.post(RESPONSES, self.responses),
            web.post(INPUT_TOKENS, self.count_input_tokens),
            web.route("*", RESPONSES + "/{rest:.+}", self.stored_response),
        ]

    async def messages(self, http: web.Request) -> web.StreamResponse:
        """Handle POST /v1/messages."""
        return await self._answer(http, await self._runner.prepare(http, "msg_", _message, self._runner.chat_threads))

    async def responses(self, http: web.Request) -> web.StreamResponse:
        """Handle POST /v1/responses."""
        return await self._answer(http, await self._runner.prepare(http, "resp_", _response, self._runner.chat_threads))

    async def count_tokens(self, http: web.Request) -> web.Response:
        """Handle POST /v1/messages/count_tokens."""
        async with self._runner.bodies.reading(http) as body:
            return await self._runner.chat_threads.run(
                lambda: _message_count(body, self._model), len(body), client_of(http)
            )

    async def count_input_tokens(self, http: web.Request) -> web.Response:
        """Handle POST /v1/responses/input_tokens."""
        async with self._runner.bodies.reading(http) as body:
            return await self._runner.chat_threads.run(
                lambda: _response_count(body, self._model), len(body), client_of(http)
            )

    async def stored_response(self, http: web.Request) -> web.Response:
        """Refuse requests for an earlier response."""
        raise HttpError(404, "This server stores no responses, so that none can be read or changed later.", "not_found")

    async def _answer(self, http: web.Request, adapted: _Adapted) -> web.StreamResponse:
        prepared = adapted.prepared
        form = ChatForm(heading(prepared.answer_id, prepared.name, self._model.fingerprint), prepared.options)
        with adapted.places.naming_errors():
            return await self._runner.answer(http, prepared, form, adapted.encoding)


def _message(body: bytes, model: ServedModel, arrival: Arrival) -> _Adapted:
    fields, unknown = _decode_message(body)
    chat = _without_vain_budget(chat_of_message(fields), model)
    return _Adapted(_prepared(chat, unknown, model, arrival), MessageEncoding(), chat.places)


def _without_vain_budget(chat: TranslatedChat, model: ServedModel) -> TranslatedChat:
    """Leave out a budget of thinking that cannot be enforced: clients send one whether or not the model thinks."""
    if model.chat.reasoning_end is not None or "thinking_token_budget" not in chat.fields:
        return chat
    fields = {name: value for name, value in chat.fields.items() if name != "thinking_token_budget"}
    return replace(chat, fields=fields, left_out=(*chat.left_out, "thinking.budget_tokens"))


def _response(body: bytes, model: ServedModel, arrival: Arrival) -> _Adapted:
    fields, unknown = _decode_response(body)
    made = chat_of_response(fields)
    encoding = ResponseEncoding(settings_of(fields), made.tools)
    return _Adapted(_prepared(made.chat, unknown, model, arrival), encoding, made.chat.places)


def _prepared(chat: TranslatedChat, unknown: tuple[str, ...], model: ServedModel, arrival: Arrival) -> Prepared:
    """Return the request with the fields of its own body that have no effect."""
    ignored = _ignored(chat, unknown)
    refuse_unknown(ignored, is_strict=model.has_strict_fields)
    with chat.places.naming_errors():
        prepared = prepare_chat(_encode(chat.fields), model, arrival)
    vain = map(chat.places.own_place, prepared.options.unknown_fields)
    return replace(prepared, options=replace(prepared.options, unknown_fields=(*ignored, *vain)))


def _ignored(chat: TranslatedChat, unknown: tuple[str, ...]) -> tuple[str, ...]:
    """Return the places of what has no effect; keys of what is left out as a whole have none of their own."""
    around = tuple(f"{each.partition(' ')[0]}." for each in chat.left_out)
    return (*(each for each in unknown if not each.startswith(around)), *chat.left_out)


def _message_count(body: bytes, model: ServedModel) -> web.Response:
    fields, unknown = _decode_count(body)
    return _counted(chat_of_count(fields), unknown, model, TokenCount)


def _response_count(body: bytes, model: ServedModel) -> web.Response:
    fields, unknown = _decode_response(body)
    return _counted(chat_of_response(fields).chat, unknown, model, InputTokenCount)


def _counted(
    chat: TranslatedChat, unknown: tuple[str, ...], model: ServedModel, make: Callable[[int], msgspec.Struct]
) -> web.Response:
    """Return what `make` makes of the number of tokens in the chat's prompt."""
    ignored = _ignored(chat, unknown)
    refuse_unknown(ignored, is_strict=model.has_strict_fields)
    with chat.places.naming_errors():
        ask = parse_chat(_encode(chat.fields))
        model.name_for(ask.options.model)
        encoding = model.tokenizer.encoding(chat_prompt(ask, model).prompt, add_special_tokens=False)
    answer = _encode(make(len(encoding)))
    return web.Response(body=answer, content_type="application/json", headers=ignored_warning(ignored))
