"""The router, sans-IO: keeps the state of each engine, asks the policy and counts requests in flight.

Of each decision it keeps the candidates, the best routable engines, to explain and to rate it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import BlockRun
from moestro.core.load_figures import LoadFigures
from moestro.core.request import Request
from moestro.core.rng import Draws
from moestro.core.views import ALONE, DEFAULT_COPY_PRICE, UNKNOWN_KV_TOKENS, EngineTable, has_true
from moestro.errors import InvariantError, NoEngineError, QueueFullError
from moestro.routing.columns import EngineColumns, EngineSpeeds, ServedAnswer
from moestro.routing.in_flight import Flight, InFlight, PeerFlight, PeerFlights, PeerRequest
from moestro.routing.kernel.passes import route_kernel
from moestro.routing.policy_contract import (
    Choice,
    Ended,
    EngineLost,
    FirstToken,
    Needs,
    Routed,
    RoutedElsewhere,
    RoutePolicy,
    RouteView,
)
from moestro.routing.prefix_index import PrefixIndex
from moestro.routing.scoring import is_stateless
from moestro.routing.scrape import FiguresReport
from moestro.routing.settings import ANY_ENGINE, DEFAULT_SETTINGS, EngineSpec, RouterSettings

NO_NEEDS = Needs()
MAX_CANDIDATES = 32  # kept per decision; longer lists of a large fleet are of no use to a reader


class Candidates(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The candidates of one decision, kept small and cheap because most are never read.

    Attributes:
        chosen: row of the chosen engine.
        num: number of routable rows.
        rows: int64[k], the MAX_CANDIDATES best rows by score plus the chosen one; the first rows without scores.
        scores: [k], scores of `rows`. None means the policy computes no scores.
        hit_tokens: int64[k], cached prompt tokens of `rows`.
        not_compared: figures that the policy reads and that did not count, each with the first rows that lack it.
        traits: float64[3, k], of each of `rows` the cached tokens in host memory alone, `speed` and `decode_speed`.
            None means that no cache has such tokens, and that the speeds are 1 or the policy reads none.
    """

    chosen: int
    num: int
    rows: NDArray[np.int64]
    scores: NDArray[np.float64] | NDArray[np.int64] | None
    hit_tokens: NDArray[np.int64]
    not_compared: dict[str, list[int]] = {}
    traits: NDArray[np.float64] | None = None

    def host_tokens_at(self, at: int) -> int:
        """Return the cached tokens that the engine at index `at` holds in host memory alone."""
        return 0 if self.traits is None else int(self.traits[0, at])

    def speed_at(self, at: int) -> float:
        """Return the speed of prompts at index `at`."""
        return 1.0 if self.traits is None else float(self.traits[1, at])

    def decode_speed_at(self, at: int) -> float:
        """Return the speed of answers at index `at`."""
        return 1.0 if self.traits is None else float(self.traits[2, at])

    def ranked(self) -> list[int]:
        """Return indices into the columns by ascending score; the lower row wins ties."""
        if self.scores is None:
            return list(range(len(self.rows)))
        order: list[int] = np.lexsort((self.rows, self.scores)).tolist()
        return order

    def score(self, at: int) -> float | None:
        """Return the score at index `at`, or None without a finite score."""
        return None if self.scores is None else finite(float(self.scores[at]))

    @property
    def regret(self) -> float | None:
        """The chosen row's score minus the best other score.

        A negative value is the margin by which the chosen row was best. A positive value means that a filter, a bound
        or a draw passed over a better row. None means no other row, or a score that is not finite.
        """
        if self.scores is None:
            return None
        others = self.scores[self.rows != self.chosen]
        if not len(others):
            return None
        return finite(float(self.scores[self.rows == self.chosen][0]) - float(np.fmin.reduce(others)))


def candidates_of(view: RouteView, choice: Choice, needs: Needs = NO_NEEDS) -> Candidates:
    """Return a decision's candidates. Columns are copied, because those of a view change later.

    Args:
        needs: what the policy reads.
    """
    rows, scores = view.engines.routable.nonzero()[0], choice.scores
    num = len(rows)
    if num > MAX_CANDIDATES:
        rows = rows[:MAX_CANDIDATES] if scores is None else rows[_best(scores[rows])]
        if not (rows == choice.engine).any():
            rows = np.append(rows, choice.engine)
    lacking = {
        name: np.flatnonzero(rows_without)[:MAX_CANDIDATES].tolist()
        for name, rows_without in view.not_compared.items()
        if name in needs.figures
    }
    scores_of_rows = None if scores is None else scores[rows]
    has_speeds = needs.speeds and view.engines.has_speeds
    traits = _traits_of(view, rows) if has_speeds or view.host_tokens is not None else None
    return Candidates(choice.engine, num, rows, scores_of_rows, view.hit_tokens[rows].astype(np.int64), lacking, traits)


def _traits_of(view: RouteView, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    traits = np.empty((3, len(rows)))
    traits[0] = 0 if view.host_tokens is None else view.host_tokens[rows]
    traits[1], traits[2] = view.engines.speed[rows], view.engines.decode_speed[rows]
    return traits


def finite(number: float) -> float | None:
    """Return `number`, or None for infinity and NaN, which JSON cannot represent."""
    return number if math.isfinite(number) else None


def _best(scores: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.intp]:
    """Indices of the MAX_CANDIDATES lowest scores. The lower index wins ties, so that all machines agree."""
    scores = np.where(np.isnan(scores), np.inf, scores)
    # The largest of MAX_CANDIDATES group minima bounds the wanted scores, at a tenth of a partition's cost.
    groups = scores[: len(scores) // MAX_CANDIDATES * MAX_CANDIDATES].reshape(MAX_CANDIDATES, -1)
    places = np.flatnonzero(scores <= groups.min(axis=1).max())
    return places[np.argsort(scores[places], kind="stable")[:MAX_CANDIDATES]]


_MOST_PENDING = 16  # reports that wait; more would delay a decision by as many microseconds


class RouteDecision(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The engine chosen for a request, and the reason.

    Attributes:
        engine: number of the chosen engine.
        score: score by the policy's own measure; lower is better.
        reason: short reason for operators.
        hit_tokens: prompt tokens that the engine's cache is expected to hold.
        candidates: engines that could have been chosen; None unless `Router.keeps_candidates` is set.
        host_tokens: those of `hit_tokens` that it is expected to copy from host memory.
    """

    engine: int
    score: float
    reason: str
    hit_tokens: int
    candidates: Candidates | None = None
    host_tokens: int = 0


class RequestObserver(Protocol):
    """Notes the router's own requests, for other routers."""

    def began(self, request: Request, flight: Flight) -> None:
        """Note a request that is sent now."""

    def first_token(self, request_id: str) -> None:
        """Note a computed prompt."""

    def ended(self, request_id: str) -> None:
        """Note the end of a request."""


class Router:
    """Chooses an engine for each request and counts what is in flight on each.

    Args:
        policy: the policy that chooses engines.
        settings: settings of the router.

    Attributes:
        keeps_candidates: whether decisions include their candidates. Callers may set it at any time.
        journal: notes this router's requests; None means that no other router is to know them.

    Invariants: requests go to routable engines only. `num_in_flight[e]` is the number of requests submitted to `e`
    and not yet `ended`, here and elsewhere. `now_ns` never decreases from call to call.
    """

    def __init__(self, policy: RoutePolicy, settings: RouterSettings = DEFAULT_SETTINGS) -> None:
        route_kernel.want()
        self._policy = policy
        self._observes = not is_stateless(policy)
        self._settings = settings
        self.keeps_candidates = False
        self._columns = EngineColumns()
        self._flights = InFlight(self._columns)
        self._elsewhere = PeerFlights(self._columns)
        self.journal: RequestObserver | None = None
        self._index = PrefixIndex(settings.index_bytes)
        self._speeds = EngineSpeeds(self._columns) if policy.needs.speeds else None
        self._pending_reports: list[FiguresReport] = []  # not taken in yet, in order
        self._removed: set[int] = set()  # removed engines with requests that have not ended
        self._absent: set[int] = set()  # removed engines whose numbers are not reused yet
        self._num_decisions = 0
        self._has_larger_blocks = False  # an engine has larger KV blocks than the router

    # --- engines

    def add_engine(self, spec: EngineSpec = ANY_ENGINE) -> int:
        """Add an engine, not routable yet, and return its number. Numbers of removed engines are reused."""
        self._take_reports()  # of the engine that had the number, which are ignored
        engine = self._columns.add()
        self._absent.discard(engine)
        self._index.add_engine(engine)
        self._set_spec(engine, spec)
        return engine

    def set_spec(self, engine: int, spec: EngineSpec) -> None:
        """Replace the specification of `engine`."""
        self._set_spec(engine, spec)

    def remove_engine(self, engine: int, now_ns: int) -> None:
        """Remove `engine`. Its requests in flight still need `ended`, after which its number can be reused."""
        self._set_routable(engine, routable=False)
        for key in self._elsewhere.keys_on(engine):
            self._end_elsewhere(key, now_ns)
        self._forget(engine, now_ns)
        self._removed.add(engine)
        self._absent.add(engine)
        self._release(engine)

    def set_routable(self, engine: int, *, routable: bool) -> None:
        """Take `engine` into rotation or out of it. Its requests in flight stay counted."""
        if routable and engine in self._removed:
            raise InvariantError(f"engine {engine} was removed")
        self._set_routable(engine, routable=routable)

    def engine_lost(self, engine: int, now_ns: int) -> None:
        """Discard the figures and the cache contents of `engine`, whose process was restarted or is gone."""
        self._forget(engine, now_ns)

    # --- requests

    def submit(
        self, request: Request, now_ns: int, exclude: Collection[int] = (), making_room: Collection[int] = ()
    ) -> RouteDecision:
        """Choose an engine and count the request there.

        Args:
            exclude: engines that must not get this request, for instance because they have failed it.
            making_room: engines that take the request even if their queues are full.

        Raises:
            NoEngineError: no engine outside of `exclude` is routable.
            QueueFullError: all these engines have the maximum number of waiting requests.
        """
        self.check_room(exclude, making_room=making_room)
        view = self._view(request, now_ns, exclude)
        choice = self._policy.decide(view, Draws(self._settings.seed, self._num_decisions))
        engine = choice.engine
        if not view.engines.routable[engine]:
            raise InvariantError(f"the route policy chose engine {engine}, which is not routable")
        candidates = candidates_of(view, choice, self._policy.needs) if self.keeps_candidates else None
        if candidates is not None:
            self._decided(view, choice, candidates)
        self._num_decisions += 1
        hit_tokens = int(view.hit_tokens.item(engine))
        host_tokens = 0 if view.host_tokens is None else int(view.host_tokens.item(engine))
        num_tokens = request.num_known_tokens
        flight = Flight(engine, now_ns, num_tokens, max(1, num_tokens - hit_tokens), hit_tokens, host_tokens)
        if self._speeds is not None:
            flight.timing = self._speeds.sent(engine, flight.num_prefill_tokens)
        self._flights.add(request.request_id, flight)
        if self._policy.needs.hits:
            flight.pending = self._index.sent(engine, request.block_hashes)
        if self.journal is not None:
            self.journal.began(request, flight)
        if self._observes:
            self._policy.observe(Routed(request, engine, hit_tokens, choice.detail, now_ns))
        return RouteDecision(engine, choice.score, choice.reason, hit_tokens, candidates, host_tokens)

    def check_room(self, exclude: Collection[int] = (), num_coming: int = 0, making_room: Collection[int] = ()) -> None:
        """Raise the error that `submit` would raise now, so that a flood is refused before its bodies are read.

        Sets the column `routable`: in rotation and with room in the queue.

        Args:
            exclude: engines that may not be chosen.
            num_coming: requests that will be submitted before this one.
            making_room: engines that take the request even if their queues are full.
        """
        if self._pending_reports:
            self._take_reports()
        columns, bound = self._columns, self._settings.max_num_queued
        is_up = columns.is_up
        if exclude:
            is_up = is_up.copy()
            is_up[list(exclude)] = False
        if not has_true(is_up):
            raise NoEngineError
        if bound is None:
            return
        table = columns.table
        is_up = is_up[: len(table)]
        num_waiting = table.num_in_flight + table.num_foreign - table.num_running.values
        room = is_up * np.maximum(bound - num_waiting, 0)
        if making_room:
            engines = list(making_room)
            room[engines] = np.maximum(room[engines], is_up[engines])
        if room.sum() <= num_coming:
            raise QueueFullError(int(num_waiting[is_up].sum()) + num_coming)
        columns.routable[: len(table)] = room > 0

    def first_token(self, request_id: str, now_ns: int) -> None:
        """Record a computed prompt. Repeated calls, and calls for ended requests, have no effect."""
        if self._pending_reports:
            self._take_reports()
        flight = self._flights.first_token(request_id)
        if flight is None:
            return
        if self._speeds is not None and flight.timing is not None:
            self._speeds.first_token(flight.engine, flight.timing, now_ns)
        if self.journal is not None:
            self.journal.first_token(request_id)
        if self._observes:
            self._policy.observe(FirstToken(request_id, flight.engine, now_ns))

    def ended(
        self,
        request_id: str,
        now_ns: int,
        num_output_tokens: int | None = None,
        cached_share: float | None = None,
        host_share: float | None = None,
    ) -> None:
        """Record the end of a request, for any reason.

        Args:
            num_output_tokens: number of generated tokens; None means not counted.
            cached_share: part of the prompt's tokens that the engine had cached, 0 .. 1; None means that it did not
                say. A share, because the engine may count other tokens than the router.
            host_share: part of the prompt's tokens that it copied from host memory; None likewise.
        """
        if self._pending_reports:
            self._take_reports()
        is_computed = self._policy.needs.hits and self._flights.is_computed(request_id)
        flight = self._flights.ended(request_id, now_ns)
        if self.journal is not None:
            self.journal.ended(request_id)
        if cached_share is not None and self._policy.needs.hits:
            self._learn(flight, cached_share)
        if self._speeds is not None:
            self._time(self._speeds, flight, now_ns, num_output_tokens or 0, (cached_share, host_share))
        if flight.pending is not None:
            self._index.ended(flight.engine, flight.pending, is_computed=is_computed)
        if self._observes:
            self._policy.observe(Ended(request_id, flight.engine, flight.submit_ns, now_ns, num_output_tokens))
        if self._removed:
            self._release(flight.engine)

    # --- requests of other routers

    def began_elsewhere(self, key: str, engine: int, request: PeerRequest, now_ns: int) -> None:
        """Count a request that another router has sent to `engine`. A repeated key has no effect.

        Args:
            key: name of the request among those of all routers.
        """
        if engine in self._absent or key in self._elsewhere:
            return
        if self._pending_reports:
            self._take_reports()
        flight = PeerFlight(
            engine, min(request.submit_ns, now_ns), request.num_known_tokens, request.num_prefill_tokens
        )
        self._elsewhere.add(key, flight)
        if self._policy.needs.hits:
            flight.pending = self._index.sent(engine, request.block_hashes)
        if self._observes:
            num_new, session_id, user = request.num_prefill_tokens, request.session_id, request.user
            self._policy.observe(RoutedElsewhere(engine, num_new, session_id, user, now_ns))

    def first_token_elsewhere(self, key: str, now_ns: int) -> None:
        """Record the computed prompt of another router's request. Unknown and repeated keys have no effect."""
        if self._pending_reports:
            self._take_reports()
        self._elsewhere.first_token(key)

    def ended_elsewhere(self, key: str, now_ns: int) -> None:
        """Record the end of another router's request. Unknown keys have no effect."""
        if self._pending_reports:
            self._take_reports()
        self._end_elsewhere(key, now_ns)

    def counts_elsewhere(self, key: str) -> bool:
        """Return whether a request of another router is counted on an engine."""
        return key in self._elsewhere

    def num_elsewhere_on(self, engine: int) -> int:
        """Return the number of other routers' requests on one engine."""
        return self._elsewhere.num_on(engine)

    def sent_elsewhere(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Record a prompt that another router sent to `engine` earlier, whose cache may hold its blocks.

        Args:
            hashes: packed block hashes, in prompt order.
        """
        if engine not in self._absent and self._policy.needs.hits:
            self._index.sent(engine, hashes, is_in_flight=False)

    def lacks_kv_events(self, engine: int) -> bool:
        """Return whether the cache of `engine` is only predicted although prompts were sent there."""
        return self._index.lacks_events(engine)

    def prompts_sent(self, engine: int) -> list[BlockRun]:
        """Return the prompts in the history of `engine`, each as its last run, oldest first."""
        return self._index.prompts(engine)

    # --- engine reports; late reports of removed engines are ignored

    def report(self, engine: int, figures: LoadFigures, as_of_ns: int, now_ns: int) -> None:
        """Take in figures that `engine` reported; figures older than the known ones are ignored.

        An engine reports every step. Of reports without another call between them, the last one of an engine alone has
        an effect. So reports wait until a call depends on them, or there are many.

        Args:
            as_of_ns: time of the report on this router's clock. The figures include every request sent to the engine
                by then, and none sent later. An engine that reads its inbox between steps reports its last read.
        """
        self._pending_reports.append(FiguresReport(engine, figures, min(as_of_ns, now_ns)))
        if len(self._pending_reports) == _MOST_PENDING:
            self._take_reports()

    def _take_reports(self) -> None:
        """Take in the reports that wait."""
        if not self._pending_reports:
            return
        last: dict[int, FiguresReport] = {}
        for report in self._pending_reports:
            earlier = last.pop(report.engine, None)
            if earlier is not None and not report.replaces(earlier):
                self._take_report(earlier)
            last[report.engine] = report
        self._pending_reports.clear()
        for report in last.values():
            self._take_report(report)

    def _take_report(self, report: FiguresReport) -> None:
        engine, figures, as_of_ns = report.engine, report.figures, report.as_of_ns
        if engine in self._absent:
            return
        taken = self._columns.report(engine, figures, as_of_ns)
        if "num_waiting" in taken and "num_running" in taken:
            assert figures.num_waiting is not None
            assert figures.num_running is not None
            of_peers = self._elsewhere.recount_requests(engine, as_of_ns)
            self._flights.recount_requests(engine, figures.num_waiting + figures.num_running, as_of_ns, of_peers)
        if "queued_prefill_tokens" in taken:
            assert figures.queued_prefill_tokens is not None
            tokens_of_peers = self._elsewhere.recount_prefill(engine, as_of_ns)
            self._flights.recount_prefill(engine, figures.queued_prefill_tokens, as_of_ns, tokens_of_peers)

    def kv_stored(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Record that `engine` holds the blocks `hashes` (packed, 16 bytes each, in prompt order) on its device."""
        if engine not in self._absent:
            self._index.reported(engine, hashes)

    def kv_hosted(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Record that `engine` holds the blocks `hashes` in host memory alone, from which it copies them back."""
        if engine not in self._absent:
            self._index.hosted(engine, hashes)

    def kv_removed(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Record that `engine` holds the blocks `hashes` no more."""
        self._index.removed(engine, hashes)

    def kv_cleared(self, engine: int, now_ns: int) -> None:
        """Record that `engine` holds no block and reports all its blocks, until `kv_incomplete` or `kv_lost`."""
        if engine not in self._absent:
            self._index.cleared(engine)

    def reports_all_blocks(self, engine: int) -> bool:
        """Return whether the index has all blocks that the events of `engine` report, since the cache was empty."""
        return engine in self._absent or self._index.is_complete(engine)

    def kv_incomplete(self, engine: int, now_ns: int) -> None:
        """Record that `engine` holds more blocks than it reports. The router predicts the others from now on."""
        self._index.incomplete(engine)

    def kv_lost(self, engine: int, now_ns: int) -> None:
        """Record that events of `engine` were missed for good. The router predicts its cache contents from now on."""
        self._index.lost_track(engine)

    # --- state

    @property
    def needs(self) -> Needs:
        """What the policy reads beyond the router's own counts."""
        return self._policy.needs

    @property
    def table(self) -> EngineTable:
        """The engines, as a read-only live view, with all figures that were reported by now."""
        self._take_reports()
        return self._columns.table

    @property
    def num_engines(self) -> int:
        """Number of engine rows, in rotation or not."""
        return self._columns.num_rows

    def is_routable(self, engine: int) -> bool:
        """Return whether `engine` is in rotation."""
        return bool(self._columns.is_up[engine])

    def in_flight_on(self, engine: int) -> tuple[str, ...]:
        """Return the ids of the requests on one engine, oldest first."""
        return self._flights.of_engine(engine)

    def engine_of(self, request_id: str) -> int | None:
        """Return the engine of a request in flight; None if it is not in flight."""
        return self._flights.engine_of(request_id)

    def best_hit_tokens(self, request: Request) -> int:
        """Return the most tokens of a prompt that any engine is expected to have cached; 0 without a prefix index."""
        if not self._policy.needs.hits:
            return 0
        return int(self._index.match(request.block_hashes, self._settings.block_size).max(initial=0))

    def waits_since_ns(self, engine: int) -> int | None:
        """Return when the oldest request on `engine` without a first token was submitted; None without such one."""
        return self._flights.waits_since_ns(engine)

    def num_in_flight_on(self, engine: int) -> int:
        """Return the number of this router's requests on one engine."""
        return self._flights.num_on(engine)

    def load_on(self, engine: int) -> int:
        """Return the number of requests on one engine that this router and its peers have sent."""
        return int(self._columns.num_in_flight[engine])

    @property
    def num_in_flight(self) -> int:
        """Number of this router's requests on all engines."""
        return len(self._flights)

    @property
    def max_num_queued(self) -> int | None:
        """Places in each engine's queue; None means no limit."""
        return self._settings.max_num_queued

    @property
    def num_routable(self) -> int:
        """Number of engines in rotation."""
        return int(self._columns.is_up.sum())

    @property
    def index_bytes(self) -> int:
        """Estimated memory of the prefix index, bytes."""
        return self._index.num_bytes

    # --- inside

    def _set_spec(self, engine: int, spec: EngineSpec) -> None:
        num_blocks = spec.num_blocks
        self._columns.num_kv_tokens[engine] = (
            UNKNOWN_KV_TOKENS if num_blocks is None else num_blocks * self._settings.block_size
        )
        self._columns.set_group(engine, ALONE if spec.group is None else spec.group)
        speed = 1.0 if spec.speed is None else spec.speed
        self._columns.speed[engine] = self._columns.decode_speed[engine] = speed
        self._columns.speeds_changed()
        self._columns.copy_price[engine] = DEFAULT_COPY_PRICE if spec.copy_price is None else spec.copy_price
        if self._speeds is not None:
            self._speeds.set_spec(engine, spec)
        self._columns.block_tokens[engine] = spec.block_size or self._settings.engine_block_size
        num_rows = self._columns.num_rows
        self._has_larger_blocks = bool((self._columns.block_tokens[:num_rows] > self._settings.block_size).any())
        self._index.set_capacity(engine, spec.num_blocks, spec.num_host_blocks)

    def _learn(self, flight: Flight, cached_share: float) -> None:
        """Compare what an engine had cached with the prediction; a difference below a block says nothing."""
        if flight.num_hit_tokens is None:
            return
        # An engine computes the last token of a prompt again, however much it has cached.
        predicted = min(flight.num_hit_tokens, flight.num_known_tokens - 1)
        num_tokens = cached_share * flight.num_known_tokens - predicted
        if abs(num_tokens) >= max(self._settings.block_size, int(self._columns.block_tokens[flight.engine])):
            self._index.surprised(flight.engine, int(num_tokens / self._settings.block_size))

    def _time(
        self,
        speeds: EngineSpeeds,
        flight: Flight,
        now_ns: int,
        num_output_tokens: int,
        shares: tuple[float | None, float | None],
    ) -> None:
        """Learn the speed of an engine from the times of an answer, whose process is still the same."""
        cached, copied = shares
        if flight.timing is None or flight.num_hit_tokens is None:
            return
        num_known = flight.num_known_tokens
        new = flight.num_prefill_tokens if cached is None else num_known * (1 - cached)
        copied = flight.num_host_tokens / num_known if copied is None else copied
        times = ServedAnswer(flight.submit_ns, now_ns, num_known, max(new, 1.0), copied * num_known, num_output_tokens)
        speeds.ended(flight.engine, flight.timing, times)

    def _set_routable(self, engine: int, *, routable: bool) -> None:
        self._columns.is_up[engine] = routable
        self._columns.routable[engine] = routable

    def _forget(self, engine: int, now_ns: int) -> None:
        self._take_reports()
        self._columns.forget_figures(engine)
        self._flights.forget(engine)
        self._elsewhere.forget(engine)
        self._index.forget(engine)
        if self._speeds is not None:
            self._speeds.forget(engine)
        self._policy.observe(EngineLost(engine, now_ns))

    def _end_elsewhere(self, key: str, now_ns: int) -> None:
        flight = self._elsewhere.ended(key)
        if flight is None:
            return
        self._flights.departed(flight.engine, flight.submit_ns, now_ns)
        if flight.pending is not None:
            self._index.ended(flight.engine, flight.pending)

    def _decided(self, view: RouteView, choice: Choice, candidates: Candidates) -> None:
        """Hook for subclasses that record decisions, called before a decision with candidates changes any state."""

    def _view(self, request: Request, now_ns: int, exclude: Collection[int] = ()) -> RouteView:
        block_size, table = self._settings.block_size, self._columns.table
        if exclude:
            table = table.without(exclude)
        not_compared: dict[str, NDArray[np.bool_]] = {}
        if self._settings.compares_known:
            table, not_compared = self._columns.compared(table, now_ns - self._settings.fresh_ns)
        host_tokens: NDArray[np.float64] | None = None
        if self._policy.needs.hits:
            hit_tokens = self._index.match(request.block_hashes, block_size)
            if self._index.has_hosted:
                host_tokens = self._index.hosted_of(request.block_hashes, hit_tokens // block_size) * block_size
            if self._has_larger_blocks:  # an engine finds only whole blocks of its own
                hit_tokens -= hit_tokens % self._columns.block_tokens[: self._columns.num_rows]
                host_tokens = None if host_tokens is None else np.minimum(host_tokens, hit_tokens)
        else:
            hit_tokens = self._columns.no_hits
        decision, fresh_ns = self._num_decisions, self._settings.fresh_ns
        return RouteView(request, table, hit_tokens, block_size, now_ns, decision, fresh_ns, not_compared, host_tokens)

    def _release(self, engine: int) -> None:
        """Free the number of a removed engine, once no request is in flight there."""
        if engine in self._removed and not self._columns.num_in_flight[engine]:
            self._removed.remove(engine)
            self._columns.give_back(engine)
