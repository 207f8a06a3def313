"""Figures of a deployment with a constant number of requests: simulated, estimated, and as curves of ever more.

Estimates order and cut the search. They take a step in its mean state, and price steps with prompts apart from those
without. In lock-step they price with drawn experts, as the simulator does. In `async` they suppose that the busiest GPU
works without a pause and runs all tokens of a layer as one item, so they are above what any scheduler reaches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.experts.expert_table import ExpertTable
from moestro.core.work import request_keys, token_keys
from moestro.cost.drawn_step import Deployment, KeyedBatch, StepPricer
from moestro.cost.links import all_reduce
from moestro.cost.model import Batch
from moestro.cost.roofline import VLLM_HOST, HostCost, Roofline, RooflineSettings
from moestro.engine.settings import SchedulerSettings
from moestro.planner.divisions import GpuDivision, MemoryUse, share_of
from moestro.planner.question import PlanQuestion
from moestro.planner.settings import ObjectiveSettings
from moestro.planner.systems import STEP_POLICY, RunLimits
from moestro.sim.closed_loop import SPREAD_S, Observation, Replacing, run_observed
from moestro.sim.groups.group import Ranks
from moestro.sim.groups.group_builder import deployment_of, make_group, pricing_of
from moestro.sim.groups.group_figures import LeastTimes, drawn_visits, least_work_ns
from moestro.sim.groups.group_setup import GroupSetup
from moestro.sim.groups.lock_step_group import LOCK_STEP, LockStepGroup, StepPricing, plain_replica
from moestro.sim.settings import GroupSettings, PolicySettings, SimEngineSettings

_NO_HOST = HostCost(step_ns=0, sequence_ns=0)
_NO_LIMIT = 1 << 30
_MULTIPLE = 8  # limits on sequences are multiples of this
# Tokens of each request, in the mean, before a run is observed and while it is, and new requests in the meantime, if
# these take longer. 2 + 4 tokens are within 5 % of 4 + 6 for 1,200 requests in `async`, whose runs take long.
_ASYNC_PASSES, _PASSES = (2, 4), (3, 8)
_ASYNC_NEW_REQUESTS, _NEW_REQUESTS = 16, 64
_MOST_PASSES = 256  # steps are nearly alike with few requests


class SimulatedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a deployment with a constant number of requests.

    Attributes:
        num_requests: requests in progress in all groups.
        seed: seed of the requests and of the experts that they visit.
        tokens_per_s: output tokens a second of all groups.
        itl_ms, itl_p99_ms: time between two tokens of an answer, mean and 99th percentile.
        ttft_ms, ttft_p99_ms: time from a request to its first token, mean and 99th percentile. NaN means that no
            request began in the run.
    """

    num_requests: int
    seed: int
    tokens_per_s: float
    itl_ms: float
    itl_p99_ms: float
    ttft_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class FittingDivision:
    """A deployment that fits, and the memory that it uses."""

    question: PlanQuestion
    division: GpuDivision
    memory: MemoryUse

    @property
    def num_engines(self) -> int:
        """Engines of all groups."""
        return self.division.num_groups * self.division.num_engines

    @property
    def most_requests(self) -> int:
        """Requests that fit the KV caches at once, in the mean."""
        return self.num_engines * int(self.memory.kv_tokens // self.question.lengths.mean_context)

    def limits(self, num_requests: int) -> RunLimits:
        """Limits under which this number of requests run at once.

        A step has at least two tokens for each sequence, as `async` mode needs, and what as many requests need in the
        mean: a token of each answer, and the prompts of new requests.
        """
        each = -(-num_requests // self.num_engines)
        max_num_seqs = -(-each // _MULTIPLE) * _MULTIPLE
        lengths = self.question.lengths
        tokens_each = max(1 + lengths.mean_prompt / lengths.mean_output, 2)
        num_tokens = max(self.question.settings.search.max_num_batched_tokens, math.ceil(max_num_seqs * tokens_each))
        return RunLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens)

    def run(self, num_requests: int, seed: int) -> SimulatedPoint:
        """Simulate one of the groups with its part of the requests, and scale the figures to all groups."""
        lengths, num_groups = self.question.lengths, self.division.num_groups
        each = max(round(num_requests / num_groups), 1)
        is_async = self.division.mode == "async"
        warm, least = _ASYNC_PASSES if is_async else _PASSES
        num_new = _ASYNC_NEW_REQUESTS if is_async else _NEW_REQUESTS
        passes = max(least, min(round(num_new * lengths.mean_output / each), _MOST_PASSES))
        num_more = 1 + round(2 * each * (warm + passes) / lengths.mean_output) + each // 4
        # In `async`, requests that enter at once would go through the layers as one wave. In lock-step they do anyway.
        spread_s = min(SPREAD_S, self.question.settings.objectives.max_itl / 1e3) if is_async else 0.0
        load = lengths.steady_load(each, num_more, spread_s, seed)
        observation = Observation(FOREVER_NS, FOREVER_NS, first_tokens=warm * each, most_tokens=(warm + passes) * each)
        group = self.group(seed, self.limits(each * num_groups))
        results = run_observed([group], observation, load, Replacing(load), computes_prompts=True)
        itl_ms = np.array(observation.gaps_ns) / 1e6
        new = np.flatnonzero(results.arrival_ns >= 0)[load.num_first :]
        # A request without a token at the end has waited at least until then.
        first_ns = np.where(results.first_token_ns[new] >= 0, results.first_token_ns[new], observation.at_ns[-1])
        ttft_ms = (first_ns - results.arrival_ns[new]) / 1e6
        waits_ms = float(ttft_ms.mean()) if len(new) else 0.0
        # Little's law: requests in progress over the time of a request. Tokens over time would depend on how many of
        # the waves, in which requests gain tokens, end in so short a run.
        token_ms = (waits_ms + (lengths.mean_output - 1) * float(itl_ms.mean())) / lengths.mean_output
        return SimulatedPoint(
            num_requests=each * num_groups,
            seed=seed,
            tokens_per_s=num_groups * each / token_ms * 1e3,
            itl_ms=float(itl_ms.mean()),
            itl_p99_ms=float(np.percentile(itl_ms, 99)),
            ttft_ms=waits_ms if len(new) else float("nan"),
            ttft_p99_ms=float(np.percentile(ttft_ms, 99)) if len(new) else float("nan"),
        )

    def group(self, seed: int, limits: RunLimits) -> Ranks:
        """Build one group on virtual time."""
        bounds = SchedulerSettings(
            num_blocks=self.memory.num_blocks,
            block_size=self.question.settings.search.block_size,
            max_model_len=min(self.question.lengths.longest_requested, self.memory.kv_tokens),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_queued_reqs=_NO_LIMIT,
            enable_prefix_caching=False,
        )
        if self.division.mode == "async":
            return make_group(self.setup(seed), self.policy, bounds, 0)
        deployment, pricing = self.lock_step(seed)
        return LockStepGroup(bounds, deployment, pricing)

    # --- parts ------------------------------------------------------------------------------------------------------

    def setup(self, seed: int) -> GroupSetup:
        """What `sim.group_builder` needs to know of a group, under a seed."""
        question, search = self.question, self.question.settings.search
        hardware = question.settings.hardware
        engines = SimEngineSettings(
            gpu=question.gpu.name,
            gpu_memory_utilization=hardware.gpu_memory_utilization,
            host_attention_us=search.host_attention_us,
            host_expert_us=search.host_expert_us,
        )
        group = GroupSettings(
            num_workers=self.division.gpus_per_group,
            workers_per_machine=hardware.gpus_per_machine,
            link_within=question.within.name,
            link_across=question.across.name,
        )
        return GroupSetup(
            group=group, engines=engines, cost=self.cost(), popularity=question.popularity(seed), seed=seed
        )

    @property
    def policy(self) -> PolicySettings:
        """The mode, as `moestro sim` has it."""
        return PolicySettings(
            mode=self.division.mode,
            num_expert_workers=self.division.num_expert_workers,
            attention_step_policy=STEP_POLICY,
            expert_step_policy=STEP_POLICY,
            launch_ahead=self.question.launch_ahead,
        )

    def cost(self) -> Roofline:
        """Prices of the stages of one GPU."""
        share = share_of(self.question, self.division)
        return Roofline(RooflineSettings(network=share, gpu=self.question.gpu, host=_NO_HOST))

    def lock_step(self, seed: int) -> tuple[Deployment, StepPricing]:
        """Return the workers of a mode in lock-step, and the prices of its steps."""
        cost = self.cost()
        grouped = cost.grouped_experts_ns if self.question.groups_experts and cost.network.experts else None
        if self.division.mode != "fused":
            setup, policy = self.setup(seed), self.policy
            deployment = deployment_of(setup, policy)
            return replace(deployment, host=VLLM_HOST, grouped_experts_ns=grouped), pricing_of(policy)
        exchange = all_reduce(self.question.within, self.question.network, self.division.gpus_per_group)
        if cost.network.experts is None:
            none = ExpertTable(0, np.zeros((1, cost.network.num_layers, 0), np.int32), 0, np.ones(1, np.bool_))
            return Deployment(
                cost=cost, gate=None, table=none, num_ranks=1, exchange=exchange, host=VLLM_HOST
            ), LOCK_STEP
        replica = plain_replica(cost, self.setup(seed).gate(), exchange)
        return replace(replica, host=VLLM_HOST, grouped_experts_ns=grouped), LOCK_STEP


Floats = NDArray[np.float64]

_NUM_DRAWS = 2  # steps whose prices are averaged; each has as many draws as layers
_LEAST_SHARE = 0.005  # steps without a prompt, or with one, that are rarer are not priced


@dataclass(frozen=True, slots=True)
class EstimatedPoint:
    """Estimate for a number of requests.

    Attributes:
        num_requests: requests in progress in all groups.
        tokens_per_s: output tokens a second of all groups.
        itl_ms: mean time between two tokens of an answer.
    """

    num_requests: int
    tokens_per_s: float
    itl_ms: float


@dataclass(frozen=True, slots=True)
class MeanStep:
    """Steps of a group that are priced as one.

    Attributes:
        share: share of all steps.
        batches: batch of each engine. All have equally many units, decodes and chunks of prompts.
    """

    share: float
    batches: Sequence[Batch]


class Estimator:
    """Estimates deployments of one question under one seed.

    Args:
        seed: seed of the experts that tokens visit.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._visits: Floats | None = None

    def estimate(self, fitting: FittingDivision, num_requests: int) -> EstimatedPoint:
        """Estimate a deployment with a constant number of requests."""
        each = max(round(num_requests / fitting.num_engines), 1)
        num_chunks = chunks_of_prompt(fitting, each)
        mean_output = fitting.question.lengths.mean_output
        steps = mean_steps(fitting, each, num_chunks)
        step_ns = self._async_ns(fitting, steps) if fitting.division.mode == "async" else self._step_ns(fitting, steps)
        # A request is in a step with the last chunk of its prompt and in one for each further token.
        tokens_per_step = fitting.num_engines * each * mean_output / (num_chunks + mean_output - 1)
        return EstimatedPoint(
            num_requests=num_requests, tokens_per_s=tokens_per_step / step_ns * 1e9, itl_ms=step_ns / 1e6
        )

    def _step_ns(self, fitting: FittingDivision, steps: Sequence[MeanStep]) -> float:
        deployment, pricing = fitting.lock_step(self._seed)
        pricer = StepPricer(deployment, pricing.num_segments)
        mean_ns = 0.0
        for step in steps:
            each = len(step.batches[0].start)
            times = []
            for draw in range(_NUM_DRAWS):
                batches: list[KeyedBatch | None] = []
                for rank, batch in enumerate(step.batches, draw * len(step.batches)):
                    requests = request_keys(np.arange(each) + rank * each)
                    keys = token_keys(requests, batch.start.astype(np.int32), batch.num_tokens.astype(np.int32))
                    batches.append(KeyedBatch(batch, keys))
                times.append(pricing.price(pricer.draw(batches)).duration_ns)
            mean_ns += step.share * fmean(times)
        return mean_ns

    def _async_ns(self, fitting: FittingDivision, steps: Sequence[MeanStep]) -> float:
        network = fitting.cost().network
        setup = fitting.setup(self._seed)
        if self._visits is None:
            self._visits = drawn_visits(setup.gate(), network.num_layers)
            self._visits[[layer for group in network.groups if not group.has_experts for layer in group.layers]] = 0
        table = deployment_of(setup, fitting.policy).table
        homes = range(fitting.division.num_attention_workers)
        work_ns = [
            step.share * least_work_ns(self._visits, self._least_times(fitting, self._visits, step), table, homes)
            for step in steps
        ]
        return float(np.sum(work_ns, axis=0).max())

    def _least_times(self, fitting: FittingDivision, visits: Floats, step: MeanStep) -> LeastTimes:
        """Return the least times of a whole step, as if it were one token."""
        cost, search = fitting.cost(), fitting.question.settings.search
        host_ns = search.host_attention_us * 1e3  # is hidden behind the item before, unless it takes longer
        attention = sum(
            group.num_layers * max(cost.attention_ns(group.layers[0], batch), host_ns)
            for batch in step.batches
            for group in cost.network.groups
        )
        sampling = sum(cost.sample_ns(len(batch.start)) for batch in step.batches)
        rows = visits * sum(int(batch.num_tokens.sum()) for batch in step.batches)
        items = np.array([cost.expert_ns(n) for n in range(int(rows.max()) + 2)], np.float64)
        item_ns = np.maximum(items[np.maximum(np.ceil(rows), 1).astype(np.int64)], search.host_expert_us * 1e3)
        # Time for all rows of a step, by one item, or by one item for each of fewer rows than one.
        pass_ns = item_ns * np.minimum(rows, 1.0)
        per_visit = np.divide(pass_ns, visits, where=visits > 0, out=0 * pass_ns)
        return LeastTimes(token_ns=attention + sampling, expert_ns=per_visit)


def chunks_of_prompt(fitting: FittingDivision, each: int) -> int:
    """Return the steps that a mean prompt takes beside `each` - 1 decodes."""
    budget = fitting.limits(each * fitting.num_engines).max_num_batched_tokens
    return math.ceil(fitting.question.lengths.mean_prompt / (budget - each + 1))


def mean_steps(fitting: FittingDivision, each: int, num_chunks: int) -> list[MeanStep]:
    """Return the mean step of a group without a prompt, and the one with prompts.

    Each request is in a chunk of its prompt in as many of its steps as its prompt has chunks, independently of the
    others, so the number of chunks in a step is binomial.

    Args:
        fitting: the deployment.
        each: requests in progress in each engine.
        num_chunks: steps of a prompt.
    """
    num_engines, lengths = fitting.division.num_engines, fitting.question.lengths
    share = num_chunks / (num_chunks + lengths.mean_output - 1)
    num_requests = num_engines * each
    without = (1 - share) ** num_requests
    if without < _LEAST_SHARE:
        without = 0.0
    found = [] if not without else [MeanStep(without, _batches(fitting, each, 0, 0, num_chunks))]
    if 1 - without >= _LEAST_SHARE:
        mean = num_requests * share / (1 - without)  # of chunks in those steps that have any
        number = max(round(mean), 1)
        chunk = max(round(mean / number * lengths.mean_prompt / num_chunks), 1)
        found.append(MeanStep(1 - without, _batches(fitting, each, number, chunk, num_chunks)))
    return found


def _batches(fitting: FittingDivision, each: int, number: int, chunk: int, num_chunks: int) -> list[Batch]:
    """Return the batch of each engine: `number` chunks of `chunk` tokens, spread evenly, and decodes."""
    num_engines = fitting.division.num_engines
    context = round(fitting.question.lengths.mean_context)
    batches = []
    for engine in range(num_engines):
        own = number // num_engines + (engine < number % num_engines)
        start, tokens = np.full(each, context, np.int64), np.ones(each, np.int64)
        start[each - own :], tokens[each - own :] = chunk * (num_chunks - 1) // 2, chunk
        batches.append(Batch(start, tokens))
    return batches


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The most that a deployment gives within the objectives, read between two runs.

    Attributes:
        num_requests: requests in progress in all groups.
        tokens_per_s: output tokens a second.
        itl_ms, ttft_ms: mean latencies; of TTFT, NaN means that it is unknown.
    """

    num_requests: int
    tokens_per_s: float
    itl_ms: float
    ttft_ms: float


@dataclass(slots=True, eq=False)
class Curve:
    """Runs of one deployment under one seed.

    Attributes:
        fitting: the deployment.
        estimated_tokens_per_s: estimate of the throughput within the objectives.
        points: runs, in ascending order of requests.
        is_dominated: whether the search left it because it cannot be the best.
    """

    fitting: FittingDivision
    estimated_tokens_per_s: float
    points: list[SimulatedPoint] = field(default_factory=list)
    is_dominated: bool = False

    def run(self, num_requests: int, seed: int) -> SimulatedPoint:
        """Simulate a number of requests, unless this was done before."""
        for known in self.points:
            if known.num_requests == num_requests:
                return known
        point = self.fitting.run(num_requests, seed)
        if all(known.num_requests != point.num_requests for known in self.points):
            self.points.append(point)
            self.points.sort(key=lambda each: each.num_requests)
        return point

    def best(self, objectives: ObjectiveSettings) -> OperatingPoint | None:
        """Return the highest throughput within the objectives; None if no run keeps them."""
        return best_within(self.points, objectives)


def excess(point: SimulatedPoint, objectives: ObjectiveSettings) -> float:
    """Return the largest of the latencies as a multiple of its objective; above 1, an objective is missed."""
    ratios = [point.itl_ms / objectives.max_itl]
    for value, most in ((point.ttft_ms, objectives.max_ttft), (point.ttft_p99_ms, objectives.max_ttft_p99)):
        if most is not None and not math.isnan(value):
            ratios.append(value / most)
    return max(ratios)


def best_within(points: Sequence[SimulatedPoint], objectives: ObjectiveSettings) -> OperatingPoint | None:
    """Return the highest throughput within the objectives, on the line between neighbouring runs; None if none is.

    Args:
        points: runs, in ascending order of requests.
    """
    found = [_between(point, point, 0.0) for point in points if excess(point, objectives) <= 1]
    for low, high in pairwise(points):
        before, after = excess(low, objectives), excess(high, objectives)
        if before <= 1 < after:
            found.append(_between(low, high, (1 - before) / (after - before)))
    return max(found, key=lambda each: each.tokens_per_s, default=None)


def _between(low: SimulatedPoint, high: SimulatedPoint, share: float) -> OperatingPoint:
    def at(first: float, second: float) -> float:
        return first + share * (second - first)

    return OperatingPoint(
        num_requests=int(at(low.num_requests, high.num_requests)),
        tokens_per_s=at(low.tokens_per_s, high.tokens_per_s),
        itl_ms=at(low.itl_ms, high.itl_ms),
        ttft_ms=at(low.ttft_ms, high.ttft_ms) if share else low.ttft_ms,
    )
