"""AMoE's loads, requests with dummy KV that arrive by a Poisson process, and the findings of their runs.

A request lasts for up to a minute, so an empty system would take minutes to reach its steady state. A run therefore
begins with requests in progress: their lengths are drawn in proportion to the time that they take, and their progress
evenly. Their number comes from runs with a constant number of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.repro.amoe.systems import Bed, Built, build
from moestro.repro.results import Cell, Findings
from moestro.sim.closed_loop import SPREAD_S, Observation, Replacing, TimedRows, run_observed
from moestro.sim.cluster import AtTimes
from moestro.workload.generated.draws import poisson
from moestro.workload.rows import Rows

# The findings: one cell for each run, and the figures of a cell.


class ItemMeans(msgspec.Struct, frozen=True):
    """Mean tokens and mean time of one item of a kind of worker; the samplers' time is added to attention's."""

    tokens: float
    ms: float


class AmoeCell(Cell, frozen=True, kw_only=True):
    """One run at a rate, while it is observed.

    Attributes:
        tokens_per_s: output tokens a second.
        itl_ms, itl_p99_ms: time between consecutive tokens of a request, mean and 99th percentile.
        requests_per_s: requests that end a second.
        bound: output tokens a second that no scheduler exceeds on these workers.
        stall_shares: share of the time for which each worker computes nothing; of steps, their starts are counted.
        num_first: requests in progress at the start.
        attention_step, expert_step: items of either kind of worker in `async`; None in lock-step.
        ended_per_s: requests that end in each second since the start.
    """

    tokens_per_s: float
    itl_ms: float
    itl_p99_ms: float
    requests_per_s: float
    bound: float
    stall_shares: tuple[float, ...]
    num_first: int
    attention_step: ItemMeans | None = None
    expert_step: ItemMeans | None = None
    ended_per_s: tuple[float, ...] = ()


class ClosedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run with a constant number of requests.

    Attributes:
        tokens_per_s: output tokens a second.
        num_sensitive: requests that are latency-sensitive. None means that all are alike.
        sensitive_tokens_per_s: their output tokens a second.
    """

    load: str
    system: str
    seed: int
    num_requests: int
    tokens_per_s: float
    num_sensitive: int | None = None
    sensitive_tokens_per_s: float = 0.0

    @property
    def itl_ms(self) -> float:
        """Mean time between tokens by Little's law, of the latency-sensitive requests where there are others."""
        if self.num_sensitive is None:
            return self.num_requests / self.tokens_per_s * 1e3
        return self.num_sensitive / self.sensitive_tokens_per_s * 1e3


class BatchPoint(msgspec.Struct, frozen=True):
    """Throughput of one expert layer at one batch size (figure 3)."""

    num_rows: int
    rows_per_s: float


class AmoeFindings(Findings[AmoeCell], kw_only=True):
    """All runs; `closed` are those with a constant number of requests, `batch_curve` is figure 3 by prices."""

    closed: list[ClosedRun] = msgspec.field(default_factory=list)
    batch_curve: dict[str, list[BatchPoint]] = msgspec.field(default_factory=dict)

    def best(self, load: str, system: str) -> AmoeCell | None:
        """The run of a system with the highest throughput over the rates of a load. None means no run."""
        cells = [cell for cell in self.cells if (cell.load, cell.system) == (load, system)]
        return max(cells, key=lambda cell: cell.tokens_per_s, default=None)

    def capacity(self, load: str, system: str) -> ClosedRun | None:
        """The run of a system with a constant number of requests that has the highest throughput. None means no run."""
        runs = [run for run in self.closed if (run.load, run.system) == (load, system)]
        return max(runs, key=lambda run: run.tokens_per_s, default=None)

    def closed_at(self, load: str, system: str, itl_ms: float) -> float | None:
        """The throughput of a system at a mean ITL, between runs with constant numbers of requests.

        None means that the system has no ITL so low. Above the highest ITL that was measured, the throughput is that
        of the highest.
        """
        runs = [run for run in self.closed if (run.load, run.system) == (load, system)]
        runs.sort(key=lambda run: run.itl_ms)
        if not runs or itl_ms < runs[0].itl_ms:
            return None
        most = np.maximum.accumulate([run.tokens_per_s for run in runs])
        return float(np.interp(itl_ms, [run.itl_ms for run in runs], most))


def throughput(cell: AmoeCell) -> float:
    """Return the output tokens a second."""
    return cell.tokens_per_s


def itl(cell: AmoeCell) -> float:
    """Return the mean ITL, ms."""
    return cell.itl_ms


def itl_p99(cell: AmoeCell) -> float:
    """Return the 99th percentile of ITL, ms."""
    return cell.itl_p99_ms


def requests(cell: AmoeCell) -> float:
    """Return the requests that end a second."""
    return cell.requests_per_s


def of_bound(cell: AmoeCell) -> float:
    """Return the throughput as a share of the bound."""
    return cell.tokens_per_s / cell.bound


def mean_stall(cell: AmoeCell) -> float:
    """Return the mean share of the time for which a worker computes nothing."""
    return sum(cell.stall_shares) / len(cell.stall_shares)


def most_stall(cell: AmoeCell) -> float:
    """Return the largest share of the time for which a worker computes nothing."""
    return max(cell.stall_shares)


Int64s = NDArray[np.int64]


# The loads.


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRanges:
    """Lengths that are drawn evenly from ranges (section 5, "Workloads").

    Attributes:
        prompt, output: least and most tokens.
    """

    prompt: tuple[int, int]
    output: tuple[int, int]

    @property
    def mean_output(self) -> float:
        """Mean output tokens of a request."""
        return sum(self.output) / 2

    @property
    def mean_context(self) -> float:
        """Mean tokens in the cache of a request in progress: longer answers last longer."""
        outputs = np.arange(self.output[0], self.output[1] + 1)
        return sum(self.prompt) / 2 + float((outputs**2).mean() / outputs.mean()) / 2

    @property
    def longest(self) -> int:
        """Most tokens that a request may ask for: those in progress ask for whole answers, as every client does."""
        return self.prompt[1] + 2 * self.output[1]


LENGTHS = {
    "short": LengthRanges(prompt=(30, 70), output=(70, 130)),
    "medium": LengthRanges(prompt=(50, 150), output=(50, 250)),
    "reasonable": LengthRanges(prompt=(100, 300), output=(100, 500)),
}


def fresh(lengths: LengthRanges, num_requests: int, rng: np.random.Generator) -> tuple[Int64s, Int64s]:
    """Draw prompt and output tokens of new requests, int64[n] each."""
    prompt = rng.integers(lengths.prompt[0], lengths.prompt[1] + 1, num_requests)
    return prompt, rng.integers(lengths.output[0], lengths.output[1] + 1, num_requests)


def in_progress(lengths: LengthRanges, num_requests: int, rng: np.random.Generator) -> tuple[Int64s, Int64s]:
    """Draw the tokens in the cache and the output tokens left of requests in a steady state, int64[n] each."""
    outputs = np.arange(lengths.output[0], lengths.output[1] + 1)
    prompt = rng.integers(lengths.prompt[0], lengths.prompt[1] + 1, num_requests)
    output = rng.choice(outputs, num_requests, p=outputs / outputs.sum())
    done = (rng.random(num_requests) * output).astype(np.int64)
    return prompt + done, output - done


def open_load(lengths: LengthRanges, rate: float, seconds: float, num_first: int, seed: int) -> TimedRows:
    """Make requests that arrive at a rate for some seconds, beside `num_first` in progress."""
    rng = np.random.default_rng([seed, 0])
    num_new = max(round(rate * seconds), 1)
    prompt, output = fresh(lengths, num_new, rng)
    arrival_ns = poisson(num_new, rate, np.random.default_rng([seed, 1]))
    kept, left = in_progress(lengths, num_first, rng)
    entry_ns = (np.arange(num_first) * (SPREAD_S * NS_PER_S / max(num_first, 1))).astype(np.int64)
    times = np.concatenate([entry_ns, arrival_ns])
    order = times.argsort(kind="stable")
    rows = Rows(
        num_prompt_tokens=np.concatenate([kept, prompt])[order],
        num_output_tokens=np.concatenate([left, output])[order],
        is_generated=True,
    )
    return TimedRows(rows, times[order], num_first)


def closed_load(
    lengths: LengthRanges, num_first: int, num_more: int, seed: int, num_sensitive: int | None = None
) -> TimedRows:
    """Make `num_first` requests in progress, and those that replace them; times are those of the former.

    Args:
        num_more: requests that may replace others, of each class.
        num_sensitive: latency-sensitive requests of the first, which stand evenly among the best-effort ones. None
            means that all are.
    """
    rng = np.random.default_rng([seed, 2])
    kept, left = in_progress(lengths, num_first, rng)
    prompt, output = fresh(lengths, num_more if num_sensitive is None else 2 * num_more, rng)
    is_ls = None
    if num_sensitive is not None:
        turns = np.arange(num_first) * num_sensitive // num_first
        is_ls = np.concatenate([np.diff(turns, prepend=-1) > 0, np.arange(2 * num_more) < num_more])
    rows = Rows(
        num_prompt_tokens=np.concatenate([kept, prompt]),
        num_output_tokens=np.concatenate([left, output]),
        is_ls=is_ls,
        is_generated=True,
    )
    return TimedRows(rows, (np.arange(num_first) * (SPREAD_S * NS_PER_S / num_first)).astype(np.int64), num_first)


# One run of a system, observed from outside and stopped at a time or after a number of tokens.


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
    busy_ns: list[Int64s] = []

    def begin() -> None:
        busy_ns.append(built.busy_ns())
        for tally in built.tallies or ():
            tally.is_counting = True

    observation = Observation(begin_ns, stop_ns, on_begin=begin)
    run_observed(built.groups, observation, load, AtTimes(load.offsets_ns), computes_prompts=False)
    assert busy_ns, "nothing happened after the beginning"
    return _seen(observation, (built.busy_ns() - busy_ns[0]) / (stop_ns - begin_ns))


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
        round(_LONGEST_S * NS_PER_S), round(_LONGEST_S * NS_PER_S), most_tokens=last,
        is_by_class=load.rows.is_ls is not None,
    )  # fmt: skip
    run_observed(built.groups, observation, load, Replacing(load), computes_prompts=computes_prompts)
    begin = int(np.searchsorted(observation.tokens, first))
    assert begin + 1 < len(observation.tokens), "the run ended before it was observed"
    return ClosedRates(observation.tokens_per_s(begin), observation.sensitive_tokens_per_s(begin))


def _seen(observation: Observation, busy_shares: NDArray[np.float64]) -> Seen:
    begin_ns, stop_ns = observation.begin_ns, observation.stop_ns
    seconds = (stop_ns - begin_ns) / NS_PER_S
    ended_ns, gaps_ms = np.array(observation.ended_ns), np.array(observation.gaps_ns) / 1e6
    first = int(np.searchsorted(observation.at_ns, begin_ns))
    assert len(gaps_ms), "no request gained two tokens"
    per_s = np.bincount(ended_ns // NS_PER_S, minlength=int(stop_ns // NS_PER_S)) if len(ended_ns) else np.zeros(0)
    return Seen(
        tokens_per_s=observation.tokens_per_s(first),
        itl_ms=float(gaps_ms.mean()),
        itl_p99_ms=float(np.percentile(gaps_ms, 99)),
        requests_per_s=float((ended_ns >= begin_ns).sum() / seconds),
        stall_shares=tuple((1 - busy_shares).clip(0, 1).tolist()),
        ended_per_s=tuple(per_s.astype(float).tolist()),
    )


# Runs with constant numbers of requests, from which throughput over concurrency follows.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Constant numbers of requests on a testbed.

    Attributes:
        load: name of the load in the findings.
        bed: testbed.
        lengths: lengths of prompts and answers.
        numbers: numbers of requests, ascending.
        passes: tokens of each request, in the mean, before a run is observed and while it is.
        num_sensitive: latency-sensitive requests in each run; the others are best effort. None means that all are.
        computes_prompts: whether prompts are computed, except those of the requests in progress at the start.
    """

    load: str
    bed: Bed
    lengths: LengthRanges
    numbers: tuple[int, ...]
    passes: tuple[int, int]
    num_sensitive: int | None = None
    computes_prompts: bool = False

    def run(self, system: str, seed: int) -> list[ClosedRun]:
        """Measure a system with each number of requests that fits, and with the most that fit.

        Raises:
            ConfigError: the network does not fit the GPUs of this system.
        """
        limits, found = (self.lengths.mean_context, self.lengths.longest), []
        most = build(system, self.bed, limits, seed).most_requests
        fitting = {number for number in self.numbers if number < most}
        for number in sorted({*fitting, min(most, self.numbers[-1])}):
            load = closed_load(self.lengths, number, self._num_replacing(number), seed, self.num_sensitive)
            built = build(system, self.bed, limits, seed)
            rates = closed_throughput(built, load, self.passes, computes_prompts=self.computes_prompts)
            run = ClosedRun(
                load=self.load, system=system, seed=seed, num_requests=number, tokens_per_s=rates.tokens_per_s,
                num_sensitive=self.num_sensitive, sensitive_tokens_per_s=rates.sensitive_tokens_per_s,
            )  # fmt: skip
            found.append(run)
        return found

    def _num_replacing(self, num_requests: int) -> int:
        """New requests that surely suffice."""
        return 1 + round(2 * num_requests * sum(self.passes) / self.lengths.mean_output) + num_requests // 4
