"""Exchanges copies between pairs of devices; all pairs of all layers at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.expert_table import EMPTY
from moestro.placement.budget import Allowance
from moestro.placement.copies import Packing
from moestro.placement.problem import Experts, PlaceProblem
from moestro.placement.traffic import Floats

LEAST_GAIN = 1e-6  # of the even load; less is rounding
PATIENCE = 6  # rounds without a gain, each with other pairs, after which a layer is at rest


def balance(problem: PlaceProblem, packing: Packing, target: Floats, num_rounds: int, allowance: Allowance) -> None:
    """Exchange copies between heavy and light devices until no device is above the target.

    Args:
        target: float64[batches], load at which a device is left alone.
        num_rounds: Rounds at most; in each one every heavy device makes one exchange at most.
    """
    resting = np.zeros(len(target), np.int64)
    for turn in range(num_rounds):
        load = problem.load(packing.work)
        batch = np.flatnonzero((load.max(axis=1) > target * (1 + LEAST_GAIN)) & (resting < PATIENCE))
        if not len(batch):
            return
        load = load[batch]
        num_heavy = int((load > target[batch, None]).sum(axis=1).max())
        num_heavy = min(num_heavy, load.shape[1] // 2)
        order = np.argsort(load, axis=1, kind="stable")
        heavy = order[:, ::-1][:, :num_heavy]
        light = order[:, (np.arange(num_heavy) + turn) % (load.shape[1] - num_heavy)]
        has_gained = exchange(problem, packing, (batch, heavy, light), target, allowance)
        resting[batch] = np.where(has_gained, 0, resting[batch] + 1)


def bring_near(problem: PlaceProblem, packing: Packing, cap: Floats, turns: range, allowance: Allowance) -> None:
    """Exchange copies so that rows travel less, between pairs that rotate over all devices.

    Args:
        cap: float64[batches], load that no device may exceed for it.
        turns: Rotations; as many as there are devices pair each one with every other one.
    """
    num_devices = len(problem.speed)
    every = np.arange(num_devices)
    batch = np.arange(len(cap))
    for turn in turns:
        partner = (turn - every) % num_devices
        first = every[every < partner]
        if len(first):
            heavy = np.broadcast_to(first, (len(batch), len(first)))
            light = np.broadcast_to(partner[first], heavy.shape)
            exchange(problem, packing, (batch, heavy, light), cap, allowance)


def exchange(
    problem: PlaceProblem,
    packing: Packing,
    pairs: tuple[Experts, Experts, Experts],
    target: Floats,
    allowance: Allowance,
) -> NDArray[np.bool_]:
    """Make the best exchange of one copy for another, or for an empty slot, in each pair of devices where one gains.

    An exchange counts the larger load of the pair (nothing below the target), what is received, and the way of rows.

    Args:
        pairs: int64[batches] and twice int64[batches, pairs]: batches, and the devices of each pair.
        target: float64[all batches].

    Returns:
        bool[batches], whether any pair of the batch made an exchange.
    """
    batch, one, other = pairs
    at = batch[:, None]
    load = (
        packing.work[at, one].sum(axis=-1) / problem.speed[one],
        packing.work[at, other].sum(axis=-1) / problem.speed[other],
    )
    cost_one, received_one = _send(problem, packing, at, one, other)
    cost_other, received_other = _send(problem, packing, at, other, one)
    delta = packing.work[at, one][..., :, None] - packing.work[at, other][..., None, :]
    floor = target[batch][:, None]
    key = np.maximum(
        load[0][..., None, None] - delta / problem.speed[one][..., None, None],
        load[1][..., None, None] + delta / problem.speed[other][..., None, None],
    )
    np.maximum(key, floor[..., None, None], out=key)
    key += cost_one[..., :, None]
    key += cost_other[..., None, :]
    num_slots = key.shape[-1]
    key = key.reshape(*one.shape, -1)
    best = key.argmin(axis=-1)
    now = np.maximum(np.maximum(load[0], load[1]), floor)
    gain = now - np.take_along_axis(key, best[..., None], axis=-1)[..., 0]
    took = gain > LEAST_GAIN * floor
    row, pair = np.nonzero(took)
    slot_one, slot_other = best[row, pair] // num_slots, best[row, pair] % num_slots
    if allowance.is_limited and len(row):
        receives = np.stack(
            [
                received_other[1][row, pair, slot_other] - received_one[0][row, pair, slot_one],
                received_one[1][row, pair, slot_one] - received_other[0][row, pair, slot_other],
            ],
            axis=1,
        )
        devices = np.stack([one[row, pair], other[row, pair]], axis=1)
        ok = allowance.admit(gain[row, pair], devices, receives)
        row, pair, slot_one, slot_other = row[ok], pair[ok], slot_one[ok], slot_other[ok]
    _swap(packing, batch[row], (one[row, pair], slot_one), (other[row, pair], slot_other))
    return np.bincount(row, minlength=len(batch)) > 0


def _send(
    problem: PlaceProblem, packing: Packing, at: Experts, source: Experts, target: Experts
) -> tuple[Floats, tuple[Experts, Experts]]:
    """Price sending each copy of one device of a pair to the other one.

    Returns:
        float64[batches, pairs, slots], seconds; infinite where the target holds the expert. And int64 of the same
        shape: whether the source had to receive the copy, and whether the target has to.
    """
    expert = packing.expert[at, source]
    at, source, target = at[..., None], source[..., None], target[..., None]
    had, has = problem.moved[at, expert, source].astype(np.int64), problem.moved[at, expert, target].astype(np.int64)
    cost = problem.move_s * (has - had)
    if problem.row_s is not None:
        way = problem.row_s[at, expert, target] - problem.row_s[at, expert, source]
        cost = cost + way * packing.share[at[..., 0], source[..., 0]]
    # Slots that do not exist stay empty.
    no_room = np.zeros(expert.shape, np.bool_) if problem.room.all() else ~problem.room[source[..., 0]]
    return np.where(packing.held[at, expert, target] | no_room, np.inf, cost), (had, has)


def _swap(packing: Packing, batch: Experts, one: tuple[Experts, Experts], other: tuple[Experts, Experts]) -> None:
    """Exchange two slots in each of some batches; no device is in two exchanges of a batch."""
    first, second = (batch, *one), (batch, *other)
    expert_one, expert_other = packing.expert[first], packing.expert[second]
    packing.held[batch, expert_one, one[0]] = False
    packing.held[batch, expert_other, other[0]] = False
    packing.held[batch, expert_one, other[0]] = expert_one != EMPTY
    packing.held[batch, expert_other, one[0]] = expert_other != EMPTY
    for figures in (packing.expert, packing.share, packing.work):
        figures[first], figures[second] = figures[second], figures[first]
