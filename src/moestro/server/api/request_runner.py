"""Runs generation requests of all APIs: reads a body, generates, and sends the answer whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
from aiohttp import web

from moestro.core.load_figures import LoadFigures
from moestro.grammar.checker import GrammarChecker
from moestro.grammar.compiler import VocabularySource
from moestro.server.api.answers.generation import SCORE_BYTES, Generation, join_pieces
from moestro.server.api.answers.responses import AnswerForm
from moestro.server.api.answers.sse import AnswerEncoding, EventStream, UsageWanted, stream
from moestro.server.api.fields.request_builder import Arrival, Prepared, ServedModel, following
from moestro.server.api.fields.request_fields import ignored_warning
from moestro.server.api.fields.structured_output import GrammarGate
from moestro.server.api.fields.validation import Options
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.piece import Piece
from moestro.server.engines.traffic import Traffic
from moestro.server.engines.unread import UnreadMemory, UnreadStream
from moestro.text.thread_pool import PrepareThreads
from moestro.web.bodies import Bodies, client_of, tenant_of
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
