"""How many copies each expert gets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.search.activation import idle_parts
from moestro.placement.search.budget import Allowance
from moestro.placement.search.copies import Packing, live_counts
from moestro.placement.search.problem import Experts, PlaceProblem
from moestro.placement.traffic import Floats

# A layer keeps more copies as long as they raise its smallest possible load by no more than this; without a price of
# reading weights they never do, and copies make loads divisible.
COPIES_MAY_COST = 0.02
NUM_GIVERS = (
    8  # experts that may spare a copy for a pair: 288 slots on 144 devices .898 with 4, .912 with 8, .913 with 16
)


def copy_work(problem: PlaceProblem, counts: Experts) -> Floats:
    """Return float64[batches, experts], seconds of each copy if the copies share evenly."""
    work: Floats = problem.token_s / counts
    if problem.expert_s > 0:
        work = work + problem.expert_s * (1 - idle_parts(problem.idle, 1.0 / counts))
    return work


def _work_of(problem: PlaceProblem, batch: NDArray[np.intp], expert: Experts, counts: Experts) -> Floats:
    """Return `copy_work` of single experts."""
    work: Floats = problem.token_s[batch, expert] / counts
    if problem.expert_s > 0:
        work = work + problem.expert_s * (1 - idle_parts(problem.idle[batch, expert], 1.0 / counts))
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
        work = _work_of(problem, every, most, now)
        if problem.expert_s > 0:
            total += work * now
        per_copy[every, most] = np.where(now < num_devices, work, -1.0)
    if problem.expert_s > 0:
        allowed = bounds <= bounds.min(axis=0) * (1 + COPIES_MAY_COST)
        last = num_extra - allowed[::-1].argmax(axis=0)  # the most copies that cost no more
        dropped = np.arange(num_extra)[:, None] >= last
        step, batch = np.nonzero(dropped)
        np.subtract.at(counts, (batch, given[step, batch]), 1)
    return counts


def suit_pairs(problem: PlaceProblem, counts: Experts) -> Experts:
    """Change numbers of copies so that pairs of copies, the heaviest with the lightest, are lighter at most.

    With two slots on a device, many light copies of a heavy expert leave other heavy experts without a light partner.
    In each round a copy moves from one of the experts that can spare it to one of the heaviest pair.
    Takes devices of equal speed; with others it stays a heuristic.

    Returns:
        int64[batches, experts]
    """
    counts = counts.copy()
    num_copies = 2 * len(problem.speed)
    largest, pair = _heaviest_pair(copy_work(problem, counts), counts, num_copies)
    batch = np.arange(len(counts))
    while len(batch):
        now, token_s = counts[batch], problem.token_s[batch]
        spared = np.where(now > 1, token_s / np.maximum(now - 1, 1), np.inf)
        gives = np.argsort(spared, axis=1, kind="stable")[:, :NUM_GIVERS]
        tried = np.repeat(np.repeat(now[:, None, None], 2, axis=1), gives.shape[1], axis=2)
        at = np.ix_(*(np.arange(each) for each in tried.shape[:3]))
        tried[(*at, pair[batch][:, :, None])] += 1
        tried[(*at, gives[:, None])] -= 1
        is_allowed = ((tried >= 1) & (tried <= len(problem.speed))).all(axis=-1).reshape(len(batch), -1)
        tried = np.maximum(tried.reshape(len(batch), -1, now.shape[1]), 1)
        flat = tried.reshape(-1, now.shape[1])
        work = copy_work(problem.only_work(np.repeat(batch, tried.shape[1])), flat)
        then, pairs = _heaviest_pair(work, flat, num_copies)
        then = np.where(is_allowed, then.reshape(is_allowed.shape), np.inf)
        best, rows = then.argmin(axis=1), np.arange(len(batch))
        better = np.flatnonzero(then[rows, best] < largest[batch] * (1 - 1e-6))
        batch, best = batch[better], best[better]
        counts[batch], largest[batch] = tried[better, best], then[better, best]
        pair[batch] = pairs.reshape(*is_allowed.shape, 2)[better, best]
    return counts


def _heaviest_pair(work: Floats, counts: Experts, num_copies: int) -> tuple[Floats, Experts]:
    """Return float64[batches], the heaviest pair of the heaviest with the lightest copies; and its two experts."""
    rows = np.arange(len(work))[:, None]
    order = np.argsort(-work, axis=1, kind="stable")
    repeats = counts[rows, order]
    is_used = np.arange(num_copies) < np.minimum(repeats.sum(axis=1), num_copies)[:, None]
    weights, experts = np.zeros(is_used.shape), np.zeros(is_used.shape, np.int64)
    experts[is_used] = np.repeat(order.ravel(), repeats.ravel())[: int(is_used.sum())]
    weights[is_used] = np.repeat(work[rows, order].ravel(), repeats.ravel())[: int(is_used.sum())]
    half = num_copies // 2
    sums = weights[:, :half] + weights[:, : half - 1 : -1]
    heaviest = sums.argmax(axis=1)[:, None]
    pair = np.concatenate([experts[rows, heaviest], experts[rows, num_copies - 1 - heaviest]], axis=1)
    return sums.max(axis=1), pair


def add_copies(problem: PlaceProblem, packing: Packing, threshold: Floats, allowance: Allowance) -> None:
    """Give experts whose copies are too heavy one more, in an empty slot or that of an expert that can spare it.

    Args:
        threshold: float64[batches], seconds of a copy above which its expert gets another one.
    """
    num_batches, num_experts, num_devices, num_slots = problem.shape
    counts, every = live_counts(packing.expert, num_experts), np.arange(num_batches)
    per_copy = np.where(counts < num_devices, copy_work(problem, counts), -1.0)
    spared = np.append(_spared(problem.token_s, counts), np.zeros((num_batches, 1)), axis=1)
    for _ in range(num_devices):
        hot = per_copy.argmax(axis=1)
        batch = np.flatnonzero(per_copy[every, hot] > threshold)
        if not len(batch):
            return
        hot = hot[batch]
        slot, ok = _slots_to_fill(problem, packing, batch, hot, (counts, spared))
        if allowance.is_limited and ok.any():
            at = np.flatnonzero(ok)
            pairs = np.stack([slot[at] // num_slots] * 2, axis=1)
            receives = problem.moved[batch[at], hot[at], pairs[:, 0]].astype(np.int64)
            gain = per_copy[batch[at], hot[at]]
            ok[at] = allowance.admit(gain, pairs, np.stack([receives, np.zeros_like(receives)], axis=1))
        if not ok.any():
            return
        batch, slot, hot = batch[ok], slot[ok], hot[ok]
        leaves = packing.expert.reshape(num_batches, -1)[batch, slot]
        put_copies(problem, packing, batch, slot, hot, 1.0 / counts[batch, hot])
        # Looked up anew for these experts only: for all of them it would take half of the time.
        is_taken = leaves != EMPTY
        row, what = np.concatenate([batch, batch[is_taken]]), np.concatenate([hot, leaves[is_taken]])
        counts[batch, hot] += 1
        counts[batch[is_taken], leaves[is_taken]] -= 1
        now = counts[row, what]
        spared[row, what] = _spared(problem.token_s[row, what], now)
        per_copy[row, what] = np.where(now < num_devices, _work_of(problem, row, what, now), -1.0)


def _slots_to_fill(
    problem: PlaceProblem, packing: Packing, batch: NDArray[np.intp], hot: Experts, known: tuple[Experts, Floats]
) -> tuple[Experts, NDArray[np.bool_]]:
    """Return int64[batches], the best slot for another copy of an expert, and whether there is one.

    Args:
        hot: int64[batches], the experts.
        known: Copies of all experts, int64[all batches, experts], and `_spared` of them, 0 for EMPTY.
    """
    counts, spared = known
    expert, work, rows = packing.expert[batch], packing.work[batch], np.arange(len(batch))
    after = problem.token_s[batch, hot] / (counts[batch, hot] + 1)
    harm = spared[batch[:, None, None], expert]
    is_open = problem.room & ~packing.held[batch, hot][:, :, None] & (harm <= after[:, None, None])
    key = np.where(is_open, problem.load(work)[:, :, None] - work + harm, np.inf).reshape(len(batch), -1)
    slot = key.argmin(axis=1)
    return slot, np.isfinite(key[rows, slot])


def _spared(token_s: Floats, counts: Experts) -> Floats:
    """Return what a copy of an expert would weigh with one fewer; the last copy stays."""
    spared: Floats = np.where(counts > 1, token_s / np.maximum(counts - 1, 1), np.inf)
    return spared


def put_copies(
    problem: PlaceProblem, packing: Packing, batch: NDArray[np.intp], slot: Experts, expert: Experts, share: Floats
) -> None:
    """Put experts into slots, numbered over all devices, and scale their shares with those of their other copies.

    Each batch comes once.
    """
    device, nth = np.divmod(slot, packing.expert.shape[2])
    leaves = packing.expert[batch, device, nth]
    packing.expert[batch, device, nth], packing.share[batch, device, nth] = expert, share
    packing.work[batch, device, nth] = 0.0
    packing.held[batch, leaves, device], packing.held[batch, expert, device] = False, True
    both, changed = np.concatenate([batch, batch]), np.concatenate([leaves, expert])
    row, device = np.nonzero(packing.held[both, changed])
    at, what = both[row], changed[row]
    where = (at, device, (packing.expert[at, device] == what[:, None]).argmax(axis=1))
    parts = packing.share[where]
    total = np.bincount(row, parts, len(both))[row]
    parts = np.where(total > 0, parts / np.where(total > 0, total, 1.0), 1 / np.bincount(row)[row])
    packing.share[where] = parts
    packing.work[where] = problem.seconds(at, what, parts)
