"""Handlers of Anthropic's `/v1/messages` and OpenAI's `/v1/responses`, which agents use: adapters over chats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from aiohttp import web

from moestro.errors import RequestError
from moestro.server.api.answers.responses import ChatForm, heading
from moestro.server.api.answers.sse import AnswerEncoding
from moestro.server.api.fields.protocol import Answer, StructuredOutputs
from moestro.server.api.fields.request_builder import Arrival, Prepared, ServedModel, chat_prompt, prepare_chat
from moestro.server.api.fields.request_fields import BodyDecoder, ignored_warning, refuse_unknown
from moestro.server.api.fields.unsupported import IN_COUNTS, IN_MESSAGES, IN_RESPONSES
from moestro.server.api.fields.validation import parse_chat
from moestro.server.api.request_runner import RequestRunner
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
from moestro.web.bodies import client_of
from moestro.web.errors import HttpError, anthropic_error_json, error_json

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
