"""Figures of a group of workers: who waited, what was sent, and the throughput that no mode exceeds.

The bound on the throughput is 1 / (time that the busiest device must work for one token): a device that must work for
t ns per token completes at most 1e9 / t tokens a second, whatever a scheduler does. The work of a token is fixed by the
experts that it visits and by who holds them. Work that several devices can do is spread so that the busiest device has
the least: attention of any request, and an expert with copies. A token is a decode token; prefill comes on top, so the
bound holds for output tokens with any prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable
from moestro.core.work import request_key
from moestro.cost.drawn_step import ExpertGate
from moestro.cost.model import Batch, PopularityForm, StageCostModel
from moestro.sim.groups.group_builder import SimGroup, deployment_of
from moestro.sim.groups.group_setup import GroupSetup
from moestro.sim.groups.lock_step_group import LockStepGroup
from moestro.sim.groups.worker_group import WorkerGroup
from moestro.sim.results import GroupFigures, PlanFigures, Results
from moestro.sim.settings import PolicySettings

Floats = NDArray[np.float64]

_MAX_PASSES = 1000  # a few passes suffice; the limit only guards against a cycle of rounding errors
_TOLERANCE = 1e-9  # relative change of the busiest device's work at which spreading ends


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastTimes:
    """Least time of each stage for one token, at the batch size that is best for it.

    Attributes:
        token_ns: attention and dense parts of all layers, and the sampler.
        expert_ns: one expert over one row; float64[layers, experts] where experts have different batches.
    """

    token_ns: float
    expert_ns: float | Floats


def least_times(cost: StageCostModel, batch: Batch, most_rows: int) -> LeastTimes:
    """Find the least times per token over batch sizes.

    Args:
        cost: prices of the stages.
        batch: largest batch of one attention stage, decodes; its first n units are the smaller batches.
        most_rows: most rows of one call of an expert.
    """
    sizes = _sizes(len(batch.start))
    attention = [
        sum(
            group.num_layers * cost.attention_ns(group.layers[0], Batch(batch.start[:n], batch.num_tokens[:n]))
            for group in cost.network.groups
        )
        / int(batch.num_tokens[:n].sum())
        for n in sizes
    ]
    sampling = [cost.sample_ns(n) / n for n in sizes]
    experts = [cost.expert_ns(n) / n for n in _sizes(most_rows)] if cost.network.experts else [0.0]
    return LeastTimes(token_ns=min(attention) + min(sampling), expert_ns=min(experts))


def _sizes(most: int) -> list[int]:
    """Every size up to 64, then about 3 % more each time, and `most`."""
    sizes = {*range(1, min(most, 64) + 1), most}
    size = 64.0
    while size < most:
        sizes.add(int(size))
        size *= 1.03
    return sorted(sizes)


def drawn_visits(gate: ExpertGate, num_layers: int, num_tokens: int = 1 << 14) -> Floats:
    """Return a token's mean visits to each expert, float64[layers, experts], from a sample of draws.

    A token chooses no expert twice, so it visits a hot expert less often than top-k times its popularity. The standard
    error of the default sample is at most 0.004.
    """
    keys = np.array([request_key(number) for number in range(num_tokens)], np.uint64)
    visits: Floats = gate.count(keys, range(num_layers)) / num_tokens
    return visits


def least_work_ns(
    visits: Floats,
    times: LeastTimes,
    table: ExpertTable,
    attention_workers: Sequence[int],
    slowdown: Floats | None = None,
) -> Floats:
    """Return the least work of each device per token, float64[workers], ns, spread so that the largest is least.

    Args:
        visits: float64[layers, experts], mean visits of a token: `drawn_visits`, or a run's counts over its tokens.
        times: least times of the stages.
        table: slots of each worker.
        attention_workers: workers that compute attention; any of them may serve any request.
        slowdown: float64[workers], factor on the times of each worker. None means 1 for all.
    """
    slowdown = np.ones(len(table.logical_of)) if slowdown is None else slowdown
    copies = (table.num_copies > 0) & table.is_alive[:, None, None]
    num_copies = copies.sum(axis=0)
    work_ns = visits * times.expert_ns
    fixed_ns = (copies * np.where(num_copies == 1, work_ns, 0.0)).sum(axis=(1, 2)) * slowdown
    amounts, holders = [times.token_ns], [np.array(attention_workers)]
    for layer, expert in np.argwhere(num_copies > 1).tolist():
        amounts.append(float(work_ns[layer, expert]))
        holders.append(np.flatnonzero(copies[:, layer, expert]))
    return _spread(fixed_ns, amounts, holders, slowdown)


def throughput_bound(work_ns: Floats) -> float:
    """Return the output tokens per second that no mode exceeds, from each device's least work per token, ns."""
    return 1e9 / float(work_ns.max())


def largest_share(work_ns: Floats) -> float:
    """Return the busiest device's share of all work. No mode exceeds its inverse as speedup over one device."""
    return float(work_ns.max() / work_ns.sum())


def _spread(
    fixed_ns: Floats, amounts: Sequence[float], holders: Sequence[NDArray[np.int64]], slowdown: Floats
) -> Floats:
    """Add divisible amounts to their holders so that the largest total is least.

    Levelling one amount at a time minimises the sum of squares, weighted by speed, and the minimum of that sum also has
    the least maximum (Fujishige 1980: lexicographically optimal base of a polymatroid with weights).
    """
    total_ns = fixed_ns.copy()
    shares = [np.zeros(len(some)) for some in holders]
    previous = -1.0
    for _ in range(_MAX_PASSES):
        for index, (amount, some) in enumerate(zip(amounts, holders, strict=True)):
            others = total_ns[some] - shares[index]
            shares[index] = _level(others, amount, slowdown[some])
            total_ns[some] = others + shares[index]
        squares = float((total_ns**2 / slowdown).sum())
        if abs(squares - previous) <= _TOLERANCE * squares:
            break
        previous = squares
    return total_ns


def _level(heights: Floats, amount: float, slowdown: Floats) -> Floats:
    """Pour `amount` on `heights` as water into vessels, each 1 / slowdown wide: the lowest ones get a common level."""
    order = np.argsort(heights)
    ordered, width = heights[order], 1 / slowdown[order]
    levels = ((ordered * width).cumsum() + amount) / width.cumsum()
    level = levels[int(np.flatnonzero(levels > ordered)[-1])] if amount > 0 else ordered[0]
    filled: Floats = np.maximum(level - heights, 0.0)
    return filled


def group_figures(
    setup: GroupSetup, policy: PolicySettings, groups: Sequence[SimGroup], results: Results
) -> GroupFigures:
    """Compute the figures of a run whose groups are all of one policy."""
    bounds = {
        hot_ids: len(groups) * _bound(setup, policy, replace(setup.popularity, hot_ids=hot_ids), results)
        for hot_ids in ("same", "permuted")
    }
    links = [group.links for group in groups if isinstance(group, WorkerGroup)]
    span_ns = int(results.last_token_ns.max() - results.arrival_ns.min())
    tokens_per_s = int(results.num_tokens.sum()) / span_ns * 1e9 if span_ns else 0.0
    return GroupFigures(
        num_attention_workers=policy.num_attention_workers(setup.group),
        num_expert_workers=policy.num_expert_workers,
        stall_shares=tuple(share for number, group in enumerate(groups) for share in _stalls(group, number, results)),
        num_messages=sum(each.num_messages for each in links) if links else None,
        num_bytes=sum(each.num_bytes for each in links) if links else None,
        bound_same=bounds["same"],
        bound_permuted=bounds["permuted"],
        share_of_bound=tokens_per_s / bounds[setup.popularity.hot_ids],
        plans=_plans(groups),
    )


def _plans(groups: Sequence[SimGroup]) -> PlanFigures | None:
    ranks = [group for group in groups if isinstance(group, LockStepGroup)]
    placements = [group.placement for group in ranks if group.placement is not None]
    if not placements:
        return None
    decisions = [each for placement in placements for each in placement.decisions]
    num_moves = [each.num_moves for each in decisions if each.plan is not None]
    return PlanFigures(
        num_plans=len(num_moves),
        num_failed_plans=len(decisions) - len(num_moves),
        num_moving_plans=sum(num > 0 for num in num_moves),
        num_moves=sum(num_moves),
    )


def _stalls(group: SimGroup, number: int, results: Results) -> list[float]:
    num_seats = len(group.seats)
    rows = results.is_answered & (results.engine // num_seats == number)
    served_ns = covered_ns(results.arrival_ns[rows], results.last_token_ns[rows])
    shares: list[float] = (1 - group.busy_ns / max(served_ns, 1)).tolist()
    return shares if served_ns else [0.0] * len(shares)


def covered_ns(starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64]) -> int:
    """Return the time that is covered by at least one of the intervals, ns."""
    order = np.argsort(starts_ns, kind="stable")
    starts, ends = starts_ns[order], np.maximum.accumulate(ends_ns[order])
    if not len(starts):
        return 0
    gaps = np.maximum(starts[1:] - ends[:-1], 0)
    return int(ends[-1] - starts[0] - gaps.sum())


def _bound(setup: GroupSetup, policy: PolicySettings, popularity: PopularityForm, results: Results) -> float:
    table = deployment_of(setup, policy).table
    num_ranks = policy.num_attention_workers(setup.group)
    if policy.plans_placement:  # any expert may come to any worker, so work may be spread over all of them
        shape = (num_ranks, table.logical_of.shape[1], table.num_experts)
        everywhere = np.broadcast_to(np.arange(table.num_experts, dtype=np.int32), shape).copy()
        table = ExpertTable(0, everywhere, table.num_experts, table.is_alive)
    work_ns = least_work_ns(
        _visits(setup, popularity), _least_times(setup, num_ranks, results), table, range(num_ranks), setup.slowdown
    )
    return throughput_bound(work_ns)


@lru_cache(maxsize=2)
def _visits(setup: GroupSetup, popularity: PopularityForm) -> NDArray[np.float64]:
    network = setup.cost.network
    visits = drawn_visits(setup.gate(popularity), network.num_layers)
    visits[[layer for group in network.groups if not group.has_experts for layer in group.layers]] = 0
    return visits


def _least_times(setup: GroupSetup, num_ranks: int, results: Results) -> LeastTimes:
    """Least times of the run's mean decode, at any size of batch that a worker can have.

    With prompts to compute, a batch may have as many tokens as a step may have, because decodes share its weights.
    """
    engines = setup.engines
    num_tokens = engines.max_num_seqs if engines.dummy_kv else engines.max_num_seqs + engines.max_num_batched_tokens
    decoded = results.num_tokens.astype(np.float64)
    context = float((decoded * (results.num_prompt_tokens + decoded / 2)).sum() / max(decoded.sum(), 1))
    batch = Batch(np.full(num_tokens, round(context), np.int64), np.ones(num_tokens, np.int64))
    return least_times(setup.cost, batch, num_tokens * num_ranks)
