"""What a router hears of its engines, as late as in life.

Nothing is sent at a time of its own: a router is only ever looked into when a request arrives, so what it would have
heard until then is worked out then. An engine in a jump is not disturbed by it: the figures at any of the boundaries
that the jump passes follow from those at its beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from moestro.core.load_figures import FIGURES, IDLE, ROUTED_FIGURES, LoadFigures
from moestro.core.setting_checks import above, at_least, check_settings
from moestro.core.work import Int32s
from moestro.errors import ConfigError
from moestro.routing.router import Router
from moestro.sim.engine import Ranks
from moestro.sim.group import Int64s

NS_PER_MS = 1_000_000


class ReportChannel(StrEnum):
    """Ways by which reports of figures reach a router."""

    PIGGYBACKED = "piggybacked"  # with an engine's outputs, at every step
    POLLED = "polled"  # read from the engine now and then, as from `/metrics`
    BROADCAST = "broadcast"  # sent by a third party for many engines


class ChannelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way by which some figures come.

    Attributes:
        figures: which, by the names of `core.load_figures.LoadFigures`.
        channel: piggybacked: said with the outputs of every step. polled, broadcast: every `period_ms`, as they were at
            the end of the last step, or just then if the engine was idle.
        delay_ms: from there to the router.
        period_ms: of polls and broadcasts.
    """

    PLACE: ClassVar[str] = "[signals] "

    figures: tuple[str, ...]
    channel: ReportChannel = ReportChannel.PIGGYBACKED
    delay_ms: Annotated[float, at_least(0)] = 0.0
    period_ms: Annotated[float, above(0)] = 100.0

    def __post_init__(self) -> None:
        check_settings(self)
        known = [name for name in ROUTED_FIGURES if FIGURES[name].is_from_rank]
        for name in self.figures:
            if name not in known:
                raise ConfigError(f"signals: no engine of a simulation says {name!r}; known: {', '.join(known)}")


class SignalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a router hears, beside what it does itself.

    Attributes:
        response_delay_ms: from an engine to the router, of first tokens and ends of requests: what its exact counts of
            requests in flight live on.
        channels: of figures; what no channel brings, the router never knows.
        kv_events_delay_ms: from an engine to the router, of the blocks that its prefix cache stores and removes (KV
            events, said with the outputs of the step in which it happens): the router knows what a cache holds. Unset:
            engines say nothing of that, and the router predicts it from where it sent which prompt.
    """

    PLACE: ClassVar[str] = "[signals] "

    response_delay_ms: Annotated[float, at_least(0)] = 0.0
    channels: tuple[ChannelSettings, ...] = ()
    kv_events_delay_ms: Annotated[float | None, at_least(0)] = None

    def __post_init__(self) -> None:
        check_settings(self)


AT_ONCE = SignalSettings()  # and no figures: for policies that live on the router's own counts


@dataclass(slots=True)
class _Moment:
    """An engine at the beginning of a step or of a jump, after its plan was made.

    Attributes:
        at_ns: when; it has read its inbox until then.
        load: the figures of the engine at that time.
        num_held: KV blocks held by sequences, before those of a jump.
        ends: boundaries of the jump, which may still be cut short; None: a single step, or nothing.
        computed, capacity: int32[n], of the sequences in the jump: tokens with KV, tokens for which there are blocks.
        is_idle: it waits for requests.
    """

    at_ns: int
    load: LoadFigures = IDLE
    num_held: int = 0
    ends: Int64s | None = None
    computed: Int32s | None = None
    capacity: Int32s | None = None
    is_idle: bool = False


class _Voice:
    """What one engine says of itself at any time that may still be asked for."""

    def __init__(self, group: Ranks, seat: int) -> None:
        self._group = group
        self._rank = group.seats[seat].rank
        self._seat = group.seats[seat]
        settings = self._rank.scheduler.settings
        self._num_blocks, self._block_size = settings.num_blocks, settings.block_size
        self._moments = deque([_Moment(0, is_idle=True)])

    def turned(self, now_ns: int, forget_before_ns: int) -> None:
        """A step or jump begins. What was true before `forget_before_ns` is not asked for any more."""
        moments, is_idle = self._moments, not self._rank.has_work
        if is_idle and moments[-1].is_idle:
            return  # others of its group go on; it has nothing new to say
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
            moment.capacity = self._rank.scheduler.table.capacity.take(self._seat.running)
        moments.append(moment)

    def cut(self) -> None:
        """The jump under way was made shorter."""
        if self._moments[-1].ends is not None:
            self._moments[-1].ends = self._group.ends

    def at(self, time_ns: int) -> tuple[_Moment, int, int]:
        """The last boundary not after `time_ns`: in which moment, after how many steps of its jump, and when."""
        moment = next(m for m in reversed(self._moments) if m.at_ns <= time_ns)
        if moment.ends is None:
            return moment, 0, moment.at_ns
        # The boundary at the end of a jump is the next moment's.
        num_steps = min(int(moment.ends.searchsorted(time_ns, side="right")), len(moment.ends) - 1)
        return moment, num_steps, int(moment.ends[num_steps - 1]) if num_steps else moment.at_ns

    def figures(self, moment: _Moment, num_steps: int, names: Sequence[str]) -> dict[str, Any]:
        """The figures `names` after `num_steps` steps of the moment's jump."""
        found: dict[str, Any] = {}
        for name in names:
            found[name] = getattr(moment.load, name)
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


class Signals:
    """Brings a router what it would have heard by now.

    Args:
        router: that is told.
        engines: group and seat of each, by the router's numbers.
        settings: what it hears, and how late.
    """

    def __init__(self, router: Router, engines: Sequence[tuple[Ranks, int]], settings: SignalSettings) -> None:
        self._router = router
        self._engines = engines
        self._voices = [_Voice(group, seat) for group, seat in engines] if settings.channels else []
        self._channels = settings.channels
        self._delays_ns = [round(each.delay_ms * NS_PER_MS) for each in settings.channels]
        self._periods_ns = [
            0 if each.channel is ReportChannel.PIGGYBACKED else round(each.period_ms * NS_PER_MS)
            for each in settings.channels
        ]
        self._response_delay_ns = round(settings.response_delay_ms * NS_PER_MS)
        self._responses: deque[tuple[int, bool, str, int]] = deque()
        kv_delay_ms = settings.kv_events_delay_ms
        self._kv_delay_ns = None if kv_delay_ms is None else round(kv_delay_ms * NS_PER_MS)
        if self._kv_delay_ns is not None:
            for engine, (group, seat) in enumerate(engines):
                group.seats[seat].publish()
                router.kv_cleared(engine, 0)  # it says all that it holds, from the beginning
        self._asked_ns = [-1] * len(settings.channels)  # until when each channel was read
        self._told_ns = [[-1] * len(engines) for _ in settings.channels]

    def first_token(self, request_id: str, now_ns: int) -> None:
        """An engine gives a request's first token."""
        self._responses.append((now_ns + self._response_delay_ns, False, request_id, 0))

    def ended(self, request_id: str, now_ns: int, num_output_tokens: int) -> None:
        """An engine gives a request's last token."""
        self._responses.append((now_ns + self._response_delay_ns, True, request_id, num_output_tokens))

    def turned(self, engine: int, now_ns: int) -> None:
        """An engine begins a step or a jump, or has nothing to do."""
        if self._voices:
            self._voices[engine].turned(now_ns, min(self._true_at(c, now_ns) for c in range(len(self._channels))))

    def cut(self, engine: int) -> None:
        """The engine's jump was made shorter."""
        if self._voices:
            self._voices[engine].cut()

    def bring(self, now_ns: int) -> None:
        """Tell the router all that has reached it by `now_ns`."""
        responses, router = self._responses, self._router
        if self._kv_delay_ns is not None:
            self._bring_kv_events(now_ns, self._kv_delay_ns)
        while responses and responses[0][0] <= now_ns:
            heard_ns, is_end, request_id, num_tokens = responses.popleft()
            if is_end:
                router.ended(request_id, heard_ns, num_tokens)
            else:
                router.first_token(request_id, heard_ns)
        for number, channel in enumerate(self._channels):
            true_at_ns = self._true_at(number, now_ns)
            if true_at_ns >= 0 and true_at_ns != self._asked_ns[number]:
                self._asked_ns[number] = true_at_ns
                self._report(number, channel, true_at_ns, now_ns)

    def _bring_kv_events(self, now_ns: int, delay_ns: int) -> None:
        # What is said at this very moment is not heard yet: an arrival comes before the end of a step.
        said_before_ns = now_ns - max(delay_ns - 1, 0)
        for engine, (group, seat) in enumerate(self._engines):
            group.catch_up(said_before_ns)
            events = group.seats[seat].kv_events
            while events and events[0].at_ns < said_before_ns:
                is_stored, names = events[0].is_stored, []
                while events and events[0].is_stored == is_stored and events[0].at_ns < said_before_ns:
                    names.append(events.popleft().block_hash)
                tell = self._router.kv_stored if is_stored else self._router.kv_removed
                tell(engine, b"".join(names), now_ns)

    def bring_all(self) -> None:
        """Tell the router what is still on its way, when nothing more will happen."""
        heard_ns = [self._responses[-1][0]] if self._responses else []
        for group, seat in self._engines:
            if events := group.seats[seat].kv_events:
                heard_ns.append(events[-1].at_ns + (self._kv_delay_ns or 1))
        if heard_ns:
            self.bring(max(heard_ns))

    def _true_at(self, channel: int, now_ns: int) -> int:
        """As of when a channel's figures are that reach the router now, or have reached it last."""
        # A step that ends this very moment is not over: an arrival comes before it.
        true_at_ns, period_ns = now_ns - max(self._delays_ns[channel], 1), self._periods_ns[channel]
        return true_at_ns // period_ns * period_ns if period_ns else true_at_ns

    def _report(self, number: int, channel: ChannelSettings, true_at_ns: int, now_ns: int) -> None:
        told_ns = self._told_ns[number]
        for engine, voice in enumerate(self._voices):
            moment, num_steps, as_of_ns = voice.at(true_at_ns)
            if moment.is_idle and channel.channel is not ReportChannel.PIGGYBACKED:
                as_of_ns = true_at_ns  # it looks into its inbox all the time
            if as_of_ns != told_ns[engine]:
                told_ns[engine] = as_of_ns
                figures = voice.figures(moment, num_steps, channel.figures)
                self._router.report(engine, LoadFigures(**figures), as_of_ns, now_ns)
