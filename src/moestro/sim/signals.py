"""Routers on virtual time: the delayed figures and events of engines, and several routers before the same engines.

Signals reach a router with the delays of a real deployment. Its state matters only when a request arrives, so the
signals due by then are computed at that time. A jump need not stop for this: the figures at each of its step boundaries
follow from those at its start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

import msgspec
import numpy as np

from moestro.core.clock import FOREVER_NS
from moestro.core.load_figures import FIGURES, IDLE, ROUTED_FIGURES, LoadFigures
from moestro.core.request import Request
from moestro.core.setting_checks import above, at_least, check_settings
from moestro.core.work import Int32s
from moestro.cost.model import Int64s
from moestro.engine.block_pool import Place
from moestro.errors import ConfigError
from moestro.routing.replication.journal import Journal, Message, OperationBatch, Outlet, RouterRun, Snapshot, Want
from moestro.routing.replication.replica import Replica, ReplicaRules
from moestro.routing.router import RouteDecision, Router
from moestro.sim.groups.group import Ranks

NS_PER_MS = 1_000_000
CachedShares = tuple[float | None, float | None]  # cached part of a prompt in any tier, and copied from host memory
UNKNOWN_SHARES: CachedShares = (None, None)
NO_GROUP = -1  # an arrival precedes the ends of steps in its nanosecond


class ReportChannel(StrEnum):
    """Ways in which load figures reach a router."""

    PIGGYBACKED = "piggybacked"  # with the output of every step
    POLLED = "polled"  # read from the engine periodically, as from `/metrics`
    BROADCAST = "broadcast"  # sent by a third party for many engines


class ChannelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The channel of some load figures.

    Attributes:
        figures: fields of `core.load_figures.LoadFigures`.
        channel: `piggybacked` sends the figures with the output of every step. `polled` and `broadcast` send them every
            `period_ms`, as of the end of the last step, or as of that time if the engine was idle.
        delay_ms: delay from the engine to the router, ms.
        period_ms: interval of polls and broadcasts, ms.
    """

    PLACE: ClassVar[str] = "[signals] "

    figures: tuple[str, ...]
    channel: ReportChannel = ReportChannel.PIGGYBACKED
    delay_ms: Annotated[float, at_least(0)] = 0.0
    period_ms: Annotated[float, above(0)] = 100.0

    def __post_init__(self) -> None:
        check_settings(self)
        known = [name for name in ROUTED_FIGURES if FIGURES[name].is_from_rank or name == "expert_pressure"]
        for name in self.figures:
            if name not in known:
                raise ConfigError(f"signals: a simulated engine does not report {name!r}; known: {', '.join(known)}")


class SignalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All signals that a router receives from its engines.

    Attributes:
        response_delay_ms: delay of first tokens and ends of requests, ms. The router's exact counts of requests in
            flight depend on them.
        channels: channels of load figures. The router never knows a figure without a channel.
        kv_events_delay_ms: delay of KV events, ms, which an engine sends with the output of the step. Unset: engines
            send none, and the router predicts each prefix cache from the prompts that it routed there.
    """

    PLACE: ClassVar[str] = "[signals] "

    response_delay_ms: Annotated[float, at_least(0)] = 0.0
    channels: tuple[ChannelSettings, ...] = ()
    kv_events_delay_ms: Annotated[float | None, at_least(0)] = None

    def __post_init__(self) -> None:
        check_settings(self)


AT_ONCE = SignalSettings()  # no delay and no figures, for policies that use the router's own counts


@dataclass(slots=True)
class _Moment:
    """State of an engine at the start of a step or jump, after its plan was made.

    Attributes:
        at_ns: start of the step or jump; requests that arrived until then are in the figures.
        load: load figures at that time.
        num_held: KV blocks that sequences hold, before the steps of a jump.
        ends: ends of the steps of the jump, which may still be shortened. None means a single step, or an idle engine.
        computed: computed tokens of the sequences in the jump, int32[n].
        capacity: tokens that their KV blocks can hold, int32[n].
        is_idle: whether the engine waits for requests.
    """

    at_ns: int
    load: LoadFigures = IDLE
    num_held: int = 0
    ends: Int64s | None = None
    computed: Int32s | None = None
    capacity: Int32s | None = None
    is_idle: bool = False


class _Voice:
    """History of one engine's load figures, as far back as a channel may still read them."""

    def __init__(self, group: Ranks, seat: int) -> None:
        self._group = group
        self._rank = group.seats[seat].rank
        self._seat = group.seats[seat]
        settings = self._rank.scheduler.settings
        self._num_blocks, self._block_size = settings.num_blocks, settings.block_size
        self._moments = deque([_Moment(0, is_idle=True)])

    def turned(self, now_ns: int, forget_before_ns: int) -> None:
        """Record the start of a step or jump, and drop what no channel reads after `forget_before_ns`."""
        moments, is_idle = self._moments, not self._rank.has_work
        if is_idle and moments[-1].is_idle:
            return  # another rank of the group has stepped, and this one is unchanged
        while len(moments) > 1 and moments[1].at_ns <= forget_before_ns:
            moments.popleft()
        moment = _Moment(
            now_ns,
            self._rank.stats(),
            self._num_blocks - self._rank.scheduler.pool.num_free,
            is_idle=is_idle,
        )
        if self._group.ends is not None and len(self._seat.running):
            moment.ends, moment.computed = self._group.ends, self._seat.computed
            moment.capacity = self._rank.scheduler.table.capacity[self._seat.running]
        moments.append(moment)

    def cut(self) -> None:
        """Record that the current jump was shortened."""
        if self._moments[-1].ends is not None:
            self._moments[-1].ends = self._group.ends

    def at(self, time_ns: int) -> tuple[_Moment, int, int]:
        """Return the last step boundary not after `time_ns`: its moment, the steps of the jump before it, its time."""
        moment = next(m for m in reversed(self._moments) if m.at_ns <= time_ns)
        if moment.ends is None:
            return moment, 0, moment.at_ns
        # The end of a jump is the start of the next moment.
        num_steps = min(int(moment.ends.searchsorted(time_ns, side="right")), len(moment.ends) - 1)
        return moment, num_steps, int(moment.ends[num_steps - 1]) if num_steps else moment.at_ns

    def figures(self, moment: _Moment, num_steps: int, names: Sequence[str]) -> dict[str, Any]:
        """Return the figures `names` after `num_steps` steps of the moment's jump."""
        found: dict[str, Any] = {}
        for name in names:
            found[name] = getattr(moment.load, name)
            if name == "expert_pressure" and self._seat.expert_pressure is not None:
                found[name] = self._seat.expert_pressure  # of the last step that was counted: it changes slowly
            if name == "kv_usage":
                found[name] = self._num_held(moment, num_steps) / self._num_blocks
            elif name == "num_tokens" and moment.computed is not None:
                found[name] += num_steps * len(moment.computed)
        return found

    def _num_held(self, moment: _Moment, num_steps: int) -> int:
        if moment.computed is None or moment.capacity is None:
            return moment.num_held
        missing = np.maximum(moment.computed + num_steps + 1 - moment.capacity, 0)
        return moment.num_held + int((-(-missing // self._block_size)).sum())


class ReportedRouter(Protocol):
    """What a router receives from engines; `routing.router.Router` implements it."""

    def first_token(self, request_id: str, now_ns: int) -> None:
        """Record a computed prompt."""

    def ended(
        self,
        request_id: str,
        now_ns: int,
        num_output_tokens: int | None = None,
        cached_share: float | None = None,
        host_share: float | None = None,
    ) -> None:
        """Record the end of a request."""

    def report(self, engine: int, figures: LoadFigures, as_of_ns: int, now_ns: int) -> None:
        """Take in figures of an engine."""

    def kv_cleared(self, engine: int, now_ns: int) -> None:
        """Record that an engine holds no block and reports all its blocks."""

    def kv_stored(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Record blocks that an engine holds."""

    def kv_hosted(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Record blocks that an engine holds in host memory alone."""

    def kv_removed(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Record blocks that an engine holds no more."""


class Signals:
    """Delivers to a router the signals that are due.

    Args:
        router: receiver of the signals.
        engines: group and seat of each engine, in the order of the router's engine numbers.
        settings: signals and their delays.

    Attributes:
        on_report: called with the row of an engine and its figures when they reach the router. None means no call.
        reports_load: whether any channel reports load figures. Without one, `turned` and `cut` need not be called.
    """

    def __init__(self, router: ReportedRouter, engines: Sequence[tuple[Ranks, int]], settings: SignalSettings) -> None:
        self._router = router
        self._report_kv = {Place.DEVICE: router.kv_stored, Place.HOST: router.kv_hosted, Place.GONE: router.kv_removed}
        self.on_report: Callable[[int, LoadFigures], None] | None = None
        self._engines = engines
        self._voices = [_Voice(group, seat) for group, seat in engines] if settings.channels else []
        self._channels, self.reports_load = settings.channels, bool(settings.channels)
        self._delays_ns = [round(each.delay_ms * NS_PER_MS) for each in settings.channels]
        self._periods_ns = [
            0 if each.channel is ReportChannel.PIGGYBACKED else round(each.period_ms * NS_PER_MS)
            for each in settings.channels
        ]
        self._response_delay_ns = round(settings.response_delay_ms * NS_PER_MS)
        self._responses: deque[tuple[int, int, str, tuple[int, float | None, float | None] | None]] = deque()
        kv_delay_ms = settings.kv_events_delay_ms
        self._kv_delay_ns = None if kv_delay_ms is None else round(kv_delay_ms * NS_PER_MS)
        if self._kv_delay_ns is not None:
            for engine, (group, seat) in enumerate(engines):
                group.seats[seat].publish()
                router.kv_cleared(engine, 0)  # the events cover the whole cache, which starts empty
        self._read_ns = [-1] * len(settings.channels)  # time as of which each channel was last read
        self._reported_ns = [[-1] * len(engines) for _ in settings.channels]

    def first_token(self, request_id: str, now_ns: int, group: int) -> None:
        """Send the router a request's first token, which may be older than what other groups have sent since.

        Args:
            group: number of its engine's group. Of responses of one nanosecond, those of the first group come first.
        """
        responses, sent_ns = self._responses, now_ns + self._response_delay_ns
        at = len(responses)
        while at and responses[at - 1][:2] > (sent_ns, group):
            at -= 1
        responses.insert(at, (sent_ns, group, request_id, None))

    def ended(
        self, request_id: str, now_ns: int, group: int, num_output_tokens: int, shares: CachedShares = UNKNOWN_SHARES
    ) -> None:
        """Send the router the end of a request, and the parts of its prompt that came from each tier of the cache.

        Args:
            group: as in `first_token`; NO_GROUP for a request that its engine refused.
        """
        self._responses.append((now_ns + self._response_delay_ns, group, request_id, (num_output_tokens, *shares)))

    def turned(self, engine: int, now_ns: int) -> None:
        """Record that an engine begins a step or jump, or becomes idle."""
        if self.reports_load:
            self._voices[engine].turned(now_ns, min(self._true_at(c, now_ns) for c in range(len(self._channels))))

    def cut(self, engine: int) -> None:
        """Record that the engine's jump was shortened."""
        if self.reports_load:
            self._voices[engine].cut()

    def bring(self, now_ns: int) -> None:
        """Deliver all signals that are due by `now_ns`."""
        responses, router = self._responses, self._router
        if self._kv_delay_ns is not None:
            self._bring_kv_events(now_ns, self._kv_delay_ns)
        while responses and responses[0][0] <= now_ns:
            received_ns, _, request_id, end = responses.popleft()
            if end is None:
                router.first_token(request_id, received_ns)
            else:
                router.ended(request_id, received_ns, *end)
        for number, channel in enumerate(self._channels):
            true_at_ns = self._true_at(number, now_ns)
            if true_at_ns >= 0 and true_at_ns != self._read_ns[number]:
                self._read_ns[number] = true_at_ns
                self._report(number, channel, true_at_ns, now_ns)

    def _bring_kv_events(self, now_ns: int, delay_ns: int) -> None:
        # Events of this very nanosecond are not due yet, because an arrival precedes the end of a step.
        sent_before_ns = now_ns - max(delay_ns - 1, 0)
        for engine, (group, seat) in enumerate(self._engines):
            group.catch_up(sent_before_ns)
            events = group.seats[seat].kv_events
            while events and events[0].at_ns < sent_before_ns:
                place, names = events[0].place, []
                while events and events[0].place is place and events[0].at_ns < sent_before_ns:
                    names.append(events.popleft().block_hash)
                self._report_kv[place](engine, b"".join(names), now_ns)

    def bring_all(self) -> None:
        """Deliver the signals that are still under way after the last event."""
        received_ns = [self._responses[-1][0]] if self._responses else []
        for group, seat in self._engines:
            if events := group.seats[seat].kv_events:
                received_ns.append(events[-1].at_ns + (self._kv_delay_ns or 1))
        if received_ns:
            self.bring(max(received_ns))

    def _true_at(self, channel: int, now_ns: int) -> int:
        """Return the time as of which the figures are that a channel has delivered last by `now_ns`."""
        # A step that ends at this very nanosecond is not over, because an arrival precedes it.
        true_at_ns, period_ns = now_ns - max(self._delays_ns[channel], 1), self._periods_ns[channel]
        return true_at_ns // period_ns * period_ns if period_ns else true_at_ns

    def _report(self, number: int, channel: ChannelSettings, true_at_ns: int, now_ns: int) -> None:
        reported_ns = self._reported_ns[number]
        for engine, voice in enumerate(self._voices):
            moment, num_steps, as_of_ns = voice.at(true_at_ns)
            if moment.is_idle and channel.channel is not ReportChannel.PIGGYBACKED:
                as_of_ns = true_at_ns  # an idle engine's figures are always current
            if as_of_ns != reported_ns[engine]:
                reported_ns[engine] = as_of_ns
                figures = voice.figures(moment, num_steps, channel.figures)
                load = LoadFigures(**figures)
                self._router.report(engine, load, as_of_ns, now_ns)
                if self.on_report is not None:
                    self.on_report(engine, load)


_FLUSH_NS = 10_000_000  # time over which operations gather to one message, as in `moestro route`


class RouterLinks(NamedTuple):
    """Links between routers.

    Attributes:
        delay_ns: time that a message takes, ns. None means that the routers exchange nothing.
        loss: share of messages that are lost, 0 .. 1.
    """

    delay_ns: int | None
    loss: float = 0.0


class _Arrival(NamedTuple):
    """A message on its way, or with source and target alike the time to send what is due."""

    at_ns: int
    number: int
    source: int
    target: int
    message: Message | None


class RouterFleet:
    """Routers that decide in turn, each on what it knows.

    Requests are spread at random, as by a balancer before the routers. Every router gets the figures and events of
    engines; each request's first token and end reach the router that has it.

    Args:
        make: makes a router with all engines.
        seed: seed of the draws.
    """

    def __init__(self, make: Callable[[], Router], num_routers: int, links: RouterLinks, seed: int) -> None:
        self._routers = [make() for _ in range(num_routers)]
        self._links = links
        self._rng = np.random.default_rng(seed)
        self._at: dict[str, int] = {}  # router of each request in flight
        self._events: list[_Arrival] = []
        self._num_events = 0
        self._due_ns = [FOREVER_NS] * num_routers  # time at which each router sends next
        self._journals: list[Journal] = []
        self._replicas: list[Replica] = []
        rules = ReplicaRules()
        if links.delay_ns is None:
            return
        for number, router in enumerate(self._routers):
            run = RouterRun(f"router-{number}", 1)
            journal = Journal(run, str, has_prompts=router.needs.hits)
            router.journal = journal
            self._journals.append(journal)
            self._replicas.append(Replica(run, router, int, rules=rules))
        self._beat_ns = rules.beat_ns
        self._outlets = [[Outlet(journal, rules.beat_ns) for _ in self._routers] for journal in self._journals]

    # --- as a router

    def submit(self, request: Request, now_ns: int, exclude: Collection[int] = ()) -> RouteDecision:
        """Let one of the routers choose an engine."""
        self._advance(now_ns)
        number = int(self._rng.integers(len(self._routers)))
        decision = self._routers[number].submit(request, now_ns, exclude)
        self._at[request.request_id] = number
        self._changed(number, now_ns)
        return decision

    def first_token(self, request_id: str, now_ns: int) -> None:
        """Report a computed prompt to the request's router."""
        self._advance(now_ns)
        number = self._at[request_id]
        self._routers[number].first_token(request_id, now_ns)
        self._changed(number, now_ns)

    def ended(
        self,
        request_id: str,
        now_ns: int,
        num_output_tokens: int | None = None,
        cached_share: float | None = None,
        host_share: float | None = None,
    ) -> None:
        """Report the end of a request to its router."""
        self._advance(now_ns)
        number = self._at.pop(request_id)
        self._routers[number].ended(request_id, now_ns, num_output_tokens, cached_share, host_share)
        self._changed(number, now_ns)

    def report(self, engine: int, figures: LoadFigures, as_of_ns: int, now_ns: int) -> None:
        """Report figures to all routers."""
        self._advance(now_ns)
        for router in self._routers:
            router.report(engine, figures, as_of_ns, now_ns)

    def kv_cleared(self, engine: int, now_ns: int) -> None:
        """Report an empty cache to all routers."""
        for router in self._routers:
            router.kv_cleared(engine, now_ns)

    def kv_stored(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Report stored blocks to all routers."""
        for router in self._routers:
            router.kv_stored(engine, hashes, now_ns)

    def kv_hosted(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Report blocks in host memory alone to all routers."""
        for router in self._routers:
            router.kv_hosted(engine, hashes, now_ns)

    def kv_removed(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Report removed blocks to all routers."""
        for router in self._routers:
            router.kv_removed(engine, hashes, now_ns)

    # --- between routers

    def _changed(self, number: int, now_ns: int) -> None:
        """Send a router's operations soon."""
        if self._journals:
            self._send_at(now_ns + _FLUSH_NS, number)

    def _send_at(self, at_ns: int, number: int) -> None:
        if at_ns < self._due_ns[number]:
            self._due_ns[number] = at_ns
            self._push(at_ns, number, number, None)

    def _push(self, at_ns: int, source: int, target: int, message: Message | None) -> None:
        self._num_events += 1
        heappush(self._events, _Arrival(at_ns, self._num_events, source, target, message))

    def _send(self, source: int, target: int, message: Message, now_ns: int) -> None:
        assert self._links.delay_ns is not None, "without a delay there is no journal"
        if not self._links.loss or self._rng.random() >= self._links.loss:
            self._push(now_ns + self._links.delay_ns, source, target, message)

    def _advance(self, now_ns: int) -> None:
        """Deliver what has arrived by `now_ns`."""
        while self._events and self._events[0].at_ns <= now_ns:
            at_ns, _, source, target, message = heappop(self._events)
            match message:
                case None:
                    self._flush(source, at_ns)
                case Want():
                    self._outlets[target][source].wanted(message)
                    self._changed(target, at_ns)
                case OperationBatch() | Snapshot():
                    want = self._replicas[target].receive(message, at_ns)
                    if want is not None:
                        self._send(target, source, want, at_ns)

    def _flush(self, number: int, now_ns: int) -> None:
        """Send what each of the others lacks, and look again after a beat while any request is in flight."""
        if now_ns != self._due_ns[number]:
            return  # It was sent earlier.
        self._due_ns[number] = FOREVER_NS
        for other, outlet in enumerate(self._outlets[number]):
            if other != number:
                for message in outlet.due(now_ns):
                    self._send(number, other, message, now_ns)
        if self._at:
            self._send_at(now_ns + self._beat_ns, number)
