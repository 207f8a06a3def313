"""Decision log: keeps the traces of recent requests through all levels, and passes finished ones to a writer."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from moestro.core.clock import NS_PER_S, ClockPair
from moestro.core.request import Request
from moestro.core.scheduling_events import ExpertsMoved, ExpertVisits, RequestEvent
from moestro.routing.router import RouteDecision, finite


class ScoredEngine(msgspec.Struct, frozen=True):
    """A candidate engine. A lower score is better; None means the policy computes no scores.

    Attributes:
        hit_tokens: prompt tokens that its cache was expected to hold, in any tier.
        host_tokens: those of them in host memory alone.
        speed, decode_speed: speed of prompts and answers against the mean engine, as configured or learnt.
    """

    engine: str
    score: float | None
    hit_tokens: int
    host_tokens: int = 0
    speed: float = 1.0
    decode_speed: float = 1.0


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One decision for a request. Further attempts follow when an engine fails before it responds.

    Attributes:
        engine: name of the chosen engine.
        because: reason for a further attempt; empty for the first.
        wait_s: wait in the router's queue, seconds.
        candidates: candidate engines, best first, including the chosen one.
        num_candidates: number of candidates, of which the list may contain only the best.
        regret: the value of `Candidates.regret`.
        not_compared: figures by which no engine was compared, each with engines that have not reported it.
        peer_ages_s: age of what the router knew of each other router, seconds.
    """

    engine: str
    score: float | None
    reason: str
    because: str
    hit_tokens: int
    candidates: list[ScoredEngine]
    num_candidates: int
    regret: float | None
    not_compared: dict[str, list[str]] = {}
    wait_s: float = 0.0
    peer_ages_s: dict[str, float] = {}


class EngineEvent(msgspec.Struct, frozen=True):
    """What the scheduler of an engine did with the request."""

    engine: str
    event: RequestEvent


class EngineVisits(msgspec.Struct, frozen=True):
    """Workers that computed the request's experts while it was on an engine."""

    engine: str
    visits: tuple[ExpertVisits, ...]


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The server of a trace, as far as its traces have to be understood.

    Attributes:
        mode: mode of `moestro serve`.
        order, evict: policies of each engine's scheduler.
        num_experts: routed experts of a layer; 0 means a dense network.
        expert_workers: names of the workers that count as devices of experts, in the order of `ExpertVisits.num_pairs`.
            Empty where each engine computes all experts itself.
        is_paced: whether devices are modelled, so that no device computes experts.
    """

    mode: str
    order: str
    evict: str
    num_experts: int
    expert_workers: tuple[str, ...] = ()
    is_paced: bool = False


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Story"):
    """Everything known about one request. The fields after `usage` are those of `moestro serve`.

    Attributes:
        time: time of arrival, seconds since 1970.
        prompt_tokens: prompt length as counted by the router, exact or estimated from the text.
        status: status of the response. 499 means that the client disconnected; None means still running.
        seconds: time from arrival to the end, seconds; None means still running.
        usage: token counts reported by the response.
        not_resumable: why its stream could not go on elsewhere; empty where it could, or without --resume-streams.
        arrival_ns: arrival on the clock of `events` and `moves`; None means that there are none.
        service_class, priority: as requested.
        server: the server; None means a router, whose servers have records of their own.
        events: what the schedulers of its engines did with it, in order; the last ones are missing if there are many.
        num_omitted_events: number of those that are missing.
        visits: workers that computed its experts, by engine.
        moves: changes of the expert table while the request was under way.
        first_token_ns: time of the first token, on the clock of `events`; None means that none came.
        tenant: tenant of the request's key; empty if it has none.
        traceparent: context of the client's span; empty if there is none, or spans are not recorded.
        served_by: engine of the router in use, beside which this one is a shadow; empty if this router is no shadow.
    """

    request_id: str
    time: float
    policy: str
    prompt_tokens: int
    attempts: list[Attempt]
    status: int | None
    seconds: float | None
    usage: dict[str, int]
    not_resumable: str = ""
    arrival_ns: int | None = None
    service_class: str = ""
    priority: int = 0
    server: ServerFacts | None = None
    events: list[EngineEvent] = []
    num_omitted_events: int = 0
    visits: list[EngineVisits] = []
    moves: list[ExpertsMoved] = []
    first_token_ns: int | None = None
    tenant: str = ""
    traceparent: str = ""
    served_by: str = ""


MOST_EVENTS = 64  # of one request; further ones are counted
MOST_MOVES = 64  # changes of the expert table that are kept
MOST_UNWRITTEN = 1000  # ended requests whose engine has yet to report what it did with them


class _Attempt(NamedTuple):
    """One decision, with the engine names of all rows at that time, because rows are reused."""

    decision: RouteDecision
    because: str
    names: Sequence[str]
    wait_ns: int = 0
    peer_ages_s: Mapping[str, float] = MappingProxyType({})


class _Entry:
    """Compact form of a request's trace, expanded only for a reader."""

    __slots__ = (
        "attempts", "began", "ended_ns", "events", "first_token_ns", "moves", "num_omitted", "obstacle", "request",
        "request_id", "served_by", "status", "tenant", "traceparent", "usage", "visits",
    )  # fmt: skip

    def __init__(self, request: Request, began: ClockPair) -> None:
        self.request_id = request.request_id
        # The prompt would take memory for as long as the trace is kept.
        self.request = (request.num_prompt_tokens, request.service_class, request.priority)
        self.tenant, self.traceparent = request.tenant or "", request.traceparent or ""
        self.began = began
        self.first_token_ns: int | None = None
        self.ended_ns = 0
        self.attempts: list[_Attempt] = []
        self.obstacle = self.served_by = ""
        self.status: int | None = None
        self.usage: dict[bytes, int] = {}
        self.events: list[EngineEvent] = []
        self.num_omitted = 0
        self.visits: list[EngineVisits] = []
        self.moves: list[ExpertsMoved] = []


class DecisionLog:
    """Keeps traces of running and recently ended requests by id, and passes those of ended requests to `write`.

    Args:
        policy: text form of the route policy.
        remember: limit of ended requests in memory.
        names: returns the names of the fleet's rows.
        write: receiver of the traces of ended requests; None means no record.
        read_clocks: reads the present time.

    Attributes:
        server: the server whose schedulers report events; None means a router.
        peer_ages_s: returns the age of what is known of each other router, seconds.
    """

    def __init__(
        self,
        policy: str,
        remember: int,
        names: Callable[[], Sequence[str]],
        write: Callable[[RequestTrace], None] | None,
        read_clocks: Callable[[], ClockPair],
    ) -> None:
        self._policy = policy
        self._remember = remember
        self._names = names
        self._write = write
        self._read_clocks = read_clocks
        self._running: dict[str, _Entry] = {}
        self._over: OrderedDict[str, _Entry] = OrderedDict()
        self._unwritten: dict[str, _Entry] = {}
        self._moves: deque[ExpertsMoved] = deque(maxlen=MOST_MOVES)
        self.server: ServerFacts | None = None
        self.peer_ages_s: Callable[[], Mapping[str, float]] = dict

    # --- what happens -----------------------------------------------------------------------------------------------

    def routed(self, request: Request, decision: RouteDecision, because: str, wait_ns: int = 0) -> None:
        """Record that a request was sent to an engine.

        Args:
            because: the reason for a retry; empty for the first attempt.
            wait_ns: wait in the router's queue, ns.
        """
        entry = self._running.get(request.request_id)
        if entry is None:
            entry = self._running[request.request_id] = _Entry(request, self._read_clocks())
        entry.attempts.append(_Attempt(decision, because, self._names(), wait_ns, self.peer_ages_s()))

    def not_resumable(self, request_id: str, obstacle: str) -> None:
        """Record why the stream of a running request cannot go on elsewhere. Unknown requests are ignored."""
        if entry := self._running.get(request_id):
            entry.obstacle = obstacle

    def scheduled(self, request_id: str, engine: str, event: RequestEvent) -> None:
        """Record what an engine's scheduler did with a request. Unknown requests are ignored."""
        entry = self._known(request_id)
        if entry is None:
            return
        if len(entry.events) < MOST_EVENTS:
            entry.events.append(EngineEvent(engine, event))
        else:
            entry.num_omitted += 1

    def visited(self, request_id: str, engine: str, visits: tuple[ExpertVisits, ...]) -> None:
        """Record which workers computed a request's experts. Unknown requests are ignored."""
        entry = self._known(request_id)
        if entry is not None and visits:
            entry.visits.append(EngineVisits(engine, visits))

    def moved(self, change: ExpertsMoved) -> None:
        """Record a change of the expert table for all running requests."""
        self._moves.append(change)

    def ended(
        self,
        request_id: str,
        status: int,
        usage: dict[bytes, int],
        *,
        is_complete: bool = True,
        first_token_ns: int | None = None,
        served_by: str = "",
    ) -> None:
        """Record the end of a request.

        Args:
            first_token_ns: time of its first token; None means that it is unknown.
            served_by: engine of the router in use, beside which this one is a shadow; empty if it is none.
            is_complete: whether its trace can be written. Otherwise `complete` writes it, after the engine's last word.
        """
        entry = self._running.pop(request_id, None)
        if entry is None:
            return
        entry.status, entry.usage, entry.ended_ns = status, usage, self._read_clocks().monotonic_ns
        entry.first_token_ns, entry.served_by = first_token_ns, served_by
        if self._moves:
            entry.moves = self._moves_of(entry)
        self._over[request_id] = entry
        self._over.move_to_end(request_id)  # a reused id counts as the newest
        while len(self._over) > self._remember:
            self._over.popitem(last=False)
        if self._write is None:
            return
        self._unwritten[request_id] = entry
        if is_complete:
            self.complete(request_id)
        elif len(self._unwritten) > MOST_UNWRITTEN:
            self.complete(next(iter(self._unwritten)))

    def complete(self, request_id: str) -> None:
        """Write the trace of an ended request, if it is not written."""
        entry = self._unwritten.pop(request_id, None)
        if entry is not None and self._write is not None:
            self._write(self._story(entry))

    def complete_all(self) -> None:
        """Write the traces of all ended requests that are not written."""
        for request_id in list(self._unwritten):
            self.complete(request_id)

    def is_running(self, request_id: str) -> bool:
        """Whether a request is known and has not ended."""
        return request_id in self._running

    # --- queries ----------------------------------------------------------------------------------------------------

    def trace(self, request_id: str) -> RequestTrace | None:
        """Return the trace of a request, or None if it is unknown, forgotten or kept without candidates."""
        entry = self._known(request_id)
        if entry is None or any(attempt.decision.candidates is None for attempt in entry.attempts):
            return None
        return self._story(entry)

    def recent(self, limit: int) -> list[RequestTrace]:
        """Return traces of running requests and of those that ended last, at most `limit`, the newest arrival first.

        The traces have decisions and outcomes, without what engines did with the requests.
        """
        newest = chain(*(islice(reversed(each.values()), limit) for each in (self._running, self._over)))
        entries = sorted(newest, key=lambda entry: entry.began.monotonic_ns, reverse=True)[:limit]
        return [
            msgspec.structs.replace(self._story(entry), events=[], num_omitted_events=0, visits=[], moves=[])
            for entry in entries
            if all(attempt.decision.candidates is not None for attempt in entry.attempts)
        ]

    def _known(self, request_id: str) -> _Entry | None:
        return self._running.get(request_id) or self._unwritten.get(request_id) or self._over.get(request_id)

    def _moves_of(self, entry: _Entry) -> list[ExpertsMoved]:
        return [change for change in self._moves if change.now_ns >= entry.began.monotonic_ns]

    def _story(self, entry: _Entry) -> RequestTrace:
        is_over = entry.status is not None
        num_prompt_tokens, service_class, priority = entry.request
        began_ns = entry.began.monotonic_ns
        is_server = self.server is not None
        return RequestTrace(
            request_id=entry.request_id,
            time=entry.began.wall_ns / NS_PER_S,
            policy=self._policy,
            prompt_tokens=num_prompt_tokens,
            attempts=[_attempt_of(attempt) for attempt in entry.attempts],
            status=entry.status,
            seconds=(entry.ended_ns - began_ns) / NS_PER_S if is_over else None,
            usage={name.decode(): count for name, count in entry.usage.items()},
            not_resumable=entry.obstacle,
            arrival_ns=began_ns if is_server else None,
            service_class=service_class.value if is_server else "",
            priority=priority if is_server else 0,
            server=self.server,
            events=entry.events,
            num_omitted_events=entry.num_omitted,
            visits=entry.visits,
            moves=entry.moves if is_over else self._moves_of(entry),
            first_token_ns=entry.first_token_ns,
            tenant=entry.tenant,
            traceparent=entry.traceparent,
            served_by=entry.served_by,
        )


def _attempt_of(attempt: _Attempt) -> Attempt:
    decision, because, names, wait_ns, peer_ages_s = attempt
    candidates = decision.candidates
    assert candidates is not None, "the router keeps none"
    return Attempt(
        engine=names[decision.engine],
        score=finite(decision.score),
        reason=decision.reason,
        because=because,
        wait_s=wait_ns / NS_PER_S,
        peer_ages_s=dict(peer_ages_s),
        hit_tokens=decision.hit_tokens,
        candidates=[
            ScoredEngine(
                names[candidates.rows[at]],
                candidates.score(at),
                int(candidates.hit_tokens[at]),
                candidates.host_tokens_at(at),
                candidates.speed_at(at),
                candidates.decode_speed_at(at),
            )
            for at in candidates.ranked()
        ],
        num_candidates=candidates.num,
        regret=candidates.regret,
        not_compared={figure: [names[row] for row in rows] for figure, rows in candidates.not_compared.items()},
    )
