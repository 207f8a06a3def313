"""Places all copies anew, the heaviest first, and exchanges copies between pairs of devices of all layers at once.

Where the compiled kernel is present, it makes the same exchanges (`kernel/source/exchanges.cpp`); a change here is one
there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.contract import Floats
from moestro.placement.kernel.choice import placement_kernel
from moestro.placement.search.problem import TINY, Allowance, Experts, Packing, PlaceProblem, QueuedCopies
from moestro.placement.search.replicas import copy_work

# With fewer slots on a device, the heaviest copies must choose first, shared or not (288 slots on 144 devices).
JOINED_SLOTS = 4
STEPS_AT_ONCE = 16  # of which moves are looked up together
TIE = 1e-9  # of all work of a layer


def pack(
    problem: PlaceProblem, counts: Experts, stay: Floats | float, near: Floats | float, *, are_plain: bool = False
) -> Experts:
    """Place each copy on the device that ends with the least load, and never two of an expert on one device.

    A further copy that finds no device without its expert is left out.

    Args:
        counts: int64[batches, experts], copies of each expert.
        stay: Load, as a part of the copy's own, that a device may have more to keep what it holds: a number, or
            float64[batches, 1, 1].
        near: The same for nearness, between an expert's farthest device and one whose rows would take no time.
        are_plain: Whether ties go to the first device, and copies join no devices, as in EPLB and FlashLB.

    Returns:
        int64[batches, devices, slots]
    """
    num_batches, _, num_devices, _ = problem.shape
    work = copy_work(problem, counts)
    are_joined = not are_plain and problem.room.sum() >= JOINED_SLOTS * num_devices
    items, is_again = _by_weight(work, counts, are_shared_first=are_joined)
    item_work = np.append(work, np.zeros((num_batches, 1)), axis=1)[np.arange(num_batches)[:, None], items]
    stay_s = np.broadcast_to(stay, (num_batches, 1, 1))[:, :, 0] * item_work
    far_s, joins = _far(problem, work, near), _joins(counts, items)[:, : None if are_joined else 0]
    room = problem.room.sum(axis=1)
    far_above = (work * counts).sum(axis=1, keepdims=True) * (1 / problem.speed).max() + 1.0
    load = _first_loads(room, far_above * (not are_plain))
    copies = QueuedCopies(items, item_work, stay_s, far_s, joins < 0, far_above * (joins != 0), load)
    kernel = placement_kernel.look()
    if kernel is not None:
        return kernel.pack(problem, room, copies)
    return _place(problem, room, copies, is_again)


def _place(problem: PlaceProblem, room: NDArray[np.intp], copies: QueuedCopies, is_again: NDArray[np.bool_]) -> Experts:
    """Place copies one after the other. The compiled kernel does the same (`kernel/source/packing.cpp`)."""
    num_batches, _, num_devices, num_slots = problem.shape
    items, item_work, adds, load = copies.items, copies.item_work, copies.adds, copies.load
    every, has_speeds = np.arange(num_batches), problem.speed.min() != problem.speed.max()
    may_not_fit = is_again | (items == EMPTY).any(axis=0)  # elsewhere, some device has room
    slowness, is_filled = 1 / problem.speed, np.zeros(load.shape, np.bool_)
    expert = np.full((num_batches, num_devices, num_slots), EMPTY, np.int64)
    # Flat arrays: several times faster to index, in a loop of many small steps.
    placed, load_at = expert.reshape(-1), load.reshape(-1)
    filled, last = np.zeros(load.size, np.int64), np.full(load.size, EMPTY)
    for k, moving_s in enumerate(_moving_s(problem, items, copies.stay_s)):
        what, cost = items[:, k], moving_s + load
        if copies.far_s is not None:
            cost += copies.far_s[every, what]
        if k < adds.shape[1]:
            cost += (is_filled == adds[:, k, None]) * copies.joining_s[:, k, None]
        if has_speeds:
            cost += item_work[:, k, None] * slowness
        if is_again[k]:  # copies of an expert follow each other, so an earlier one is the device's last
            cost[last.reshape(load.shape) == what[:, None]] = np.inf
        device = cost.argmin(axis=1)
        at, now = every * num_devices + device, item_work[:, k] * slowness[device]
        if may_not_fit[k]:
            ok = np.isfinite(cost.reshape(-1)[at]) & (what != EMPTY)
            at, what, device, now = at[ok], what[ok], device[ok], now[ok]
        nth = filled[at]
        placed[at * num_slots + nth] = last[at] = what
        filled[at] = nth + 1
        load_at[at] = np.where(nth + 1 < room[device], load_at[at] + now, np.inf)
        if k < adds.shape[1]:
            is_filled.reshape(-1)[at] = True
    return expert


def _first_loads(room: NDArray[np.intp], far_above: Floats) -> Floats:
    """Return float64[batches, devices], infinite for devices without slots.

    Ties go to another device in each layer; else the first one would hold what joins the others in all of them.
    """
    num_batches, num_devices = len(far_above), len(room)
    turn = (np.arange(num_devices) - np.arange(num_batches)[:, None]) % num_devices
    return np.where(room == 0, np.inf, turn * (TIE * far_above / num_devices))


def _moving_s(problem: PlaceProblem, items: Experts, stay_s: Floats) -> Iterator[Floats]:
    """Yield float64[batches, devices] for each place of the order: `stay_s` where the device lacks the expert."""
    every = np.arange(len(items))
    for first in range(0, items.shape[1], STEPS_AT_ONCE):
        some = slice(first, first + STEPS_AT_ONCE)
        yield from problem.moved[every, items[:, some].T] * stay_s.T[some, :, None]


def _far(problem: PlaceProblem, work: Floats, near: Floats | float) -> Floats | None:
    """Return float64[batches, experts + 1, devices], load that a copy may cost more where it is near, or None."""
    if problem.row_s is None:
        return None
    weight = np.append(work, np.zeros((len(work), 1)), axis=1)[:, :, None]
    far_s: Floats = problem.row_s * (near * weight / np.maximum(problem.row_s.max(axis=-1, keepdims=True), TINY))
    return far_s


def _joins(counts: Experts, items: Experts) -> Experts:
    """Return int64[batches, shared copies]: 1 where a copy joins devices that others share, -1 where it adds a device.

    So the copies of shared experts join all devices, if there are enough, and shares can level the loads of all.
    """
    batch = np.arange(len(items))[:, None]
    is_shared = np.append(counts > 1, np.zeros((len(items), 1), np.bool_), axis=1)[batch, items]
    is_shared = is_shared[:, : int(is_shared.sum(axis=1).max(initial=0))]
    adds = np.zeros(is_shared.shape, np.bool_)
    adds[:, 1:] = items[:, 1 : is_shared.shape[1]] == items[:, : max(0, is_shared.shape[1] - 1)]
    return np.where(is_shared, np.where(adds, -1, 1), 0)


def _by_weight(work: Floats, counts: Experts, *, are_shared_first: bool) -> tuple[Experts, NDArray[np.bool_]]:
    """Return int64[batches, copies], the expert of each copy, the heaviest first; EMPTY pads.

    Also returns whether any batch has the same expert twice in a row, for each place of the order.
    """
    num_batches = len(work)
    order = np.lexsort((-work, counts == 1)) if are_shared_first else np.argsort(-work, axis=1, kind="stable")
    batch = np.arange(num_batches)[:, None]
    repeats = counts[batch, order]
    totals = repeats.sum(axis=1)
    items = np.full((num_batches, int(totals.max(initial=0))), EMPTY, np.int64)
    items[np.arange(items.shape[1]) < totals[:, None]] = np.repeat(order.ravel(), repeats.ravel())
    is_again = np.zeros(items.shape[1], np.bool_)
    is_again[1:] = ((items[:, 1:] == items[:, :-1]) & (items[:, 1:] != EMPTY)).any(axis=0)
    return items, is_again


LEAST_GAIN = 1e-6  # of the even load; less is rounding
CYCLE = 3  # rounds, in the last of which the heaviest device alone looks for an exchange, with all others
SLOW = 0.2  # part of what is above its goal by which a cycle lowers a batch at least, or the batch is left


def balance_numbers() -> dict[str, float]:
    """Return the constants of `balance` for the kernel."""
    return {"cycle": CYCLE, "slow": SLOW, "least_gain": LEAST_GAIN}


@dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """Loads that are low enough, in seconds.

    Attributes:
        largest: float64[batches], largest load at which a batch is left alone.
        each: float64[batches], load at which a device is left alone: less than `largest` where a hot expert keeps one
            device above all others. These become level on the way, so that in the next window few can be the largest.
    """

    largest: Floats
    each: Floats


def balance(problem: PlaceProblem, packing: Packing, goal: Goal, num_rounds: int, allowance: Allowance) -> None:
    """Exchange copies between heavy and light devices until the largest load of each batch is low enough.

    Args:
        num_rounds: Rounds at most; in each one every heavy device makes one exchange at most.
    """
    kernel = None if allowance.is_limited else placement_kernel.look()
    if kernel is not None:
        kernel.level(
            problem, packing, (goal.largest, goal.each), num_rounds=num_rounds, num_parts=1, **balance_numbers()
        )
        return
    batch, before = np.arange(len(goal.each)), np.full(len(goal.each), np.inf)
    for turn in range(num_rounds):
        load = problem.load(packing.work[batch])
        above = load.max(axis=1) - goal.largest[batch] * (1 + LEAST_GAIN)
        left = above > 0
        if turn % CYCLE == 0:
            left &= above < (1 - SLOW) * before[batch]
            before[batch] = above
        batch, load = batch[left], load[left]
        if not len(batch) or allowance.total < 1:
            return
        order = np.argsort(load, axis=1, kind="stable")
        num_devices = load.shape[1]
        num_heavy = min(int((load > goal.each[batch, None]).sum(axis=1).max()), num_devices // 2)
        if turn % CYCLE == CYCLE - 1 or num_heavy == 1:
            heavy = np.broadcast_to(order[:, -1:], (len(batch), num_devices - 1))
            pairs = batch, heavy, order[:, :-1]
            # A batch whose heaviest device finds no exchange with any other one is at rest.
            batch = batch[exchange(problem, packing, pairs, goal.each, allowance, one_each=True)]
        else:
            heavy = order[:, ::-1][:, :num_heavy]
            light = order[
                :, (np.arange(num_heavy) + turn // CYCLE * (CYCLE - 1) + turn % CYCLE) % (num_devices - num_heavy)
            ]
            exchange(problem, packing, (batch, heavy, light), goal.each, allowance)


def bring_near(problem: PlaceProblem, packing: Packing, cap: Floats, num_turns: int, allowance: Allowance) -> None:
    """Exchange copies so that rows travel less, between pairs that rotate over all devices as in a tournament.

    Args:
        cap: float64[batches], load that no device may exceed for it.
        num_turns: Rotations at most; as many as there are devices pair each one with every other one.
    """
    kernel = None if allowance.is_limited else placement_kernel.look()
    if kernel is not None:
        kernel.bring_near(problem, packing, cap, num_turns, LEAST_GAIN)
        return
    num_devices = len(problem.speed)
    cycle = num_devices - 1 + num_devices % 2
    every, batch = np.arange(cycle), np.arange(len(cap))
    num_idle = 0
    for turn in range(num_turns):
        partner = (turn - every) % cycle
        if num_devices > cycle:
            partner[partner == every] = cycle  # of an even number of devices, the last one pairs with who is left
        first = every[every < partner]
        if not len(first):
            return
        one = np.broadcast_to(first, (len(batch), len(first)))
        other = np.broadcast_to(partner[first], one.shape)
        has_gained = exchange(problem, packing, (batch, one, other), cap, allowance)
        num_idle = 0 if has_gained.any() else num_idle + 1
        if num_idle == cycle:
            return


def exchange(
    problem: PlaceProblem,
    packing: Packing,
    pairs: tuple[Experts, Experts, Experts],
    target: Floats,
    allowance: Allowance,
    *,
    one_each: bool = False,
) -> NDArray[np.bool_]:
    """Make the best exchange of one copy for another, or for an empty slot, in each pair of devices where one gains.

    An exchange counts the larger load of the pair (nothing below the target), what is received, and the way of rows.

    Args:
        pairs: int64[batches] and twice int64[batches, pairs]: batches, and the devices of each pair.
        target: float64[all batches].
        one_each: Whether each batch makes the best of its exchanges only, so that its pairs may share a device.

    Returns:
        bool[batches], whether any pair of the batch made an exchange.
    """
    kernel = placement_kernel.look()
    batch, one, other = pairs
    floor = target[batch][:, None]
    each, devices = np.repeat(batch, one.shape[1]), np.stack([one.ravel(), other.ravel()])
    floors = np.repeat(floor, one.shape[1])
    if kernel is None:
        best, gain = _best_exchanges(_Sides.of(problem, packing, each, devices), floors)
    else:
        best, gain = kernel.best_exchanges(problem, packing, each, devices, floors)
    best, gain = best.reshape(2, *one.shape), gain.reshape(one.shape)
    if one_each:
        row, pair = np.arange(len(batch)), gain.argmax(axis=1)
        row, pair = row[is_gain := gain[row, pair] > LEAST_GAIN * floor[:, 0]], pair[is_gain]
    else:
        row, pair = np.nonzero(gain > LEAST_GAIN * floor)
    slot_one, slot_other = best[:, row, pair]
    devices = np.stack([one[row, pair], other[row, pair]], axis=1)
    if allowance.is_limited and len(row):
        receives = _receives(problem, packing, batch[row], devices, np.stack([slot_one, slot_other], axis=1))
        ok = allowance.admit(gain[row, pair], devices, receives)
        row, devices, slot_one, slot_other = row[ok], devices[ok], slot_one[ok], slot_other[ok]
    swap(packing, batch[row], (devices[:, 0], slot_one), (devices[:, 1], slot_other))
    return np.bincount(row, minlength=len(batch)) > 0


@dataclass(frozen=True, slots=True, eq=False)
class _Sides:
    """Both devices of each pair. Pairs come last, because steps along many numbers are several times faster.

    Attributes:
        slow: float64[2, pairs], seconds per second of work at speed 1.
        work: float64[slots, 2, pairs], seconds of each copy at speed 1.
        load: float64[2, pairs], seconds of the device.
        cost: float64[slots, 2, pairs], seconds that sending each copy to the other device costs; infinite where that
            one holds the expert.
    """

    slow: Floats
    work: Floats
    load: Floats
    cost: Floats

    @classmethod
    def of(cls, problem: PlaceProblem, packing: Packing, batch: Experts, device: Experts) -> _Sides:
        """Look up what two devices hold in each of some batches.

        Args:
            batch: int64[pairs].
            device: int64[2, pairs].
        """
        _, num_experts, num_devices, num_slots = problem.shape
        # Indices into flat arrays: several times faster than indices by axis, and this is where the time goes.
        every = np.arange(num_slots)[:, None, None]
        slots = (batch * num_devices + device) * num_slots + every
        expert = packing.expert.reshape(-1).take(slots)
        expert[expert == EMPTY] = num_experts
        base = (batch * (num_experts + 1) + expert) * num_devices
        here, there = base + device, base + device[::-1]
        work = packing.work.reshape(-1).take(slots)
        moved = problem.moved.reshape(-1).view(np.int8)
        cost: Floats = problem.move_s * (moved.take(there) - moved.take(here)).astype(np.float64)
        if problem.row_s is not None:
            row_s = problem.row_s.reshape(-1)
            cost += (row_s.take(there) - row_s.take(here)) * packing.share.reshape(-1).take(slots)
        cost[packing.held.reshape(-1).take(there)] = np.inf
        if not problem.room.all():  # slots that do not exist stay empty
            cost[~problem.room[device, every]] = np.inf
        slow: Floats = (1 / problem.speed)[device]
        load: Floats = work.sum(axis=0) * slow
        return cls(slow, work, load, cost)


def _best_exchanges(sides: _Sides, floor: Floats) -> tuple[Experts, Floats]:
    """Return the slots whose exchange leaves each pair with the least key, and what it gains.

    The key is the larger load of the pair above the floor, 0 below it, plus the costs of both copies.

    Args:
        floor: float64[pairs], seconds.

    Returns:
        int64[2, pairs] and float64[pairs].
    """
    num_slots, _, num_pairs = sides.work.shape
    above = sides.load - floor
    # What a slot of either device adds to the load of the first device, to that of the second, and to the floor. In
    # single precision, which takes half the time, and rounds a load by less than the least gain.
    gives, takes = sides.work * sides.slow, sides.work * sides.slow[::-1]
    one = np.zeros((3, num_slots, num_pairs), np.float32)
    other = np.zeros_like(one)
    one[0], one[1] = above[0] - gives[:, 0], above[1] + takes[:, 0]
    other[0], other[1] = takes[:, 1], -gives[:, 1]
    # Rounded before they are added: compilers may leave out the way of a sum through single precision (GCC 12 does).
    cost = sides.cost.astype(np.float32)
    one += cost[:, 0]
    other += cost[:, 1]
    key = one[0][:, None] + other[0]
    term = one[1][:, None] + other[1]
    np.maximum(key, term, out=key)
    np.add(one[2][:, None], other[2], out=term)
    np.maximum(key, term, out=key)
    every = np.arange(num_pairs)
    first = key.min(axis=1).argmin(axis=0)
    of_first = key.reshape(-1).take((first * num_slots + np.arange(num_slots)[:, None]) * num_pairs + every)
    second = of_first.argmin(axis=0)
    gain = np.maximum(above.max(axis=0), 0.0) - of_first[second, every]
    return np.stack([first, second]), gain


def _receives(problem: PlaceProblem, packing: Packing, batch: Experts, devices: Experts, slots: Experts) -> Experts:
    """Return int64[exchanges, 2], copies that each device of an exchange receives, less those that it gives back."""
    at = batch[:, None]
    expert = packing.expert[at, devices, slots]
    had = problem.moved[at, expert, devices].astype(np.int64)
    receives: Experts = problem.moved[at, expert[:, ::-1], devices] - had
    return receives


def swap(packing: Packing, batch: Experts, one: tuple[Experts, Experts], other: tuple[Experts, Experts]) -> None:
    """Exchange pairs of slots in place; no slot is in two exchanges, and no device in two with one expert.

    Args:
        batch: int64[exchanges].
        one, other: Twice int64[exchanges]: devices and slots.
    """
    first, second = (batch, *one), (batch, *other)
    expert_one, expert_other = packing.expert[first], packing.expert[second]
    packing.held[batch, expert_one, one[0]] = False
    packing.held[batch, expert_other, other[0]] = False
    packing.held[batch, expert_one, other[0]] = expert_one != EMPTY
    packing.held[batch, expert_other, one[0]] = expert_other != EMPTY
    for figures in (packing.expert, packing.share, packing.work):
        figures[first], figures[second] = figures[second], figures[first]
