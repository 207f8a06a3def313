"""What a shadow sees: copies of requests, their answers in the access log, and counters of engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.core.clock import NS_PER_S
from moestro.core.request import Request
from moestro.errors import RequestError, shown
from moestro.gateway.engines.fleet import Fleet, RouteBounds, RoutedEngine
from moestro.gateway.metrics import Counts
from moestro.gateway.shadow.access_log import LogFollower, LoggedAnswer
from moestro.routing.record.decision_log import DecisionLog
from moestro.routing.record.decision_record import EngineCounted, Entry, Served
from moestro.routing.router import RouteDecision
from moestro.web.ports.faults import LogLimit

logger = logging.getLogger(__name__)

_LOOK_S = 0.25  # Time between two looks at the log.
_COUNTS_NS = 60 * NS_PER_S  # Time between two records of what engines have counted.
_FORGET_NS = 3600 * NS_PER_S  # Longest wait for the line of a request.
_UNKNOWN_STATUS = 0
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
            self.counts.lines["no_copy"] += 1
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
        while self._open and now_ns - next(iter(self._open.values())).arrival_ns > _FORGET_NS:
            request_id, _ = self._open.popitem(last=False)
            self.counts.copies["no_line"] += 1
            self._fleet.router.ended(request_id, now_ns)
            self._decision_log.ended(request_id, _UNKNOWN_STATUS, {})

    def _note_counts(self, now_ns: int, *, is_last: bool) -> None:
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
