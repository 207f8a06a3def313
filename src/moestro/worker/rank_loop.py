"""A rank's main loop, for any kind of rank. No torch here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from moestro.config.launch_spec import LaunchSpec
from moestro.core.clients import FairQueue
from moestro.core.clock import FOREVER_NS
from moestro.core.load_figures import IDLE, LoadFigures, PaceCounts
from moestro.core.request import ModelInfo, NewOutputs, Request
from moestro.core.scheduling_events import SchedulingEvent
from moestro.core.work import IsWanted
from moestro.engine.rank import UNCHANGED, CacheChanges, Rank
from moestro.errors import GaveWayError, RequestError
from moestro.grammar.backend import MaskBackend
from moestro.grammar.compiler import VocabularySource
from moestro.wire.messages import (
    Abort,
    Add,
    DropLayer,
    EngineEvents,
    ExpertReport,
    FromRank,
    MoveLayer,
    Outputs,
    ReadExperts,
    Refused,
    Shutdown,
    ToRank,
    WakeGroup,
)


class Steppable(Protocol):
    """The interface of `engine.rank.Rank` for its driver."""

    def add(self, request: Request, now_ns: int) -> int:
        """Take a request, or raise RequestError. Returns its serial."""
        ...

    def take_given_way(self) -> Sequence[str]:
        """Return the ids of requests that left the full queue since the last call."""
        ...

    def abort(self, request_id: str, now_ns: int) -> None:
        """Drop a request."""
        ...

    def wake(self, step: int) -> None:
        """Take part in a step of the rank's group."""
        ...

    def outputs(self, now_ns: int, is_wanted: IsWanted = ...) -> NewOutputs:
        """Collect new outputs of requests. A device that works when polled works here, to the end or `is_wanted`."""
        ...

    def begin(self, now_ns: int) -> object:
        """Plan the next step and start it, if there is one."""
        ...

    def ready_at_ns(self) -> int | None:
        """Time of the next result; None if only the hardware knows, FOREVER_NS if only a message brings one."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether there is anything to do."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps begun since the start; constant while the rank makes no progress."""
        ...

    def stats(self) -> LoadFigures:
        """The rank's load now, and its totals since the start."""
        ...


class RankInbox(Protocol):
    """The interface of a rank's end of the connections to other processes; `Channel` and `PeerInbox` implement it."""

    num_steps: int
    owes: bool

    def receive(self, wait_s: float | None) -> list[ToRank]:
        """Return the API server's messages. Waits up to `wait_s` for something to arrive (None means no limit)."""
        ...

    def has_messages(self) -> bool:
        """Whether something has arrived."""
        ...

    def send(self, message: FromRank) -> None:
        """Queue `message` for the API server."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SideJobs:
    """What a rank's loop does beside the steps.

    Attributes:
        take_cache_changes: Supplier of the changes of the prefix cache since the last call, called after each step.
        pace_counts: Supplier of the counts of a paced device, which accompany other news: they change too often to be
            news themselves.
        report_experts: Answers a question about the load of experts. None means that the rank has no experts.
        take_events: Supplier of what the scheduler did since the last call; empty where no record wants it.
        move_experts: Takes a message about moves of experts. None means that the rank moves none.
    """

    take_cache_changes: Callable[[], CacheChanges] = lambda: UNCHANGED
    pace_counts: Callable[[], PaceCounts | None] = lambda: None
    report_experts: Callable[[ReadExperts], ExpertReport] | None = None
    take_events: Callable[[], tuple[SchedulingEvent, ...]] = tuple
    move_experts: Callable[[MoveLayer | DropLayer], None] | None = None


_NOTHING = SideJobs()
_LOOK_AGAIN_S = 50e-6  # a fraction of the shortest step, and long enough for other threads to get the interpreter


def run_rank(
    rank: Steppable,
    channel: RankInbox,
    now_ns: Callable[[], int],
    jobs: SideJobs = _NOTHING,
) -> None:
    """Serve until a shutdown message.

    The loop reads messages between any two steps (in preemptive mode, between pieces of them). It sleeps only without
    work, until the device's announced time, or for a moment while the accelerator works.
    Outputs leave as soon as their step is done and the next is launched, and a request that arrives during a step can
    join the next one. Both hold on a CPU too, where `outputs` does the work and `begin` only launches.

    Args:
        now_ns: the wall clock; the API server's `arrival_ns` must use the same clock.
        jobs: what is done beside the steps.
    """

    def is_wanted(until_ns: int | None) -> bool:
        return channel.has_messages() or (until_ns is not None and now_ns() >= until_ns)

    last_load = IDLE
    wait_s: float | None = 0  # a worker of a group may have got messages before it was ready
    while True:
        has_just_looked = wait_s == 0 and rank.has_work  # it computes first, and looks then
        messages = [] if has_just_looked else channel.receive(wait_s if rank.has_work else None)
        if not _obey(messages, rank, channel, now_ns, jobs):
            return
        num_steps = rank.num_steps
        outputs = rank.outputs(now_ns(), is_wanted)
        came_meanwhile = channel.receive(0)
        as_of_ns = now_ns()
        goes_on = _obey(came_meanwhile, rank, channel, now_ns, jobs)
        if goes_on:
            rank.begin(now_ns())
        channel.num_steps = rank.num_steps
        cache = jobs.take_cache_changes()
        if events := jobs.take_events():
            channel.send(EngineEvents(events))  # before the outputs, so that an ended request's events are complete
        load = rank.stats()
        if outputs or load != last_load or cache is not UNCHANGED:
            pace = jobs.pace_counts()
            reported = load if pace is None else msgspec.structs.replace(load, pace=pace)
            channel.send(Outputs(outputs, reported, as_of_ns, *cache))
            last_load = load
        if not goes_on:
            return
        has_news = bool(messages or outputs or came_meanwhile or rank.num_steps != num_steps)
        wait_s = _wait_s(rank, now_ns, has_news=has_news)
        channel.owes = wait_s is not None


def _wait_s(rank: Steppable, now_ns: Callable[[], int], *, has_news: bool) -> float | None:
    """Time to wait for messages before the next step. None means until a message comes."""
    ready_ns = rank.ready_at_ns()
    if ready_ns == FOREVER_NS:
        return 0 if has_news else None
    if ready_ns is not None:
        return max(ready_ns - now_ns(), 0) / 1e9
    # Nothing done and nothing received: an immediate retry would keep the channel's thread from the interpreter.
    return 0 if has_news else _LOOK_AGAIN_S


def _obey(
    messages: Sequence[ToRank], rank: Steppable, channel: RankInbox, now_ns: Callable[[], int], jobs: SideJobs
) -> bool:
    """Apply the API server's messages. Returns False for a shutdown."""
    for message in messages:
        match message:
            case Add(request):
                _add(request, rank, channel, now_ns())
            case Abort(request_ids):
                for request_id in request_ids:
                    rank.abort(request_id, now_ns())
            case WakeGroup(step):
                rank.wake(step)
            case ReadExperts() if jobs.report_experts is not None:
                channel.send(jobs.report_experts(message))
            case MoveLayer() | DropLayer() if jobs.move_experts is not None:
                jobs.move_experts(message)
            case Shutdown():
                return False
    return True


def _add(request: Request, rank: Steppable, channel: RankInbox, now_ns: int) -> None:
    """Give the rank a request, and report which requests it refuses: this one, or those that gave way to it."""
    try:
        rank.add(request, now_ns)
    except RequestError as error:
        channel.send(_refused(request.request_id, error))
    for request_id in rank.take_given_way():
        channel.send(_refused(request_id, GaveWayError()))


def _refused(request_id: str, error: RequestError) -> Refused:
    return Refused(
        request_id=request_id,
        http_status=error.http_status,
        error_type=error.error_type,
        message=error.message,
        param=error.param,
        code=error.code,
        retry_after_s=error.retry_after_s,
    )


# Holds a rank's requests with slow grammars back while many of them run, and wakes the loop for late masks.

_MASKS_LOOK_AGAIN_S = 1e-3  # while a mask is computed, which takes less for most grammars


class GrammarInbox:
    """Passes messages on; a request with a slow grammar comes when few others run. Implements `RankInbox`.

    Args:
        inbox: source of the messages.
        backend: computes the masks.
    """

    def __init__(self, inbox: RankInbox, backend: MaskBackend) -> None:
        self._inbox, self._backend = inbox, backend
        self._held: dict[str, Add] = {}  # by request id
        self._turns = FairQueue[Add]()  # the same, by client

    @property
    def num_steps(self) -> int:
        """Implement `RankInbox.num_steps`."""
        return self._inbox.num_steps

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self._inbox.num_steps = num_steps

    @property
    def owes(self) -> bool:
        """Implement `RankInbox.owes`."""
        return self._inbox.owes

    @owes.setter
    def owes(self, owes: bool) -> None:
        self._inbox.owes = owes

    def receive(self, wait_s: float | None) -> list[ToRank]:
        """Implement `RankInbox.receive`. While masks are computed it may return early, with nothing."""
        released = self._released()
        if released:
            wait_s = 0
        elif (self._held or self._backend.is_waiting) and (wait_s is None or wait_s > _MASKS_LOOK_AGAIN_S):
            wait_s = _MASKS_LOOK_AGAIN_S
        return [*released, *self._sift(self._inbox.receive(wait_s), len(released))]

    def has_messages(self) -> bool:
        """Implement `RankInbox.has_messages`."""
        return self._inbox.has_messages()

    def send(self, message: FromRank) -> None:
        """Implement `RankInbox.send`."""
        self._inbox.send(message)

    def _released(self) -> list[Add]:
        """Take the requests for which there is room: clients in turn, the oldest request of each first."""
        found: list[Add] = []
        while self._held and self._has_room(next(iter(self._held.values())), len(found)):  # alike for all of them
            message = self._turns.pop()
            del self._held[message.request.request_id]
            found.append(message)
        return found

    def _has_room(self, message: Add, num_coming: int) -> bool:
        grammar = message.request.sampling.grammar
        return grammar is None or self._backend.has_room(grammar, num_coming)

    def _sift(self, messages: Sequence[ToRank], num_coming: int) -> list[ToRank]:
        """Hold requests back, and drop those of them that are aborted.

        Args:
            num_coming: requests with slow grammars that come before these messages.
        """
        passed: list[ToRank] = []
        for message in messages:
            match message:
                case Add(request) if request.sampling.grammar is not None and not request.sampling.grammar.is_light:
                    if self._held or not self._has_room(message, num_coming):
                        self._held[request.request_id] = message
                        self._turns.push(request.client, message)
                        continue
                    num_coming += 1
                case Abort(request_ids):
                    for request_id in request_ids:
                        if (held := self._held.pop(request_id, None)) is not None:
                            self._turns.discard(held.request.client, held)
            passed.append(message)
        return passed


@contextlib.contextmanager
def following_grammars(spec: LaunchSpec, rank: Rank, info: ModelInfo, inbox: RankInbox) -> Iterator[RankInbox]:
    """Let the answers of `rank` follow grammars during the block, if it computes logits.

    The block gets the inbox that the rank's loop should read.
    """
    if not info.has_logits:
        yield inbox
        return
    tokenizer = spec.model.tokenizer_directory
    backend = MaskBackend(VocabularySource(tokenizer, info.vocab_size, info.eos_token_ids))
    backend.start()
    rank.scheduler.use_grammars(backend)
    try:
        yield GrammarInbox(inbox, backend)
    finally:
        backend.close()
