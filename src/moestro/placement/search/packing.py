"""Places all copies anew, the heaviest first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.kernel.choice import search_kernel
from moestro.placement.search.copies import QueuedCopies
from moestro.placement.search.problem import TINY, Experts, PlaceProblem
from moestro.placement.search.replicas import copy_work
from moestro.placement.traffic import Floats

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
    kernel = search_kernel()
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
