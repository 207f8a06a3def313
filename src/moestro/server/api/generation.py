"""Runs the sequences of one HTTP request and converts their tokens to text."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

import msgspec

from moestro.core.request import FinishReason, Output, PackedLogprobs, Request
from moestro.errors import QueueFullError, RequestError
from moestro.server.api.protocol import CompletionTokensDetails, PromptTokensDetails, Usage
from moestro.server.api.request_builder import Job, ServedModel
from moestro.server.engines.engine_client import EngineClient, RefusedByRankError
from moestro.server.engines.request_state import (
    Inbox,
    InboxEvent,
    Interrupted,
    Piece,
    PromptChoices,
    Score,
    UnreadEvents,
    first_score,
    score_of,
)
from moestro.text.parsing.answer_parser import ChatPart, StopFinder
from moestro.text.thread_pool import PrepareThreads
from moestro.text.tokenizer import CONTEXT_TOKENS, Tokenizer
from moestro.web.errors import GenerationError

SCORE_BYTES = 64  # of one log probability in an answer, which decide the lane of its work
_BYTES_AT_ONCE = 1 << 20  # of jobs that are submitted without a pause: less than a millisecond
_JOB_BYTES = 64 << 10  # of a job beside its prompt: 16 jobs without a pause
RETRY_S = 0.05  # until choices for which the engines' queues were full are tried again


class _Choice:
    """One sequence as the client sees it. Counts generated tokens, including a stop token, which is not shown.

    The state of the parsers is here, so that an answer that another engine resumes is parsed on.
    """

    def __init__(self, index: int, job: Job, tokenizer: Tokenizer) -> None:
        self.index = index
        self.job = job
        self.num_generated = 0
        self.num_cached = self.num_host_cached = 0
        self._token_ids = array("i")
        self.num_reasoning = 0
        self._tokenizer = tokenizer
        self._parts: list[ChatPart] = []
        self._detokenizer = tokenizer.detokenizer(
            job.request.token_array()[-CONTEXT_TOKENS:].tolist(), _shown_special_ids(job, tokenizer)
        )
        self._stops = StopFinder(job.stop, keeps_stop=job.keeps_stop)
        self._parser = None if job.answers is None else job.answers.parser(self._stops)
        self._num_chars = 0  # Length of the decoded text, including stop strings and held-back text.
        self._has_begun = self._was_ended = False  # `_was_ended`: the budget has ended the reasoning.
        self._wants_text_alone = not (
            job.stop or job.answers or job.request.sampling.logprobs is not None or job.returns_token_ids
        )

    def take(self, output: Output) -> Piece:
        """Convert an output's tokens to text. A stop string ends the choice; the tokens after it are discarded."""
        if self._wants_text_alone and self._token_ids and output.finish_reason is None:
            return self._take_text(output.token_ids)
        if not self._token_ids:  # An engine that resumes the answer may have cached more, or less, of the prompt.
            self.num_cached, self.num_host_cached = output.num_cached_tokens, output.num_host_tokens
        is_first = not self._token_ids
        self._token_ids.extend(output.token_ids)
        num_before = self.num_generated
        prompt_scores = self._score_prompt(output.prompt_logprobs)
        text, scores = self._begin(prompt_scores)
        text += self._text_of(output, scores)
        reason: str | None = output.finish_reason
        if output.finish_reason is not None:
            text += self._show(self._detokenizer.flush())
            text += self._end_text(is_cut=output.finish_reason is not FinishReason.STOP)
        if self._stops.found is not None:
            reason = FinishReason.STOP
        parts, reason = self._take_parts(reason)
        job = self.job
        wants_scores, wants_ids = job.request.sampling.logprobs is not None, job.returns_token_ids
        return Piece(
            self.index,
            text,
            reason,
            tuple(scores) if wants_scores else None,
            prompt_scores if job.prompt_logprobs is not None else None,
            self._stop_reason(output),
            output.token_ids[: self.num_generated - num_before] if wants_ids else None,
            tuple(job.request.token_array().tolist()) if wants_ids and is_first else None,
            parts,
        )

    def _take_text(self, token_ids: Sequence[int]) -> Piece:
        """Take tokens between the first and the last one, where nothing but their text is wanted: most tokens."""
        self._token_ids.extend(token_ids)
        self.num_generated += len(token_ids)
        return Piece(self.index, "".join(map(self._detokenizer.push, token_ids)), None)

    def _text_of(self, output: Output, scores: list[Score]) -> str:
        """Return the text of the new tokens, count them, and add their scores to `scores`."""
        text = ""
        hides_last = output.finish_reason is FinishReason.STOP and not self.job.keeps_stop
        for i, token_id in enumerate(output.token_ids):
            self.num_generated += 1
            if output.logprobs:
                scores.append(score_of(output.logprobs[i], self._num_chars, self._tokenizer.token_texts))
            if hides_last and i + 1 == len(output.token_ids):
                break  # The stop token is counted and not shown.
            text += self._show(self._detokenizer.push(token_id))
            if self._stops.found is not None or (output.finish_reason is None and self.exceeds_budget):
                break
        return text

    @property
    def exceeds_budget(self) -> bool:
        """Whether the reasoning has all tokens that the client allows, and the rest of an answer would still fit."""
        limit = self.job.thinking
        if limit is None or self._was_ended or self._parser is None or not self._parser.is_reasoning:
            return False
        num_after = self.num_generated + len(limit.end_token_ids)
        return self.num_reasoning >= limit.num_tokens and num_after < self.job.request.sampling.max_tokens

    def end_reasoning(self, request_id: str) -> Piece:
        """End the reasoning with its end tag, as if the model had written it, and return the piece of the tag.

        Args:
            request_id: Id of the request that continues the answer, which becomes the choice's own.
        """
        assert self.job.thinking is not None, "only a budget ends the reasoning"
        self._was_ended = True
        del self._token_ids[self.num_generated :]  # Tokens of the same output that the budget does not allow.
        piece = self.take(Output(request_id=request_id, token_ids=self.job.thinking.end_token_ids))
        request = msgspec.structs.replace(self.resumed(), request_id=request_id)
        self.job = replace(self.job, request=request)
        return piece

    def _stop_reason(self, output: Output) -> str | int | None:
        if self._stops.found is not None or output.finish_reason is not FinishReason.STOP:
            return self._stops.found
        last = output.token_ids[-1]
        return last if last in self.job.stop_token_ids else None

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
        """Return the part of one token's text that can be shown, and parse it.

        With a parser, stop strings hold for the content that it finds. It also counts the tokens of the reasoning.
        """
        self._num_chars += len(text)
        may_stop = self.num_generated > self.job.request.sampling.min_tokens
        if self._parser is None:
            return self._stops.push(text, look=may_stop)
        was_reasoning = self._parser.is_reasoning
        self._parts += self._parser.feed(text, may_stop=may_stop)
        self.num_reasoning += was_reasoning and self._parser.is_reasoning
        return text

    def _end_text(self, *, is_cut: bool) -> str:
        """Return the text that was held back until the end of the answer."""
        if self._parser is None:
            return self._stops.flush()
        self._parts += self._parser.finish(is_cut=is_cut)
        return ""

    def _take_parts(self, reason: str | None) -> tuple[tuple[ChatPart, ...] | None, str | None]:
        """Return the new parts, and the reason that the client gets for the end of the choice."""
        if self._parser is None:
            return None, reason
        if reason is not None:
            reason = self._parser.finish_reason(reason)
        parts, self._parts = tuple(self._parts), []
        return parts, reason

    def _score_prompt(self, entries: PackedLogprobs | None) -> tuple[Score, ...] | None:
        """Return the scores of the prompt's tokens, with offsets into the text that these tokens spell."""
        if entries is None:
            return None
        shown = self._tokenizer.special_ids if self.job.echo_has_special_tokens else frozenset[int]()
        texts, spelling = self._tokenizer.token_texts, self._tokenizer.detokenizer([], shown)
        first, *rest = self.job.request.token_array().tolist()
        scores, num_chars = [first_score(first, texts)], len(spelling.push(first))
        for token_id, entry in zip(rest, entries, strict=True):
            scores.append(score_of(entry, num_chars, texts))
            num_chars += len(spelling.push(token_id))
        return tuple(scores)


class Generation:
    """Runs the sequences of one HTTP request: submits `jobs` on entry, and aborts those that still run on exit.

    At most `ServedModel.max_choices_at_once` are submitted at once. Each further one follows the end of an earlier one,
    behind the requests that came meanwhile, so that one request never takes all places of the engines. Choices for
    which the engines' queues were full follow with the next output after `RETRY_S`.

    When the engine of a choice ends, another engine continues the choice. If that is impossible and the client has
    nothing of the answer, another engine begins the choice again. Either way, a single engine could have given that
    answer. Otherwise the answer ends with an error.

    Args:
        jobs: Jobs, one per choice, in order.
        threads: Threads for what would hold up the event loop.

    Attributes:
        has_begun: Whether the client may have a part of the answer; set before the first byte is sent.
    """

    def __init__(self, engines: EngineClient, model: ServedModel, jobs: Sequence[Job], threads: PrepareThreads) -> None:
        self.has_begun = False
        self._num_host_cached = 0
        self._num_prompt = self._num_cached = self._num_generated = self._num_reasoning = 0  # in all choices
        self._threads = threads
        self._jobs = jobs
        self._engines = engines
        self._model = model
        self._inbox = Inbox()
        self._pass_on: Callable[[Piece], bool] = lambda piece: False
        self._choices: list[_Choice] = []
        self._collected: list[list[Piece]] = [[] for _ in jobs]
        self._running: dict[str, _Choice] = {}
        self._held: deque[int] = deque()  # Numbers of the choices that no engine has.
        self._siblings: list[PromptChoices] = []
        self._retry_at_s = math.inf  # Time of the next try to submit choices for which the queues were full.

    async def __aenter__(self) -> Generation:
        """Submit the jobs, and serve others between some of them: a request may have a thousand large ones."""
        num_bytes = 0
        for job in self._jobs:
            if not job.is_copy:
                self._num_prompt += job.request.num_prompt_tokens
            self._siblings.append(self._siblings[-1] if job.is_copy else PromptChoices())
            self._siblings[-1].num_choices += 1
        self._held.extend(range(len(self._jobs)))
        try:
            while self._may_submit:
                job = self._jobs[self._held[0]]
                self._submit(job)
                num_bytes += _JOB_BYTES + len(job.request.token_ids or b"")
                if num_bytes > _BYTES_AT_ONCE:
                    num_bytes = 0
                    await asyncio.sleep(0)
        except QueueFullError:
            if not self._running:
                raise
            self._retry_at_s = time.monotonic() + RETRY_S
        except BaseException:
            self._stop_all()
            raise
        return self

    def _submit(self, job: Job) -> None:
        """Submit the first held choice, as `job`."""
        number = self._held[0]
        choice = _Choice(number, _with_unused_id(job, self._engines), self._model.tokenizer)
        request = choice.job.request
        self._engines.submit(request, self._inbox, self._siblings[number])
        self._held.popleft()
        self._choices[number : number + 1] = [choice]  # The next one, or one that is submitted again.
        self._running[request.request_id] = choice

    def _hold_again(self, refusal: Exception) -> bool:
        """Hold a choice that found no place in an engine's queue. Returns False if no other choice runs."""
        if not isinstance(refusal, RefusedByRankError) or not refusal.may_be_repeated:
            return False
        choice = self._running.get(refusal.request_id)
        if choice is None:
            return True  # Its end is known.
        if choice.num_generated or len(self._running) == 1:
            return False
        del self._running[refusal.request_id]
        self._held.appendleft(choice.index)
        self._retry_at_s = time.monotonic() + RETRY_S
        return True

    @property
    def _may_submit(self) -> bool:
        """Whether a held choice may join those that run."""
        return bool(self._held) and len(self._running) < self._model.max_choices_at_once

    def _submit_later(self) -> None:
        """Submit held choices in place of ended ones while the engines have room; raise if none runs without it."""
        num_bytes, self._retry_at_s = 0, math.inf
        try:
            while self._may_submit and num_bytes <= _BYTES_AT_ONCE:
                job = self._jobs[self._held[0]]
                arrived = msgspec.structs.replace(job.request, arrival_ns=time.monotonic_ns())
                self._submit(replace(job, request=arrived))
                num_bytes += _JOB_BYTES + len(arrived.token_ids or b"")
        except RequestError:
            if not self._running:
                raise
        if self._may_submit:
            self._retry_at_s = time.monotonic() + RETRY_S

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_all()

    def pass_on_with(self, pass_on: Callable[[Piece], bool]) -> None:
        """Hand pieces to `pass_on` as soon as their outputs arrive, while the caller waits in `next_piece`.

        No task wakes up for such a piece. `next_piece` returns the last piece of each choice, and those that `pass_on`
        refuses by returning False.
        """
        self._pass_on = pass_on
        self._inbox.intercept = self._take_at_once

    def count_unread_with(self, unread: UnreadEvents) -> None:
        """Let `unread` count the outputs that wait because the client reads too slowly."""
        self._inbox.unread = unread

    def _take_at_once(self, event: InboxEvent) -> InboxEvent | None:
        """Pass an output on, and return what is left for `next_piece`."""
        if not isinstance(event, Output) or event.finish_reason is not None or event.prompt_logprobs:
            return event
        choice = self._running.get(event.request_id)
        if choice is None:
            return None  # This output came after a stop string, before the engine received the abort.
        piece = self._taken(choice, event)
        return None if piece.finish_reason is None and self._pass_on(piece) else piece

    async def next_piece(self) -> Piece | None:
        """Return the next piece of any choice; None means that all choices have ended.

        Raises:
            RequestError: A choice was refused, or its engine failed. The caller discards the other choices.
        """
        while self._running:
            event = self._inbox.get_nowait() or await self._inbox.get()
            if isinstance(event, Exception):
                if not self._hold_again(event):
                    raise event
                continue
            if isinstance(event, Interrupted):
                self._move(event)
                continue
            piece = event if isinstance(event, Piece) else await self._take(event)
            if piece is None:
                continue
            if piece.finish_reason is not None:
                request_id = self._choices[piece.index].job.request.request_id
                del self._running[request_id]
                # Aborts a sequence that a stop string ended; an ended sequence is ignored.
                self._engines.abort(request_id, FinishReason.STOP)
                self._submit_later()
            return piece
        return None

    async def _take(self, output: Output) -> Piece | None:
        """Convert an output; None means that its choice has ended. Raises as `next_piece` does."""
        if output.finish_reason is not None and (failure := _failure(output.finish_reason)) is not None:
            raise failure
        choice = self._running.get(output.request_id)
        if choice is None:
            return None
        if not output.prompt_logprobs:
            return self._taken(choice, output)
        # A thread spells the scores of a long prompt, because the event loop must stay free for other requests.
        num_scores = output.prompt_logprobs.num_scores
        return await self._threads.run(lambda: self._taken(choice, output), SCORE_BYTES * num_scores)

    def _taken(self, choice: _Choice, output: Output) -> Piece:
        """Convert an output, and count its tokens: a chunk that reports the usage does not add up all choices."""
        if self._held and time.monotonic() > self._retry_at_s:
            self._submit_later()
        self._uncount(choice)
        piece = choice.take(output)
        if piece.finish_reason is None and choice.exceeds_budget:
            piece = join_pieces([piece, self._end_reasoning(choice)])
        self._num_generated += choice.num_generated
        self._num_reasoning += choice.num_reasoning
        if not choice.job.is_copy:
            self._num_cached += choice.num_cached
            self._num_host_cached += choice.num_host_cached
        return piece

    def _end_reasoning(self, choice: _Choice) -> Piece:
        """End the reasoning of a choice: a request under a new id continues it, because tokens may be under way."""
        request_id = choice.job.request.request_id
        piece = choice.end_reasoning(self._engines.unused_id(request_id))
        self._running[choice.job.request.request_id] = self._running.pop(request_id)
        self._engines.replace(request_id, choice.job.request)
        return piece

    def _uncount(self, choice: _Choice) -> None:
        self._num_generated -= choice.num_generated
        self._num_reasoning -= choice.num_reasoning
        if not choice.job.is_copy:
            self._num_cached -= choice.num_cached
            self._num_host_cached -= choice.num_host_cached

    async def all_pieces(self) -> list[list[Piece]]:
        """Return the pieces of each choice, in order.

        Raises:
            RequestError: As for `next_piece`.
        """
        self.pass_on_with(self._collect)
        while piece := await self.next_piece():
            self._collect(piece)
        return self._collected

    def _collect(self, piece: Piece) -> bool:
        self._collected[piece.index].append(piece)
        return True

    def usage(self) -> Usage:
        """Return the token counts so far, summed over all choices."""
        prompt, generated = self._num_prompt, self._num_generated
        details = PromptTokensDetails(self._num_cached, self._num_host_cached)
        usage = Usage(prompt, generated, prompt + generated, details)
        if self._model.chat.reasoning is not None:
            usage.completion_tokens_details = CompletionTokensDetails(self._num_reasoning)
        return usage

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
            self._uncount(choice)
            request = msgspec.structs.replace(choice.job.request, resumed_token_ids=b"")
            again = _Choice(choice.index, replace(choice.job, request=request), self._model.tokenizer)
            self._choices[choice.index] = self._running[interrupted.request_id] = again
            self._engines.move(request, has_begun=False)
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
        self._held.clear()


def _failure(reason: FinishReason) -> RequestError | None:
    """Return the error of an answer that its engine could not complete; None means that `reason` is no failure."""
    match reason:
        case FinishReason.ERROR:
            return GenerationError("The engine failed on this request; its log says why.", code="engine_error")
        case FinishReason.NON_FINITE:
            return GenerationError(
                "The model's logits are not finite (NaN or infinity) after these tokens, so that there is no next"
                " token. A retry will likely fail in the same way: change the prompt, or contact the operator.",
                code=reason,
            )
        case FinishReason.EXCLUDED:
            return RequestError(
                "The request excludes every token after these ones: its allowed_token_ids, bad_words, logit_bias,"
                " min_tokens and grammar have no token in common that the model considers possible. Loosen one.",
                code=reason,
            )
        case FinishReason.GRAMMAR:
            text = (
                "The grammar is too complex to be followed after these tokens, or the machine too busy. Send a simpler"
                " one, or try again later."
            )
            return RequestError(text, code=reason)
    return None


def join_pieces(parts: Sequence[Piece]) -> Piece:
    """Return all pieces of a choice as one."""
    first, last = parts[0], parts[-1]
    parsed = None if first.parts is None else tuple(part for piece in parts for part in piece.parts or ())
    return Piece(
        first.index,
        "".join(part.text for part in parts),
        last.finish_reason,
        None if first.scores is None else tuple(score for part in parts for score in part.scores or ()),
        first.prompt_scores,
        last.stop_reason,
        None if first.token_ids is None else tuple(token_id for part in parts for token_id in part.token_ids or ()),
        first.prompt_token_ids,
        parsed,
    )


def _shown_special_ids(job: Job, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special tokens whose text is kept: on request all of them, else those that the parsers look for."""
    if job.keeps_special_tokens:
        return tokenizer.special_ids
    return frozenset() if job.answers is None else tokenizer.special_ids_of(job.answers.markers)


def _with_unused_id(job: Job, engines: EngineClient) -> Job:
    """Return the job under an id that no running request has: a client may give one id to several requests."""
    request_id = engines.unused_id(job.request.request_id)
    if request_id == job.request.request_id:
        return job
    return replace(job, request=msgspec.structs.replace(job.request, request_id=request_id))
