"""Estimates without simulation, by which the search is ordered and cut: a step in its mean state.

Steps with prompts are priced apart from those without. In lock-step they are priced as the simulator prices them, with
drawn experts. In `async` the busiest GPU works without a pause, and all tokens of a layer run as one item, so the
estimate is more than any scheduler reaches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from moestro.core.token_keys import request_keys, token_keys
from moestro.cost.drawn_step import KeyedBatch, StepPricer
from moestro.cost.model import Batch
from moestro.planner.simulated import FittingDivision
from moestro.sim.groups.group_builder import deployment_of
from moestro.sim.groups.throughput_bound import LeastTimes, drawn_visits, least_work_ns

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
