"""How many copies each expert gets, and how its tokens are divided among them so that devices are equally loaded.

With shares s of an expert with w seconds of tokens, prices x of devices change them by s_d (mean of x over the copies -
x_d). The loads then change by -K x exactly, where K is the Laplacian of the graph that copies of one expert join.
So one linear system gives the shares that equalise all loads, where none becomes negative; else it is one Newton step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.contract import Floats
from moestro.placement.kernel.choice import placement_kernel
from moestro.placement.score import idle_parts
from moestro.placement.search.problem import TINY, Allowance, Experts, Packing, PlaceProblem, live_counts

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


def _work_of(
    problem: PlaceProblem, log_idle: Floats | None, batch: NDArray[np.intp], expert: Experts, counts: Experts
) -> Floats:
    """Return `copy_work` of single experts, by operations that the kernel repeats.

    Args:
        log_idle: That of the problem.
    """
    work: Floats = problem.token_s[batch, expert] / counts
    if problem.expert_s > 0:
        logs = None if log_idle is None else log_idle[batch, expert]
        work = work + problem.expert_s * (1 - _idle_parts(problem.idle[batch, expert], logs, 1.0 / counts))
    return work


def copy_counts(problem: PlaceProblem) -> Experts:
    """Give each further copy to the expert with the most work per copy; stop where reading weights costs more.

    The compiled kernel does the same (`kernel/source/counts.cpp`).

    Returns:
        int64[batches, experts], at least 1 and at most the number of devices.
    """
    num_batches, num_experts, num_devices, _ = problem.shape
    num_extra = min(int(problem.room.sum()), num_experts * num_devices) - num_experts
    kernel = placement_kernel.look()
    if kernel is not None:
        return kernel.copy_counts(problem, num_extra, COPIES_MAY_COST)
    counts = np.ones((num_batches, num_experts), np.int64)
    every, log_idle = np.arange(num_batches), problem.log_idle()
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
        now = counts[every, most] + 1
        work = _work_of(problem, log_idle, every, most, now)
        if problem.expert_s > 0:
            total -= per_copy[every, most] * (now - 1)
            total += work * now
        counts[every, most] = now
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
    per_copy, log_idle = np.where(counts < num_devices, copy_work(problem, counts), -1.0), problem.log_idle()
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
        per_copy[row, what] = np.where(now < num_devices, _work_of(problem, log_idle, row, what, now), -1.0)


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


RIDGE = 1e-4  # of the even load: joins devices that no expert joins, so that the system can be solved
KEPT = 0.05  # part of a share that a step keeps at least, so that the share can grow again
CELLS = 1 << 22  # of the matrices that are solved at once


def share_out(problem: PlaceProblem, packing: Packing, target: Floats, num_steps: int) -> None:
    """Set the shares of all copies so that the largest load falls, in place.

    A batch whose largest load is at most its target is left alone, and so is one that no step improves. The compiled
    kernel does the same (`kernel/source/shares.cpp`).

    Args:
        target: float64[batches], seconds.
        num_steps: Newton steps at most.
    """
    kernel = placement_kernel.look()
    if kernel is not None:
        kernel.level(problem, packing, (target, target), num_parts=1, num_share_steps=num_steps, **share_numbers())
        return
    best = problem.load(packing.work).max(axis=1)
    batch = np.flatnonzero(best > target)
    at_once = max(1, CELLS // problem.shape[2] ** 2)
    for first in range(0, len(batch), at_once):
        copies = _shared_copies(problem, packing, batch[first : first + at_once])
        if len(copies.row):
            _take_steps(packing, copies, (best, target), num_steps)


def _take_steps(packing: Packing, copies: _SharedCopies, loads: tuple[Floats, Floats], num_steps: int) -> None:
    """Take steps while they lower the largest loads.

    Args:
        loads: float64[batches] twice: the largest load, which is changed, and the target.
    """
    best, target = loads
    for _ in range(num_steps):
        copies = replace(copies, share=copies.stepped())
        largest = copies.load().max(axis=1)
        before = best[copies.batch]
        better = largest < before
        best[copies.batch] = np.minimum(before, largest)
        copies.of_rows(better).put(packing)
        left = better & (largest > target[copies.batch])
        if not left.any():
            return
        if not left.all():
            copies = copies.of_rows(left)


def share_numbers() -> dict[str, float]:
    """Return the constants of `share_out` for the kernel."""
    return {"ridge": RIDGE, "kept": KEPT}


@dataclass(frozen=True, slots=True, eq=False)
class _SharedCopies:
    """Copies of the experts with several copies, in some batches. Arrays of copies have an entry for each one.

    Attributes:
        batch: int64[rows], numbers of the batches; a row is one of them.
        fixed: float64[rows, devices], seconds of all other copies at speed 1.
        speed: float64[devices].
        expert_s: Seconds in which a device of speed 1 reads the weights of one activated expert.
        one, other: int64[pairs], copies of an expert, the one before the other; pairs in the order of experts.
        row, device, slot: int64[copies], where each copy is.
        which: int64[copies], its expert, numbered within the row.
        token_s, idle, log_idle: float64[copies], of its expert, as in the problem.
        share: float64[copies].
    """

    batch: NDArray[np.intp]
    fixed: Floats
    speed: Floats
    expert_s: float
    one: Experts
    other: Experts
    row: Experts
    device: Experts
    slot: Experts
    which: Experts
    token_s: Floats
    idle: Floats
    log_idle: Floats
    share: Floats

    def of_rows(self, is_kept: NDArray[np.bool_]) -> _SharedCopies:
        """Return some rows."""
        in_kept, number = is_kept[self.row], np.cumsum(is_kept) - 1
        names = [each.name for each in fields(self)][6:]
        copies = {name: getattr(self, name)[in_kept] for name in names}
        copies["row"] = number[copies["row"]]
        at, pairs = np.cumsum(in_kept) - 1, in_kept[self.one]
        one, other = at[self.one[pairs]], at[self.other[pairs]]
        return replace(self, batch=self.batch[is_kept], fixed=self.fixed[is_kept], one=one, other=other, **copies)

    def work(self) -> Floats:
        """Return float64[copies], seconds of each copy at speed 1."""
        work: Floats = self.token_s * self.share
        if self.expert_s > 0:
            idle = _idle_parts(self.idle, self.log_idle, self.share)
            work += np.where(self.share > 0, self.expert_s * (1 - idle), 0.0)
        return work

    def load(self) -> Floats:
        """Return float64[rows, devices], seconds of each device."""
        shape = self.fixed.shape
        shared = np.bincount(self.row * shape[1] + self.device, self.work(), self.fixed.size).reshape(shape)
        load: Floats = (self.fixed + shared) / self.speed
        return load

    def put(self, packing: Packing) -> None:
        """Set the shares of these copies in a placement."""
        where = (self.batch[self.row], self.device, self.slot)
        packing.share[where], packing.work[where] = self.share, self.work()

    def stepped(self) -> Floats:
        """Return float64[copies], shares after one step that leaves some of each; those of an expert sum to 1."""
        load = self.load()
        unit = np.maximum((load * self.speed).sum(axis=1) / self.speed.sum(), TINY)
        excess = ((load / unit[:, None] - 1) * self.speed).astype(np.float32)
        price = self._prices(unit, excess)[self.row, self.device]
        num_experts = int(self.which.max(initial=0)) + 1
        index, num_cells = self.row * num_experts + self.which, len(load) * num_experts
        mean = np.bincount(index, self.share * price, num_cells)[index]
        kept = self.share * np.maximum(1 - (price - mean), KEPT)
        totals = np.bincount(index, kept, num_cells)
        share: Floats = kept / np.maximum(totals, TINY)[index]
        return share

    def _prices(self, unit: Floats, excess: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return float32[rows, devices], the solutions of the linear systems.

        In single precision, which takes half the time: the next step corrects what this one rounds.

        Args:
            unit: float64[rows], seconds of the even load.
            excess: float32[rows, devices], load above it.
        """
        num_rows, num_devices = self.fixed.shape
        weight = self.share * self.token_s / unit[self.row]
        at = self.row * num_devices + self.device
        joined = np.bincount(
            at[self.one] * num_devices + self.device[self.other],
            weight[self.one] * self.share[self.other],
            num_rows * num_devices**2,
        ).reshape(num_rows, num_devices, num_devices)
        matrix = -(joined + joined.swapaxes(1, 2)).astype(np.float32)
        own = np.bincount(at, weight - weight * self.share, self.fixed.size).reshape(self.fixed.shape)
        # Devices with few neighbours come first, which keeps the kernel's matrix sparse.
        order = np.argsort(np.count_nonzero(matrix, axis=2), axis=1, kind="stable")
        every = np.arange(num_devices)
        matrix[:, every, every] = own + RIDGE
        row, price = np.arange(num_rows)[:, None], np.empty_like(excess)
        ordered = matrix[row[:, :, None], order[:, :, None], order[:, None]]
        price[row, order] = _solved(ordered.transpose(1, 2, 0), excess[row, order].T).T
        return price


def _idle_parts(idle: Floats, log_idle: Floats | None, share: Floats) -> Floats:
    """Return `score.idle_parts` by operations that the kernel repeats to the last bit.

    Args:
        log_idle: Logarithms of what is above 0; None means that nothing is.
    """
    parts = idle.copy()
    if log_idle is not None:
        some = np.flatnonzero((idle > 0) & (share < 1))
        parts[some] = _exponentials(log_idle[some] * share[some])
    return parts


LOG2_E = float.fromhex("0x1.71547652b82fep+0")
LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")


def _exponentials(x: Floats) -> Floats:
    """Return exp(x) of numbers up to 0. NumPy's own differs between processors, and from that of C++."""
    x = np.maximum(x, -700.0)
    twos = np.rint(x * LOG2_E)
    rest = (x - twos * LN2_HIGH) - twos * LN2_LOW
    total = np.full_like(x, 1.0 / math.factorial(13))
    for n in range(12, -1, -1):
        total = total * rest + 1.0 / math.factorial(n)
    return np.ldexp(total, twos.astype(np.int64))


def _solved(matrix: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    """Solve symmetric linear systems by elimination without pivots, which need none: no row is above its diagonal.

    LAPACK's results differ between libraries and processors, and plans with them.

    Args:
        matrix: float32[n, n, systems], of which the upper half is read.
        right: float32[n, systems].

    Returns:
        float32[n, systems].
    """
    matrix, right = np.ascontiguousarray(matrix), np.ascontiguousarray(right)
    buffer, n = np.empty_like(matrix), len(right)
    for k in range(n):
        np.maximum(matrix[k, k], np.float32(RIDGE), out=matrix[k, k])  # rounding must not let a diagonal vanish
        row = matrix[k, k + 1 :]
        if not row.any():
            continue
        factor, some = row / matrix[k, k], slice(k + 1, n)
        matrix[some, some] -= np.multiply(factor[:, None], row, out=buffer[some, some])
        right[some] -= factor * right[k]
    for k in range(n - 1, -1, -1):
        right[k] /= matrix[k, k]
        right[:k] -= matrix[:k, k] * right[k]
    return right


def _shared_copies(problem: PlaceProblem, packing: Packing, batch: NDArray[np.intp]) -> _SharedCopies:
    """Find the copies of experts with several ones in some batches."""
    num_experts = problem.shape[1]
    expert, work = packing.expert[batch], packing.work[batch]
    is_shared = np.append(live_counts(expert, num_experts) > 1, np.zeros((len(batch), 1), np.bool_), axis=1)
    of_slot = is_shared[np.arange(len(batch))[:, None, None], expert] & (expert != EMPTY)
    row, device, slot = np.nonzero(of_slot)
    what = expert[row, device, slot]
    log_idle = problem.log_idle()
    one, other = _pairs(row * num_experts + what)
    return _SharedCopies(
        batch,
        np.where(of_slot, 0.0, work).sum(axis=2),
        problem.speed,
        problem.expert_s,
        one,
        other,
        row,
        device,
        slot,
        (np.cumsum(is_shared, axis=1) - 1)[row, what],
        problem.token_s[batch[row], what],
        problem.idle[batch[row], what],
        np.zeros(len(row)) if log_idle is None else log_idle[batch[row], what],
        packing.share[batch[row], device, slot],
    )


def _pairs(group: Experts) -> tuple[Experts, Experts]:
    """Return int64[pairs] twice: members of one group each, the first one before the second; by group and member.

    Args:
        group: int64[members], group of each.
    """
    members = np.argsort(group, kind="stable")
    ordered = group[members]
    last = np.searchsorted(ordered, ordered, side="right")
    nth = np.arange(len(group))
    num_later = last - nth - 1
    one = np.repeat(nth, num_later)
    begin = np.cumsum(num_later) - num_later
    other = one + 1 + np.arange(len(one)) - begin[one]
    return members[one], members[other]
