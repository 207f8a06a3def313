"""The OpenAPI document of `moestro serve`, made from the structs that decode bodies and encode answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from moestro import __version__
from moestro.server.agent_api import InputTokenCount, TokenCount
from moestro.server.protocol import (
    Answer,
    BatchChatFields,
    ChatChoice,
    ChatFields,
    CompletionFields,
    ModelCard,
    ModelList,
    TextChoice,
)
from moestro.server.server_info import ServerInfo
from moestro.server.text_api import Detokenized, DetokenizeFields, TokenizeChatFields, Tokenized, TokenizeFields
from moestro.web.adapters.messages_request import CountFields, MessagesFields
from moestro.web.adapters.responses_request import ResponsesFields
from moestro.web.errors import AnthropicErrorBody, ErrorBody
from moestro.web.statistics import LiveStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPath:
    """One path of the API.

    Attributes:
        bodies: Structs of the body, of which each request has one; empty without a body.
        answer: Struct of the answer; None means that `says` describes it.
        says: The answer in words.
        is_streamed: Whether the answer can be a stream of events.
        is_public: Whether no key is needed.
        error: Struct of a refusal.
    """

    path: str
    summary: str
    says: str
    method: str = "get"
    bodies: tuple[type, ...] = ()
    answer: type | None = None
    media_type: str = "application/json"
    is_streamed: bool = False
    is_public: bool = False
    error: type = ErrorBody


def _answer_struct(name: str, choice: type) -> type[msgspec.Struct]:
    """Return the struct of an answer with choices of one kind; `Answer` serves all kinds."""
    hints: dict[str, Any] = get_type_hints(Answer) | {"choices": list[choice]}  # type: ignore[valid-type]
    required = [(field.name, hints[field.name]) for field in msgspec.structs.fields(Answer) if field.required]
    optional = [
        (field.name, hints[field.name], field.default) for field in msgspec.structs.fields(Answer) if not field.required
    ]
    return msgspec.defstruct(name, [*required, *optional])


_ChatCompletion = _answer_struct("ChatCompletion", ChatChoice)
_PROBE = "Empty; the status says it."
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
    ApiPath(path="/health", summary="200 while any engine takes requests.", says=_PROBE, is_public=True),
    ApiPath(path="/ping", summary="The same as /health.", says=_PROBE, is_public=True),
    ApiPath(path="/ready", summary="200 while the server takes new requests.", says=_PROBE, is_public=True),
    ApiPath(path="/readyz", summary="The same as /ready.", says=_PROBE, is_public=True),
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


def openapi_document(endpoints: Sequence[ApiPath] = API_PATHS) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of `endpoints`."""
    structs = list(
        dict.fromkeys(
            struct for each in endpoints for struct in (*each.bodies, each.answer, each.error) if struct is not None
        )
    )
    schemas, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(structs, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.method] = _operation(each, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Moestro", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(endpoint: ApiPath, schema_of: dict[type, dict[str, Any]]) -> dict[str, Any]:
    answer = {"schema": {"type": "object"} if endpoint.answer is None else schema_of[endpoint.answer]}
    if endpoint.media_type != "application/json":
        answer = {"schema": {"type": "string"}}
    content = {} if endpoint.says == _PROBE else {endpoint.media_type: answer}
    if endpoint.is_streamed:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    refusal = {"application/json": {"schema": schema_of[endpoint.error]}}
    operation: dict[str, Any] = {
        "operationId": endpoint.method + endpoint.path.replace("/", "_").replace("{", "").replace("}", ""),
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": endpoint.says, **({"content": content} if content else {})},
            "4XX": {"description": "The request is refused.", "content": refusal},
            "5XX": {"description": "The server cannot answer.", "content": refusal},
        },
        "security": [] if endpoint.is_public else [{}, {"bearer": []}, {"key": []}],
    }
    if endpoint.bodies:
        schemas = [schema_of[body] for body in endpoint.bodies]
        body = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if "{name}" in endpoint.path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation
