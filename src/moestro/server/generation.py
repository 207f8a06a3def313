"""Runs the sequences of one HTTP request and converts their tokens to text."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec

from moestro.core.request import FinishReason, Output, Request, TokenLogprobs
from moestro.errors import RequestError
from moestro.server.engine_client import EngineClient
from moestro.server.logprobs import Score, first_score, score_of
from moestro.server.protocol import PromptTokensDetails, Usage
from moestro.server.request_builder import Job, ServedModel
from moestro.server.request_state import Inbox, Interrupted
from moestro.text.stop_strings import StopFinder
from moestro.text.tokenizer import CONTEXT_TOKENS, Tokenizer
from moestro.web.errors import GenerationError


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of one choice.

    Attributes:
        text: New text; may be empty.
        finish_reason: Reason for the end of the choice; None means that more pieces follow.
        scores: Scores of the new tokens, shown or not, after those of an echoed prompt; None means not requested.
        prompt_scores: Scores of the prompt's tokens, if `prompt_logprobs` requests them.
    """

    index: int
    text: str
    finish_reason: str | None
    scores: tuple[Score, ...] | None = None
    prompt_scores: tuple[Score, ...] | None = None


class _Choice:
    """One sequence as the client sees it. Counts generated tokens, including a stop token, which is not shown."""

    def __init__(self, index: int, job: Job, tokenizer: Tokenizer) -> None:
        self.index = index
        self.job = job
        self.num_generated = 0
        self.num_cached = 0
        self._token_ids = array("i")
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(job.request.token_array()[-CONTEXT_TOKENS:].tolist())
        self._stops = StopFinder(job.stop)
        self._num_chars = 0  # Length of the decoded text, including stop strings and held-back text.
        self._has_begun = False

    def take(self, output: Output) -> Piece:
        """Convert an output's tokens to text. A stop string ends the choice; the tokens after it are discarded."""
        if not self._token_ids:  # An engine that resumes the answer may have cached more, or less, of the prompt.
            self.num_cached = output.num_cached_tokens
        self._token_ids.extend(output.token_ids)
        prompt_scores = self._score_prompt(output.prompt_logprobs)
        text, scores = self._begin(prompt_scores)
        reason: str | None = output.finish_reason
        is_stopped = output.finish_reason is FinishReason.STOP
        entries: Sequence[TokenLogprobs | None] = output.logprobs or [None] * len(output.token_ids)
        for i, (token_id, entry) in enumerate(zip(output.token_ids, entries, strict=True), 1):
            self.num_generated += 1
            if entry is not None:
                scores.append(score_of(entry, self._num_chars, self._tokenizer.token_texts))
            if is_stopped and i == len(output.token_ids):
                break  # The stop token is counted and not shown.
            text += self._show(self._detokenizer.push(token_id))
            if self._stops.found is not None:
                break
        if output.finish_reason is not None:
            text += self._show(self._detokenizer.flush()) + self._stops.flush()
        if self._stops.found is not None:
            reason = FinishReason.STOP
        wants = self.job.request.sampling.logprobs is not None
        shown_apart = prompt_scores if self.job.prompt_logprobs is not None else None
        return Piece(self.index, text, reason, tuple(scores) if wants else None, shown_apart)

    def resumed(self) -> Request:
        """Return the request with all tokens of its answer so far, for another engine to continue."""
        return msgspec.structs.replace(self.job.request, resumed_token_ids=self._token_ids.tobytes())

    def _begin(self, prompt_scores: tuple[Score, ...] | None) -> tuple[str, list[Score]]:
        """Return the echo and its scores with the first piece, and nothing with later ones."""
        if self._has_begun or self.job.echo is None:
            return "", []
        self._has_begun = True
        self._num_chars = len(self.job.echo)
        return self.job.echo, list(prompt_scores or ())

    def _show(self, text: str) -> str:
        self._num_chars += len(text)
        return self._stops.push(text, look=self.num_generated > self.job.request.sampling.min_tokens)

    def _score_prompt(self, entries: Sequence[TokenLogprobs] | None) -> tuple[Score, ...] | None:
        """Return the scores of the prompt's tokens, with offsets into the text that these tokens spell."""
        if entries is None:
            return None
        texts, spelling = self._tokenizer.token_texts, self._tokenizer.detokenizer([])
        first, *rest = self.job.request.token_array().tolist()
        scores, num_chars = [first_score(first, texts)], len(spelling.push(first))
        for token_id, entry in zip(rest, entries, strict=True):
            scores.append(score_of(entry, num_chars, texts))
            num_chars += len(spelling.push(token_id))
        return tuple(scores)


class Generation:
    """Runs the sequences of one HTTP request: submits `jobs` on entry, and aborts those that still run on exit.

    When the engine of a choice ends, another engine continues the choice. If that is impossible and the client has
    nothing of the answer, another engine begins the choice again. Either way, a single engine could have given that
    answer. Otherwise the answer ends with an error.

    Args:
        jobs: Jobs, one per choice, in order.

    Attributes:
        has_begun: Whether the client may have a part of the answer; set before the first byte is sent.
    """

    def __init__(self, engines: EngineClient, model: ServedModel, jobs: Sequence[Job]) -> None:
        self.has_begun = False
        self._engines = engines
        self._model = model
        self._inbox: Inbox = asyncio.Queue()
        self._choices = [_Choice(i, job, model.tokenizer) for i, job in enumerate(jobs)]
        self._collected: list[list[Piece]] = [[] for _ in jobs]
        self._running = {choice.job.request.request_id: choice for choice in self._choices}

    def __enter__(self) -> Generation:
        try:
            for choice in self._choices:
                self._engines.submit(choice.job.request, self._inbox)
        except BaseException:
            self._stop_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_all()

    async def next_piece(self) -> Piece | None:
        """Return the next piece of any choice; None means that all choices have ended.

        Raises:
            RequestError: A choice was refused, or its engine failed. The caller discards the other choices.
        """
        while self._running:
            event = await self._inbox.get()
            if isinstance(event, RequestError):
                raise event
            if isinstance(event, Interrupted):
                self._move(event)
                continue
            if event.finish_reason is FinishReason.ERROR:
                raise GenerationError("The engine failed on this request; its log says why.", code="engine_error")
            if event.finish_reason is FinishReason.NON_FINITE:
                raise GenerationError(
                    "The model's logits are not finite (NaN or infinity) after these tokens, so that there is no next"
                    " token. A retry will likely fail in the same way: change the prompt, or contact the operator.",
                    code=event.finish_reason,
                )
            choice = self._running.get(event.request_id)
            if choice is None:
                continue  # This output came after a stop string, before the engine received the abort.
            # A thread spells the scores of a long prompt, because the event loop must stay free for other requests.
            piece = await asyncio.to_thread(choice.take, event) if event.prompt_logprobs else choice.take(event)
            if piece.finish_reason is not None:
                del self._running[event.request_id]
                # Aborts a sequence that a stop string ended; an ended sequence is ignored.
                self._engines.abort(event.request_id, FinishReason.STOP)
            return piece
        return None

    async def all_pieces(self) -> list[Piece]:
        """Return each choice as one piece, in order.

        Raises:
            RequestError: As for `next_piece`.
        """
        while piece := await self.next_piece():
            self._collected[piece.index].append(piece)
        return [_join(parts) for parts in self._collected]

    def usage(self) -> Usage:
        """Return the token counts so far, summed over all choices."""
        prompts = [choice for choice in self._choices if not choice.job.is_copy]
        prompt = sum(choice.job.request.num_prompt_tokens for choice in prompts)
        generated = sum(choice.num_generated for choice in self._choices)
        cached = sum(choice.num_cached for choice in prompts)
        return Usage(prompt, generated, prompt + generated, PromptTokensDetails(cached))

    def _move(self, interrupted: Interrupted) -> None:
        """Move a choice whose engine has ended to another engine.

        Raises:
            RequestError: The client has a part of the answer that another engine cannot continue exactly.
        """
        choice = self._running.get(interrupted.request_id)
        if choice is None:
            return  # A stop string ended the choice earlier.
        if choice.num_generated == 0:
            self._engines.move(choice.job.request, has_begun=False)
        elif self._can_resume(choice):
            self._engines.move(choice.resumed(), has_begun=self.has_begun)
        elif not self.has_begun:
            self._collected[choice.index].clear()
            again = _Choice(choice.index, choice.job, self._model.tokenizer)
            self._choices[choice.index] = self._running[interrupted.request_id] = again
            self._engines.move(choice.job.request, has_begun=False)
        else:
            self._engines.abort(interrupted.request_id, FinishReason.ERROR)
            raise interrupted.error

    def _can_resume(self, choice: _Choice) -> bool:
        """Return whether another engine may continue `choice` from its last token.

        The next tokens must be the same, unless the operator accepts different ones. Answers with log probabilities
        are not continued, because these would differ in the last bits.
        """
        sampling = choice.job.request.sampling
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            return False
        if not self.has_begun:
            return self._model.info.is_exact
        return len(self._choices) == 1 and (self._model.info.is_exact or self._model.resumes_streams)

    def _stop_all(self) -> None:
        for request_id in self._running:
            self._engines.abort(request_id)
        self._running.clear()


def _join(parts: Sequence[Piece]) -> Piece:
    first, last = parts[0], parts[-1]
    scores = None if first.scores is None else tuple(score for part in parts for score in part.scores or ())
    return Piece(first.index, "".join(part.text for part in parts), last.finish_reason, scores, first.prompt_scores)
