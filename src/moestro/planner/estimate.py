"""Estimates without simulation, by which the search is ordered and cut: one step in its mean state.

In lock-step the step is priced as the simulator prices it, with drawn experts. In `async` the busiest GPU works without
a pause, and all tokens of a layer run as one item, so the estimate is more than any scheduler reaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from moestro.core.token_keys import request_keys, token_keys
from moestro.cost.drawn_step import KeyedBatch, StepPricer
from moestro.cost.model import Batch
from moestro.planner.simulated import FittingDivision
from moestro.sim.group_builder import deployment_of
from moestro.sim.throughput_bound import LeastTimes, drawn_visits, least_work_ns

Floats = NDArray[np.float64]

_NUM_DRAWS = 2  # steps whose prices are averaged; each has as many draws as layers


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
        each = max(num_requests / fitting.num_engines, 1.0)
        budget = fitting.limits(num_requests).max_num_batched_tokens
        prefill_share = fitting.question.lengths.mean_prompt / fitting.question.lengths.mean_output
        num_decodes = max(round(min(each, budget / (1 + prefill_share))), 1)
        if fitting.division.mode == "async":
            step_ns = self._async_ns(fitting, num_decodes, prefill_share)
        else:
            step_ns = self._lock_step_ns(fitting, num_decodes, prefill_share)
        return EstimatedPoint(
            num_requests=num_requests,
            tokens_per_s=fitting.num_engines * num_decodes / step_ns * 1e9,
            itl_ms=step_ns / 1e6,
        )

    def _lock_step_ns(self, fitting: FittingDivision, num_decodes: int, prefill_share: float) -> float:
        deployment, pricing = fitting.lock_step(self._seed)
        pricer = StepPricer(deployment, pricing.num_segments)
        batch = mean_batch(fitting, num_decodes, prefill_share)
        times = []
        for draw in range(_NUM_DRAWS):
            batches: list[KeyedBatch | None] = []
            for rank in range(deployment.num_ranks):
                numbers = np.arange(len(batch.start)) + (draw * deployment.num_ranks + rank) * len(batch.start)
                start, tokens = batch.start.astype(np.int32), batch.num_tokens.astype(np.int32)
                batches.append(KeyedBatch(batch, token_keys(request_keys(numbers), start, tokens)))
            times.append(pricing.price(pricer.draw(batches)).duration_ns)
        return fmean(times)

    def _async_ns(self, fitting: FittingDivision, num_decodes: int, prefill_share: float) -> float:
        setup, cost, search = fitting.setup(self._seed), fitting.cost(), fitting.question.settings.search
        network, num_homes = cost.network, fitting.division.num_attention_workers
        if self._visits is None:
            self._visits = drawn_visits(setup.gate(), network.num_layers)
            self._visits[[layer for group in network.groups if not group.has_experts for layer in group.layers]] = 0
        batch = mean_batch(fitting, num_decodes, prefill_share)
        host_ns = search.host_attention_us * 1e3  # is hidden behind the item before, unless it takes longer
        attention = sum(
            group.num_layers * max(cost.attention_ns(group.layers[0], batch), host_ns) for group in network.groups
        )
        rows = self._visits * num_homes * (num_decodes + num_decodes * prefill_share)
        items = np.array([cost.expert_ns(n) for n in range(int(rows.max()) + 2)], np.float64)
        item_ns = np.maximum(items[np.maximum(np.ceil(rows), 1).astype(np.int64)], search.host_expert_us * 1e3)
        # Time for all rows of a pass, by one item, or by one item for each of fewer rows than one.
        pass_ns = item_ns * np.minimum(rows, 1.0)
        per_visit = np.divide(pass_ns, self._visits * num_homes * num_decodes, where=self._visits > 0, out=0 * pass_ns)
        times = LeastTimes(token_ns=(attention + cost.sample_ns(num_decodes)) / num_decodes, expert_ns=per_visit)
        table = deployment_of(setup, fitting.policy).table
        work_ns = least_work_ns(self._visits, times, table, range(num_homes))
        return float(work_ns.max()) * num_homes * num_decodes


def mean_batch(fitting: FittingDivision, num_decodes: int, prefill_share: float) -> Batch:
    """Return the units of a mean step of one engine: decodes, and the prompts that are computed for each token."""
    lengths = fitting.question.lengths
    num_prefill = num_decodes * prefill_share
    num_chunks = max(round(num_prefill / lengths.mean_prompt), 1) if num_prefill >= 1 else 0
    chunk = max(round(num_prefill / num_chunks), 1) if num_chunks else 0
    start = np.append(np.full(num_decodes, round(lengths.mean_context), np.int64), np.zeros(num_chunks, np.int64))
    tokens = np.append(np.ones(num_decodes, np.int64), np.full(num_chunks, chunk, np.int64))
    return Batch(start, tokens)
