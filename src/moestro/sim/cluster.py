"""Many engines on virtual time behind the production router and its queue: arrivals of requests become `Results`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.load_figures import LoadFigures
from moestro.core.request import Request, Script, ServiceClass
from moestro.core.views import OrderPolicy
from moestro.core.work import Plan
from moestro.engine.sequences import Sequence as EngineSequence
from moestro.engine.steps import StepOutput
from moestro.errors import RequestError
from moestro.routing.policy_contract import FRESH_NS
from moestro.routing.route_queue import EngineSaturation, QueueRules, RouteQueue, SaturationRules
from moestro.routing.router import RouteDecision, Router
from moestro.sim.groups.group import Ranks, Seat
from moestro.sim.results import ANSWERED, Results
from moestro.sim.signals import AT_ONCE, NO_GROUP, ReportedRouter, Signals, SignalSettings

Int64s = NDArray[np.int64]


class Arrivals(Protocol):
    """The order and times in which requests arrive; `workload.sessions.Sessions` implements it for conversations."""

    @property
    def first_rows(self) -> Int64s:
        """Rows of the requests whose arrival depends on no other request, int64[m]."""
        ...

    @property
    def start_ns(self) -> Int64s:
        """Arrival times of `first_rows`, int64[m], ascending."""
        ...

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """Return the request that follows `row` and its arrival time; None means no request follows.

        Args:
            row: a request that has ended.
            ended_ns: time of its end.
        """
        ...


class AtTimes:
    """Open loop: every request arrives at a fixed time.

    Args:
        start_ns: arrival times, int64[n], ascending.
        rows: request of each time, int64[n]. None means that request i has time i.

    Attributes:
        first_rows: rows of all requests, int64[n].
    """

    def __init__(self, start_ns: Int64s, rows: Int64s | None = None) -> None:
        self.start_ns = start_ns
        self.first_rows: Int64s = np.arange(len(start_ns)) if rows is None else rows

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """Return None, because no request depends on another."""
        return None


class ClosedLoop:
    """Closed loop over recorded conversations: a turn arrives a think time after the end of the turn before it.

    Args:
        session: conversation of each request, int64[n].
        arrival_ns: arrivals, int64[n], ascending. Only those of first turns hold.
        think_ns: time to think before each request, int64[n]; of no meaning for first turns.

    Attributes:
        first_rows: rows of each conversation's first turn, int64[s].
        start_ns: their arrivals, int64[s].
    """

    def __init__(self, session: Int64s, arrival_ns: Int64s, think_ns: Int64s) -> None:
        before, after = _turns(session)
        self._next = np.full(len(session), -1)
        self._next[before] = after
        self._think_ns = think_ns
        is_first = np.ones(len(session), np.bool_)
        is_first[after] = False
        self.first_rows: Int64s = np.flatnonzero(is_first)
        self.start_ns: Int64s = arrival_ns[self.first_rows]

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """Return the next turn of the conversation and its arrival; None after the last one."""
        following = int(self._next[row])
        return None if following < 0 else (following, ended_ns + int(self._think_ns[following]))


def think_times(session: Int64s, arrival_ns: Int64s, ended_ns: Int64s) -> Int64s:
    """Return the time from the end of the turn before to each request, at least 0; 0 for first turns.

    Args:
        session, arrival_ns: as in `ClosedLoop`.
        ended_ns: end of each answer, recorded or assumed, int64[n].
    """
    before, after = _turns(session)
    think_ns = np.zeros(len(session), np.int64)
    think_ns[after] = np.maximum(arrival_ns[after] - ended_ns[before], 0)
    return think_ns


def _turns(session: Int64s) -> tuple[Int64s, Int64s]:
    """Return the rows of consecutive turns of a conversation as pairs, int64[m] each."""
    order = np.argsort(session, kind="stable")  # turns of a conversation stay in order of arrival
    follows = session[order][1:] == session[order][:-1]
    return order[:-1][follows], order[1:][follows]


LOOK_NS = 100_000_000  # `moestro route` reads figures so often while requests wait


class WaitingJob(NamedTuple):
    """A request that waits, and its row in the results."""

    request: Request
    script: Script
    row: int


class SimulatedQueue:
    """Requests that wait in front of a simulated router. None is refused.

    Args:
        router: router whose engines are judged.
        policy: orders the requests.
        rules: when an engine is saturated.
    """

    def __init__(self, router: Router, policy: OrderPolicy, rules: SaturationRules) -> None:
        self._router = router
        self._queue = RouteQueue(policy, QueueRules(ttl_ns=FOREVER_NS))
        self._saturation = EngineSaturation(rules, FRESH_NS)
        self._jobs: dict[str, WaitingJob] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def enter(self, job: WaitingJob, now_ns: int) -> None:
        """Add a request."""
        request = job.request
        best_hit = self._router.best_hit_tokens(request) if self._queue.policy.reads_cache else 0
        num_uncached = max(1, request.num_prompt_tokens - best_hit)
        self._queue.enter(request, now_ns, group=None, client=None, num_uncached=num_uncached)
        self._jobs[request.request_id] = job

    def next(self, now_ns: int) -> tuple[WaitingJob, list[int]] | None:
        """Remove and return the next request if an engine has room, with the rows of the saturated ones."""
        full = self._saturation.full(self._router.table, now_ns)
        queued = self._queue.next(lambda _: not full.all(), now_ns)
        return None if queued is None else (self._jobs.pop(queued.request.request_id), np.flatnonzero(full).tolist())

    def sent(self, request: Request, engine: int, now_ns: int) -> None:
        """Record that the router sent a request."""
        self._saturation.sent(request, engine, self._router.table, now_ns)

    def first_token(self, request_id: str, now_ns: int) -> None:
        """Record a first token."""
        self._saturation.first_token(request_id, now_ns)

    def ended(self, request: Request, num_generated_tokens: int) -> None:
        """Record the end of a request."""
        self._saturation.ended(request.request_id)
        self._queue.ended(request, num_generated_tokens)

    def reported(self, engine: int, figures: LoadFigures) -> None:
        """Take in an engine's figures."""
        self._saturation.reported(engine, figures)


# Kinds of events: a request whose time is known from the start, one that follows another, the end of a step, and a look
# at figures for requests that wait in front of the router. At the same nanosecond the smaller kind comes first: a
# request that arrives exactly when a step ends enters the next step, as in a worker, which reads its inbox first.
FIRST_ARRIVAL, ARRIVAL, STEP, LOOK = range(4)


class World:
    """A queue of events, and the current time.

    Events are ordered by (time, kind, number), so their order is never left to chance. An event that has become
    obsolete stays in the queue; its receiver detects it from its own state.

    Attributes:
        now_ns: current time, integer nanoseconds; never decreases.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[tuple[int, int, int]] = []

    def at(self, time_ns: int, kind: int, number: int) -> None:
        """Schedule event `number` of `kind` at `time_ns`, which is not in the past."""
        assert time_ns >= self.now_ns, f"an event at {time_ns}, and it is {self.now_ns}"
        heappush(self._events, (time_ns, kind, number))

    @property
    def next_ns(self) -> int:
        """Time of the next event, or FOREVER_NS."""
        return self._events[0][0] if self._events else FOREVER_NS

    def next(self) -> tuple[int, int] | None:
        """Advance to the next event and return it; None means that the queue is empty."""
        if not self._events:
            return None
        self.now_ns, kind, number = heappop(self._events)
        return kind, number


_BE = ServiceClass.BE  # to find the member of an enumeration costs more than to compare with it


class Workload(Protocol):
    """Requests that are made as they arrive; `workload.rows.RequestMaker` implements it."""

    def __len__(self) -> int:
        """Number of requests."""
        ...

    def make(self, index: int, arrival_ns: int) -> tuple[Request, Script]:
        """Return one request and the script of its output tokens."""
        ...


class SubmittingRouter(ReportedRouter, Protocol):
    """What a cluster needs of a router; `routing.router.Router` implements it."""

    def submit(self, request: Request, now_ns: int, exclude: Collection[int] = ()) -> RouteDecision:
        """Choose an engine and count the request there."""
        ...


class ClusterEngine:
    """One engine of the cluster, and the requests on it.

    Attributes:
        number: index among the engines of the router.
        group: index of its group.
        index: index in its group.
        seat: its rank.
        row_of: row of the results of each request on the engine, by serial number.
        without_token: serial numbers of its requests that lack a first token.
    """

    __slots__ = ("group", "index", "number", "row_of", "seat", "without_token")

    def __init__(self, number: int, group: int, index: int, seat: Seat) -> None:
        self.number = number
        self.group = group
        self.index = index
        self.seat = seat
        self.row_of: dict[int, int] = {}
        self.without_token: set[int] = set()


class OutsideTime(msgspec.Struct, frozen=True):
    """Time of a request outside its engine, ns: of each, and for each token of its prompt."""

    request_ns: float = 0.0
    token_ns: float = 0.0

    def of(self, num_prompt_tokens: int) -> int:
        """Return the time of one request, ns."""
        return round(self.request_ns + self.token_ns * num_prompt_tokens)


IN_NO_TIME = OutsideTime()


class Cluster:
    """Runs a workload to its end.

    Args:
        groups: groups of ranks; engines are numbered through the groups in order.
        router: router with as many engines, all routable.
        signals: figures and events that reach the router, and their delays.
        on_arrival: called at each arrival, for progress bars.
        queue: holds requests while all engines are saturated. None means that none waits in front of the router.
        outside: time of a request outside its engine. It delays all its tokens alike, so it is added to their times.
    """

    def __init__(
        self,
        groups: Sequence[Ranks],
        router: SubmittingRouter,
        signals: SignalSettings = AT_ONCE,
        on_arrival: Callable[[], None] | None = None,
        queue: SimulatedQueue | None = None,
        outside: OutsideTime = IN_NO_TIME,
    ) -> None:
        self._outside = outside
        self.groups = groups
        self.router = router
        self.engines = [
            ClusterEngine(number, group, index, seat)
            for number, (group, index, seat) in enumerate(
                (g, i, seat) for g, group in enumerate(groups) for i, seat in enumerate(group.seats)
            )
        ]
        self.signals = Signals(router, [(groups[engine.group], engine.index) for engine in self.engines], signals)
        self.world = World()
        self._of_group: list[list[ClusterEngine]] = [[] for _ in groups]
        for engine in self.engines:
            self._of_group[engine.group].append(engine)
        self._on_arrival = on_arrival
        self._queue = queue
        self._is_look_due = False
        self._leaping: dict[int, ClusterEngine] = {}  # those whose leap may have first tokens that are not recorded yet
        if queue is None and not signals.channels and signals.kv_events_delay_ms is None:
            for engine in self.engines:
                engine.seat.may_leap = True
        if queue is not None:
            self.signals.on_report = queue.reported
        self._arrivals: Arrivals = AtTimes(np.empty(0, np.int64))
        self._firsts: Iterator[tuple[int, int]] = iter(())

    def run(self, workload: Workload, arrivals: Arrivals) -> Results:
        """Serve the requests of `workload`, and return when all have ended."""
        tells_prefill = all(group.tells_prefill for group in self.groups)
        results = Results(len(workload), len(self.engines), tells_prefill=tells_prefill)
        world, firsts = self.world, zip(arrivals.start_ns.tolist(), arrivals.first_rows.tolist(), strict=True)
        self._arrivals, self._firsts = arrivals, iter(firsts)
        self._await_next()
        while (event := world.next()) is not None:
            kind, number = event
            if kind == STEP:
                if self.groups[number].next_ns == world.now_ns:  # else an arrival shortened the jump, and replaced it
                    self._turn(number, results)
                continue
            if kind == LOOK:
                self._is_look_due = False
                self._send_waiting(results)
                continue
            if kind == FIRST_ARRIVAL:
                self._await_next()
            self._arrive(workload, number, results)
        self.signals.bring_all()
        return results

    def _await_next(self) -> None:
        """Queue the next of the known arrivals. The queue holds one at a time, so that it stays small."""
        first = next(self._firsts, None)
        if first is not None:
            self.world.at(first[0], FIRST_ARRIVAL, first[1])

    def _over(self, row: int, ended_ns: int) -> None:
        """Queue the request that follows `row`, which has ended for its client."""
        following = self._arrivals.next_turn(row, ended_ns)
        if following is not None:
            self.world.at(following[1], ARRIVAL, following[0])

    def _arrive(self, workload: Workload, row: int, results: Results) -> None:
        now_ns = self.world.now_ns
        if self._on_arrival is not None:
            self._on_arrival()
        if self._leaping:
            for engine in list(self._leaping.values()):
                self._take_first_tokens(engine, now_ns, results)
                if not engine.seat.first_tokens:
                    del self._leaping[engine.number]
        self.signals.bring(now_ns)
        request, script = workload.make(row, now_ns)
        results.arrival_ns[row] = now_ns
        results.num_prompt_tokens[row] = request.num_prompt_tokens
        results.is_best_effort[row] = request.service_class is _BE
        job = WaitingJob(request, script, row)
        if self._queue is None:
            self._submit(job, (), results)
        else:
            self._queue.enter(job, now_ns)
            self._send_waiting(results)

    def _send_waiting(self, results: Results) -> None:
        """Send requests on that wait in front of the router, as long as an engine has room."""
        queue, now_ns = self._queue, self.world.now_ns
        if queue is None or not queue:
            return
        self.signals.bring(now_ns)
        while (found := queue.next(now_ns)) is not None:
            self._submit(*found, results)
        if queue and not self._is_look_due:
            self._is_look_due = True
            self.world.at(now_ns + LOOK_NS, LOOK, 0)

    def _submit(self, job: WaitingJob, full: Collection[int], results: Results) -> None:
        (request, script, row), now_ns = job, self.world.now_ns
        try:
            decision = self.router.submit(request, now_ns, full)
        except RequestError as error:
            results.refused(row, error.code or error.error_type, error.message)
            self._over(row, now_ns)
            return
        engine = self.engines[decision.engine]
        group = self.groups[engine.group]
        before_ns = group.next_ns
        try:
            serial = group.add(engine.index, request, script, now_ns)
        except RequestError as error:
            self.signals.ended(request.request_id, now_ns, NO_GROUP, 0)
            results.refused(row, error.code or error.error_type, error.message)
            self._over(row, now_ns)
            return
        if self._queue is not None:
            self._queue.sent(request, engine.number, now_ns)
        results.engine[row] = engine.number
        engine.row_of[serial] = row
        engine.without_token.add(serial)
        if group.next_ns != before_ns:
            assert group.next_ns is not None
            if self.signals.reports_load:
                for each in self._of_group[engine.group]:
                    self.signals.cut(each.number)
            self.world.at(group.next_ns, STEP, engine.group)

    def _turn(self, number: int, results: Results) -> None:
        world, group, engines = self.world, self.groups[number], self._of_group[number]
        now_ns = world.now_ns
        for engine in engines:
            seat = engine.seat
            if seat.plan is not None:
                _count_prefill(engine, seat.plan, group, now_ns, results)
                if seat.first_tokens:
                    self._take_first_tokens(engine, now_ns + 1, results)
        outputs = group.turn(now_ns, world.next_ns)
        for engine in engines:
            output = outputs[engine.index]
            if output.sequences:
                self._take(engine, output, results)
            if engine.seat.first_tokens:
                self._leaping[engine.number] = engine
            if self.signals.reports_load:
                self.signals.turned(engine.number, now_ns)
        if (next_ns := group.next_ns) is not None:
            world.at(next_ns, STEP, number)
        self._send_waiting(results)

    def _take(self, engine: ClusterEngine, output: StepOutput, results: Results) -> None:
        """Record the first tokens and the ends of requests in a step's output."""
        now_ns, without_token = self.world.now_ns, engine.without_token
        if without_token:
            first = []
            for sequence in reversed(output.sequences):  # the newest come last
                if sequence.serial in without_token:
                    without_token.remove(sequence.serial)
                    first.append(sequence)
                    if not without_token:
                        break
            for sequence in reversed(first):
                self._note_first_token(engine, sequence, now_ns, results)
        for ended in output.finish_reasons:
            sequence = output.sequences[ended]
            row = engine.row_of.pop(sequence.serial)
            ended_ns = now_ns + self._outside.of(sequence.request.num_prompt_tokens)
            _note_end(results, row, sequence, ended_ns)
            num_prompt = sequence.request.num_prompt_tokens
            shares = ((sequence.num_cached_tokens or 0) / num_prompt, sequence.num_host_tokens / num_prompt)
            self.signals.ended(sequence.request.request_id, now_ns, engine.group, len(sequence.generated), shares)
            if self._queue is not None:
                self._queue.ended(sequence.request, len(sequence.generated))
            self._over(row, ended_ns)

    def _note_first_token(self, engine: ClusterEngine, sequence: EngineSequence, at_ns: int, results: Results) -> None:
        outside_ns = self._outside.of(sequence.request.num_prompt_tokens)
        results.first_token_ns[engine.row_of[sequence.serial]] = at_ns + outside_ns
        self.signals.first_token(sequence.request.request_id, at_ns, engine.group)
        if self._queue is not None:
            self._queue.first_token(sequence.request.request_id, at_ns)

    def _take_first_tokens(self, engine: ClusterEngine, until_ns: int, results: Results) -> None:
        """Record the first tokens of an engine's leap that were sampled before `until_ns`."""
        first_tokens = engine.seat.first_tokens
        while first_tokens and first_tokens[0][0] < until_ns:
            at_ns, sequence = first_tokens.pop(0)
            if sequence.serial in engine.without_token:
                engine.without_token.remove(sequence.serial)
                self._note_first_token(engine, sequence, at_ns, results)


def _note_end(results: Results, row: int, sequence: EngineSequence, ended_ns: int) -> None:
    results.admitted_ns[row] = sequence.admitted_ns
    results.last_token_ns[row] = ended_ns
    num_tokens, most = len(sequence.generated), sequence.request.sampling.max_tokens
    results.num_tokens[row] = num_tokens if num_tokens < most else most  # none if scored
    results.num_hit_tokens[row] = sequence.num_cached_tokens or 0
    results.num_host_tokens[row] = sequence.num_host_tokens
    results.num_preemptions[row] = sequence.num_preemptions
    results.status[row] = ANSWERED


def _count_prefill(engine: ClusterEngine, plan: Plan, group: Ranks, now_ns: int, results: Results) -> None:
    """Attribute the time of the steps that end now to prefill, by the share of their tokens that are prefill."""
    leap = engine.seat.leap
    if leap is None or group.ends is None:
        _count_step(engine, plan.units.num_tokens.tolist(), group.began_ns, now_ns, results)
        return
    began_ns = group.began_ns
    for chunk, ended_ns in zip(leap.chunks, group.ends.data, strict=False):  # an arrival may have cut the leap
        _count_step(engine, chunk.tolist(), began_ns, ended_ns, results)
        began_ns = ended_ns


def _count_step(engine: ClusterEngine, num_tokens: list[int], began_ns: int, ended_ns: int, results: Results) -> None:
    total = sum(num_tokens)
    if total > len(num_tokens):
        num_prefill = total - num_tokens.count(1)
        results.prefilled(engine.number, began_ns, (ended_ns - began_ns) * num_prefill // total)
