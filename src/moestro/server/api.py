"""The HTTP API of `moestro serve`: one handler per path. `web/middleware.py` handles errors, keys and request ids."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import msgspec
from aiohttp import web

from moestro.server.engine_client import EngineClient
from moestro.server.generation import Generation
from moestro.server.operations import Operations
from moestro.server.protocol import ModelCard, ModelList
from moestro.server.request_builder import Arrival, Prepared, ServedModel, prepare_chat, prepare_completion
from moestro.server.responses import AnswerForm, ChatForm, CompletionForm, heading
from moestro.server.sse import EventStream, UsageWanted, stream
from moestro.server.text_api import TextApi
from moestro.server.traffic import Traffic
from moestro.text.thread_pool import PrepareThreads
from moestro.web.bodies import MAX_BODY_BYTES, Bodies
from moestro.web.prometheus import Exposition


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
        self._write_timeout_s = write_timeout_s
        self._bodies = Bodies()
        self._threads = PrepareThreads()
        self._chat_threads = PrepareThreads()  # A chat template may take seconds; completions do not wait for it.
        self.traffic = Traffic()

    def app(self, exposition: Exposition) -> web.Application:
        """Return the application, which runs behind `HttpMiddleware`."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                *TextApi(self._model, self._bodies, self._chat_threads).routes(),
                *Operations(self._engines, self.traffic, exposition).routes(),
            ]
        )
        return app

    def close(self) -> None:
        """Stop the threads, and the processes that render chat templates."""
        self._threads.close()
        self._chat_threads.close()
        self._model.tokenizer.close()

    # --- generation

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """Handle POST /v1/completions."""
        arrival = Arrival(f"cmpl-{uuid.uuid4().hex}", time.monotonic_ns())
        prepared = await self._prepare(http, prepare_completion, arrival, self._threads)
        form = CompletionForm(heading(arrival.answer_id, prepared.name, self._model.fingerprint), prepared.options)
        return await self._answer(http, prepared, form)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """Handle POST /v1/chat/completions."""
        arrival = Arrival(f"chatcmpl-{uuid.uuid4().hex}", time.monotonic_ns())
        prepared = await self._prepare(http, prepare_chat, arrival, self._chat_threads)
        form = ChatForm(heading(arrival.answer_id, prepared.name, self._model.fingerprint), prepared.options)
        return await self._answer(http, prepared, form)

    async def _prepare(
        self,
        http: web.Request,
        prepare: Callable[[bytes, ServedModel, Arrival], Prepared],
        arrival: Arrival,
        threads: PrepareThreads,
    ) -> Prepared:
        self.traffic.check_open()
        self._engines.check_room()  # Before the body is decoded and tokenized, so that a refusal is cheap.
        async with self._bodies.reading(http) as body:
            return await threads.run(lambda: prepare(body, self._model, arrival))

    async def _answer(self, http: web.Request, prepared: Prepared, form: AnswerForm) -> web.StreamResponse:
        options = prepared.options
        with (
            self.traffic.answering(),
            Generation(self._engines, self._model, prepared.jobs) as generation,
        ):
            if options.stream:
                wanted = UsageWanted(options.include_usage, options.continuous_usage)
                return await stream(EventStream(http, self._write_timeout_s), generation, form, wanted)
            return _json(form.whole(await generation.all_pieces(), generation.usage()))

    # --- models

    async def models(self, _http: web.Request) -> web.Response:
        """Handle GET /v1/models."""
        return _json(ModelList([self._card(name) for name in self._model.names]))

    async def model(self, http: web.Request) -> web.Response:
        """Handle GET /v1/models/{name}."""
        return _json(self._card(self._model.name_for(http.match_info["name"])))

    def _card(self, name: str) -> ModelCard:
        model, info = self._model, self._model.info
        return ModelCard(
            id=name,
            created=model.created,
            root=model.root,
            max_model_len=info.max_model_len,
            device=info.device,
            pace_dilation=info.pace_dilation,
        )


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
