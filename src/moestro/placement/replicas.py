"""How many copies each expert gets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.expert_table import EMPTY
from moestro.placement.budget import Allowance
from moestro.placement.copies import Packing, held_by, live_counts, normal_shares
from moestro.placement.problem import TINY, Experts, PlaceProblem
from moestro.placement.traffic import Floats

# A layer keeps more copies as long as they raise its smallest possible load by no more than this; without a price of
# reading weights they never do, and copies make loads divisible.
COPIES_MAY_COST = 0.005
LAST_CHOICE = 1e6  # times the even load: above any load, so that other devices come first


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


def restore(problem: PlaceProblem, packing: Packing, allowance: Allowance) -> NDArray[np.intp]:
    """Place every expert without a copy into an empty slot, or into that of an expert with further copies.

    Coverage comes before limits: a device that may receive nothing more is the last choice, but a choice.

    Returns:
        Batches that changed.
    """
    num_experts = problem.shape[1]
    changed = np.zeros(len(packing.expert), np.bool_)
    while True:
        counts = live_counts(packing.expert, num_experts)
        batch = np.flatnonzero((counts == 0).any(axis=1))
        if not len(batch):
            return np.flatnonzero(changed)
        changed[batch] = True
        lost = np.where(counts[batch] == 0, problem.token_s[batch], -1.0).argmax(axis=1)
        expert = packing.expert[batch]
        is_free = (expert == EMPTY) & problem.room
        is_spare = (expert != EMPTY) & (counts[batch[:, None, None], expert] > 1)
        key = (problem.load(packing.work[batch])[:, :, None] - packing.work[batch]) / problem.even_load(
            packing.work[batch]
        ).clip(TINY)[:, None, None]
        key = key + LAST_CHOICE * (allowance.each < 1)[:, None]
        key[~(is_free | is_spare)] = np.inf
        slot = key.reshape(len(batch), -1).argmin(axis=1)
        _put(problem, packing, batch, slot, lost, np.ones(len(batch)))
        np.subtract.at(allowance.each, slot // expert.shape[2], 1.0)
        allowance.total -= len(batch)


def add_copies(problem: PlaceProblem, packing: Packing, threshold: Floats, allowance: Allowance) -> None:
    """Give experts whose copies are too heavy one more, in an empty slot or that of an expert that can spare it.

    Args:
        threshold: float64[batches], seconds of a copy above which its expert gets another one.
    """
    num_batches, num_experts, num_devices, num_slots = problem.shape
    for _ in range(num_devices):
        counts = live_counts(packing.expert, num_experts)
        per_copy = np.where(counts < num_devices, copy_work(problem, counts), -1.0)
        hot = per_copy.argmax(axis=1)
        batch = np.flatnonzero(per_copy[np.arange(num_batches), hot] > threshold)
        if not len(batch):
            return
        hot, counts, expert, work = hot[batch], counts[batch], packing.expert[batch], packing.work[batch]
        rows = np.arange(len(batch))
        # What a copy of an expert would weigh with one fewer; the last copy stays.
        spared = np.where(counts > 1, problem.token_s[batch] / np.maximum(counts - 1, 1), np.inf)
        spared = np.append(spared, np.zeros((len(batch), 1)), axis=1)
        after = problem.token_s[batch, hot] / (counts[rows, hot] + 1)
        harm = spared[rows[:, None, None], expert]
        is_open = problem.room & ~packing.held[batch, hot][:, :, None] & (harm <= after[:, None, None])
        key = np.where(is_open, problem.load(work)[:, :, None] - work + harm, np.inf)
        slot = key.reshape(len(batch), -1).argmin(axis=1)
        ok = np.isfinite(key.reshape(len(batch), -1)[rows, slot])
        if allowance.is_limited and ok.any():
            at = np.flatnonzero(ok)
            pairs = np.stack([slot[at] // num_slots] * 2, axis=1)
            receives = problem.moved[batch[at], hot[at], pairs[:, 0]].astype(np.int64)
            gain = per_copy[batch[at], hot[at]]
            ok[at] = allowance.admit(gain, pairs, np.stack([receives, np.zeros_like(receives)], axis=1))
        if not ok.any():
            return
        share = 1.0 / counts[rows, hot]
        _put(problem, packing, batch[ok], slot[ok], hot[ok], share[ok])


def _put(
    problem: PlaceProblem, packing: Packing, batch: NDArray[np.intp], slot: Experts, expert: Experts, share: Floats
) -> None:
    """Put experts into slots, numbered over all devices, and scale their shares with those of their other copies."""
    num_slots = packing.expert.shape[2]
    where = (batch, slot // num_slots, slot % num_slots)
    packing.expert[where], packing.share[where] = expert, share
    now = packing.expert[batch]
    shares = normal_shares(now, packing.share[batch], problem.shape[1])
    packing.share[batch] = shares
    packing.work[batch] = problem.only_work(batch).work(now, shares)
    packing.held[batch] = held_by(now, problem.shape[1])
