"""State of one request in the API server, and the metrics that are derived from it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from moestro.core.hashing import name_key
from moestro.core.request import Output, Request
from moestro.errors import RequestError
from moestro.server.engines.metrics import EngineMetrics
from moestro.server.engines.piece import Piece
from moestro.workload.traces.request_record import RecordedRequest

# A request that has lost more engines than this may be the cause, even if it gained tokens in between.
MAX_MOVES = 3


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Notice that the engine of a request has ended; no further outputs of that engine follow.

    The reader of the inbox calls `EngineClient.move`, or ends the answer with `error`.
    """

    request_id: str
    error: RequestError


InboxEvent = Output | Piece | Interrupted | Exception


class UnreadEvents(Protocol):
    """Counts the events that wait for a slow reader."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is counted any more, because the reader's connection is closed."""
        ...

    def waits(self, event: InboxEvent) -> None:
        """Count an event that waits."""
        ...

    def taken(self, event: InboxEvent) -> None:
        """Stop counting an event."""
        ...


class Inbox:
    """Events of one HTTP request for its only reader, which stops at the first error.

    Each token passes through it, and `asyncio.Queue`, which allows for several readers and a bound, costs three times
    as much.

    Attributes:
        intercept: Callable that gets each event for which the reader waits, and returns the event that the reader gets
            instead; None lets the reader wait on. Events that the reader has not taken yet are never overtaken. The
            reader gets an exception of the callable as its event, because the caller of `put_nowait` serves all.
        unread: Counter of the events that wait for a reader; None means that they are not counted.
    """

    __slots__ = ("_events", "_waiter", "intercept", "unread")

    def __init__(self) -> None:
        self._events: deque[InboxEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.intercept: Callable[[InboxEvent], InboxEvent | None] | None = None
        self.unread: UnreadEvents | None = None

    def put_nowait(self, event: InboxEvent) -> None:
        """Append an event, and wake the reader."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._append(event)
            return
        left: InboxEvent | None = event
        if self.intercept is not None:
            try:
                left = self.intercept(event)
            except Exception as error:
                left = error
        if left is not None:
            self._append(left)
            waiter.set_result(None)

    def get_nowait(self) -> InboxEvent | None:
        """Return the next event; None means that there is none yet."""
        return self._pop() if self._events else None

    async def get(self) -> InboxEvent:
        """Wait for the next event."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._pop()

    def _append(self, event: InboxEvent) -> None:
        unread = self.unread
        if unread is not None:
            if unread.is_over:
                self._events.clear()  # The connection is closed, and so the reader ends.
            unread.waits(event)
        self._events.append(event)

    def _pop(self) -> InboxEvent:
        event = self._events.popleft()
        if self.unread is not None:
            self.unread.taken(event)
        return event


@dataclass(slots=True)
class PromptChoices:
    """The choices of one prompt, whose sizes are counted when the last of them has been answered.

    Attributes:
        num_choices: Number of choices.
        num_answered: Number of choices with a complete answer.
        longest: Tokens of the longest answer so far.
    """

    num_choices: int = 0
    num_answered: int = 0
    longest: int = 0

    def count_answer(self, num_tokens: int, metrics: EngineMetrics) -> None:
        """Count an answer of `num_tokens` tokens."""
        self.num_answered += 1
        self.longest = max(self.longest, num_tokens)
        if self.num_answered == self.num_choices:
            metrics.num_choices.observe(self.num_choices)
            metrics.longest_choice.observe(self.longest)


@dataclass(slots=True)
class RequestState:
    """State of one request between its submission and its end.

    Attributes:
        engine: Current engine or, between two engines, the last one.
        is_placed: Whether the request is assigned to `engine`.
        is_prefilling: Whether no output has come from that engine.
        num_moves: Number of moves to another engine.
        num_tokens: Number of answer tokens so far.
        num_tokens_before: Value of `num_tokens` at the last move.
        num_preemptions: Times that the engine took the request's KV, as the engine's last such output says.
        has_output, has_token: Whether an output, and a token, has come from any engine.
        choices: All choices of the request's prompt.
    """

    request: Request
    inbox: Inbox
    engine: int
    is_placed: bool = True
    is_prefilling: bool = True
    num_moves: int = 0
    num_tokens: int = 0
    num_tokens_before: int = 0
    has_output: bool = False
    has_token: bool = False
    num_hit_tokens: int = 0
    num_host_tokens: int = 0
    admitted_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    num_preemptions: int = 0
    choices: PromptChoices = field(default_factory=lambda: PromptChoices(1))

    def may_move(self) -> bool:
        """Return whether another engine may take the request: without progress, it may have crashed its last engine."""
        got_on = not self.num_moves or self.num_tokens > self.num_tokens_before
        return got_on and self.num_moves < MAX_MOVES

    @property
    def cached_shares(self) -> tuple[float | None, float | None]:
        """Parts of the prompt that the engine had cached, and copied from host memory; None before an output."""
        if not self.has_output:
            return None, None
        num_prompt = self.request.num_prompt_tokens
        return self.num_hit_tokens / num_prompt, self.num_host_tokens / num_prompt

    def moved(self, request: Request) -> None:
        """Record that the request continues as `request` on another engine."""
        self.request = request
        self.num_moves += 1
        self.num_tokens_before, self.num_tokens = self.num_tokens, request.num_resumed_tokens

    def count_output(self, output: Output, metrics: EngineMetrics, now_ns: int) -> None:
        """Count the tokens of an output, and its latencies."""
        request, num_tokens = self.request, len(output.token_ids)
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)
        if not self.has_output:
            self.has_output = True
            self.admitted_ns, self.num_hit_tokens = output.admitted_ns, output.num_cached_tokens
            self.num_host_tokens = output.num_host_tokens
            metrics.num_prompt_tokens += request.num_prompt_tokens
            metrics.num_cached_tokens += output.num_cached_tokens
            metrics.num_host_tokens += output.num_host_tokens
            metrics.queue_s[request.service_class].observe((output.admitted_ns - request.arrival_ns) / 1e9)
            metrics.prefill_s.observe((now_ns - output.admitted_ns) / 1e9)
        if not num_tokens:
            return  # The output has only the scores of the prompt.
        metrics.num_generated_tokens += num_tokens
        if self.has_token:
            metrics.gap_s.observe((now_ns - self.last_ns) / 1e9)
        else:
            self.has_token = True
            metrics.first_token_s[request.service_class].observe((now_ns - request.arrival_ns) / 1e9)
            self.first_ns = now_ns
        self.num_tokens += num_tokens
        self.last_ns = now_ns

    def count_answer(self, metrics: EngineMetrics, now_ns: int) -> None:
        """Count the request as completely answered."""
        request, decode_s = self.request, (self.last_ns - self.first_ns) / 1e9
        metrics.whole_s.observe((now_ns - request.arrival_ns) / 1e9)
        metrics.decode_s.observe(decode_s)
        metrics.inference_s.observe(max(0, self.last_ns - self.admitted_ns) / 1e9)
        metrics.computed_tokens.observe(request.num_prompt_tokens - self.num_hit_tokens)
        metrics.max_tokens.observe(request.sampling.max_tokens)
        metrics.num_preemptions.observe(self.num_preemptions)
        self.choices.count_answer(self.num_tokens, metrics)
        metrics.prompt_tokens.observe(request.num_prompt_tokens)
        metrics.generation_tokens.observe(self.num_tokens)
        if self.num_tokens > 1:
            metrics.mean_gap_s[request.service_class].observe(decode_s / (self.num_tokens - 1))

    def recorded(self) -> RecordedRequest:
        """Return the entry that `--record` writes for the request."""
        request = self.request
        return RecordedRequest(
            request_id=request.request_id,
            arrival_ns=request.arrival_ns,
            admitted_ns=self.admitted_ns,
            first_token_ns=self.first_ns,
            last_token_ns=self.last_ns,
            engine=self.engine,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=self.num_tokens,
            num_hit_tokens=self.num_hit_tokens,
            max_tokens=request.sampling.max_tokens,
            block_hashes=request.block_hashes,
            priority=request.priority,
            service_class=request.service_class,
            user=name_key(request.fair_user),
            session=name_key(request.session_id),
        )
