"""Slots of a new placement: every policy that decides which device holds which expert numbers the copies here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.devices import Devices
from moestro.placement.registry import PlaceView

Holders = NDArray[np.bool_]  # [devices, layers, experts], whether the device has a copy


def table_with(view: PlaceView, holders: Holders) -> ExpertTable:
    """Make the next table, with equal shares; a copy that stays on its device keeps its slot.

    Args:
        view: what the policy saw.
        holders: bool[devices, layers, experts]; a dead device has none, and no device has more than it has slots.

    Returns:
        `view.table` itself if it has these copies, equal shares and the same live devices.
    """
    old, devices = view.table, view.devices
    is_same = (old.num_copies == holders).all() and (old.is_alive == devices.is_alive).all()
    if is_same and old.shares is None:
        return old
    num_slots = old.logical_of.shape[2]
    is_filled = old.logical_of != EMPTY
    stays = is_filled & np.take_along_axis(holders, np.where(is_filled, old.logical_of, 0), axis=2)
    stays &= np.arange(num_slots) < devices.num_slots[:, None, None]
    logical_of = np.where(stays, old.logical_of, EMPTY)
    new = holders.copy()
    device, layer, slot = np.nonzero(stays)
    new[device, layer, logical_of[device, layer, slot]] = False
    device, layer, expert = np.nonzero(new)
    free_slots = np.argsort(stays, axis=2, kind="stable")  # free ones first, in order
    nth = np.cumsum(new, axis=2)[device, layer, expert] - 1
    logical_of[device, layer, free_slots[device, layer, nth]] = expert
    return ExpertTable(old.version + 1, logical_of, old.num_experts, devices.is_alive.copy())


def in_slots_of(old: ExpertTable, new: ExpertTable) -> ExpertTable:
    """Return a placement whose copies keep the slots that they have in the present one.

    Args:
        old: Present placement.
        new: Placement of the same shape, with its copies in any order.
    """
    shares = new.slot_parts
    logical_of, moved = new.logical_of.copy(), shares.copy()
    differs = np.argwhere((old.logical_of != new.logical_of).any(axis=2))
    for device, layer in differs.tolist():
        before, after = old.logical_of[device, layer], new.logical_of[device, layer]
        slot_of = {expert: slot for slot, expert in enumerate(after.tolist()) if expert != EMPTY}
        order = np.array([slot_of.pop(expert, EMPTY) for expert in before.tolist()])
        order[np.flatnonzero(order == EMPTY)[: len(slot_of)]] = list(slot_of.values())
        is_used = order != EMPTY
        logical_of[device, layer] = np.where(is_used, after[order], EMPTY)
        moved[device, layer] = np.where(is_used, shares[device, layer][order], 0.0)
    return replace(new, logical_of=logical_of, shares=None if new.shares is None else moved)


def even_sizes(devices: Devices, num_experts: int) -> NDArray[np.int64]:
    """Return how many experts of a layer each device holds when each expert has one copy.

    Live devices get equally many as far as their slots allow; the first ones get one more where that leaves some over.

    Returns:
        int64[devices].

    Raises:
        ValueError: The live devices have fewer slots than there are experts.
    """
    sizes = np.zeros(devices.num_devices, np.int64)
    while (left := num_experts - int(sizes.sum())) > 0:
        has_room = np.flatnonzero(devices.is_alive & (sizes < devices.num_slots))
        if not len(has_room):
            raise ValueError(f"{num_experts} experts do not fit: live devices have {int(sizes.sum())} slots a layer")
        sizes[has_room[:left]] += 1
    return sizes
