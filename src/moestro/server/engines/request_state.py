"""State of requests in the API server: outputs and the memory of those that no client has read, and counters.

The counters are plain numbers for the hot path; `prometheus.py` exports them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from moestro.core.hashing import name_key
from moestro.core.request import FinishReason, Output, Request, ServiceClass, TokenLogprobs
from moestro.errors import DrainingError, RequestError
from moestro.text.parsing.answer_parser import ChatPart
from moestro.text.tokenizer_library import TokenText, TokenTexts
from moestro.web.errors import Refusals
from moestro.web.figures import Histogram
from moestro.workload.traces.request_record import RecordedRequest

_LEAST = -9999.0  # OpenAI's value for minus infinity, which JSON lacks.


class Alternative(NamedTuple):
    """A likely token at one position of a text."""

    token_id: int
    token: TokenText
    logprob: float


class Score(NamedTuple):
    """Log probability of one token of an answer or a prompt.

    Attributes:
        offset: Start of the token's text, in characters.
        logprob, rank: Values in the raw distribution, rank 1 for the most likely token. A prompt's first token has no
            distribution: its logprob is None and its rank 0.
        top: Most likely tokens, the most likely first.
    """

    token_id: int
    token: TokenText
    offset: int
    logprob: float | None
    rank: int
    top: tuple[Alternative, ...]


def score_of(entry: TokenLogprobs, offset: int, texts: TokenTexts) -> Score:
    """Return the score of one token."""
    top = tuple(Alternative(token_id, texts[token_id], max(logprob, _LEAST)) for token_id, logprob in entry.top)
    return Score(entry.token_id, texts[entry.token_id], offset, max(entry.logprob, _LEAST), entry.rank, top)


def first_score(token_id: int, texts: TokenTexts) -> Score:
    """Return the score of a prompt's first token, which has no log probability."""
    return Score(token_id, texts[token_id], 0, None, 0, ())


class Piece(msgspec.Struct, frozen=True, gc=False):
    """New output of one choice.

    Attributes:
        text: New text; may be empty.
        finish_reason: Reason for the end of the choice; None means that more pieces follow.
        stop_reason: Stop string, or the client's stop token, that ended the choice.
        scores: Scores of the new tokens, shown or not, after those of an echoed prompt; None means not requested.
        prompt_scores: Scores of the prompt's tokens, if `prompt_logprobs` requests them.
        token_ids: New tokens, shown or not; None means not requested.
        prompt_token_ids: Tokens of the prompt, with the first piece of a choice that requests them.
        parts: Parsed parts of a chat's text; None means that all text is content.
    """

    index: int
    text: str
    finish_reason: str | None
    scores: tuple[Score, ...] | None = None
    prompt_scores: tuple[Score, ...] | None = None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    parts: tuple[ChatPart, ...] | None = None

    @property
    def has_only_text(self) -> bool:
        """Whether all other fields have their default values."""
        return (
            self.finish_reason is None
            and self.parts is None
            and self.scores is None
            and self.token_ids is None
            and self.stop_reason is None
            and self.prompt_scores is None
            and self.prompt_token_ids is None
        )


# vLLM's bounds, so that the heat maps of its dashboards fit. The gaps begin lower, for small models.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_WHOLE_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)  # vLLM's buckets
_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))

ByClass = dict[ServiceClass, Histogram]


def _by_class(bounds: Sequence[float]) -> ByClass:
    return {service_class: Histogram(bounds) for service_class in ServiceClass}


class EngineMetrics:
    """Totals of one engine since the start of the API server, across the engine's restarts.

    Attributes:
        first_token_s, mean_gap_s: TTFT and TPOT by service class, in seconds, measured in the API server.
        gap_s, whole_s: ITL and E2E latency, in seconds.
        queue_s: Time from arrival to admission by service class, in seconds.
        prefill_s, decode_s: Time from admission to the first output, and from the first to the last token, in seconds.
        inference_s: Time from admission to the last token, in seconds.
        prompt_tokens, generation_tokens: Number of tokens of each finished request.
        computed_tokens: Number of prompt tokens of each finished request that no cache had.
        max_tokens: Limit of generated tokens of each finished request.
        step_tokens: Number of tokens of each step with an output: generated ones, and the prompts that it completed.
        num_preemptions: Number of preemptions of each finished request.
        num_choices, longest_choice: Number of choices of each finished prompt, and tokens of the longest of them.
        num_cached_tokens: Number of prompt tokens that came from a cache.
        num_host_tokens: Number of those that were copied from host memory.
        num_prompt_tokens: Number of prompt tokens of requests with a first output.
        num_generated_tokens: Number of tokens received from the engine, shown or not.
        ended: Number of ended requests by finish reason.
        num_restarts, num_stalls: Number of restarts and of stalls.
        num_moved: Number of requests moved away when the engine's process ended.
        num_streams_resumed: Number of moved requests of which the client had a part already.
    """

    __slots__ = (
        "computed_tokens", "decode_s", "ended", "first_token_s", "gap_s", "generation_tokens", "inference_s",
        "longest_choice", "max_tokens", "mean_gap_s", "num_cached_tokens", "num_choices", "num_generated_tokens",
        "num_host_tokens",
        "num_moved", "num_preemptions", "num_prompt_tokens", "num_restarts", "num_stalls", "num_streams_resumed",
        "prefill_s", "prompt_tokens", "queue_s", "step_tokens", "whole_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.first_token_s = _by_class(_FIRST_TOKEN_S)
        self.gap_s = Histogram(_GAP_S)
        self.mean_gap_s = _by_class(_GAP_S)
        self.whole_s = Histogram(_WHOLE_S)
        self.queue_s = _by_class(_WHOLE_S)
        self.prefill_s = Histogram(_WHOLE_S)
        self.decode_s = Histogram(_WHOLE_S)
        self.inference_s = Histogram(_WHOLE_S)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.computed_tokens = Histogram(_TOKENS)
        self.max_tokens = Histogram(_TOKENS)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.num_preemptions = Histogram(_PREEMPTIONS)
        self.num_choices = Histogram(_CHOICES)
        self.longest_choice = Histogram(_TOKENS)
        self.num_cached_tokens = self.num_host_tokens = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.ended = dict.fromkeys(FinishReason, 0)
        self.num_restarts = 0
        self.num_stalls = 0
        self.num_moved = 0
        self.num_streams_resumed = 0


class Metrics:
    """Counters of the API server.

    Attributes:
        engines: Counters of each engine, by number.
        refusals: Number of refusals by error code.
        num_delivery_errors: Number of messages of ranks, or outputs in them, that the API server failed to process.
    """

    def __init__(self, num_engines: int) -> None:
        self.engines = [EngineMetrics() for _ in range(num_engines)]
        self.refusals = Refusals()
        self.num_delivery_errors = 0


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


# Outputs of the engines that wait for slow clients. Text of 1,024 choices over a minute takes a tenth of it.
MAX_UNREAD_BYTES = 256 << 20
_EVENT_BYTES = 384  # of an output of one token: the object, its request id and its tokens
_SCORE_BYTES = 96  # of one log probability: two numbers and their tuple


class UnreadMemory:
    """Counts the outputs that wait for clients which read more slowly than the engines generate.

    An engine does not pause a sequence for a slow client. Where all outputs that wait exceed the bound, the stream with
    most of them is cut, among those of the client that has most in all.

    Args:
        max_bytes: Most bytes of all streams.

    Attributes:
        num_bytes: Present bytes of all streams.
    """

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._of_client: dict[Hashable, set[UnreadStream]] = {}  # Streams that hold something.

    def count(self, stream: UnreadStream, num_bytes: int) -> None:
        """Count further bytes of a stream, and cut streams until all are within the bound."""
        if num_bytes:
            self._of_client.setdefault(stream.client, set()).add(stream)
        stream.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._largest().cut()

    def forget(self, stream: UnreadStream) -> None:
        """Stop counting the bytes of a stream."""
        self.num_bytes -= stream.num_bytes
        stream.num_bytes = 0
        if (streams := self._of_client.get(stream.client)) is not None:
            streams.discard(stream)
            if not streams:
                del self._of_client[stream.client]

    def _largest(self) -> UnreadStream:
        most = max(self._of_client.values(), key=lambda streams: sum(each.num_bytes for each in streams))
        return max(most, key=lambda each: each.num_bytes)


class UnreadStream:
    """Outputs that wait for one client's connection. As a context manager it forgets them at the end.

    Args:
        client: Name of the client (`Access.client_of`).
        cut: Closes the connection, which ends the request.

    Attributes:
        num_bytes: Counted bytes.
    """

    __slots__ = ("_cut", "_is_over", "_memory", "client", "num_bytes")

    def __init__(self, memory: UnreadMemory, client: Hashable, cut: Callable[[], None]) -> None:
        self._memory = memory
        self._cut = cut
        self._is_over = False
        self.client = client
        self.num_bytes = 0

    def __enter__(self) -> UnreadStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def is_over(self) -> bool:
        """Whether nothing waits for the connection any more."""
        return self._is_over

    def waits(self, event: InboxEvent) -> None:
        """Count an event that the connection does not take yet, for which this or another stream may be cut."""
        if not self._is_over:
            self._memory.count(self, _size_of(event))

    def taken(self, event: InboxEvent) -> None:
        """Stop counting an event that waited."""
        if not self._is_over:
            self._memory.count(self, -_size_of(event))
            if not self.num_bytes:
                self._memory.forget(self)

    def cut(self) -> None:
        """Close the connection, and count its outputs no longer."""
        self._end()
        self._cut()

    def _end(self) -> None:
        self._is_over = True
        self._memory.forget(self)


def _size_of(event: InboxEvent) -> int:
    """Return the approximate bytes of an event of the engine."""
    if not isinstance(event, Output) or not event.logprobs:
        return _EVENT_BYTES
    return _EVENT_BYTES + _SCORE_BYTES * sum(1 + len(entry.top) for entry in event.logprobs)


class Traffic:
    """Counts generation requests, and refuses new ones while the server drains.

    Attributes:
        num_answering: Number of requests without a complete response.
        is_draining: Whether new requests are refused; writable.
    """

    def __init__(self) -> None:
        self.num_answering = 0
        self.is_draining = False

    def check_open(self) -> None:
        """Raise DrainingError while the server drains."""
        if self.is_draining:
            raise DrainingError

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count one more request inside the block; raise DrainingError while the server drains."""
        self.check_open()
        self.num_answering += 1
        try:
            yield
        finally:
            self.num_answering -= 1
