"""How many copies each expert gets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.expert_table import EMPTY
from moestro.placement.problem import Experts, PlaceProblem
from moestro.placement.traffic import Floats

# A layer keeps more copies as long as they raise its smallest possible load by no more than this; without a price of
# reading weights they never do, and copies make loads divisible.
COPIES_MAY_COST = 0.005


def copy_work(problem: PlaceProblem, counts: Experts) -> Floats:
    """Return float64[batches, experts], seconds of each copy if the copies share evenly."""
    work: Floats = problem.token_s / counts
    if problem.expert_s > 0:
        work = work + problem.expert_s * (1 - problem.idle ** (1.0 / counts))
    return work


def copy_counts(problem: PlaceProblem) -> Experts:
    """Give each further copy to the expert with the most work per copy; stop where reading weights costs more.

    Returns:
        int64[batches, experts], at least 1 and at most the number of devices.
    """
    num_batches, num_experts, num_devices, _ = problem.shape
    num_extra = min(int(problem.room.sum()), num_experts * num_devices) - num_experts
    counts = np.ones((num_batches, num_experts), np.int64)
    every = np.arange(num_batches)
    per_copy = copy_work(problem, counts)
    total, speed = per_copy.sum(axis=1), problem.speed.sum()
    given, bounds = np.zeros((num_extra, num_batches), np.int64), np.empty((num_extra + 1, num_batches))
    fastest = problem.speed.max()
    for i in range(num_extra + 1):
        most = per_copy.argmax(axis=1)
        bounds[i] = np.maximum(total / speed, per_copy[every, most] / fastest)
        if i == num_extra:
            break
        given[i] = most
        total -= (per_copy * counts)[every, most] if problem.expert_s > 0 else 0.0
        counts[every, most] += 1
        now = counts[every, most]
        work = problem.token_s[every, most] / now
        if problem.expert_s > 0:
            work = work + problem.expert_s * (1 - problem.idle[every, most] ** (1.0 / now))
            total += work * now
        per_copy[every, most] = np.where(now < num_devices, work, -1.0)
    if problem.expert_s > 0:
        allowed = bounds <= bounds.min(axis=0) * (1 + COPIES_MAY_COST)
        last = num_extra - allowed[::-1].argmax(axis=0)  # the most copies that cost no more
        dropped = np.arange(num_extra)[:, None] >= last
        step, batch = np.nonzero(dropped)
        np.subtract.at(counts, (batch, given[step, batch]), 1)
    return counts


def live_counts(expert: Experts, num_experts: int) -> Experts:
    """Return int64[batches, experts], copies of each expert."""
    num_batches = len(expert)
    index = np.arange(num_batches)[:, None, None] * num_experts + expert
    counts = np.bincount(index[expert != EMPTY], minlength=num_batches * num_experts)
    return counts.reshape(num_batches, num_experts)


def even_shares(expert: Experts, num_experts: int) -> Floats:
    """Return float64[batches, devices, slots], equal parts for all copies of an expert; 0 for EMPTY."""
    counts = np.maximum(live_counts(expert, num_experts), 1)
    share: Floats = np.where(expert == EMPTY, 0.0, 1.0 / counts[np.arange(len(expert))[:, None, None], expert])
    return share


def held_by(expert: Experts, num_experts: int) -> NDArray[np.bool_]:
    """Return bool[batches, experts + 1, devices], who holds what; the last expert stands for EMPTY and is never held."""
    num_batches, num_devices, _ = expert.shape
    held = np.zeros((num_batches, num_experts + 1, num_devices), np.bool_)
    batch, device, slot = np.nonzero(expert != EMPTY)
    held[batch, expert[batch, device, slot], device] = True
    return held
