"""The sequences of one HTTP request, from tokens to shown text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from moestro.core.request import FinishReason, Output, Request
from moestro.errors import RequestError
from moestro.serve.engines import Engines
from moestro.serve.protocol import PromptTokensDetails, Usage
from moestro.serve.refusals import GenerationError
from moestro.serve.stops import StopFinder
from moestro.serve.tokenizer import CONTEXT_TOKENS, Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice gained: text, perhaps none, and with the last one why it ended."""

    index: int
    text: str
    finish_reason: str | None


class _Choice:
    """One sequence as the client sees it. Counts what was generated, shown or not."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.index = index
        self.request = request
        self.num_generated = 0
        self.num_cached = 0
        self.finish_reason: str | None = None
        self._detokenizer = tokenizer.detokenizer(request.token_array()[-CONTEXT_TOKENS:].tolist())
        self._stops = StopFinder(stops)

    def take(self, output: Output) -> Piece:
        """Turn tokens into text. A stop string ends the choice there, whatever else came with it."""
        self.num_cached = output.num_cached_tokens
        text = ""
        is_stopped = output.finish_reason is FinishReason.STOP
        for i, token_id in enumerate(output.token_ids, 1):
            self.num_generated += 1
            if is_stopped and i == len(output.token_ids):
                break  # the stop token is counted and not shown
            text += self._stops.push(self._detokenizer.push(token_id))
            if self._stops.found is not None:
                self.finish_reason = FinishReason.STOP
                return Piece(self.index, text, self.finish_reason)
        if output.finish_reason is not None:
            text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
            self.finish_reason = FinishReason.STOP if self._stops.found is not None else output.finish_reason
        return Piece(self.index, text, self.finish_reason)


class Generation:
    """Submits `requests` on entering; on leaving, whatever the reason, stops those that still run.

    Args:
        requests: one per choice, in order.
        stops: stop strings.
    """

    def __init__(
        self, engines: Engines, tokenizer: Tokenizer, requests: Sequence[Request], stops: Sequence[str]
    ) -> None:
        self._engines = engines
        self._inbox: asyncio.Queue[Output | RequestError] = asyncio.Queue()
        self._choices = [_Choice(i, request, tokenizer, stops) for i, request in enumerate(requests)]
        self._running = {choice.request.request_id: choice for choice in self._choices}

    def __enter__(self) -> Generation:
        try:
            for choice in self._choices:
                self._engines.submit(choice.request, self._inbox)
        except BaseException:
            self._stop_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_all()

    async def next_piece(self) -> Piece | None:
        """What came next, of any choice; None: all have ended.

        Raises:
            RequestError: a choice was refused, or its engine failed. The others are not worth having.
        """
        while self._running:
            event = await self._inbox.get()
            if isinstance(event, RequestError):
                raise event
            if event.finish_reason is FinishReason.ERROR:
                raise GenerationError("The engine failed on this request; its log says why.", code="engine_error")
            choice = self._running.get(event.request_id)
            if choice is None:
                continue  # came after a stop string, before the engine heard of it
            piece = choice.take(event)
            if piece.finish_reason is not None:
                del self._running[event.request_id]
                self._engines.abort(event.request_id)  # nothing to stop, unless a stop string ended it
            return piece
        return None

    def usage(self) -> Usage:
        """Tokens so far, all choices together."""
        prompt = sum(choice.request.num_prompt_tokens for choice in self._choices)
        generated = sum(choice.num_generated for choice in self._choices)
        cached = sum(choice.num_cached for choice in self._choices)
        return Usage(prompt, generated, prompt + generated, PromptTokensDetails(cached))

    def _stop_all(self) -> None:
        for request_id in self._running:
            self._engines.abort(request_id)
        self._running.clear()
