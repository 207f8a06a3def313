"""Fills the device of an expert that is too hot for it to be level, where no expert can have a second copy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.placement.search.copies import Packing
from moestro.placement.search.descent import swap
from moestro.placement.search.problem import PlaceProblem
from moestro.placement.traffic import Floats


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
