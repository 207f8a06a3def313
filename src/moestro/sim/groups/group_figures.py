"""Figures of a group of workers: who waited, what was sent, and the throughput that no mode exceeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable
from moestro.cost.model import Batch
from moestro.cost.popularity import PopularityForm
from moestro.sim.figures.results import Results
from moestro.sim.groups.group_builder import GroupSetup, SimGroup, deployment_of
from moestro.sim.groups.lock_step_group import LockStepGroup
from moestro.sim.groups.throughput_bound import LeastTimes, drawn_visits, least_times, least_work_ns, throughput_bound
from moestro.sim.groups.worker_group import WorkerGroup
from moestro.sim.settings import PolicySettings


class PlanFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Placement while serving, in all groups of one policy's run.

    Attributes:
        num_plans: answers of the placement policy.
        num_moving_plans: answers by which at least one copy moves.
        num_moves: copies that devices received.
    """

    num_plans: int
    num_moving_plans: int
    num_moves: int


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all groups of one policy's run.

    Attributes:
        num_attention_workers, num_expert_workers: workers of a group; the former have experts too if the latter are 0.
        stall_shares: share of its group's time, in which the group has requests, for which each worker does not
            compute; all groups one after another, attention workers first.
        num_messages, num_bytes: messages between workers and their bytes. None in lock-step, which has collectives.
        bound_same, bound_permuted: output tokens a second that no mode exceeds with this division of the workers, if
            all layers have the same hot experts and if each layer has others.
        share_of_bound: output tokens a second over the bound that holds for this run.
        plans: figures of placement while serving. None where experts stay.
    """

    num_attention_workers: int
    num_expert_workers: int
    stall_shares: tuple[float, ...]
    num_messages: int | None
    num_bytes: int | None
    bound_same: float
    bound_permuted: float
    share_of_bound: float
    plans: PlanFigures | None = None


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
    loops = [group.loop for group in groups if isinstance(group, LockStepGroup) and group.loop is not None]
    if not loops:
        return None
    num_moves = [plan.num_moves for loop in loops for plan in loop.plans]
    return PlanFigures(
        num_plans=len(num_moves),
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
