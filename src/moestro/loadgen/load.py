"""One run: sends and records every request of a load."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from moestro.errors import ConfigError
from moestro.loadgen.client import BenchClient, Endpoint
from moestro.loadgen.settings import ArrivalSettings, BenchSettings, EndpointSettings, EndpointType, RequestSettings
from moestro.workload.generated.draws import (
    PromptKey,
    at_rate,
    constant,
    draw_shape,
    faster,
    gamma,
    poisson,
    replay,
    text,
    token_ids,
    weibull,
)
from moestro.workload.generated.sessions import SHAPES, steady_rows
from moestro.workload.rows import Rows, equal_rows
from moestro.workload.run_records import RecordBook, Records
from moestro.workload.traces.reading import read_sharegpt, read_trace
from moestro.workload.traces.servegen import Span, draw_requests, read_clients

# (request, arrival, turn): the two times differ only where --max-concurrency held the request back.
Send = Callable[[int, int, int], Awaitable[None]]

BEAT_NS = 20_000_000


async def send_open(offsets_ns: NDArray[np.int64], send: Send) -> None:
    """Send each request at its offset from now, regardless of unanswered ones; return when all have ended."""
    start_ns = time.monotonic_ns()
    async with asyncio.TaskGroup() as tasks:
        for row, offset_ns in enumerate(offsets_ns.tolist()):
            due_ns = start_ns + offset_ns
            await _sleep_until(due_ns)
            tasks.create_task(_started(send, row, due_ns))


async def send_bounded(num_requests: int, limit: int, offsets_ns: NDArray[np.int64] | None, send: Send) -> None:
    """Send requests in order, at most `limit` at once; return when all have ended.

    Without offsets a request arrives when its turn comes; with them, when it is due, and its wait for a turn counts.
    """
    start_ns = time.monotonic_ns()
    rows = iter(range(num_requests))

    async def work() -> None:
        for row in rows:  # shared: each worker takes the next free row
            turn_ns = arrival_ns = time.monotonic_ns()
            if offsets_ns is not None:
                arrival_ns = start_ns + int(offsets_ns[row])
                await _sleep_until(arrival_ns)
                turn_ns = max(arrival_ns, turn_ns)
            await send(row, arrival_ns, turn_ns)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(limit, num_requests)):
            tasks.create_task(work())


@asynccontextmanager
async def heartbeat() -> AsyncIterator[array[int]]:
    """Watch the loop: collect how late each beat of BEAT_NS was, in nanoseconds, including beats that a stall lost.

    A client whose loop stalls timestamps answers late, and would report the delay as the server's latency.
    """
    late_ns: array[int] = array("q")
    task = asyncio.create_task(_beat(late_ns))
    try:
        yield late_ns
    finally:
        task.cancel()


async def _beat(late_ns: array[int]) -> None:
    due_ns = time.monotonic_ns() + BEAT_NS
    while True:
        await asyncio.sleep((due_ns - time.monotonic_ns()) / 1e9)
        now_ns = time.monotonic_ns()
        while due_ns <= now_ns:
            late_ns.append(now_ns - due_ns)
            due_ns += BEAT_NS


async def _sleep_until(due_ns: int) -> None:
    """Sleep until `due_ns`. The loop's timers count milliseconds and may fire early, hence the repetition."""
    while (left_ns := due_ns - time.monotonic_ns()) > 0:  # noqa: ASYNC110 the condition is time itself
        await asyncio.sleep(left_ns / 1e9)


async def _started(send: Send, row: int, due_ns: int) -> None:
    await send(row, due_ns, due_ns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BenchLoad:
    """The requests of a run, their times, and their limit.

    Attributes:
        bodies: one for each request, ready to send, so that nothing is computed while the clock runs.
        num_requested_tokens: int64[n], requested lengths of the answers.
        offsets_ns: int64[n], arrivals after the start, or None: a request then arrives when its turn comes.
        limit: most requests at the server at once; None means no limit.
        name: name of the run, to find its requests in the server's log.
    """

    bodies: Sequence[bytes]
    num_requested_tokens: NDArray[np.int64]
    offsets_ns: NDArray[np.int64] | None
    limit: int | None
    name: str


def run_load(
    settings: EndpointSettings, endpoint: Endpoint, load: BenchLoad, on_end: Callable[[], None] = lambda: None
) -> Records:
    """Send all of `load` and return the records; `on_end` is called once a request."""
    # Freeze existing objects: repeated collections of them would stall the loop. What the caller froze stays frozen.
    was_frozen = gc.get_freeze_count() > 0
    if not was_frozen:
        gc.collect()
        gc.freeze()
    try:
        return uvloop.run(_run(settings, endpoint, load, on_end))
    finally:
        if not was_frozen:
            gc.unfreeze()


async def _run(settings: EndpointSettings, endpoint: Endpoint, load: BenchLoad, on_end: Callable[[], None]) -> Records:
    book, count = RecordBook(load.num_requested_tokens), len(load.bodies)
    async with BenchClient(settings) as client, heartbeat() as stall_ns:

        async def send(row: int, arrival_ns: int, turn_ns: int) -> None:
            book.sent(row, arrival_ns, time.monotonic_ns() - turn_ns)
            outcome = await client.ask(endpoint.url, load.bodies[row], _headers(load.name, row))
            book.ended(row, time.monotonic_ns(), outcome)
            on_end()

        if load.offsets_ns is None or load.limit is not None:
            await send_bounded(count, load.limit or count, load.offsets_ns, send)
        else:
            await send_open(load.offsets_ns, send)
        return book.freeze(stall_ns)


def _headers(name: str, row: int) -> Mapping[str, str]:
    return {"x-request-id": f"{name}-{row}"}


# Turns settings into requests: rows that fit the model, their bodies, their times.

_USUAL_PROMPTS = 200
_WARM_UP_RUN = 0


def make_rows(settings: RequestSettings, rate: float | None = None) -> Rows:
    """Make the requests that the settings ask for.

    Args:
        rate: requests a second of generated sessions; None or inf means 1, to be stretched later.

    Raises:
        ConfigError: the trace cannot be read, or holds fewer than --num-prompts.
    """
    count = settings.num_prompts or _USUAL_PROMPTS
    if settings.dataset_path is not None:
        return _read_rows(settings, settings.dataset_path)
    if settings.dataset_name in SHAPES:
        pace = 1.0 if rate is None or rate == math.inf else rate
        return steady_rows(SHAPES[settings.dataset_name], count, pace, settings.seed)
    return equal_rows(count, settings.random_input_len, settings.random_output_len, settings.random_prefix_len)


def _read_rows(settings: RequestSettings, path: Path) -> Rows:
    wanted = settings.num_prompts
    if settings.dataset_name == "servegen":
        rows = draw_requests(read_clients(path), Span(), settings.seed)
        wanted = wanted or _USUAL_PROMPTS
    elif settings.dataset_name == "sharegpt":
        rows = read_sharegpt(path, wanted or _USUAL_PROMPTS)
    elif settings.length_shape is not None:
        rows = read_trace(path, None, settings.random_output_len)
        rng = np.random.default_rng(settings.seed)
        return draw_shape(rows, settings.length_shape, wanted or _USUAL_PROMPTS, rng)
    else:
        rows = read_trace(path, wanted, settings.random_output_len)
    if wanted is not None and len(rows) < wanted:
        raise ConfigError(f"{path} holds {len(rows)} requests: lower --num-prompts or leave it out")
    return rows if wanted is None else rows.select(np.arange(wanted))


def fit(rows: Rows, max_model_len: int | None, skip: bool) -> Rows:  # noqa: FBT001 the operator's --skip-too-long
    """Select the rows that fit the model's context.

    Raises:
        ConfigError: a row does not fit and `skip` is not set, or no row fits. Prompts are never cut, because that would
            change the workload.
    """
    if max_model_len is None:
        return rows
    fits = rows.num_prompt_tokens + rows.num_output_tokens <= max_model_len
    if fits.all():
        return rows
    if not skip or not fits.any():
        raise ConfigError(
            f"{int((~fits).sum())} of {len(rows)} requests need more than the model's {max_model_len} tokens:"
            " --skip-too-long leaves those of a trace out; random ones get shorter with --random-input-len and"
            " --random-output-len"
        )
    return rows.select(np.flatnonzero(fits))


@dataclass(frozen=True, slots=True)
class Loads:
    """Makes the loads of one bench. No two of them share a prompt, except for texts from a file."""

    settings: BenchSettings
    endpoint: Endpoint
    rows: Rows

    def warm_up(self) -> BenchLoad:
        """Make --num-warmups simultaneous requests with the first rows' lengths."""
        which = np.arange(self.settings.arrivals.num_warmups) % len(self.rows)
        return self._load(self.rows.select(which), _WARM_UP_RUN, None)

    def run(self, number: int, rate: float | None = None) -> BenchLoad:
        """Make the load of run `number`, from 1; `rate` replaces --request-rate."""
        arrivals = self.settings.arrivals
        rng = np.random.default_rng([self.settings.requests.seed, number])
        offsets_ns = make_offsets(self.rows, arrivals, rate or arrivals.request_rate, rng)
        return self._load(self.rows, number, offsets_ns)

    def _load(self, rows: Rows, run: int, offsets_ns: NDArray[np.int64] | None) -> BenchLoad:
        requests = self.settings.requests
        key = PromptKey(requests.seed, run)
        return BenchLoad(
            bodies=[self._body(rows, i, key) for i in range(len(rows))],
            num_requested_tokens=rows.num_output_tokens,
            offsets_ns=offsets_ns,
            limit=self.settings.arrivals.max_concurrency,
            name=f"bench-{requests.seed}-{run}",
        )

    def _body(self, rows: Rows, index: int, key: PromptKey) -> bytes:
        kind, requests = self.settings.endpoint.endpoint_type, self.settings.requests
        if kind == "chat" or rows.texts is not None:
            prompt: str | list[int] = text(rows, index, key)
        else:
            prompt = token_ids(rows, index, requests.vocab_size, key).tolist()
        body = _ask(kind, prompt, int(rows.num_output_tokens[index]))
        extra = {"temperature": requests.temperature} | ({"ignore_eos": True} if requests.ignore_eos else {})
        return msgspec.json.encode({"model": self.endpoint.model} | body | extra)


def _ask(kind: EndpointType, prompt: str | list[int], max_tokens: int) -> dict[str, object]:
    common: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "chat":
        messages = [{"role": "user", "content": prompt}]
        return {"messages": messages, "max_completion_tokens": max_tokens} | common
    return {"prompt": prompt, "max_tokens": max_tokens} | common


def make_offsets(
    rows: Rows, arrivals: ArrivalSettings, rate: float | None, rng: np.random.Generator
) -> NDArray[np.int64] | None:
    """Arrivals after the start, int64[n] nanoseconds, or None without a schedule.

    Raises:
        ConfigError: --arrivals does not go with the rate or the trace.
    """
    kind = arrivals.arrivals
    if kind == "auto" and rows.timestamp_ns is None:
        kind = "poisson" if arrivals.burstiness == 1 else "gamma"
    if rate == math.inf or (rate is None and rows.timestamp_ns is None and arrivals.arrivals == "auto"):
        return None
    if kind in {"auto", "trace"}:
        return _replayed(rows, arrivals, rate, rng)
    if rate is None:
        raise ConfigError(f"--arrivals {kind} needs a --request-rate")
    if kind == "constant":
        return constant(len(rows), rate)
    if kind == "poisson":
        return poisson(len(rows), rate, rng)
    return (gamma if kind == "gamma" else weibull)(len(rows), rate, arrivals.burstiness, rng)


def _replayed(rows: Rows, arrivals: ArrivalSettings, rate: float | None, rng: np.random.Generator) -> NDArray[np.int64]:
    if rows.timestamp_ns is None:
        raise ConfigError("--arrivals trace: this trace has no times; give --arrivals poisson and --request-rate")
    offsets_ns = replay(rows.timestamp_ns, rng)
    return faster(offsets_ns, arrivals.rate_factor) if rate is None else at_rate(offsets_ns, rate)
