"""Fills the slots that a policy leaves empty, for engines that know no empty slot and divide tokens evenly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.expert_table import EMPTY
from moestro.placement.problem import Experts
from moestro.placement.traffic import Floats


def fill_empty(placed: Experts, load: Floats, present: Experts | None = None) -> Experts:
    """Give each empty slot a further copy, because these engines know no empty slot.

    The slot's present expert stays if that makes no device slower than the slowest one, because it moves nothing.
    Otherwise the expert gets a copy that levels the devices best. Two copies on a device are left to devices that have
    more slots than there are experts.

    Args:
        placed: int64[layers, devices, slots], expert in each slot; EMPTY means none.
        load: float64[layers, experts], tokens of each expert.
        present: What is in these slots now; None means nothing.

    Returns:
        int64[layers, devices, slots], without empty slots.
    """
    filled = placed.copy()
    for layer in np.flatnonzero((placed == EMPTY).any(axis=(1, 2))).tolist():
        slots = filled[layer]  # a view: writing changes `filled`
        copies = _LayerCopies(slots, load[layer])
        for device, slot in np.argwhere(slots == EMPTY).tolist():
            now = EMPTY if present is None else int(present[layer, device, slot])
            slots[device, slot] = copies.add(device, now)
    return filled


class _LayerCopies:
    """Copies of one layer's experts on devices, with equal parts of an expert's load.

    Args:
        slots: int64[devices, slots], expert in each slot; EMPTY means none.
        load: float64[experts].
    """

    def __init__(self, slots: Experts, load: Floats) -> None:
        self._load = load
        self._on: NDArray[np.float64] = np.zeros((len(load), len(slots)))  # [experts, devices], copies
        device, slot = np.nonzero(slots != EMPTY)
        np.add.at(self._on, (slots[device, slot], device), 1)

    def add(self, device: int, present: int) -> int:
        """Give an expert one more copy, on `device`, and return the expert.

        Args:
            device: Device with an empty slot.
            present: Expert whose weights are in that slot now; EMPTY means none.
        """
        counts = self._on.sum(axis=1)
        part = self._load / counts
        devices = part @ self._on
        # Load of all devices [experts, devices] if this expert got the copy.
        after = devices + self._on * (self._load / (counts + 1) - part)[:, None]
        after[:, device] += self._load / (counts + 1)
        allowed = self._on[:, device] == 0
        if not allowed.any():
            allowed[:] = True
        if present != EMPTY and allowed[present] and after[present].max() <= devices.max():
            expert = present
        else:
            expert = int(np.where(allowed, (after**2).sum(axis=1), np.inf).argmin())
        self._on[expert, device] += 1
        return expert
