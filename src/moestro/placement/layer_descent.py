"""Steepest descent on the placement objective in one layer: swaps, moves, additions and removals of single copies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.placement.devices import Devices
from moestro.placement.linear_costs import WEIGHTS, Floats, LinearCosts

# A maximum gives no direction while several devices share it. A norm of each term does; the last one is the maximum.
SHARPNESSES = (2.0, 8.0, 32.0, np.inf)
_LEAST_GAIN = 1e-9  # of the present value; less is rounding
_ALL_STEPS = 2_500  # pairs of copies up to which all steps are tried; above, only those that change a busiest device
_KICK_STEPS, _KICK_SHARPNESSES = 3, (8.0, np.inf)
_TRIED = 128  # steps that are evaluated at once
_MOST_NUMBERS = 1 << 18  # evaluated before a descent ends; all steps of 32 experts, one in ten of 256 on 64 devices

Ids = NDArray[np.int64]
Steps = tuple[Ids, Ids]  # ids of the two edits of each step


class LayerDescent:
    """One layer's copies, and the steps that improve them.

    An *edit* moves a copy of an expert to another device, removes one, or adds one. A *step* has one edit, or two edits
    of different experts that meet in one slot.

    Attributes:
        holders: bool[experts, devices].
    """

    def __init__(self, costs: LinearCosts, holders: NDArray[np.bool_], devices: Devices) -> None:
        self._costs = costs
        self._slots = np.where(devices.is_alive, devices.num_slots, 0)
        self.holders = holders.copy()
        self._sum_up()

    @property
    def weights_s(self) -> Floats:
        """float64[devices], seconds per step of the horizon in which each device receives this layer's weights."""
        weights_s: Floats = self._totals[WEIGHTS]
        return weights_s

    def descend(self, others_s: Floats, sharpness: float) -> bool:
        """Take the best step until none improves the objective; return whether there was one.

        Args:
            others_s: float64[devices], `weights_s` of all other layers together.
            sharpness: exponent of the norm that stands for each maximum over devices.
        """
        has_changed = False
        while True:
            enough = self._value(others_s, sharpness) * (1 - _LEAST_GAIN)
            step, value = self._good_step(others_s, sharpness, enough)
            if not value < enough:
                return has_changed
            self._take(step)
            has_changed = True

    def kick(self, others_s: Floats, draws: np.random.Generator) -> bool:
        """Take some steps at random and descend again; keep the result only if it is better, and return whether it is.

        Args:
            others_s: float64[devices], `weights_s` of all other layers together.
            draws: source of random numbers.
        """
        start, bound = self.holders.copy(), self._value(others_s, np.inf) * (1 - _LEAST_GAIN)
        for _ in range(_KICK_STEPS):
            first, second = self._steps(self._base(others_s))
            if len(first):
                nth = int(draws.integers(len(first)))
                self._take((int(first[nth]), int(second[nth])))
        for sharpness in _KICK_SHARPNESSES:
            self.descend(others_s, sharpness)
        if self._value(others_s, np.inf) < bound:
            return True
        self.holders = start
        self._sum_up()
        return False

    def _value(self, others_s: Floats, sharpness: float) -> float:
        return float(smooth_maxima(self._base(others_s)[None], sharpness)[0])

    def _base(self, others_s: Floats) -> Floats:
        base = self._totals.copy()
        base[WEIGHTS] += others_s
        return base

    def _good_step(
        self, others_s: Floats, sharpness: float, enough: float
    ) -> tuple[tuple[int, int], float]:
        """Return a step and the objective after it, which is infinite if there is no step.

        The objective is convex in what devices add up, so its tangent bounds the value after each step from below.
        Steps are tried in the order of their bounds, some at a time, until one of them gets below `enough`.
        """
        base = self._base(others_s)
        first, second = self._steps(base)
        slopes = self._slopes(slope_of_maxima(base, sharpness))
        bounds = self._value(others_s, sharpness) + slopes[first] + slopes[second]
        order = np.argsort(bounds, kind="stable")[: _MOST_NUMBERS // base.size]
        best, found = (0, 0), np.inf
        for at in range(0, len(order), _TRIED):
            if bounds[order[at]] >= enough:
                break
            one, other = first[order[at : at + _TRIED]], second[order[at : at + _TRIED]]
            values = smooth_maxima(base + self._changes(one) + self._changes(other), sharpness)
            nth = int(values.argmin())
            if values[nth] < found:
                best, found = (int(one[nth]), int(other[nth])), float(values[nth])
            if found < enough:
                break
        return best, found

    def _sum_up(self) -> None:
        num_experts, self._num_devices = self.holders.shape
        self._copies = self.holders.sum(axis=1)
        self._expert, self._device = np.nonzero(self.holders)  # of each copy
        self._parts = self._costs.seconds(np.arange(num_experts), self.holders + 0.0, self._copies + 0.0)
        self._totals: Floats = self._parts.sum(axis=0)

    # Ids of edits. Edit 0 changes nothing, so that a step with one edit has two ids as well.

    def _moved(self, copy: Ids, target: Ids) -> Ids:
        return 1 + copy * self._num_devices + target

    def _removed(self, copy: Ids) -> Ids:
        return 1 + len(self._expert) * self._num_devices + copy

    def _added(self, expert: Ids, target: Ids) -> Ids:
        return 1 + len(self._expert) * (self._num_devices + 1) + expert * self._num_devices + target

    def _decoded(self, edit: Ids) -> tuple[Ids, Ids, Ids]:
        """Return each edit's expert, the device that loses a copy and the one that gets one; -1 means none."""
        num_copies, num_devices = len(self._expert), self._num_devices
        ends = (1 + num_copies * num_devices, 1 + num_copies * (num_devices + 1))
        kinds = [edit == 0, edit < ends[0], edit < ends[1]]
        moving, adding = edit - 1, edit - ends[1]
        copy = np.select(kinds[1:], [moving // num_devices, edit - ends[0]], 0)
        expert = np.select(kinds, [np.zeros_like(edit), self._expert[copy], self._expert[copy]], adding // num_devices)
        source = np.select(kinds, [np.full_like(edit, -1), self._device[copy], self._device[copy]], -1)
        nowhere = np.full_like(edit, -1)
        target = np.select(kinds, [nowhere, moving % num_devices, nowhere], adding % num_devices)
        return expert, source, target

    def _steps(self, base: Floats) -> Steps:
        """Return all steps from here, or in a large layer those that change a device on which a term is largest."""
        expert, device = self._expert, self._device
        lacks = ~self.holders  # [experts, devices]
        is_near, is_spare = np.ones(len(expert), np.bool_), self._copies[expert] > 1
        if len(expert) ** 2 > _ALL_STEPS:
            is_near = np.isin(device, base.argmax(axis=1))
        near_experts = np.zeros(len(lacks), np.bool_)
        near_experts[expert[is_near]] = True
        has_room = self.holders.sum(axis=0) < self._slots
        fits = lacks[:, device][expert]  # [copies, copies], whether the first may come to the second's device
        first, second = np.nonzero(np.triu(fits & fits.T & (is_near[:, None] | is_near)))
        swaps = (self._moved(first, device[second]), self._moved(second, device[first]))
        first, second = np.nonzero(fits.T & is_spare[:, None] & (is_near[:, None] | is_near))
        displaced = (self._removed(first), self._moved(second, device[first]))
        copy, more = np.nonzero(lacks.T[device] & is_spare[:, None] & (is_near[:, None] | near_experts))
        replaced = (self._removed(copy), self._added(more, device[copy]))
        alone = [
            self._moved(*np.nonzero(lacks[expert] & has_room & is_near[:, None])),
            self._removed(np.flatnonzero(is_spare & is_near)),
            self._added(*np.nonzero(lacks & has_room & near_experts[:, None])),
        ]
        alone_ids = np.concatenate(alone)
        firsts = np.concatenate([alone_ids, swaps[0], displaced[0], replaced[0]])
        seconds = np.concatenate([np.zeros_like(alone_ids), swaps[1], displaced[1], replaced[1]])
        return firsts, seconds

    def _slopes(self, slope: Floats) -> Floats:
        """Return the slope of the objective along each edit, float64[edits], in the order of their ids."""
        costs, held, copies = self._costs, self.holders, self._copies
        now, more = costs.slopes(slope, copies + 0.0), costs.slopes(slope, copies + 1.0)
        fewer = costs.slopes(slope, np.maximum(copies - 1.0, 1.0))
        present, thinner, denser = ((each * held).sum(axis=1) for each in (now, more, fewer))
        expert, device = self._expert, self._device
        moved = now[expert] - now[expert, device][:, None]
        removed = denser[expert] - fewer[expert, device] - present[expert]
        added = (thinner - present)[:, None] + more
        return np.concatenate([np.zeros(1), moved.ravel(), removed, added.ravel()])

    def _changes(self, edit: Ids) -> Floats:
        """Return what each edit adds to the terms, float64[edits, TERMS, devices]."""
        expert, source, target = self._decoded(edit)
        rows = np.arange(len(edit))
        holders = self.holders[expert] + 0.0
        holders[rows[source >= 0], source[source >= 0]] = 0.0
        holders[rows[target >= 0], target[target >= 0]] = 1.0
        return self._costs.seconds(expert, holders, holders.sum(axis=1)) - self._parts[expert]

    def _take(self, step: tuple[int, int]) -> list[int]:
        """Change the copies; return the experts that changed."""
        expert, source, target = (ids.tolist() for ids in self._decoded(np.array(step)))
        changed = []
        for which, lost, got in zip(expert, source, target, strict=True):
            if lost >= 0:
                self.holders[which, lost] = False
            if got >= 0:
                self.holders[which, got] = True
            if lost >= 0 or got >= 0:
                changed.append(which)
        self._sum_up()
        return changed


def smooth_maxima(totals: Floats, sharpness: float) -> Floats:
    """Return the sum over terms of a norm over devices.

    Args:
        totals: float64[rows, TERMS, devices], not negative.
        sharpness: exponent of the norm, a power of two; infinity gives the maximum.

    Returns:
        float64[rows].
    """
    largest = totals.max(axis=2)
    if np.isinf(sharpness):
        return np.asarray(largest.sum(axis=1))
    ratio = totals / np.maximum(largest, np.finfo(float).tiny)[:, :, None]
    return np.asarray((largest * _power(ratio, sharpness).sum(axis=2) ** (1.0 / sharpness)).sum(axis=1))


def slope_of_maxima(totals: Floats, sharpness: float) -> Floats:
    """Return the slope of `smooth_maxima` at one point, float64[TERMS, devices].

    Args:
        totals: float64[TERMS, devices].
    """
    if np.isinf(sharpness):
        return (np.arange(totals.shape[1]) == totals.argmax(axis=1)[:, None]) + 0.0
    ratio = totals / np.maximum(totals.max(axis=1, keepdims=True), np.finfo(float).tiny)
    powers = _power(ratio, sharpness)
    norm = np.maximum(powers.sum(axis=1, keepdims=True), 1.0)
    slope: Floats = powers / np.maximum(ratio, np.finfo(float).tiny) / norm ** (1.0 - 1.0 / sharpness)
    return slope


def _power(numbers: Floats, exponent: float) -> Floats:
    """Raise to a power of two by squaring, which is many times faster than the general power."""
    for _ in range(int(exponent).bit_length() - 1):
        numbers = numbers * numbers
    return numbers
