"""Loads with requests in progress at the start, and runs that are observed from outside and stopped.

A request may last for a minute, so an empty system would take minutes to reach its steady state. A run begins with
requests in progress instead, whose KV exists already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.core.request import Request, Script
from moestro.core.views import LS
from moestro.engine.steps import StepOutput
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.cluster import Arrivals, Cluster
from moestro.sim.groups.group import Ranks, Seat
from moestro.sim.results import Results
from moestro.workload.rows import RequestForm, RequestMaker, Rows

Int64s = NDArray[np.int64]

SPREAD_S = 0.3  # the requests in progress enter over this time, so that they do not form one wave of equal depth


@dataclass(frozen=True, slots=True, eq=False)
class TimedRows:
    """Requests and their arrival times.

    Attributes:
        rows: requests.
        offsets_ns: int64[n], ascending; of a closed load, those of the requests in progress.
        num_first: requests in progress at the start, which come first in a closed load.
    """

    rows: Rows
    offsets_ns: Int64s
    num_first: int


class Replacing:
    """Closed loop: when a request ends, a new one of its class arrives if there is one; implements `sim.Arrivals`."""

    def __init__(self, load: TimedRows) -> None:
        self.start_ns = load.offsets_ns
        is_ls = load.rows.is_ls
        self._is_ls = np.ones(len(load.rows), np.bool_) if is_ls is None else is_ls
        new = np.arange(load.num_first, len(load.rows))
        self._new = {each: iter(new[self._is_ls[new] == each].tolist()) for each in (False, True)}

    @property
    def first_rows(self) -> Int64s:
        """Rows of the requests in progress."""
        return np.arange(len(self.start_ns))

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """Return the next new request of the class, which arrives at once."""
        new = next(self._new[bool(self._is_ls[row])], None)
        return None if new is None else (new, ended_ns)


@dataclass(slots=True)
class Observation:
    """Observation of a run, and the end of the run.

    Attributes:
        begin_ns: start of the observation.
        stop_ns: time at which all groups stop.
        first_tokens: output tokens after which the observation begins, if that is before `begin_ns`. None means that
            time alone decides.
        most_tokens: output tokens after which all groups stop. None means no limit.
        on_begin: called once when the observation begins.
        is_by_class: whether tokens of latency-sensitive requests are counted apart.
        num_tokens, num_sensitive: output tokens since the start, and those of latency-sensitive requests.
        at_ns, tokens: time of each turn in which a group's requests gain tokens, and output tokens up to its end.
        sensitive: those of latency-sensitive requests.
        gaps_ns: times between consecutive tokens of a request that end in the observation.
        ended_ns: ends of requests.
    """

    begin_ns: int
    stop_ns: int
    first_tokens: int | None = None
    most_tokens: int | None = None
    on_begin: Callable[[], None] = lambda: None
    is_by_class: bool = False
    num_tokens: int = 0
    num_sensitive: int = 0
    at_ns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sensitive: list[int] = field(default_factory=list)
    gaps_ns: list[int] = field(default_factory=list)
    ended_ns: list[int] = field(default_factory=list)
    has_begun: bool = False

    @property
    def is_over(self) -> bool:
        """Whether enough tokens were seen."""
        return self.most_tokens is not None and self.num_tokens >= self.most_tokens

    def at(self, now_ns: int) -> None:
        """Begin the observation if it is time."""
        if self.has_begun:
            return
        if self.first_tokens is not None and self.num_tokens >= self.first_tokens:
            self.begin_ns = min(self.begin_ns, now_ns)
        if now_ns >= self.begin_ns:
            self.has_begun = True
            self.on_begin()

    def gained(self, output: StepOutput) -> None:
        """Count the tokens of an output."""
        self.num_tokens += len(output.sequences)
        if self.is_by_class:
            self.num_sensitive += sum(sequence.service_class == LS for sequence in output.sequences)

    def turned(self, now_ns: int) -> None:
        """Record the tokens up to the end of a turn."""
        self.at_ns.append(now_ns)
        self.tokens.append(self.num_tokens)
        self.sensitive.append(self.num_sensitive)

    def tokens_per_s(self, first: int) -> float:
        """Output tokens a second from turn `first` to the last, both with tokens."""
        return self._per_s(self.tokens, first)

    def sensitive_tokens_per_s(self, first: int) -> float:
        """As `tokens_per_s`, of latency-sensitive requests."""
        return self._per_s(self.sensitive, first)

    def _per_s(self, totals: list[int], first: int) -> float:
        return (totals[-1] - totals[first]) / ((self.at_ns[-1] - self.at_ns[first]) / NS_PER_S)


class ObservedRanks:
    """A group under observation; implements `sim.groups.group.Ranks`.

    Args:
        group: the group.
        observation: where its output is noted.
        num_first: requests in progress at the start, which have the KV of their prompts; the following ones compute
            their prompts. None leaves this to the seats.

    Attributes:
        began_ns: start of the current turn.
        ends: None, because there are no jumps.
    """

    def __init__(self, group: Ranks, observation: Observation, num_first: int | None = None) -> None:
        self._group, self._observation, self._num_first = group, observation, num_first
        self.began_ns = 0
        self.ends: Int64s | None = None
        self._last_ns: list[dict[int, int]] = [{} for _ in group.seats]

    @property
    def seats(self) -> Sequence[Seat]:
        """The ranks."""
        return self._group.seats

    @property
    def steps_together(self) -> bool:
        """Implement `Ranks.steps_together`."""
        return self._group.steps_together

    @property
    def tells_prefill(self) -> bool:
        """False, because the observation has no use for it."""
        return False

    @property
    def next_ns(self) -> int | None:
        """Time of the next turn; None once the observation is over."""
        at_ns, observation = self._group.next_ns, self._observation
        return None if at_ns is None or at_ns >= observation.stop_ns or observation.is_over else at_ns

    def add(self, seat: int, request: Request, script: Script, now_ns: int) -> int:
        """Add a request."""
        if self._num_first is not None:
            self.seats[seat].has_prompt_kv = row_of(request) < self._num_first
        return self._group.add(seat, request, script, now_ns)

    def catch_up(self, before_ns: int) -> None:
        """Return without effect, because there are no jumps."""

    def turn(self, now_ns: int, until_ns: int) -> list[StepOutput]:
        """Take a turn of the group, and record the tokens that its requests gained."""
        observation = self._observation
        observation.at(now_ns)
        self.began_ns = now_ns
        is_seen = now_ns >= observation.begin_ns
        outputs = self._group.turn(now_ns, min(until_ns, observation.stop_ns if is_seen else observation.begin_ns))
        for last_ns, output in zip(self._last_ns, outputs, strict=True):
            if not output.sequences:
                continue
            observation.gained(output)
            for row, sequence in enumerate(output.sequences):
                before_ns = last_ns.get(sequence.serial)
                if before_ns is not None and is_seen:
                    observation.gaps_ns.append(now_ns - before_ns)
                if row not in output.finish_reasons:
                    last_ns[sequence.serial] = now_ns
                else:
                    last_ns.pop(sequence.serial, None)
                    observation.ended_ns.append(now_ns)
        if any(output.sequences for output in outputs):
            observation.turned(now_ns)
        return outputs


def row_of(request: Request) -> int:
    """Return the row of a request that `RequestMaker` made under the default name."""
    return int(request.request_id.rpartition("-")[2])


def run_observed(
    groups: Sequence[Ranks], observation: Observation, load: TimedRows, arrivals: Arrivals, *, computes_prompts: bool
) -> Results:
    """Serve a load under observation, with the requests spread by load.

    Args:
        groups: ranks, all with the same block size.
        observation: receives what happens.
        load: requests.
        arrivals: their arrivals.
        computes_prompts: whether requests that are not in progress at the start compute their prompts. Otherwise all
            requests have the KV of their prompts.

    Raises:
        AssertionError: a request was refused.
    """
    settings = groups[0].seats[0].rank.scheduler.settings
    block_size = settings.block_size
    router = Router(ROUTE_POLICIES.make("least_loaded"), RouterSettings(block_size=block_size, seed=0))
    for group in groups:
        for seat in group.seats:
            seat.has_prompt_kv = not computes_prompts
            num_blocks = seat.rank.scheduler.settings.num_blocks
            router.set_routable(router.add_engine(EngineSpec(num_blocks=num_blocks)), routable=True)
    maker = RequestMaker(load.rows, RequestForm(block_size=block_size, names_blocks=False))
    num_first = load.num_first if computes_prompts else None
    observed = [ObservedRanks(group, observation, num_first) for group in groups]
    results = Cluster(observed, router).run(maker, arrivals)
    assert not results.refusals, f"requests were refused: {results.refusals}"
    return results
