"""The HTTP API of `moestro serve`: OpenAI's completions and models, paths of tokenizers and operators, and all routes.

`web/middleware.py` handles errors, keys and request ids. The OpenAPI document is made from the structs that decode
bodies and encode answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, get_type_hints

import msgspec
from aiohttp import web

from moestro import __version__
from moestro.config.config_sources import SECRETS, settings_in
from moestro.config.serve_settings import ServeSettings
from moestro.core.clients import count_elements
from moestro.core.request import ModelInfo
from moestro.errors import RequestError
from moestro.server.api.openapi_bounds import add_bounds
from moestro.server.api.protocol import (
    Answer,
    BatchChatFields,
    ChatChoice,
    ChatFields,
    CompletionFields,
    ModelCard,
    ModelList,
    TextChoice,
)
from moestro.server.api.request_builder import (
    Arrival,
    Prepared,
    ServedModel,
    chat_prompt,
    prepare_chat,
    prepare_chats,
    prepare_completion,
    refuse_foreign_ids,
    refuse_too_much_text,
)
from moestro.server.api.request_fields import CHAT_SHAPES, IN_CHAT, BodyDecoder, ignored_warning, refuse_unknown
from moestro.server.api.request_runner import AgentApi, InputTokenCount, RequestRunner, TokenCount
from moestro.server.api.responses import ChatForm, CompletionForm, Heading, OpenAIEncoding, heading
from moestro.server.api.validation import chat_ask
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.request_state import Traffic
from moestro.text.thread_pool import PrepareThreads
from moestro.text.tokenizer import Tokenizer
from moestro.web.adapters.messages import CountFields, MessagesFields
from moestro.web.adapters.responses_request import ResponsesFields
from moestro.web.bodies import Bodies, client_of
from moestro.web.errors import AnthropicErrorBody, HttpError
from moestro.web.figures import CONTENT_TYPE, Exposition, LiveStatistics, page_routes
from moestro.web.openapi import DOCS_HEADERS, EMPTY, ApiPath, docs_page, document_of
from moestro.web.page import HEALTH_PATHS, READY_PATHS, VERSION_BODY, probe_status
from moestro.wire.messages import Phase


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `GET /server_info`.

    Attributes:
        settings: Value of each setting by the name of its flag, without keys.
        engines: Information of each engine's model, by number.
        start_s: Duration of each phase of the start, in seconds.
    """

    version: str
    served_model_names: tuple[str, ...]
    settings: dict[str, Any]
    engines: list[ModelInfo]
    start_s: dict[str, float]


def server_info(settings: ServeSettings, infos: Sequence[ModelInfo], phases: Sequence[Phase]) -> ServerInfo:
    """Return the information of a server that has started."""
    return ServerInfo(
        version=__version__,
        served_model_names=settings.server.served_model_name,
        settings={
            name: value if isinstance(value, str | int | float | tuple | None) else str(value)
            for name, value in settings_in(settings)
            if name not in SECRETS
        },
        engines=list(infos),
        start_s={phase.name: round(phase.seconds, 3) for phase in phases},
    )


class TokenizeFields(msgspec.Struct, kw_only=True):
    """Body of `POST /tokenize` with a prompt."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None  # None means yes.
    return_token_strs: bool | None = None


class TokenizeChatFields(ChatFields, kw_only=True):
    """Body of `POST /tokenize` with a chat, of which every field counts that shapes the prompt of a completion."""

    add_special_tokens: bool | None = None  # None means no, because the chat template writes them.
    return_token_strs: bool | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class Tokenized(msgspec.Struct):
    """Response of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Detokenized(msgspec.Struct):
    """Response of `POST /detokenize`."""

    prompt: str


_NULL = msgspec.Raw(b"null")


class _PromptOrChat(msgspec.Struct):
    """Fields that tell a prompt from a chat."""

    prompt: msgspec.Raw = _NULL
    messages: msgspec.Raw = _NULL


_OWN_FIELDS = frozenset(TokenizeChatFields.__struct_fields__)
_NEUTRAL_IN_CHATS = {name: values for name, values in IN_CHAT.items() if name not in _OWN_FIELDS}
_tokenize = BodyDecoder(TokenizeFields)
_tokenize_chat = BodyDecoder(TokenizeChatFields, _NEUTRAL_IN_CHATS, shapes=CHAT_SHAPES)
_detokenize = BodyDecoder(DetokenizeFields, ids="tokens")
_kind = BodyDecoder(_PromptOrChat)

Unknown = tuple[str, ...]  # Names of fields that nothing reads.


class TextApi:
    """Converts text to token ids and back, on the threads that prepare requests."""

    def __init__(self, model: ServedModel, bodies: Bodies, threads: PrepareThreads) -> None:
        self._model = model
        self._bodies = bodies
        self._threads = threads

    def routes(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.get("/tokenizer_info", self.tokenizer_info),
        ]

    async def tokenizer_info(self, _http: web.Request) -> web.Response:
        """Handle GET /tokenizer_info."""
        if not self._model.shows_tokenizer:
            text = "This server does not show its tokenizer (--enable-tokenizer-info-endpoint)."
            raise HttpError(404, text, "not_found")
        return _json(tokenizer_settings(self._model.tokenizer), ())

    async def tokenize(self, http: web.Request) -> web.Response:
        """Handle POST /tokenize."""
        async with self._bodies.reading(http) as body:
            return await self._threads.run(lambda: _json(*tokenized(body, self._model)), len(body), client_of(http))

    async def detokenize(self, http: web.Request) -> web.Response:
        """Handle POST /detokenize."""
        async with self._bodies.reading(http) as body:
            return await self._threads.run(lambda: _json(*detokenized(body, self._model)), len(body), client_of(http))


def tokenizer_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json without names of files, the class, and the chat template in use."""
    path = tokenizer.path / "tokenizer_config.json"
    given: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
    shown = {name: value for name, value in given.items() if not name.endswith("_file")}
    template = tokenizer.chat_template
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | shown | ({"chat_template": template} if template else {})


def tokenized(body: bytes, model: ServedModel) -> tuple[Tokenized, Unknown]:
    """Return the tokens that a completion, or a chat completion, with the same fields would have.

    Raises:
        RequestError: The model is unknown, both or neither of prompt and messages are given, or the text is too long.
    """
    kind = _kind(body).fields
    has_prompt, has_messages = (bytes(field) != b"null" for field in (kind.prompt, kind.messages))
    if has_prompt == has_messages:
        raise RequestError("Send either prompt or messages.", param="prompt", code="invalid_value")
    return _tokenized_prompt(body, model) if has_prompt else _tokenized_chat(body, model)


def _tokenized_prompt(body: bytes, model: ServedModel) -> tuple[Tokenized, Unknown]:
    fields, unknown = _tokenize(body)
    model.name_for(fields.model)
    refuse_unknown(unknown, is_strict=model.has_strict_fields)
    refuse_too_much_text(len(fields.prompt), model)
    ids = model.tokenizer.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
    return _answer(ids, model, with_names=bool(fields.return_token_strs)), unknown


def _tokenized_chat(body: bytes, model: ServedModel) -> tuple[Tokenized, Unknown]:
    fields, unknown = _tokenize_chat(body)
    model.name_for(fields.model)
    refuse_unknown(unknown, is_strict=model.has_strict_fields)
    ask = chat_ask(fields, unknown)
    text = chat_prompt(ask, model).prompt
    ids = model.tokenizer.encode(text, add_special_tokens=bool(fields.add_special_tokens))
    return _answer(ids, model, with_names=bool(fields.return_token_strs)), unknown


def _answer(ids: list[int], model: ServedModel, *, with_names: bool) -> Tokenized:
    names = [model.tokenizer.name(i) for i in ids] if with_names else None
    return Tokenized(len(ids), model.info.max_model_len, ids, names)


def detokenized(body: bytes, model: ServedModel) -> tuple[Detokenized, Unknown]:
    """Return the text of the tokens, including special ones.

    Raises:
        RequestError: The model is unknown, an id is not in its vocabulary, or the ids exceed its context length.
    """
    limit = model.info.max_model_len

    def check_ids(ids: memoryview) -> None:
        if (num_ids := count_elements(ids, sys.maxsize)) > limit:
            raise RequestError(
                f"tokens may hold {limit} ids at most, got {num_ids}.", param="tokens", code="invalid_value"
            )

    fields, unknown = _detokenize(body, check_ids)
    model.name_for(fields.model)
    refuse_unknown(unknown, is_strict=model.has_strict_fields)
    refuse_foreign_ids("tokens", fields.tokens, model.info.vocab_size)
    return Detokenized(model.tokenizer.decode(fields.tokens)), unknown


def _json(value: object, unknown: Unknown) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, content_type="application/json", headers=ignored_warning(unknown))


def _answer_struct(name: str, choice: type) -> type[msgspec.Struct]:
    """Return the struct of an answer with choices of one kind; `Answer` serves all kinds."""
    hints: dict[str, Any] = get_type_hints(Answer) | {"choices": list[choice]}  # type: ignore[valid-type]
    required = [(field.name, hints[field.name]) for field in msgspec.structs.fields(Answer) if field.required]
    optional = [
        (field.name, hints[field.name], field.default) for field in msgspec.structs.fields(Answer) if not field.required
    ]
    return msgspec.defstruct(name, [*required, *optional])


_ChatCompletion = _answer_struct("ChatCompletion", ChatChoice)
API_PATHS: tuple[ApiPath, ...] = (
    ApiPath(
        path="/v1/chat/completions", method="post", summary="Answer a chat.", says="A chat completion, or its chunks.",
        bodies=(ChatFields,), answer=_ChatCompletion, is_streamed=True,
    ),
    ApiPath(
        path="/v1/chat/completions/batch", method="post", summary="Answer several chats.",
        says="A chat completion with the choices of all chats, in order.", bodies=(BatchChatFields,),
        answer=_ChatCompletion,
    ),
    ApiPath(
        path="/v1/completions", method="post", summary="Continue a prompt.", says="A completion, or its chunks.",
        bodies=(CompletionFields,), answer=_answer_struct("Completion", TextChoice), is_streamed=True,
    ),
    ApiPath(
        path="/v1/messages", method="post", summary="Answer a conversation (Anthropic's API).",
        says="A message of Anthropic's API, or its events.", bodies=(MessagesFields,), is_streamed=True,
        error=AnthropicErrorBody,
    ),
    ApiPath(
        path="/v1/messages/count_tokens", method="post", summary="Count the tokens of a conversation.",
        says="The number of tokens.", bodies=(CountFields,), answer=TokenCount, error=AnthropicErrorBody,
    ),
    ApiPath(
        path="/v1/responses", method="post", summary="Answer a conversation (OpenAI's responses, without storage).",
        says="A response of OpenAI's API, or its events.", bodies=(ResponsesFields,), is_streamed=True,
    ),
    ApiPath(
        path="/v1/responses/input_tokens", method="post", summary="Count the tokens of a response's request.",
        says="The number of tokens.", bodies=(ResponsesFields,), answer=InputTokenCount,
    ),
    ApiPath(path="/v1/models", summary="List the models.", says="All models.", answer=ModelList),
    ApiPath(path="/v1/models/{name}", summary="Describe one model.", says="The model.", answer=ModelCard),
    ApiPath(
        path="/tokenize", method="post", summary="Return the tokens of a prompt or a chat.", says="The tokens.",
        bodies=(TokenizeFields, TokenizeChatFields), answer=Tokenized,
    ),
    ApiPath(
        path="/detokenize", method="post", summary="Return the text of tokens.", says="The text.",
        bodies=(DetokenizeFields,), answer=Detokenized,
    ),
    ApiPath(
        path="/tokenizer_info", summary="Describe the tokenizer, with --enable-tokenizer-info-endpoint.",
        says="The fields of tokenizer_config.json, and the chat template in use.",
    ),
    ApiPath(path="/health", summary="200 while any engine takes requests.", says=EMPTY, is_public=True),
    ApiPath(path="/ping", summary="The same as /health.", says=EMPTY, is_public=True),
    ApiPath(path="/ready", summary="200 while the server takes new requests.", says=EMPTY, is_public=True),
    ApiPath(path="/readyz", summary="The same as /ready.", says=EMPTY, is_public=True),
    ApiPath(path="/load", summary="Requests under way, and each engine's load.", says="Counts by name."),
    ApiPath(
        path="/metrics", summary="All metrics.", says="Prometheus' text format.", media_type="text/plain",
    ),
    ApiPath(path="/version", summary="The version.", says="The version by name."),
    ApiPath(path="/server_info", summary="Settings and engines.", says="Settings and engines.", answer=ServerInfo),
    ApiPath(path="/openapi.json", summary="This document.", says="An OpenAPI document.", is_public=True),
    ApiPath(
        path="/docs", summary="This document as a page.", says="A page.", media_type="text/html", is_public=True,
    ),
    ApiPath(
        path="/statistics", summary="Figures of the page at /, with ?experts=true the load of experts.",
        says="The present figures.", answer=LiveStatistics,
    ),
    ApiPath(path="/", summary="The page.", says="The page.", media_type="text/html", is_public=True),
    ApiPath(path="/page/{name}", summary="A file of the page.", says="The file.", media_type="*/*", is_public=True),
)  # fmt: skip


def openapi_document(*, is_strict: bool = False) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the server.

    Args:
        is_strict: Whether the server refuses unknown fields (--strict-fields).
    """
    return document_of(API_PATHS, lambda components: add_bounds(components, is_strict=is_strict))


ROOT_PATH = web.AppKey("root_path", str)  # Prefix under which a proxy shows the server; empty means none.


def docs_routes(*, is_strict: bool) -> list[web.RouteDef]:
    """Return the routes of both paths.

    Args:
        is_strict: Whether the server refuses unknown fields.
    """

    @cache
    def document(root_path: str) -> bytes:
        servers = {"servers": [{"url": root_path}]} if root_path else {}
        return msgspec.json.encode(openapi_document(is_strict=is_strict) | servers)

    async def openapi(http: web.Request) -> web.Response:
        return web.Response(body=document(http.app[ROOT_PATH]), content_type="application/json")

    async def docs(_http: web.Request) -> web.Response:
        return web.Response(body=docs_page(), content_type="text/html", charset="utf-8", headers=DOCS_HEADERS)

    return [web.get("/openapi.json", openapi), web.get("/docs", docs)]


class Operations:
    """Handles requests of operators from the API server's own state, without waiting for an engine.

    Args:
        statistics: Callable that returns the answer of /statistics, with the load of experts if its argument is true.
        is_strict: Whether the server refuses unknown fields, as its document then says.
    """

    def __init__(
        self,
        engines: EngineClient,
        traffic: Traffic,
        exposition: Exposition,
        info: ServerInfo,
        statistics: Callable[[bool], LiveStatistics],
        *,
        is_strict: bool,
    ) -> None:
        self._is_strict = is_strict
        self._engines = engines
        self._info = info
        self._traffic = traffic
        self._exposition = exposition
        self._statistics = statistics

    def routes(self) -> list[web.RouteDef]:
        """Return all routes; GET includes HEAD."""
        return [
            *(web.get(path, self.probe) for path in (*HEALTH_PATHS, *READY_PATHS)),
            web.post("/ping", self.probe),
            web.get("/version", self.version),
            web.get("/load", self.load),
            web.get("/metrics", self.metrics),
            web.get("/server_info", self.server_info),
            *docs_routes(is_strict=self._is_strict),
            *page_routes("serve", "clients", self._statistics),
        ]

    async def probe(self, http: web.Request) -> web.Response:
        """Handle GET /health and /ping: 200 while any engine takes requests; /ready, /readyz also fail in a drain."""
        is_healthy, is_draining = self._engines.is_healthy, self._traffic.is_draining
        return web.Response(status=probe_status(http.path, is_healthy=is_healthy, is_draining=is_draining))

    async def version(self, _http: web.Request) -> web.Response:
        """Handle GET /version."""
        return web.Response(body=VERSION_BODY, content_type="application/json")

    async def server_info(self, _http: web.Request) -> web.Response:
        """Handle GET /server_info."""
        return web.Response(body=msgspec.json.encode(self._info), content_type="application/json")

    async def load(self, _http: web.Request) -> web.Response:
        """Handle GET /load: the number of running requests, and the last load figures of each engine."""
        figures = {"server_load": self._traffic.num_answering, "engines": self._engines.loads}
        return web.Response(body=msgspec.json.encode(figures), content_type="application/json")

    async def metrics(self, _http: web.Request) -> web.Response:
        """Handle GET /metrics: all metrics in Prometheus' text format."""
        return web.Response(body=self._exposition.text(), headers={"Content-Type": CONTENT_TYPE})


class ApiServer:
    """Serves the API's paths with the outputs of the engines.

    Args:
        write_timeout_s: Time for which a client may leave its stream unread, in seconds.

    Attributes:
        traffic: Generation requests without a complete response.
    """

    def __init__(self, engines: EngineClient, model: ServedModel, write_timeout_s: float) -> None:
        self._engines = engines
        self._model = model
        self._runner = RequestRunner(engines, model, write_timeout_s)
        self.traffic = self._runner.traffic

    def app(
        self, exposition: Exposition, info: ServerInfo, statistics: Callable[[bool], LiveStatistics]
    ) -> web.Application:
        """Return the application, which runs behind `HttpMiddleware`."""
        app = web.Application()
        runner, model = self._runner, self._model
        operations = Operations(
            self._engines, self.traffic, exposition, info, statistics, is_strict=model.has_strict_fields
        )
        app.add_routes(
            [
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/chat/completions/batch", self.chats),
                *AgentApi(runner, model).routes(),
                *TextApi(model, runner.bodies, runner.chat_threads).routes(),
                *operations.routes(),
            ]
        )
        return app

    def close(self) -> None:
        """Stop the threads, and the processes that render chat templates."""
        self._runner.close()
        self._model.tokenizer.close()

    # --- generation

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """Handle POST /v1/completions."""
        prepared = await self._runner.prepare(http, "cmpl-", prepare_completion, self._runner.threads)
        form = CompletionForm(self._heading(prepared), prepared.options)
        return await self._runner.answer(http, prepared, form, OpenAIEncoding())

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """Handle POST /v1/chat/completions."""
        return await self._chat(http, prepare_chat)

    async def chats(self, http: web.Request) -> web.StreamResponse:
        """Handle POST /v1/chat/completions/batch: one answer with the choices of all conversations, in order."""
        return await self._chat(http, prepare_chats)

    async def _chat(
        self, http: web.Request, prepare: Callable[[bytes, ServedModel, Arrival], Prepared]
    ) -> web.StreamResponse:
        prepared = await self._runner.prepare(http, "chatcmpl-", prepare, self._runner.chat_threads)
        form = ChatForm(self._heading(prepared), prepared.options)
        return await self._runner.answer(http, prepared, form, OpenAIEncoding())

    def _heading(self, prepared: Prepared) -> Heading:
        return heading(prepared.answer_id, prepared.name, self._model.fingerprint)

    # --- models

    async def models(self, _http: web.Request) -> web.Response:
        """Handle GET /v1/models."""
        return _card_json(ModelList([self._card(name) for name in self._model.names]))

    async def model(self, http: web.Request) -> web.Response:
        """Handle GET /v1/models/{name}."""
        return _card_json(self._card(self._model.name_for(http.match_info["name"])))

    def _card(self, name: str) -> ModelCard:
        model, info = self._model, self._model.info
        return ModelCard(
            id=name,
            created=model.created,
            root=name,
            max_model_len=info.max_model_len,
            device=info.device,
            pace_dilation=info.pace_dilation,
        )


def _card_json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
