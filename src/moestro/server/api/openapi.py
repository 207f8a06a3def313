"""The OpenAPI document of `moestro serve`, made from the structs that decode bodies and encode answers."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec

from moestro.server.api.agent_api import InputTokenCount, TokenCount
from moestro.server.api.fields.protocol import (
    Answer,
    BatchChatFields,
    ChatChoice,
    ChatFields,
    CompletionFields,
    ModelCard,
    ModelList,
    TextChoice,
)
from moestro.server.api.openapi_bounds import add_bounds
from moestro.server.api.server_info import ServerInfo
from moestro.server.api.text_api import Detokenized, DetokenizeFields, TokenizeChatFields, Tokenized, TokenizeFields
from moestro.web.adapters.messages import CountFields, MessagesFields
from moestro.web.adapters.responses_request import ResponsesFields
from moestro.web.errors import AnthropicErrorBody
from moestro.web.openapi import EMPTY, ApiPath, document_of
from moestro.web.statistics import LiveStatistics


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
