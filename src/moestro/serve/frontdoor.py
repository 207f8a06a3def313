"""The HTTP API: what each path does. Errors, keys and request ids are `gate.py`'s."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from aiohttp import web

from moestro import __version__
from moestro.core.request import Request
from moestro.serve.answers import AnswerForm, ChatForm, CompletionForm, heading
from moestro.serve.engines import Engines
from moestro.serve.gate import gate
from moestro.serve.generation import Generation, Piece
from moestro.serve.prepare import Arrival, ServedModel, chat_requests, completion_requests
from moestro.serve.protocol import ModelCard, ModelList
from moestro.serve.refusals import BodyTimeoutError, DrainingError, HttpError
from moestro.serve.sse import UsageWanted, stream
from moestro.serve.validation import Options, parse_chat, parse_completion

T = TypeVar("T")

MAX_BODY_BYTES = 32 << 20
BODY_TIMEOUT_S = 60.0


class FrontDoor:
    """Answers clients from `engines`.

    Attributes:
        num_answering: generation requests that have no complete answer yet.
    """

    def __init__(self, engines: Engines, model: ServedModel) -> None:
        self._engines = engines
        self._model = model
        # Tokenizing a long prompt takes milliseconds to seconds, in which the event loop must serve the others.
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="prepare")
        self.num_answering = 0
        self._is_draining = False
        self._nothing_left = asyncio.Event()

    def app(self, api_keys: tuple[str, ...]) -> web.Application:
        """The application to run; open without `api_keys`."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        gate(app, api_keys)
        app.add_routes(
            [
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.get("/health", self.health),
                web.get("/ping", self.health),
                web.post("/ping", self.health),
                web.get("/version", self.version),
                web.get("/load", self.load),
            ]
        )
        return app

    async def drain(self, patience_s: float) -> None:
        """Refuse what comes from now on; return once everything is answered, or after `patience_s`."""
        self._is_draining = True
        if self.num_answering:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._nothing_left.wait()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- generation

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        self._refuse_while_draining()
        ask = parse_completion(await _body(http))
        name = self._model.name_for(ask.options.model)
        arrival = Arrival(f"cmpl-{uuid.uuid4().hex}", time.monotonic_ns())
        requests = await self._in_thread(lambda: completion_requests(ask, self._model, arrival))
        form = CompletionForm(heading(arrival.answer_id, name, self._model.fingerprint))
        return await self._answer(http, requests, form, ask.options)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        self._refuse_while_draining()
        ask = parse_chat(await _body(http))
        name = self._model.name_for(ask.options.model)
        arrival = Arrival(f"chatcmpl-{uuid.uuid4().hex}", time.monotonic_ns())
        requests = await self._in_thread(lambda: chat_requests(ask, self._model, arrival))
        form = ChatForm(heading(arrival.answer_id, name, self._model.fingerprint))
        return await self._answer(http, requests, form, ask.options)

    async def _answer(
        self, http: web.Request, requests: list[Request], form: AnswerForm, options: Options
    ) -> web.StreamResponse:
        self._refuse_while_draining()
        self.num_answering += 1
        try:
            with Generation(self._engines, self._model.tokenizer, requests, options.stop) as generation:
                if options.stream:
                    wanted = UsageWanted(options.include_usage, options.continuous_usage)
                    return await stream(http, generation, form, wanted)
                choices = await _collect(generation, len(requests))
                return _json(form.whole(choices, generation.usage()))
        finally:
            self.num_answering -= 1
            if self._is_draining and not self.num_answering:
                self._nothing_left.set()

    def _refuse_while_draining(self) -> None:
        if self._is_draining:
            raise DrainingError

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # --- the rest

    async def models(self, _http: web.Request) -> web.Response:
        """GET /v1/models."""
        return _json(ModelList([self._card(name) for name in self._model.names]))

    async def model(self, http: web.Request) -> web.Response:
        """GET /v1/models/{name}."""
        return _json(self._card(self._model.name_for(http.match_info["name"])))

    async def health(self, _http: web.Request) -> web.Response:
        """GET /health, /ping: 200 while any engine takes requests."""
        return web.Response(status=200 if self._engines.is_healthy else 503)

    async def version(self, _http: web.Request) -> web.Response:
        """GET /version."""
        return _json({"version": __version__})

    async def load(self, _http: web.Request) -> web.Response:
        """GET /load: requests being answered, and what each engine said of itself last."""
        return _json({"server_load": self.num_answering, "engines": self._engines.loads})

    def _card(self, name: str) -> ModelCard:
        model = self._model
        return ModelCard(id=name, created=model.created, root=model.root, max_model_len=model.info.max_model_len)


async def _body(http: web.Request) -> bytes:
    """The whole body, if it is JSON by its own account and comes in time."""
    if http.content_type != "application/json" and not http.content_type.endswith("+json"):
        text = f"Content-Type must be application/json, got {http.content_type}."
        raise HttpError(415, text, "unsupported_media_type")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await http.read()
    except TimeoutError:
        raise BodyTimeoutError(BODY_TIMEOUT_S) from None


async def _collect(generation: Generation, num_choices: int) -> list[Piece]:
    """The whole text of each choice, in order."""
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    reasons: list[str | None] = [None] * num_choices
    while piece := await generation.next_piece():
        texts[piece.index].append(piece.text)
        reasons[piece.index] = piece.finish_reason
    return [Piece(i, "".join(texts[i]), reasons[i]) for i in range(num_choices)]


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
