"""A testbed on virtual time: equal engines that serve a load by a routing policy, and the figures of the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.core.hashing import split_hashes
from moestro.cost.gpus import Gpu, kv_blocks
from moestro.cost.networks import NetworkShape
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.engine.settings import SchedulerSettings
from moestro.repro.results import Cell
from moestro.routing.policy_contract import RoutePolicy
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.group import Group, OneRank
from moestro.sim.results import WINDOW_NS, Results
from moestro.sim.scenario import middle_rate
from moestro.sim.signals import ChannelSettings, ReportChannel, SignalSettings
from moestro.workload.generated.draws import at_rate
from moestro.workload.rows import RequestForm, RequestMaker, Rows

Floats = NDArray[np.float64]

LEAD_IN = 0.1  # share of the requests left out of all figures: they find cold caches and empty queues
# The same where a run lasts until caches are full and batches have their lasting size: at least, and at most.
_LONG_LEAD_IN = (0.3, 0.5)
_GROWS = 1.5  # mean TTFT of a run's last quarter over that of its second, above which a queue grows
_STEP, _MOST_STEPS, _NUM_HALVINGS = 1.25, 6, 2  # of the search for the capacity, which ends within 6 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """Equal engines, each one GPU with the whole network.

    Attributes:
        block_size: tokens of a KV block.
        max_num_seqs: sequences of an engine; vLLM's default for a GPU of this memory.
        max_num_batched_tokens: tokens of a step of an engine; vLLM's default for a GPU of this memory.
    """

    network: NetworkShape
    gpu: Gpu
    num_engines: int = 16
    block_size: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192

    @property
    def num_blocks(self) -> int:
        """The number of KV blocks of one engine."""
        return kv_blocks(self.network, self.gpu, self.block_size)

    def scheduler(self, rows: Rows) -> SchedulerSettings:
        """The settings of each engine. Every request of `rows` fits."""
        longest = int(rows.num_prompt_tokens.max() + rows.num_output_tokens.max())
        return SchedulerSettings(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=min(self.num_blocks * self.block_size, longest),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_queued_reqs=1 << 30,  # the papers refuse no request
        )

    def cost(self) -> Roofline:
        """The cost model of one engine's steps."""
        return Roofline(RooflineSettings(network=self.network, gpu=self.gpu))


@dataclass(frozen=True, slots=True, eq=False)
class TimedLoad:
    """Requests and their arrival times.

    Attributes:
        name: the load's name in tables.
        rows: the requests.
        offsets_ns: arrival times, int64[n], ascending.
        is_generated: whether it is made of generated sessions rather than of a trace.
    """

    name: str
    rows: Rows
    offsets_ns: NDArray[np.int64]
    is_generated: bool

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.rows) / (int(self.offsets_ns[-1]) / NS_PER_S)


class Latency(msgspec.Struct, frozen=True):
    """A latency over requests, milliseconds."""

    mean: float
    p50: float
    p99: float


class ServingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run, without the requests of its lead-in. An imbalance is max over mean, at least 1.

    Attributes:
        num_requests: requests of the run, the lead-in among them.
        span_s: time in which the counted requests arrived, seconds.
    """

    num_requests: int
    num_counted: int
    span_s: float
    ttft_ms: Latency
    tpot_ms: Latency
    hit_ratio: float
    request_imbalance: float
    prefill_imbalance: float
    unlike_prefill_s: tuple[float, float]  # prefill seconds a window of the two most different engines
    requests_per_s: float  # rate of the middle 80 % of all answers


class RoutedCell(Cell, frozen=True, kw_only=True):
    """One run of the testbed; the system is the routing policy."""

    measured: ServingFigures


def run(bed: Testbed, load: TimedLoad, policy: RoutePolicy, signals: SignalSettings, seed: int = 0) -> Results:
    """Serve a load on a testbed, its requests spread by a policy."""
    cost, settings = bed.cost(), bed.scheduler(load.rows)
    router = Router(policy, RouterSettings(block_size=bed.block_size, seed=seed))
    groups = [Group(settings, OneRank(cost)) for _ in range(bed.num_engines)]
    for _ in groups:
        router.set_routable(router.add_engine(EngineSpec(num_blocks=bed.num_blocks)), routable=True)
    maker = RequestMaker(load.rows, RequestForm(block_size=bed.block_size))
    return Cluster(groups, router, signals).run(maker, AtTimes(load.offsets_ns))


def signals_of(policy: RoutePolicy, *, has_pressure: bool = False, period_ms: float | None = None) -> SignalSettings:
    """Return the signals that deliver the figures a policy needs.

    Every policy gets figures that are equally fresh, as in LMetric's experiments, whose router reads them from each
    answer whatever decides (section 3).

    Args:
        has_pressure: whether the engines know their expert pressure; those with the whole network do not.
        period_ms: interval at which figures come, as those of vLLM's coordinator come every 100 ms. None means with the
            output of every step.
    """
    figures = policy.needs.figures
    sent = tuple(name for name in figures if has_pressure or name != "expert_pressure")
    if not sent:
        return SignalSettings()
    if period_ms is None:
        return SignalSettings(channels=(ChannelSettings(figures=sent),))
    channel = ChannelSettings(figures=sent, channel=ReportChannel.BROADCAST, period_ms=period_ms)
    return SignalSettings(channels=(channel,))


def num_until_full(bed: Testbed, rows: Rows) -> int:
    """The number of first requests whose distinct blocks and answers would fill the KV caches of all engines.

    It is at least 30 % of the requests, in which batches grow to their lasting size, and at most a half.
    """
    maker = RequestMaker(rows, RequestForm(block_size=bed.block_size))
    capacity = bed.num_engines * bed.num_blocks
    seen: set[bytes] = set()
    least, most = (int(share * len(rows)) for share in _LONG_LEAD_IN)
    num_answer_blocks = 0.0
    for at in range(most):
        seen.update(split_hashes(maker.make(at, 0)[0].block_hashes))
        num_answer_blocks += int(rows.num_output_tokens[at]) / bed.block_size
        if len(seen) + num_answer_blocks >= capacity:
            return max(at, least)
    return most


def measured(results: Results, num_lead_in: int | None = None) -> ServingFigures:
    """The figures of a run.

    Args:
        num_lead_in: first requests left out. None means LEAD_IN of all.

    Raises:
        AssertionError: a request was refused or not answered, and the figures would leave it out.
    """
    assert results.is_answered.all(), f"not all were answered: {results.refusals}"
    first = int(LEAD_IN * len(results)) if num_lead_in is None else num_lead_in
    counted = slice(first, None)
    gaps = results.num_tokens[counted].astype(np.int64) - 1
    spans = (results.last_token_ns - results.first_token_ns)[counted]
    prefill = counted_prefill(results, first)
    work = prefill.sum(1)
    requests = np.bincount(results.engine[counted], minlength=results.num_engines)
    return ServingFigures(
        num_requests=len(results),
        num_counted=len(results) - first,
        span_s=float(results.arrival_ns.max() - results.arrival_ns[first]) / NS_PER_S,
        ttft_ms=latency_ms((results.first_token_ns - results.arrival_ns)[counted]),
        tpot_ms=latency_ms(spans[gaps > 0] / gaps[gaps > 0]),
        hit_ratio=float(results.num_hit_tokens[counted].sum() / results.num_prompt_tokens[counted].sum()),
        request_imbalance=float(requests.max() / requests.mean()),
        prefill_imbalance=float(work.max() / work.mean()),
        unlike_prefill_s=(float(prefill[work.argmax()].mean()), float(prefill[work.argmin()].mean())),
        requests_per_s=middle_rate(results.last_token_ns),
    )


def sustained_rate(bed: Testbed, load: TimedLoad, make_policy: Callable[[], RoutePolicy]) -> float:
    """The most requests a second that the testbed bears under a policy without a queue that grows.

    A queue grows if the mean TTFT of the last quarter of the requests is over _GROWS times that of the second. The rate
    is changed by _STEP until one is found that is borne below one that is not, and _NUM_HALVINGS narrow the two.

    Args:
        load: requests whose order and relative times are kept; the search begins at its rate, and ends at _MOST_STEPS
            from it where a load is too short for a queue.
        make_policy: makes the policy, new for each run.
    """

    def is_borne(rate: float) -> bool:
        policy = make_policy()
        results = run(bed, replace(load, offsets_ns=at_rate(load.offsets_ns, rate)), policy, signals_of(policy))
        quarters = np.array_split((results.first_token_ns - results.arrival_ns).astype(np.float64), 4)
        return bool(quarters[3].mean() <= _GROWS * quarters[1].mean())

    goes_up = is_borne(load.rate)
    borne = too_high = load.rate
    for _ in range(_MOST_STEPS):
        rate = borne * _STEP if goes_up else too_high / _STEP
        if is_borne(rate) != goes_up:
            borne, too_high = (borne, rate) if goes_up else (rate, too_high)
            break
        borne = too_high = rate
    for _ in range(_NUM_HALVINGS):
        middle = (borne * too_high) ** 0.5
        borne, too_high = (middle, too_high) if is_borne(middle) else (borne, middle)
    return borne


def batch_figures(results: Results, num_lead_in: int, num_batches: int) -> dict[str, tuple[float, ...]]:
    """Figures of successive parts of a run, from which intervals follow (the method of batch means).

    Returns:
        By figure, its value in each batch, ms: TTFT and TPOT, mean and P99.
    """
    ttft_ns, gaps = results.first_token_ns - results.arrival_ns, results.num_tokens.astype(np.int64) - 1
    tpot_ns = (results.last_token_ns - results.first_token_ns) / np.maximum(gaps, 1)
    edges = np.linspace(num_lead_in, len(results), num_batches + 1).astype(int)
    found: dict[str, tuple[float, ...]] = {}
    for name, values, is_counted in (("TTFT", ttft_ns, gaps >= 0), ("TPOT", tpot_ns, gaps > 0)):
        parts = [values[a:b][is_counted[a:b]] for a, b in itertools.pairwise(edges)]
        latencies = [latency_ms(part) for part in parts]
        found[f"{name} mean"] = tuple(latency.mean for latency in latencies)
        found[f"{name} P99"] = tuple(latency.p99 for latency in latencies)
    return found


def paired_interval(
    ours: list[float], others: list[float], quantile: Callable[[int], float]
) -> tuple[float, float, float]:
    """The mean of `ours / others - 1` over runs with equal seeds, and its 95 % interval (Student's t).

    Args:
        quantile: returns the 97.5 % quantile of t for the degrees of freedom.
    """
    ratios = np.asarray(ours) / np.asarray(others) - 1
    mean = float(ratios.mean())
    if len(ratios) < 2:
        return mean, float("-inf"), float("inf")
    half = quantile(len(ratios) - 1) * float(ratios.std(ddof=1)) / len(ratios) ** 0.5
    return mean, mean - half, mean + half


def counted_prefill(results: Results, first_row: int) -> Floats:
    """Prefill seconds while requests arrived, from `first_row` on, float64[engines, windows]."""
    first, last = results.arrival_ns[first_row] // WINDOW_NS, results.arrival_ns.max() // WINDOW_NS
    return results.prefill_seconds()[:, first : last + 1]


def latency_ms(values_ns: NDArray[np.int64] | Floats) -> Latency:
    """The latency figures of values in nanoseconds."""
    values = values_ns / 1e6
    return Latency(float(values.mean()), float(np.percentile(values, 50)), float(np.percentile(values, 99)))
