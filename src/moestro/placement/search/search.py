"""Searches a better placement: from the present one, or from none; small problems more thoroughly, from many starts.

With few copies, a placement that no single exchange improves is often far from the best; with many, it hardly is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.contract import Floats, PlaceLimits
from moestro.placement.kernel.choice import placement_kernel
from moestro.placement.search.filling import recover
from moestro.placement.search.packing import (
    CYCLE,
    LEAST_GAIN,
    Goal,
    balance,
    balance_numbers,
    bring_near,
    exchange,
    pack,
    swap,
)
from moestro.placement.search.problem import (
    Allowance,
    Experts,
    Packing,
    PlaceProblem,
    Pricer,
    allowance_of,
    even_shares,
    held_by,
    live_counts,
    packing_of,
)
from moestro.placement.search.replicas import (
    add_copies,
    copy_counts,
    copy_work,
    share_numbers,
    share_out,
    suit_pairs,
)


def fill_hottest(problem: PlaceProblem, packing: Packing, level: Floats) -> NDArray[np.bool_]:
    """Give the device of the hottest expert the lightest other ones, in batches where it stays above the level anyway.

    Single exchanges would get there too, by one of its slots in each round. Nothing is done where devices differ in
    speed or slots.

    Args:
        level: float64[batches], load of a device that is level.

    Returns:
        bool[batches], whether the device of the hottest expert stays above the level.
    """
    num_batches, _, num_devices, num_slots = problem.shape
    if not problem.room.all() or problem.speed.min() != problem.speed.max():
        return np.zeros(num_batches, np.bool_)
    work = packing.work.reshape(num_batches, -1)
    order = np.argsort(work, axis=1, kind="stable")
    wanted = np.concatenate([order[:, -1:], order[:, : num_slots - 1]], axis=1)
    least = np.take_along_axis(work, wanted, axis=1).sum(axis=1) / problem.speed[0]
    is_above: NDArray[np.bool_] = least >= level
    batch = np.flatnonzero(is_above)
    is_wanted = np.zeros((len(batch), num_devices * num_slots), np.bool_)
    np.put_along_axis(is_wanted, wanted[batch], values=True, axis=1)
    is_there = np.repeat(np.arange(num_devices), num_slots) == order[batch, -1:] // num_slots
    row, leaving = np.nonzero(is_there & ~is_wanted)
    _, coming = np.nonzero(is_wanted & ~is_there)  # as many in each batch
    swap(packing, batch[row], np.divmod(leaving, num_slots), np.divmod(coming, num_slots))
    return is_above


# Exchanges tried in each layer, as a multiple of the mean number that the allowance permits. 4 gains nothing more
# (bench/simulator/placement_constants.py, for both constants).
WIDEST = 2.5
# Part of the devices, the lightest ones, that the heaviest device is paired with. With all of them the balance is .001
# higher to .0007 lower, depending on the allowance.
LIGHT_PART = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """Placements of all layers after 0, 1, 2, … exchanges in each layer.

    Attributes:
        packings: Placements.
        largest: float64[exchanges + 1, batches], seconds of the heaviest device.
        received: int64[exchanges + 1, batches, devices], copies that devices receive.
    """

    packings: list[Packing]
    largest: Floats
    received: Experts


def relieve_heaviest(
    problem: PlaceProblem, packing: Packing, goal: Goal, num_rounds: int, allowance: Allowance
) -> None:
    """Exchange copies of the heaviest device of each layer, one after the other, within a scarce allowance.

    The search first tries more exchanges in each layer than the allowance permits. The allowance then goes to the
    exchanges that lower a largest load most per received copy. The first exchange of one layer often gains less than
    the fourth exchange of another layer, so layers get different numbers of exchanges.

    Args:
        num_rounds: Exchanges of a layer at most.
    """
    total = min(allowance.total, float(allowance.each.sum()))
    widest = math.ceil(WIDEST * total / (2 * max(len(packing.expert), 1)))  # An exchange moves two copies.
    stages = _try_exchanges(problem, packing, goal, min(num_rounds, widest))
    stage = _best_stages(stages, allowance)
    for number in range(1, len(stages.packings)):
        batch = np.flatnonzero(stage == number)
        packing.put(batch, stages.packings[number].of_layers(batch))
    received = stages.received[stage, np.arange(len(stage))].sum(axis=0)
    allowance.total -= float(received.sum())
    allowance.each -= received


def _try_exchanges(problem: PlaceProblem, packing: Packing, goal: Goal, num_rounds: int) -> Stages:
    unlimited = allowance_of(PlaceLimits(), 1, problem.shape[2])
    every, before = np.arange(len(packing.expert)), _lacking(problem, packing)
    now, batch = packing.of_layers(every), every
    packings, largest, received = [packing], [problem.load(packing.work).max(axis=1)], [np.zeros_like(before)]
    for _ in range(num_rounds):
        batch = batch[largest[-1][batch] > goal.largest[batch] * (1 + LEAST_GAIN)]
        if not len(batch):
            break
        order = np.argsort(problem.load(now.work[batch]), axis=1, kind="stable")
        light = order[:, : max(round(LIGHT_PART * (order.shape[1] - 1)), 1)]
        pairs = batch, np.broadcast_to(order[:, -1:], light.shape), light
        batch = batch[exchange(problem, now, pairs, goal.each, unlimited, one_each=True)]
        packings.append(now.of_layers(every))
        largest.append(problem.load(now.work).max(axis=1))
        received.append(_lacking(problem, now) - before)
    return Stages(packings, np.stack(largest), np.stack(received))


def _lacking(problem: PlaceProblem, packing: Packing) -> Experts:
    """Return int64[batches, devices], copies that are where the present placement has none."""
    lacking: Experts = np.count_nonzero(packing.held & problem.moved, axis=1)
    return lacking


def _best_stages(stages: Stages, allowance: Allowance) -> NDArray[np.intp]:
    """Return int64[batches], the stage of each layer that the allowance is spent on."""
    saved = np.maximum.accumulate(stages.largest[0] - stages.largest, axis=0).T
    copies = stages.received.sum(axis=2).T
    num_batches, num_stages = saved.shape
    every = np.arange(num_batches)
    at, steps = np.zeros(num_batches, np.intp), []
    while True:  # along the upper hull of each layer: the next stage that saves most per copy from the present one on
        rest = np.arange(num_stages) > at[:, None]
        gain = np.where(rest, saved - saved[every, at][:, None], 0.0)
        rate = gain / np.maximum(copies - copies[every, at][:, None], 1)
        to = rate.argmax(axis=1)
        batch = np.flatnonzero(rate[every, to] > 0)
        if not len(batch):
            break
        steps.append(np.stack([-rate[batch, to[batch]], batch, to[batch]]))
        at[batch] = to[batch]
    return _within(steps, stages, allowance)


def _within(steps: list[Floats], stages: Stages, allowance: Allowance) -> NDArray[np.intp]:
    """Take the steps that save most per copy, as far as the allowance goes; a layer ends at its first misfit."""
    stage = np.zeros(stages.largest.shape[1], np.intp)
    if not steps:
        return stage
    every = np.concatenate(steps, axis=1)
    _, batches, to = every[:, np.argsort(every[0], kind="stable")]
    left, has_ended = allowance.each.copy(), np.zeros(len(stage), np.bool_)
    total = allowance.total
    for batch, number in zip(batches.astype(np.intp).tolist(), to.astype(np.intp).tolist(), strict=True):
        due = stages.received[number, batch] - stages.received[stage[batch], batch]
        if has_ended[batch] or due.sum() > total or (due > left).any():
            has_ended[batch] = True
            continue
        stage[batch], left, total = number, left - due, total - float(due.sum())
    return stage


# A copy may weigh this much more than with the best numbers of copies before one of them moves.
HEAVIER_COPY = 1.05
# Where fewer copies may be received than experts lack, heavy devices are relieved first, and only copies above this
# part of the even load, which are hard to pack, are split.
HEAVY_COPY = 0.6
SHARE_STEPS = 3  # Newton steps for shares; further ones gain nothing (bench/simulator/placement_constants.py)
LEVELS = 4  # times that shares are set between exchanges; fewer move more, and more leave too few exchanges each time
# A layer is left where exchanges and shares lower what is above its goal by less than this part. Plans for 144 devices
# then take up to a third less time.
STALLED = 0.003
STAY = 0.1  # load that a new packing may cost a copy more, as a part of the copy, so that it stays where it is held
SLOTS_A_TURN = 8  # devices with more slots take more turns, because each turn exchanges one of them
NEAR = 8.0  # weight of the way of rows in a new packing; a sweep from 0 to 8 shortened ways at no loss of balance


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """How far a search goes.

    Attributes:
        target: Mean load over largest load at which a layer is left alone: a number, or float64[batches].
        slack: Part of its load that a device may have more so that rows travel less.
        num_rounds: Rounds of exchanges for balance.
        num_turns: Rotations of pairs of devices that exchange copies so that rows travel less.
        num_share_steps: Newton steps for shares; 0 leaves the copies of an expert equal parts.
    """

    target: Floats | float
    slack: float
    num_rounds: int
    num_turns: int
    num_share_steps: int


def improve(problem: PlaceProblem, packing: Packing, limits: SearchLimits, allowance: Allowance) -> None:
    """Improve a placement in place, by as few moves as its target takes: copies, shares, exchanges, ways of rows."""
    prepare(problem, packing, copy_counts(problem), limits, allowance)
    settle(problem, packing, limits, allowance)


def start_anew(problem: PlaceProblem, counts: Experts, limits: SearchLimits) -> Packing:
    """Place all copies anew, which may move almost all of them. `counts`: those of `copy_counts`."""
    packing = pack_anew(problem, counts)
    settle(problem, packing, limits, allowance_of(PlaceLimits(), 1, problem.shape[2]))
    return packing


def prepare(
    problem: PlaceProblem, packing: Packing, counts: Experts, limits: SearchLimits, allowance: Allowance
) -> None:
    """Add copies of the experts with the heaviest ones, and divide their tokens, before copies are exchanged.

    Args:
        counts: int64[batches, experts], the best numbers of copies, by `copy_counts`.
    """
    if not _can_share(problem):
        return
    add_copies(problem, packing, _lightest_to_split(problem, packing, counts, allowance), allowance)
    share_out(problem, packing, problem.even_load(packing.work) / limits.target, limits.num_share_steps)
    # A further copy is half of an exchange, which counts where few copies may move.
    if allowance.is_limited and limits.num_share_steps:
        recover(problem, packing, problem.even_load(packing.work) / limits.target, allowance)


def pack_anew(problem: PlaceProblem, counts: Experts) -> Packing:
    """Place all copies, as many as `copy_counts` gives each expert."""
    if problem.shape[3] == 2:
        counts = suit_pairs(problem, counts)
    expert = pack(problem, counts, STAY, NEAR)
    return packing_of(problem, expert, even_shares(expert, problem.shape[1]))


def settle(problem: PlaceProblem, packing: Packing, limits: SearchLimits, allowance: Allowance) -> None:
    """Exchange copies and divide tokens until devices are level; then shorten ways of rows."""
    level(problem, packing, limits, allowance)
    shorten(problem, packing, limits, allowance)


def level(problem: PlaceProblem, packing: Packing, limits: SearchLimits, allowance: Allowance) -> None:
    """Exchange copies and divide tokens until devices are as equally loaded as the target asks."""
    least, even = least_load(problem, packing), problem.even_load(packing.work)
    goal = Goal(least / limits.target, even / limits.target)
    num_rounds = limits.num_rounds * _turns(problem)
    if not _can_share(problem):
        if allowance.is_limited:
            # What it leaves is for the exchanges below.
            relieve_heaviest(problem, packing, goal, num_rounds, allowance)
        else:
            is_hot = fill_hottest(problem, packing, goal.each)
            # The others become level too, so that in the next window few can be the largest.
            first = Goal(np.where(is_hot, goal.each, goal.largest), goal.each)
            balance(problem, packing, first, CYCLE * int(is_hot.any()), allowance)
    num_parts = LEVELS if limits.num_share_steps and _can_share(problem) else 1
    _level_by_turns(problem, packing, goal, (math.ceil(num_rounds / num_parts), num_parts, limits), allowance)


def _level_by_turns(
    problem: PlaceProblem, packing: Packing, goal: Goal, how: tuple[int, int, SearchLimits], allowance: Allowance
) -> None:
    """Exchange copies and set shares in turn.

    Shares level what exchanges began: a few of them join devices with too much work to others with too little.

    Args:
        how: Rounds of exchanges in each turn, turns, and the limits of the search.
    """
    num_rounds, num_parts, limits = how
    kernel = None if allowance.is_limited else placement_kernel.look()
    if kernel is not None:
        numbers = balance_numbers() | share_numbers() | {"num_rounds": num_rounds, "num_parts": num_parts}
        numbers |= {"num_share_steps": limits.num_share_steps, "stalled": STALLED}
        kernel.level(problem, packing, (goal.largest, goal.each), **numbers)
        return
    for _ in range(num_parts):
        before = problem.load(packing.work).max(axis=1)
        balance(problem, packing, goal, num_rounds, allowance)
        share_out(problem, packing, goal.largest, limits.num_share_steps)
        after = problem.load(packing.work).max(axis=1)
        has_stalled = before - after < STALLED * (before - goal.largest)
        if (has_stalled | (after <= goal.largest * (1 + LEAST_GAIN))).all():
            return
        goal.largest[has_stalled] = np.inf


def shorten(problem: PlaceProblem, packing: Packing, limits: SearchLimits, allowance: Allowance) -> None:
    """Exchange copies so that rows travel less, for no more load than the slack."""
    if problem.row_s is None:
        return
    largest = problem.load(packing.work).max(axis=1)
    cap = largest * (1 + limits.slack)
    bring_near(problem, packing, cap, limits.num_turns * _turns(problem), allowance)


def _lightest_to_split(problem: PlaceProblem, packing: Packing, counts: Experts, allowance: Allowance) -> Floats:
    """Return float64[batches], seconds of a copy above which its expert gets another one.

    Many light copies also vary less than few heavy ones when the next window brings other loads.
    """
    lightest: Floats = HEAVIER_COPY * copy_work(problem, counts).max(axis=1)
    num_lacking = np.maximum(counts - live_counts(packing.expert, problem.shape[1]), 0).sum()
    if min(allowance.total, allowance.each.sum()) >= num_lacking:
        return lightest
    hard_to_pack: Floats = HEAVY_COPY * problem.even_load(packing.work) * problem.speed.max()
    return np.maximum(lightest, hard_to_pack)


def _can_share(problem: PlaceProblem) -> bool:
    """Return whether any expert can have a second copy."""
    return int(problem.room.sum()) > problem.shape[1]


def _turns(problem: PlaceProblem) -> int:
    """Return by how much more rounds a device with many slots takes."""
    return math.ceil(problem.shape[3] / SLOTS_A_TURN)


def is_level(problem: PlaceProblem, packing: Packing, target: Floats | float) -> NDArray[np.bool_]:
    """Return bool[batches], whether the least possible load over the largest load reaches the target."""
    largest: Floats = problem.load(packing.work).max(axis=1)
    return least_load(problem, packing) >= target * largest * (1 - 1e-9)


def least_load(problem: PlaceProblem, packing: Packing) -> Floats:
    """Return float64[batches], seconds below which exchanges hardly bring the largest load.

    Work is spread evenly at best. Without room for further copies, the devices of the k heaviest experts also hold k
    times as many others as they have slots left, at best the lightest.
    """
    even = problem.even_load(packing.work)
    if _can_share(problem):
        return even
    num_slots = problem.room.sum(axis=1)
    sums = np.cumsum(np.sort(copy_work(problem, np.ones_like(problem.token_s)), axis=1), axis=1)
    sums = np.concatenate([np.zeros((len(sums), 1)), sums], axis=1)
    num_hot = np.arange(1, np.count_nonzero(num_slots) + 1)
    lightest = sums[:, num_hot * (int(num_slots[num_slots > 0].min()) - 1)]
    heaviest = sums[:, -1:] - sums[:, -1 - num_hot]
    hot: Floats = ((heaviest + lightest) / num_hot).max(axis=1) / problem.speed.max()
    return np.maximum(even, hot)


SMALL = 2048  # slots of all layers up to which a problem gets several starts
MOST_STARTS = 256
TINY_SLOTS = 24  # slots of a layer up to which all neighbours of a placement are priced
NUM_CLIMBERS = 12  # best starts of a layer from which neighbours are tried
MOST_CLIMBS = 12


def is_small(problem: PlaceProblem) -> bool:
    """Whether the problem is small enough for several starts."""
    num_batches, _, num_devices, num_slots = problem.shape
    return num_batches * num_devices * num_slots <= SMALL


@dataclass(frozen=True, slots=True, eq=False)
class SmallSearch:
    """A search of all layers of a small problem.

    Attributes:
        pricer, problem: What is placed, and what it costs.
        limits: How far the search goes.
        move_weight: Steps' seconds that a second of moving counts.
    """

    pricer: Pricer
    problem: PlaceProblem
    limits: SearchLimits
    move_weight: float

    def best(self, present: Packing) -> Packing:
        """Return the best placement found of every layer, the present one included."""
        num_layers = self.problem.shape[0]
        num_starts = min(MOST_STARTS, max(2, 2 * SMALL // present.expert.size))
        layers = np.tile(np.arange(num_layers), num_starts)
        expert = np.concatenate([self._starts(layers), present.expert])
        layers = np.append(layers, np.arange(num_layers))
        if self.problem.room.size <= TINY_SLOTS:
            climbed, of_climbed = self._climb(expert, layers)
            expert, layers = np.concatenate([expert, climbed]), np.append(layers, of_climbed)
        packing = packing_of(self.problem.of_layers(layers), expert, even_shares(expert, self.problem.shape[1]))
        if self.limits.num_share_steps:
            wide = self.problem.of_layers(layers)
            shared = packing.of_layers(np.arange(len(layers)))
            share_out(wide, shared, least_load(wide, shared) / self.limits.target, self.limits.num_share_steps)
            packing = _joined(packing, shared)
            layers = np.tile(layers, 2)
        cost = self._cost(packing, layers)
        order = np.lexsort((cost, layers))
        first = order[np.searchsorted(layers[order], np.arange(num_layers))]
        return packing.of_layers(first)

    def _starts(self, layers: NDArray[np.intp]) -> Experts:
        """Return int64[starts, devices, slots], packings that differ in copies, order, and what draws a copy.

        Half of them are leveled. The rest stay as drawn: few placements are level, and exchanges leave some out.
        """
        wide, rng, column = self.problem.of_layers(layers), np.random.default_rng(0), (len(layers), 1)
        is_leveled = np.arange(len(layers)) < len(layers) // 2
        noise = np.where(is_leveled, 0.5, 3.0)[:, None] * rng.random(column)
        stay, near = STAY * 10 ** rng.uniform(0, 3, column), NEAR * 10 ** rng.uniform(-2, 0, column)
        kept = rng.choice([1.0, 0.5, 0.0], column)
        first = np.arange(self.problem.shape[0])  # the first start of each layer is that of a large problem
        noise[first], stay[first], near[first], kept[first] = 0.0, STAY, NEAR, 1.0
        guess = replace(wide, token_s=wide.token_s * np.exp(noise * rng.standard_normal(wide.token_s.shape)))
        counts = copy_counts(guess)
        counts = suit_pairs(wide, counts) if wide.shape[3] == 2 else counts
        counts = 1 + rng.binomial(counts - 1, np.broadcast_to(kept, counts.shape))
        expert = pack(guess, counts, stay[..., None], near[..., None])
        rows = np.flatnonzero(is_leveled)
        some, unlimited = self.problem.of_layers(layers[rows]), allowance_of(PlaceLimits(), 1, wide.shape[2])
        packing = packing_of(some, expert[rows], even_shares(expert[rows], wide.shape[1]))
        level(some, packing, replace(self.limits, num_share_steps=0), unlimited)
        shorten(some, packing, self.limits, unlimited)
        expert[rows] = packing.expert
        return expert

    def _cost(self, packing: Packing, layers: NDArray[np.intp]) -> Floats:
        """Return float64[placements], seconds per step and of the move."""
        prices = self.pricer.of_layers(layers).price(packing)
        cost: Floats = prices.step_s + self.move_weight * prices.receive_s.max(axis=1)
        return cost

    def _climb(self, expert: Experts, layers: NDArray[np.intp]) -> tuple[Experts, NDArray[np.intp]]:
        """Move the best placements of each layer to their best neighbours until none is better."""
        num_experts = self.problem.shape[1]
        best = np.full(self.problem.shape[0], np.inf)
        for _ in range(MOST_CLIMBS):
            # The order of slots makes no difference.
            _, index = np.unique(_keys(expert, layers), return_index=True)
            expert, layers = expert[index], layers[index]
            packing = packing_of(self.problem.of_layers(layers), expert, even_shares(expert, num_experts))
            cost = self._cost(packing, layers)
            order = np.lexsort((cost, layers))
            place = np.arange(len(order)) - np.searchsorted(layers[order], layers[order])
            expert, layers, first = expert[order], layers[order], cost[order][place == 0]
            expert, layers = expert[place < NUM_CLIMBERS], layers[place < NUM_CLIMBERS]
            if (first >= best * (1 - 1e-9)).all():
                break
            best = first
            further, origin = _neighbours(expert, num_experts, self.problem.room)
            expert, layers = np.concatenate([expert, further]), np.append(layers, layers[origin])
        return expert, layers


def _keys(expert: Experts, layers: NDArray[np.intp]) -> NDArray[np.bytes_]:
    """Return bytes[placements], equal for placements of a layer that differ in the order of slots only.

    They sort as the rows of numbers do, which NumPy would compare one number after the other.
    """
    held = np.sort(expert, axis=2).reshape(len(expert), -1)
    rows = np.append(held, layers[:, None], axis=1) - EMPTY
    return rows.astype(">u4").view(f"S{4 * rows.shape[1]}").ravel()


def _neighbours(expert: Experts, num_experts: int, room: NDArray[np.bool_]) -> tuple[Experts, NDArray[np.intp]]:
    """Return placements in which one slot holds another expert or none, or two slots were exchanged.

    Returns:
        int64[neighbours, devices, slots], those that cover all experts and have none twice on a device; and
        int64[neighbours], the placement from which each comes.
    """
    flat, slots = expert.reshape(len(expert), -1), np.flatnonzero(room.ravel())
    slot, other = (each.ravel() for each in np.meshgrid(slots, np.arange(EMPTY, num_experts), indexing="ij"))
    one, two = slots[np.array(np.triu_indices(len(slots), 1))]
    changed = np.repeat(flat[:, None], len(slot) + len(one), axis=1)
    changed[:, np.arange(len(slot)), slot] = other
    rows = len(slot) + np.arange(len(one))
    changed[:, rows, one], changed[:, rows, two] = flat[:, two], flat[:, one]
    found = changed.reshape(-1, *expert.shape[1:])
    counts = live_counts(found, num_experts)
    num_held = held_by(found, num_experts).sum(axis=(1, 2))
    is_valid = (counts > 0).all(axis=1) & (num_held == counts.sum(axis=1))
    return found[is_valid], np.repeat(np.arange(len(expert)), changed.shape[1])[is_valid]


def _joined(one: Packing, other: Packing) -> Packing:
    """Return the placements of both."""
    return Packing(
        np.concatenate([one.expert, other.expert]),
        np.concatenate([one.share, other.share]),
        np.concatenate([one.work, other.work]),
        np.concatenate([one.held, other.held]),
    )
