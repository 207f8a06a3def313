"""Handlers of `/tokenize`, `/detokenize` and `/tokenizer_info`, as in vLLM.

Clients use them to make prompts of an exact length.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from aiohttp import web

from moestro.core.json_elements import count_elements
from moestro.errors import RequestError
from moestro.server.api.fields.protocol import ChatFields
from moestro.server.api.fields.request_builder import ServedModel, chat_prompt, refuse_foreign_ids, refuse_too_much_text
from moestro.server.api.fields.request_fields import CHAT_SHAPES, BodyDecoder, ignored_warning, refuse_unknown
from moestro.server.api.fields.unsupported import IN_CHAT
from moestro.server.api.fields.validation import chat_ask
from moestro.text.thread_pool import PrepareThreads
from moestro.text.tokenizer import Tokenizer
from moestro.web.bodies import Bodies, client_of
from moestro.web.errors import HttpError


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
