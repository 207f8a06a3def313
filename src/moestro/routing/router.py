"""The router: keeps what it knows of each engine, asks the policy, remembers the answer. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import numpy as np

from moestro.core.load_figures import LoadFigures
from moestro.core.prefix_tree import BlockRun
from moestro.core.request import Request
from moestro.core.rng import Draws
from moestro.core.views import UNKNOWN_KV_TOKENS, EngineTable
from moestro.errors import InvariantError, NoEngineError, QueueFullError
from moestro.routing.candidates import Candidates, candidates_of
from moestro.routing.columns import EngineColumns
from moestro.routing.in_flight import Flight, InFlight
from moestro.routing.policy_contract import Choice, Ended, EngineLost, FirstToken, Routed, RoutePolicy, RouteView
from moestro.routing.prefix_index import PrefixIndex
from moestro.routing.settings import ANY_ENGINE, DEFAULT_SETTINGS, EngineSpec, RouterSettings


class RouteDecision(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Which engine gets a request, and why.

    Attributes:
        engine: its number.
        score: lower is better; what it means is the policy's affair.
        reason: in a few words.
        hit_tokens: of the prompt, that the engine's cache is thought to hold.
        candidates: what else could have been chosen; None: nobody wants to know (`Router.keeps_candidates`).
    """

    engine: int
    score: float
    reason: str
    hit_tokens: int
    candidates: Candidates | None = None


class Router:
    """Chooses an engine for each request and counts what is in flight on each.

    Args:
        policy: chooses.
        settings: see there.

    Attributes:
        keeps_candidates: decisions come with their candidates; set freely.

    Invariants: no request goes to an engine that is not routable. `num_in_flight[e]` is the number of requests
    submitted to `e` and not `ended` since. `now_ns` never goes back from call to call.
    """

    def __init__(self, policy: RoutePolicy, settings: RouterSettings = DEFAULT_SETTINGS) -> None:
        self._policy = policy
        self._settings = settings
        self.keeps_candidates = False
        self._columns = EngineColumns()
        self._flights = InFlight(self._columns)
        self._index = PrefixIndex(settings.index_bytes, int(settings.predicted_expiry_s * 1e9))
        self._removed: set[int] = set()  # gone, and with requests that have not ended
        self._absent: set[int] = set()  # gone, and no other engine has their numbers
        self._num_decisions = 0

    # --- engines come and go

    def add_engine(self, spec: EngineSpec = ANY_ENGINE) -> int:
        """A new engine, not routable yet. Returns its number: the next, or that of one that was removed."""
        engine = self._columns.add()
        self._absent.discard(engine)
        self._index.add_engine(engine)
        self._set_spec(engine, spec)
        return engine

    def set_spec(self, engine: int, spec: EngineSpec) -> None:
        """What is known of `engine` now."""
        self._set_spec(engine, spec)

    def remove_engine(self, engine: int, now_ns: int) -> None:
        """`engine` is gone for good. What is in flight there is still to be `ended`; then its number is free."""
        self._set_routable(engine, routable=False)
        self._forget(engine, now_ns)
        self._removed.add(engine)
        self._absent.add(engine)
        self._release(engine)

    def set_routable(self, engine: int, *, routable: bool) -> None:
        """Take `engine` into rotation, or out of it (what is in flight stays counted)."""
        if routable and engine in self._removed:
            raise InvariantError(f"engine {engine} was removed")
        self._set_routable(engine, routable=routable)

    def engine_lost(self, engine: int, now_ns: int) -> None:
        """The process behind `engine` is another, or none: forget what the old one said, and what its cache held."""
        self._forget(engine, now_ns)

    # --- requests come and go

    def submit(self, request: Request, now_ns: int, exclude: Collection[int] = ()) -> RouteDecision:
        """Choose an engine and count the request there.

        Args:
            exclude: Engines that this request must not go to, for instance because they have failed it.

        Raises:
            NoEngineError: No engine outside of `exclude` is routable.
            QueueFullError: Each of these engines has as many waiting requests as it may have.
        """
        self.check_room(exclude)
        view = self._view(request, now_ns, exclude)
        choice = self._policy.decide(view, Draws(self._settings.seed, self._num_decisions))
        engine = choice.engine
        if not view.engines.routable[engine]:
            raise InvariantError(f"the route policy chose engine {engine}, which is not routable")
        candidates = candidates_of(view, choice) if self.keeps_candidates else None
        if candidates is not None:
            self._decided(view, choice, candidates)
        self._num_decisions += 1
        hit_tokens = int(view.hit_tokens[engine])
        num_prefill_tokens = max(1, request.num_known_tokens - hit_tokens)
        flight = Flight(engine, now_ns, request.num_known_tokens, num_prefill_tokens)
        self._flights.add(request.request_id, flight)
        if self._policy.needs.hits:
            flight.pending = self._index.sent(engine, request.block_hashes, now_ns)
        self._policy.observe(Routed(request, engine, hit_tokens, choice.detail, now_ns))
        return RouteDecision(engine, choice.score, choice.reason, hit_tokens, candidates)

    def check_room(self, exclude: Collection[int] = ()) -> None:
        """Raise what `submit` would raise now: a flood is refused before anybody reads what it sends.

        Sets the column `routable`: in rotation, and with room in the queue.
        """
        columns, bound = self._columns, self._settings.max_num_queued
        is_up = columns.is_up
        if exclude:
            is_up = is_up.copy()
            is_up[list(exclude)] = False
        if not np.count_nonzero(is_up):
            raise NoEngineError
        if bound is None:
            return
        table = columns.table
        is_up = is_up[: len(table)]
        num_waiting = table.num_in_flight + table.num_foreign - table.num_running.values
        has_room = is_up & (num_waiting < bound)
        if not np.count_nonzero(has_room):
            raise QueueFullError(int(num_waiting[is_up].sum()))
        columns.routable[: len(table)] = has_room

    def first_token(self, request_id: str, now_ns: int) -> None:
        """The request's prompt is computed; said again, or of a request that is over, it changes nothing."""
        flight = self._flights.first_token(request_id)
        if flight is not None:
            self._policy.observe(FirstToken(request_id, flight.engine, now_ns))

    def ended(self, request_id: str, now_ns: int, num_output_tokens: int | None = None) -> None:
        """The request came to its end, whatever it was.

        Args:
            num_output_tokens: that it generated, if somebody counted.
        """
        flight = self._flights.ended(request_id, now_ns)
        if flight.pending is not None:
            self._index.ended(flight.engine, flight.pending)
        self._policy.observe(Ended(request_id, flight.engine, flight.submit_ns, now_ns, num_output_tokens))
        self._release(flight.engine)

    def sent_elsewhere(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Another router has sent `engine` a prompt of these blocks (packed): its cache is thought to hold them."""
        self._index.sent(engine, hashes, now_ns, is_ours=False)

    def forget_elsewhere(self, engine: int) -> None:
        """What was told by `sent_elsewhere` of `engine` is told anew."""
        self._index.forget_elsewhere(engine)

    def prompts_sent(self, engine: int) -> list[BlockRun]:
        """The prompts by which the cache of `engine` is known, each by its last run, the oldest first."""
        return self._index.prompts(engine)

    # --- what the engines say; of one that was removed the last words may still come, and mean nothing

    def report(self, engine: int, figures: LoadFigures, as_of_ns: int, now_ns: int) -> None:
        """`engine` said these figures of itself; each that is older than what is known is ignored.

        Args:
            as_of_ns: until when its requests are in them, on this router's clock: all that it had been sent by then,
                and nothing sent later. An engine that reads its inbox between steps says when it last read it.
        """
        if engine in self._absent:
            return
        as_of_ns = min(as_of_ns, now_ns)
        taken = self._columns.report(engine, figures, as_of_ns)
        if "num_waiting" in taken and "num_running" in taken:
            assert figures.num_waiting is not None
            assert figures.num_running is not None
            self._flights.recount_requests(engine, figures.num_waiting + figures.num_running, as_of_ns)
        if "queued_prefill_tokens" in taken:
            assert figures.queued_prefill_tokens is not None
            self._flights.recount_prefill(engine, figures.queued_prefill_tokens, as_of_ns)

    def kv_stored(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """`engine` holds these blocks (packed, 16 bytes each, a prompt's in order)."""
        if engine not in self._absent:
            self._index.said(engine, hashes)

    def kv_removed(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """`engine` holds these blocks no more."""
        self._index.removed(engine, hashes)

    def kv_cleared(self, engine: int, now_ns: int) -> None:
        """`engine` holds no block; and all that it will hold is going to be said, until `kv_lost`."""
        if engine not in self._absent:
            self._index.cleared(engine)

    def kv_lost(self, engine: int, now_ns: int) -> None:
        """Events of `engine` were missed and will not be sent again: from now on it is predicted what it holds."""
        self._index.lost_track(engine)

    # --- what is known

    @property
    def table(self) -> EngineTable:
        """The engines, read-only, always as they are now."""
        return self._columns.table

    @property
    def num_engines(self) -> int:
        """Rows, in rotation or not."""
        return self._columns.num_rows

    def is_routable(self, engine: int) -> bool:
        """Whether `engine` is in rotation."""
        return bool(self._columns.is_up[engine])

    def in_flight_on(self, engine: int) -> tuple[str, ...]:
        """Ids of the requests on one engine, the longest there first."""
        return self._flights.of_engine(engine)

    def num_in_flight_on(self, engine: int) -> int:
        """Requests on one engine."""
        return int(self._columns.num_in_flight[engine])

    @property
    def num_in_flight(self) -> int:
        """Requests on all engines."""
        return len(self._flights)

    @property
    def num_routable(self) -> int:
        """Engines in rotation."""
        return int(self._columns.is_up.sum())

    @property
    def index_bytes(self) -> int:
        """Approximate memory of the prefix index."""
        return self._index.num_bytes

    # --- inside

    def _set_spec(self, engine: int, spec: EngineSpec) -> None:
        num_blocks = spec.num_blocks
        self._columns.num_kv_tokens[engine] = (
            UNKNOWN_KV_TOKENS if num_blocks is None else num_blocks * self._settings.block_size
        )
        self._columns.speed[engine] = spec.speed
        self._index.set_capacity(engine, spec.num_blocks)

    def _set_routable(self, engine: int, *, routable: bool) -> None:
        self._columns.is_up[engine] = routable
        self._columns.routable[engine] = routable

    def _forget(self, engine: int, now_ns: int) -> None:
        self._columns.forget_figures(engine)
        self._flights.forget(engine)
        self._index.forget(engine)
        self._policy.observe(EngineLost(engine, now_ns))

    def _decided(self, view: RouteView, choice: Choice, candidates: Candidates) -> None:
        """Called with each decision that keeps its candidates before it changes anything; for who keeps a record."""

    def _view(self, request: Request, now_ns: int, exclude: Collection[int] = ()) -> RouteView:
        block_size, table = self._settings.block_size, self._columns.table
        if exclude:
            table = table.without(exclude)
        if self._policy.needs.hits:
            hit_tokens = self._index.match(request.block_hashes) * block_size
        else:
            hit_tokens = np.zeros(self._columns.num_rows, np.int64)
        return RouteView(request, table, hit_tokens, block_size, now_ns, self._num_decisions)

    def _release(self, engine: int) -> None:
        """Give back the number of an engine that was removed, once nothing is in flight there."""
        if engine in self._removed and not self._columns.num_in_flight[engine]:
            self._removed.remove(engine)
            self._columns.give_back(engine)
