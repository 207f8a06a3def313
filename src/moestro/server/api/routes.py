"""The HTTP API of `moestro serve`: OpenAI's completions and models, and the routes of all other paths.

`web/middleware.py` handles errors, keys and request ids.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from moestro.server.api.agent_api import AgentApi
from moestro.server.api.answers.responses import ChatForm, CompletionForm, Heading, heading
from moestro.server.api.answers.sse import OpenAIEncoding
from moestro.server.api.fields.protocol import ModelCard, ModelList
from moestro.server.api.fields.request_builder import (
    Arrival,
    Prepared,
    ServedModel,
    prepare_chat,
    prepare_chats,
    prepare_completion,
)
from moestro.server.api.operations import Operations
from moestro.server.api.request_runner import RequestRunner
from moestro.server.api.server_info import ServerInfo
from moestro.server.api.text_api import TextApi
from moestro.server.engines.engine_client import EngineClient
from moestro.web.prometheus import Exposition
from moestro.web.statistics import LiveStatistics


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
        return _json(ModelList([self._card(name) for name in self._model.names]))

    async def model(self, http: web.Request) -> web.Response:
        """Handle GET /v1/models/{name}."""
        return _json(self._card(self._model.name_for(http.match_info["name"])))

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


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
