"""One run of a system, observed from outside and stopped at a time or after a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.core.request import Request
from moestro.core.script import Script
from moestro.core.views import LS
from moestro.engine.step_output import StepOutput
from moestro.repro.amoe.beds import BLOCK_SIZE
from moestro.repro.amoe.loads import Replacing, TimedRows
from moestro.repro.amoe.systems import Built
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.arrivals import Arrivals, AtTimes
from moestro.sim.cluster import Cluster
from moestro.sim.engine import Ranks
from moestro.sim.group import Seat
from moestro.workload.requests import RequestForm, RequestMaker

Int64s = NDArray[np.int64]


@dataclass(slots=True)
class Observation:
    """Observation of a run from `begin_ns` on, and the end of the run.

    Attributes:
        stop_ns: time at which all groups stop.
        most_tokens: output tokens after which all groups stop. None means no limit.
        num_tokens: output tokens since the start.
        is_by_class: whether tokens of latency-sensitive requests are counted apart, in `sensitive`.
        num_with_kv: requests that still enter with the KV of their prompts. None means all.
        at_ns, tokens: time of each turn in which a group's requests gain tokens, and output tokens up to its end.
        sensitive: those of latency-sensitive requests.
        gaps_ns: times between consecutive tokens of a request that end after `begin_ns`.
        ended_ns: ends of requests.
        busy_ns: time for which each worker had computed at `begin_ns`, int64[workers]; None before.
    """

    built: Built
    begin_ns: int
    stop_ns: int
    most_tokens: int | None = None
    num_tokens: int = 0
    is_by_class: bool = False
    num_sensitive: int = 0
    num_with_kv: int | None = None
    at_ns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sensitive: list[int] = field(default_factory=list)
    gaps_ns: list[int] = field(default_factory=list)
    ended_ns: list[int] = field(default_factory=list)
    busy_ns: Int64s | None = None

    @property
    def is_over(self) -> bool:
        """Whether enough tokens were seen."""
        return self.most_tokens is not None and self.num_tokens >= self.most_tokens

    def enters_with_kv(self) -> bool:
        """Whether the request that enters now has the KV of its prompt: those in progress at the start have it."""
        if self.num_with_kv is None:
            return True
        self.num_with_kv -= 1
        return self.num_with_kv >= 0

    def gained(self, output: StepOutput) -> None:
        """Count the tokens of an output."""
        self.num_tokens += len(output.sequences)
        if self.is_by_class:
            self.num_sensitive += sum(sequence.service_class == LS for sequence in output.sequences)

    def turned(self, now_ns: int) -> None:
        """Note the tokens up to the end of a turn."""
        self.at_ns.append(now_ns)
        self.tokens.append(self.num_tokens)
        self.sensitive.append(self.num_sensitive)

    def at(self, now_ns: int) -> None:
        """Note the workers' times when the observation begins."""
        if self.busy_ns is None and now_ns >= self.begin_ns:
            self.busy_ns = self.built.busy_ns()
            for tally in self.built.tallies or ():
                tally.is_counting = True


class ObservedRanks:
    """A group under observation; implements `sim.engine.Ranks`.

    Args:
        group: the group.
        observation: where its output is noted.

    Attributes:
        began_ns: start of the current turn.
        ends: None, because there are no jumps.
    """

    def __init__(self, group: Ranks, observation: Observation) -> None:
        self._group, self._observation = group, observation
        self.began_ns = 0
        self.ends: Int64s | None = None
        self._last_ns: list[dict[int, int]] = [{} for _ in group.seats]

    @property
    def seats(self) -> Sequence[Seat]:
        """The ranks."""
        return self._group.seats

    @property
    def tells_prefill(self) -> bool:
        """False, because nobody asks how far prompts are."""
        return False

    @property
    def next_ns(self) -> int | None:
        """Time of the next turn; None once the observation is over."""
        at_ns, observation = self._group.next_ns, self._observation
        return None if at_ns is None or at_ns >= observation.stop_ns or observation.is_over else at_ns

    def add(self, seat: int, request: Request, script: Script, now_ns: int) -> int:
        """Add a request."""
        self._group.seats[seat].has_prompt_kv = self._observation.enters_with_kv()
        return self._group.add(seat, request, script, now_ns)

    def catch_up(self, before_ns: int) -> None:
        """Return without effect, because there are no jumps."""

    def turn(self, now_ns: int, until_ns: int) -> list[StepOutput]:
        """Take a turn of the group, and note what its requests gained."""
        observation = self._observation
        observation.at(now_ns)
        self.began_ns = now_ns
        is_seen = now_ns >= observation.begin_ns
        outputs = self._group.turn(now_ns, min(until_ns, observation.stop_ns if is_seen else observation.begin_ns))
        for last_ns, output in zip(self._last_ns, outputs, strict=True):
            if not output.sequences:
                continue
            observation.gained(output)
            for sequence, reason in zip(output.sequences, output.finish_reasons, strict=True):
                before_ns = last_ns.get(sequence.serial)
                if before_ns is not None and is_seen:
                    observation.gaps_ns.append(now_ns - before_ns)
                if reason is None:
                    last_ns[sequence.serial] = now_ns
                else:
                    last_ns.pop(sequence.serial, None)
                    observation.ended_ns.append(now_ns)
        if any(output.sequences for output in outputs):
            observation.turned(now_ns)
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Figures of one run, after its beginning.

    Attributes:
        tokens_per_s: output tokens a second.
        itl_ms, itl_p99_ms: time between consecutive tokens of a request, mean and 99th percentile.
        requests_per_s: requests that end a second.
        stall_shares: share of the time for which each worker computes nothing.
        ended_per_s: requests that end in each second since the start.
    """

    tokens_per_s: float
    itl_ms: float
    itl_p99_ms: float
    requests_per_s: float
    stall_shares: tuple[float, ...]
    ended_per_s: tuple[float, ...]


def serve_open(built: Built, load: TimedRows, begin_s: float, stop_s: float) -> Seen:
    """Serve requests that arrive at fixed times; figures are those between two times."""
    begin_ns, stop_ns = round(begin_s * NS_PER_S), round(stop_s * NS_PER_S)
    observation = Observation(built, begin_ns, stop_ns)
    _run(built, observation, load, AtTimes(load.offsets_ns))
    return _seen(built, observation, begin_ns, stop_ns)


_LONGEST_S = 60.0  # of a run with a constant number of requests


class ClosedRates(NamedTuple):
    """Output tokens a second, and those of latency-sensitive requests if the load has both classes."""

    tokens_per_s: float
    sensitive_tokens_per_s: float


def closed_throughput(
    built: Built, load: TimedRows, passes: tuple[int, int], *, computes_prompts: bool = False
) -> ClosedRates:
    """Serve a constant number of requests.

    Args:
        passes: tokens of each request, in the mean, before the observation and in it.
        computes_prompts: whether requests that replace others have their prompts computed.
    """
    first, last = passes[0] * load.num_first, sum(passes) * load.num_first
    observation = Observation(
        built, round(_LONGEST_S * NS_PER_S), round(_LONGEST_S * NS_PER_S), most_tokens=last,
        is_by_class=load.rows.is_ls is not None, num_with_kv=load.num_first if computes_prompts else None,
    )  # fmt: skip
    _run(built, observation, load, Replacing(load))
    begin = int(np.searchsorted(observation.tokens, first))
    assert begin + 1 < len(observation.tokens), "the run ended before it was observed"
    seconds = (observation.at_ns[-1] - observation.at_ns[begin]) / NS_PER_S
    sensitive = observation.sensitive
    return ClosedRates(
        (observation.tokens[-1] - observation.tokens[begin]) / seconds,
        (sensitive[-1] - sensitive[begin]) / seconds,
    )


def _run(built: Built, observation: Observation, load: TimedRows, arrivals: Arrivals) -> None:
    router = Router(ROUTE_POLICIES.make("least_loaded"), RouterSettings(block_size=BLOCK_SIZE, seed=0))
    for group in built.groups:
        for seat in group.seats:
            num_blocks = seat.rank.scheduler.settings.num_blocks
            router.set_routable(router.add_engine(EngineSpec(num_blocks=num_blocks)), routable=True)
    maker = RequestMaker(load.rows, RequestForm(block_size=BLOCK_SIZE, names_blocks=False))
    results = Cluster([ObservedRanks(group, observation) for group in built.groups], router).run(maker, arrivals)
    assert not results.refusals, f"requests were refused: {results.refusals}"


def _seen(built: Built, observation: Observation, begin_ns: int, stop_ns: int) -> Seen:
    seconds = (stop_ns - begin_ns) / NS_PER_S
    ended_ns, gaps_ms = np.array(observation.ended_ns), np.array(observation.gaps_ns) / 1e6
    first = int(np.searchsorted(observation.at_ns, begin_ns))
    spent_s = (observation.at_ns[-1] - observation.at_ns[first]) / NS_PER_S  # between ends of steps, which may be long
    assert observation.busy_ns is not None, "nothing happened after the beginning"
    assert len(gaps_ms), "no request gained two tokens"
    busy = (built.busy_ns() - observation.busy_ns) / (stop_ns - begin_ns)
    per_s = np.bincount(ended_ns // NS_PER_S, minlength=int(stop_ns // NS_PER_S)) if len(ended_ns) else np.zeros(0)
    return Seen(
        tokens_per_s=(observation.tokens[-1] - observation.tokens[first]) / spent_s,
        itl_ms=float(gaps_ms.mean()),
        itl_p99_ms=float(np.percentile(gaps_ms, 99)),
        requests_per_s=float((ended_ns >= begin_ns).sum() / seconds),
        stall_shares=tuple((1 - busy).clip(0, 1).tolist()),
        ended_per_s=tuple(per_s.astype(float).tolist()),
    )
