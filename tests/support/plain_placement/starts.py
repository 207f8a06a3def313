"""Placements from which a search starts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.placement.contract import Holders, PlaceView


def present_start(view: PlaceView) -> Holders:
    """Return the present copies on live devices; an expert that lost its last one gets another.

    It goes to the free slot of the least loaded device, or takes the slot of the least busy copy of several.

    Raises:
        ValueError: The live devices have fewer slots than there are experts.
    """
    devices, tokens = view.devices, view.load.total
    _check_room(view)
    holders = (view.table.num_copies > 0) & devices.is_alive[:, None, None]
    for layer, expert in np.argwhere(~holders.any(axis=0)).tolist():
        held = holders[:, layer]
        room = devices.num_slots - held.sum(axis=1)
        copies = held.sum(axis=0)
        if (devices.is_alive & (room > 0)).any():
            loads = held @ (tokens[layer] / np.maximum(copies, 1)) / devices.speed
            target = int(np.where(devices.is_alive & (room > 0), loads, np.inf).argmin())
        else:
            share = np.where(held & (copies > 1), tokens[layer] / np.maximum(copies, 1), np.inf)
            target, dropped = (int(i) for i in np.unravel_index(share.argmin(), share.shape))
            held[target, dropped] = False
        held[target, expert] = True
    return holders


def fresh_start(view: PlaceView) -> Holders:
    """Return a placement for tokens alone: copies by load, then the longest copy first to the least loaded device.

    Spare slots hold further copies of the experts with the most tokens a copy. A copy that finds only devices that have
    its expert is left out.

    Raises:
        ValueError: The live devices have fewer slots than there are experts.
    """
    devices = view.devices
    _check_room(view)
    live_slots = int(devices.num_slots[devices.is_alive].sum())
    holders = np.zeros(view.table.num_copies.shape, np.bool_)
    for layer, tokens in enumerate(view.load.total):
        copies = _copies_by_load(tokens, live_slots, int(devices.is_alive.sum()))
        loads = np.zeros(devices.num_devices)
        room = np.where(devices.is_alive, devices.num_slots, 0)
        for expert in np.argsort(-tokens / copies, kind="stable").tolist():
            share = tokens[expert] / copies[expert]
            for _ in range(int(copies[expert])):
                can_take = (room > 0) & ~holders[:, layer, expert]
                if not can_take.any():
                    break
                target = int(np.where(can_take, (loads + share) / devices.speed, np.inf).argmin())
                holders[target, layer, expert] = True
                loads[target] += share
                room[target] -= 1
    return holders


def _copies_by_load(tokens: NDArray[np.float64], num_slots: int, max_copies: int) -> NDArray[np.int64]:
    """Return int64[experts]: one copy each, then one more to the expert with the most tokens a copy."""
    copies = np.ones(len(tokens), np.int64)
    for _ in range(min(num_slots, len(tokens) * max_copies) - len(tokens)):
        copies[np.where(copies < max_copies, tokens / copies, -1.0).argmax()] += 1
    return copies


def _check_room(view: PlaceView) -> None:
    num_slots = int(view.devices.num_slots[view.devices.is_alive].sum())
    if num_slots < view.table.num_experts:
        raise ValueError(f"{view.table.num_experts} experts do not fit: live devices have {num_slots} slots a layer")
