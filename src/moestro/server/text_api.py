"""Handlers of `/tokenize` and `/detokenize`, as in vLLM: clients use them to make prompts of an exact length."""

from __future__ import annotations

import sys

import msgspec
from aiohttp import web

from moestro.errors import RequestError
from moestro.server.protocol import Message
from moestro.server.request_builder import ServedModel, refuse_foreign_ids, refuse_too_much_text
from moestro.server.request_fields import BodyDecoder
from moestro.server.validation import check_messages
from moestro.text.thread_pool import PrepareThreads
from moestro.web.bodies import Bodies
from moestro.web.json_elements import count_elements


class TokenizeFields(msgspec.Struct, kw_only=True):
    """Body of `POST /tokenize`: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # None means yes for a prompt, no for a chat, whose template writes them.
    add_generation_prompt: bool | None = None  # None means yes.
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


_tokenize = BodyDecoder(TokenizeFields)
_detokenize = BodyDecoder(DetokenizeFields, ids="tokens")


class TextApi:
    """Converts text to token ids and back, on the threads that prepare requests."""

    def __init__(self, model: ServedModel, bodies: Bodies, threads: PrepareThreads) -> None:
        self._model = model
        self._bodies = bodies
        self._threads = threads

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of both paths."""
        return [web.post("/tokenize", self.tokenize), web.post("/detokenize", self.detokenize)]

    async def tokenize(self, http: web.Request) -> web.Response:
        """Handle POST /tokenize."""
        async with self._bodies.reading(http) as body:
            return _json(await self._threads.run(lambda: tokenized(_tokenize(body), self._model)))

    async def detokenize(self, http: web.Request) -> web.Response:
        """Handle POST /detokenize."""
        async with self._bodies.reading(http) as body:
            return _json(await self._threads.run(lambda: detokenized(body, self._model)))


def tokenized(fields: TokenizeFields, model: ServedModel) -> Tokenized:
    """Return the tokens that a completion, or a chat completion, with the same fields would have.

    Raises:
        RequestError: The model is unknown, both or neither of prompt and messages are given, or the text is too long.
    """
    model.name_for(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("Send either prompt or messages.", param="prompt", code="invalid_value")
    if fields.messages is not None:
        messages = check_messages(fields.messages)
        refuse_too_much_text(sum(len(message["content"]) for message in messages), model)
        text = model.tokenizer.render_chat(messages, add_generation_prompt=fields.add_generation_prompt is not False)
    else:
        assert fields.prompt is not None
        text = fields.prompt
    refuse_too_much_text(len(text), model)
    adds = fields.messages is None if fields.add_special_tokens is None else fields.add_special_tokens
    ids = model.tokenizer.encode(text, add_special_tokens=adds)
    names = [model.tokenizer.backend.id_to_token(i) for i in ids] if fields.return_token_strs else None
    return Tokenized(len(ids), model.info.max_model_len, ids, names)


def detokenized(body: bytes, model: ServedModel) -> Detokenized:
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

    fields = _detokenize(body, check_ids)
    model.name_for(fields.model)
    refuse_foreign_ids("tokens", fields.tokens, model.info.vocab_size)
    return Detokenized(model.tokenizer.backend.decode(fields.tokens, skip_special_tokens=False))


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
