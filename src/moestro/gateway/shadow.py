"""The router as a shadow: follows the traffic of the router in use, decides beside it, and sends nothing.

It sees copies of requests, their answers in the access log, and counters of engines. The log has lines of JSON; its
reader follows the file while it grows and is rotated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.core.clock import NS_PER_S
from moestro.core.request import Request
from moestro.errors import RequestError, shown
from moestro.gateway.clients.downstream import ClientConnection
from moestro.gateway.clients.http_headers import Incoming, own_head
from moestro.gateway.engines.fleet import Counts, Fleet, RouteBounds, RoutedEngine
from moestro.gateway.exchange import ExchangeContext
from moestro.gateway.proxy import Admission, Proxy
from moestro.routing.decision_log import DecisionLog
from moestro.routing.decision_record import EngineCounted, Entry, Served, Uncopied
from moestro.routing.router import RouteDecision
from moestro.web.ports.faults import LogLimit

logger = logging.getLogger(__name__)


_MAX_LINE_BYTES = 64 << 10
_MAX_READ_BYTES = 1 << 20  # of one read, so that a long file does not stop the router
_EVENT_STREAM = "text/event-stream"


class _LogLine(msgspec.Struct):
    """Fields of a line. Numbers may be texts, and times seconds (nginx) or milliseconds (Envoy)."""

    request_id: str
    upstream: str | None = None
    status: int | str = 0
    bytes: int | str = 0
    seconds: float | str | None = None
    milliseconds: float | str | None = None
    first_seconds: float | str | None = None
    first_milliseconds: float | str | None = None
    content_type: str | None = None


class LoggedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the router in use, as its access log has it.

    Attributes:
        upstream: Address or name of the engine that answered; empty if the router itself did.
        status: Status of the answer.
        seconds: Time from the request's arrival to the end of the answer, seconds.
        first_s: Time to the first byte of the answer's body, seconds. None means that the log does not say.
        num_bytes: Bytes of the answer's body.
        is_stream: Whether the answer was a stream of events.
    """

    request_id: str
    upstream: str
    status: int
    seconds: float
    first_s: float | None
    num_bytes: int
    is_stream: bool


_decode = msgspec.json.Decoder(_LogLine).decode


def read_line(line: bytes) -> LoggedAnswer | None:
    """Return the answer that a line describes; None for a line of another form."""
    try:
        found = _decode(line)
        seconds = _seconds(found.seconds, found.milliseconds)
        if seconds is None or not found.request_id:
            return None
        return LoggedAnswer(
            request_id=found.request_id,
            upstream=_last_of(found.upstream or ""),
            status=int(found.status),
            seconds=seconds,
            first_s=_seconds(found.first_seconds, found.first_milliseconds),
            num_bytes=max(int(found.bytes), 0),
            is_stream=(found.content_type or "").startswith(_EVENT_STREAM),
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
        return None


def _seconds(seconds: float | str | None, milliseconds: float | str | None) -> float | None:
    """Return a time in seconds; None where the router writes nothing or a dash."""
    for value, unit in ((seconds, 1.0), (milliseconds, 1e-3)):
        if value not in (None, "", "-"):
            return max(float(value or 0) * unit, 0.0)
    return None


def _last_of(upstream: str) -> str:
    """Return the engine that answered: nginx lists all that it tried, with commas and colons between them."""
    last = upstream.replace(" : ", ", ").rpartition(", ")[2].strip()
    return "" if last == "-" else last


class LogFollower:
    """Reads the lines that are appended to a file, also after it was replaced or emptied.

    What the file has at the start is passed over, because no copy of its requests came. The file may appear later.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""
        self._open(at_end=True)

    def answers(self) -> Iterator[LoggedAnswer | None]:
        """Yield what was appended since the last call; None for a line that cannot be read."""
        yield from self._read()
        if self._was_replaced():
            yield from self._read()
            self.close()
            self._open(at_end=False)
            yield from self._read()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def _open(self, *, at_end: bool) -> None:
        try:
            self._file = self._path.open("rb")
        except OSError:
            return
        if at_end:
            self._file.seek(0, os.SEEK_END)

    def _read(self) -> Iterator[LoggedAnswer | None]:
        if self._file is None:
            return
        while data := self._file.read(_MAX_READ_BYTES):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if line.strip():
                    yield read_line(line)
            if len(self._rest) > _MAX_LINE_BYTES:
                self._rest = b""  # No router writes such a line; its end will not be read either.
                yield None

    def _was_replaced(self) -> bool:
        try:
            found = self._path.stat()
        except OSError:
            return False  # Its writer will make it again.
        if self._file is None:
            return True
        is_other = found.st_ino != os.fstat(self._file.fileno()).st_ino
        return is_other or found.st_size < self._file.tell()


_LOOK_S = 0.25  # Time between two looks at the log.
_COUNTS_NS = 60 * NS_PER_S  # Time between two records of what engines have counted.
_FORGET_NS = 3600 * NS_PER_S  # Longest wait for the line of a request.
_MAX_OPEN = 1 << 16  # Requests without a line, some 100 MB: a log that nothing is written to must not fill the memory.
_UNKNOWN_STATUS = 0
_NO_COPIES = 10  # Answers without any copy of a request, after which the log says that none comes.
_LINES = ("matched", "no_copy", "no_engine", "unreadable")
_COPIES = ("decided", "refused", "repeated", "no_line")


@dataclass(slots=True)
class ShadowCounts:
    """Counts of a shadow since its start.

    Attributes:
        copies: copies of requests, by what became of them.
        lines: lines of the access log, by what became of them.
        num_moved: requests that the policy would have sent to another engine.
        num_prompt_tokens: prompt tokens of requests whose line was found.
        num_served_hits, num_chosen_hits: those of them in the cache of the engine that served the request, and of the
            engine that the policy chose.
    """

    copies: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    num_moved: int = 0
    num_prompt_tokens: int = 0
    num_served_hits: int = 0
    num_chosen_hits: int = 0


@dataclass(slots=True)
class _Copy:
    """A request whose line has not come."""

    request: Request
    decision: RouteDecision
    arrival_ns: int
    hits: dict[int, int]  # by row of each candidate
    is_computed: bool = False


class ShadowObserver(Collector):
    """Decides for each copy of a request, and learns from the access log what the router in use did with it.

    A request counts on the engine that the policy chose, until its line comes. Its first token counts as come after
    the mean TTFT of the engines.

    Args:
        write: Appends an entry to the record.
        follower: Reads the access log.
        counts: Counts of the router.

    Attributes:
        counts: Counts of the shadow.
    """

    def __init__(
        self,
        fleet: Fleet,
        decision_log: DecisionLog,
        write: Callable[[Entry], None],
        follower: LogFollower,
        counts: Counts,
    ) -> None:
        self._fleet = fleet
        self._decision_log = decision_log
        self._write = write
        self._follower = follower
        self._router_counts = counts
        self._open: OrderedDict[str, _Copy] = OrderedDict()
        self._counted_ns: dict[RoutedEngine, int] = {}
        self._num_noted = 0  # answers without a copy, in the record
        self._noted_ns = -_COUNTS_NS
        self._log = LogLimit(logger)
        self.counts = ShadowCounts()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the access log inside the block, and note the last counts at its end."""
        following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            self.look(time.monotonic_ns(), is_last=True)
            self._follower.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self.look(time.monotonic_ns())
            except Exception:
                logger.exception("a look at the access log failed; the shadow goes on")

    # --- requests

    def arrived(self, request: Request, model: str | None, now_ns: int) -> None:
        """Decide for a copy of a request."""
        counts = self.counts.copies
        if request.request_id in self._open:
            counts["repeated"] += 1
            return
        self._router_counts.num_requests += 1
        before_ns = time.monotonic_ns()
        try:
            decision = self._fleet.submit(request, RouteBounds(model), now_ns)
        except RequestError:
            counts["refused"] += 1
            return
        self._router_counts.decision_s.observe((time.monotonic_ns() - before_ns) * 1e-9)
        counts["decided"] += 1
        self._fleet[decision.engine].counts.num_decisions += 1
        self._decision_log.routed(request, decision, "")
        found = decision.candidates
        assert found is not None, "the router of a shadow keeps them"
        hits = dict(zip(found.rows.tolist(), found.hit_tokens.tolist(), strict=True))
        self._open[request.request_id] = _Copy(request, decision, now_ns, hits)

    def look(self, now_ns: int, *, is_last: bool = False) -> None:
        """Take in what the log has got, and what follows from the time.

        Args:
            is_last: Whether no look follows, so that engines' counts are noted whatever their age.
        """
        for answer in self._follower.answers():
            if answer is None:
                self.counts.lines["unreadable"] += 1
                self._log.warning("line", "a line of --access-log is not of the form that docs/shadow.md shows")
            else:
                self._answered(answer, now_ns)
        self._count_first_tokens(now_ns)
        self._forget(now_ns)
        self._note_counts(now_ns, is_last=is_last)

    def _answered(self, answer: LoggedAnswer, now_ns: int) -> None:
        copy = self._open.pop(answer.request_id, None)
        if copy is None:
            self._has_no_copy()
            return
        engine = self._engine_at(answer.upstream)
        if engine is not None:
            self._note_served(copy, engine, answer)
        else:
            self.counts.lines["no_engine"] += 1
            if answer.upstream:
                self._log.warning(
                    "engine",
                    f"--access-log names the engine {shown(answer.upstream)}, which no --engine has: give its --engine"
                    " this name, NAME=URL",
                )
        self._fleet.router.ended(answer.request_id, now_ns)
        if engine is not None:
            self._write(
                Served(
                    request_id=answer.request_id,
                    engine=engine.row,
                    seconds=answer.seconds,
                    first_s=answer.first_s,
                    status=answer.status,
                    num_answer_bytes=answer.num_bytes,
                    is_stream=answer.is_stream,
                )
            )
        name = answer.upstream if engine is None else engine.name
        self._decision_log.ended(answer.request_id, answer.status, {}, served_by=name)

    def _has_no_copy(self) -> None:
        lines = self.counts.lines
        lines["no_copy"] += 1
        if lines["no_copy"] == _NO_COPIES and not self.counts.copies:
            logger.warning(
                "--access-log has %d answers, and the shadow got no copy of a request: a log has no prompts, so no hits"
                " and no TTFT can be predicted. Let the router in use copy its requests to this port, with the request"
                " ids of the log as X-Request-ID (docs/shadow.md).",
                _NO_COPIES,
            )

    def _note_served(self, copy: _Copy, engine: RoutedEngine, answer: LoggedAnswer) -> None:
        counts, chosen = self.counts, copy.decision.engine
        counts.lines["matched"] += 1
        counts.num_moved += chosen != engine.row
        counts.num_prompt_tokens += copy.request.num_prompt_tokens
        counts.num_served_hits += copy.hits.get(engine.row, 0)
        counts.num_chosen_hits += copy.decision.hit_tokens
        engine.counts.statuses[answer.status] += 1

    def _engine_at(self, upstream: str) -> RoutedEngine | None:
        """Return the engine that a log names by its name, its address as given, or the address of its connections."""
        for engine in self._fleet:
            if upstream in (engine.name, engine.url.partition("://")[2], engine.pool.endpoint):
                return engine
        return None

    def _count_first_tokens(self, now_ns: int) -> None:
        ttft_ns = self._mean_ttft_ns()
        for request_id, copy in self._open.items():
            if ttft_ns is None or now_ns - copy.arrival_ns < ttft_ns:
                return  # Later copies are younger.
            if not copy.is_computed:
                copy.is_computed = True
                self._fleet.router.first_token(request_id, now_ns)

    def _mean_ttft_ns(self) -> float | None:
        known = [each.totals for each in self._fleet if each.totals.num_first_tokens]
        num = sum(totals.num_first_tokens or 0 for totals in known)
        return sum(totals.first_token_s or 0.0 for totals in known) / num * NS_PER_S if num else None

    def _forget(self, now_ns: int) -> None:
        while len(self._open) > _MAX_OPEN or (
            self._open and now_ns - next(iter(self._open.values())).arrival_ns > _FORGET_NS
        ):
            request_id, _ = self._open.popitem(last=False)
            self.counts.copies["no_line"] += 1
            self._fleet.router.ended(request_id, now_ns)
            self._decision_log.ended(request_id, _UNKNOWN_STATUS, {})

    def _note_counts(self, now_ns: int, *, is_last: bool) -> None:
        num_uncopied = self.counts.lines["no_copy"]
        if num_uncopied != self._num_noted and (is_last or now_ns - self._noted_ns >= _COUNTS_NS):
            self._num_noted, self._noted_ns = num_uncopied, now_ns
            self._write(Uncopied(num_uncopied, now_ns))
        for engine in self._fleet:
            since_ns = self._counted_ns.get(engine, now_ns - _COUNTS_NS)
            if engine.totals.num_first_tokens is not None and (is_last or now_ns - since_ns >= _COUNTS_NS):
                self._counted_ns[engine] = now_ns
                self._write(EngineCounted(engine.row, engine.totals, now_ns))

    # --- figures

    def collect(self) -> Iterator[Metric]:
        """Yield all families with their current values."""
        counts = self.counts
        for name, text, values, names in (
            ("shadow_copies", "Copies of requests, by result.", counts.copies, _COPIES),
            ("shadow_log_lines", "Lines of the access log, by result.", counts.lines, _LINES),
        ):
            family = CounterMetricFamily(f"moestro:route_{name}", text, labels=("result",))
            for each in names:
                family.add_metric((each,), values[each])
            yield family
        text = "Requests that the policy would have sent to another engine than the router in use."
        yield CounterMetricFamily("moestro:route_shadow_moved", text, value=counts.num_moved)
        text = "Prompt tokens of requests whose line was found."
        yield CounterMetricFamily("moestro:route_shadow_prompt_tokens", text, value=counts.num_prompt_tokens)
        text = "Those of them in the cache of the engine that served the request, and of the one that the policy chose."
        family = CounterMetricFamily("moestro:route_shadow_hit_tokens", text, labels=("engine",))
        family.add_metric(("served",), counts.num_served_hits)
        family.add_metric(("chosen",), counts.num_chosen_hits)
        yield family
        yield GaugeMetricFamily("moestro:route_shadow_open", "Requests without a line.", value=len(self._open))


_ACCEPTED = 202


class ShadowProxy(Proxy):
    """Answers each copy of a request at once, because nginx keeps a client's connection until its mirror has answered.

    Paths that need no engine are answered as by any router.
    """

    def __init__(self, shared: ExchangeContext, admission: Admission, observer: ShadowObserver) -> None:
        super().__init__(shared, admission)
        self._observer = observer

    def _send_on(self, client: ClientConnection, incoming: Incoming) -> None:
        """Answer a copy, and let the observer see it."""
        now_ns, max_bytes = time.monotonic_ns(), client.max_body_bytes
        if self._admission.is_read_inline(incoming):
            self._observer.arrived(*self._admission.read(incoming, now_ns), now_ns)
        else:
            kept = replace(incoming, hold=None)  # The answer releases the body.
            task = asyncio.get_running_loop().create_task(self._read(kept, max_bytes, now_ns))
            self._work.add(task)
            task.add_done_callback(self._work.discard)
        client.reply(own_head(_ACCEPTED, "", 0))

    async def _read(self, incoming: Incoming, max_bytes: int, now_ns: int) -> None:
        try:
            request, model = await self._admission.read_on_thread(incoming, max_bytes)
        except RequestError as error:
            self.refused(incoming, error, incoming.client)
        except Exception as error:
            self._shared.faults.bug("a copy could not be read", error)
        else:
            self._observer.arrived(request, model, now_ns)
