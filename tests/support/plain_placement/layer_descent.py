"""Steepest descent on the placement objective in one layer."""

from __future__ import annotations

from itertools import count

import numpy as np
from numpy.typing import NDArray
from support.plain_placement.layer_steps import Ids, LayerSteps, Steps
from support.plain_placement.smooth_maxima import slope_of_maxima, smooth_maxima

from moestro.placement.contract import Devices
from moestro.placement.integer_program import COMPUTE, ROWS, WEIGHTS, Floats, LinearCosts

SHARPNESSES = (2.0, 8.0, 32.0, np.inf)  # of the maxima; each descent starts where the one before it ended
_LEAST_GAIN = 1e-9  # of the present value; less is rounding
# Bounds on the work of a step. All steps of a layer with 50 copies are tried, and the best ones of a larger layer.
_ALL_COPIES = 50  # above, only steps that change a device on which a term is largest
_TRIED_AT_ONCE = 128  # steps
_TRIED_NUMBERS = 1 << 18  # before a descent ends: 10 922 steps on 8 devices, 1365 on 64
_JOINT_NUMBERS = 1 << 22  # of all pairs of steps, above which none is tried
_SMALL_SLOTS = 16  # a layer with no more of them is cheap enough for restarts


class LayerDescent:
    """One layer's copies, and the descent that improves them.

    Attributes:
        holders: bool[experts, devices].
    """

    def __init__(self, costs: LinearCosts, holders: NDArray[np.bool_], devices: Devices) -> None:
        self._costs = costs
        self._slots = np.where(devices.is_alive, devices.num_slots, 0).astype(np.int64)
        self._replace(holders.copy())

    @property
    def weights_s(self) -> Floats:
        """float64[devices], seconds per step of the horizon in which each device receives this layer's weights."""
        weights_s: Floats = self._totals[WEIGHTS]
        return weights_s

    @property
    def step_s(self) -> float:
        """Seconds per step that this layer computes and exchanges rows."""
        return float(self._totals[COMPUTE].max() + self._totals[ROWS].max())

    @property
    def is_small(self) -> bool:
        """Whether the layer has few enough slots for restarts."""
        return int(self._slots.sum()) <= _SMALL_SLOTS

    def descend(self, others_s: Floats, sharpness: float = np.inf, num_steps: int | None = None) -> bool:
        """Take good steps until none improves the objective; return whether there was one.

        Args:
            others_s: float64[devices], `weights_s` of all other layers together.
            sharpness: exponent of the norm that stands for each maximum over devices.
            num_steps: Steps at most; None means no limit.
        """
        has_changed = False
        for _ in count() if num_steps is None else range(num_steps):
            enough = self._value(others_s, sharpness) * (1 - _LEAST_GAIN)
            step, value = self._good_step(others_s, sharpness, enough)
            if not value < enough:
                return has_changed
            self._take(*step)
            has_changed = True
        return has_changed

    def step_twice(self, others_s: Floats) -> bool:
        """Take the best two steps at once if they improve the objective, and return whether they do.

        A layer with too many pairs of steps stays as it is.
        """
        base = self._base(others_s)
        first, second = steps = self._steps(base)
        if len(first) ** 2 * base.size > _JOINT_NUMBERS:
            return False
        one, other = self._options.joint_steps(steps, self._slots - self.holders.sum(axis=0))
        if not len(one):
            return False
        change = self._changes(first) + self._changes(second)
        values = smooth_maxima(base + change[one] + change[other], np.inf)
        best = int(values.argmin())
        if not values[best] < self._value(others_s, np.inf) * (1 - _LEAST_GAIN):
            return False
        pair = [one[best], other[best]]
        self._take(*first[pair], *second[pair])
        return True

    def restart(self, others_s: Floats, draws: np.random.Generator, sharpnesses: tuple[float, ...]) -> None:
        """Descend from a random placement; keep the result only if it is better."""
        before, present_s = self.holders, self._value(others_s, np.inf)
        self._replace(self._random_holders(draws))
        for sharpness in sharpnesses:
            self.descend(others_s, sharpness)
        while self.step_twice(others_s):
            self.descend(others_s)
        if not self._value(others_s, np.inf) < present_s * (1 - _LEAST_GAIN):
            self._replace(before)

    def _random_holders(self, draws: np.random.Generator) -> NDArray[np.bool_]:
        """Return one copy of each expert on a random device with room, and others in some of the free slots."""
        holders = np.zeros_like(self.holders)
        for expert in draws.permutation(len(holders)):
            holders[expert, draws.choice(np.flatnonzero(holders.sum(axis=0) < self._slots))] = True
        for device in np.flatnonzero(holders.sum(axis=0) < self._slots):
            room = int(self._slots[device] - holders[:, device].sum())
            more = draws.permutation(np.flatnonzero(~holders[:, device]))[: draws.integers(room + 1)]
            holders[more, device] = True
        return holders

    def _value(self, others_s: Floats, sharpness: float) -> float:
        return float(smooth_maxima(self._base(others_s)[None], sharpness)[0])

    def _base(self, others_s: Floats) -> Floats:
        base = self._totals.copy()
        base[WEIGHTS] += others_s
        return base

    def _steps(self, base: Floats) -> Steps:
        is_large = len(self._options.expert) > _ALL_COPIES
        return self._options.steps(base.argmax(axis=1) if is_large else None)

    def _good_step(self, others_s: Floats, sharpness: float, enough: float) -> tuple[tuple[int, int], float]:
        """Return a step and the objective after it, which is infinite if no step can get below `enough`.

        The objective is convex in what devices add up, so its tangent bounds the value after each step from below.
        Steps are tried in the order of their bounds, some at a time, until one of them gets below `enough`.
        """
        base = self._base(others_s)
        first, second = self._steps(base)
        slopes = self._slopes(slope_of_maxima(base, sharpness))
        bounds = self._value(others_s, sharpness) + slopes[first] + slopes[second]
        order = np.argsort(bounds, kind="stable")[: _TRIED_NUMBERS // base.size]
        best, found = (0, 0), np.inf
        for at in range(0, len(order), _TRIED_AT_ONCE):
            if found < enough or bounds[order[at]] >= enough:
                break
            tried = order[at : at + _TRIED_AT_ONCE]
            values = smooth_maxima(base + self._changes(first[tried]) + self._changes(second[tried]), sharpness)
            nth = int(values.argmin())
            if values[nth] < found:
                best, found = (int(first[tried[nth]]), int(second[tried[nth]])), float(values[nth])
        return best, found

    def _slopes(self, slope: Floats) -> Floats:
        """Return the slope of the objective along each edit, float64[edits]."""
        copies = self.holders.sum(axis=1)
        now, more = self._costs.slopes(slope, copies + 0.0), self._costs.slopes(slope, copies + 1.0)
        fewer = self._costs.slopes(slope, np.maximum(copies - 1.0, 1.0))
        present, thinner, denser = ((each * self.holders).sum(axis=1) for each in (now, more, fewer))
        expert, device = self._options.expert, self._options.device
        moved = now[expert] - now[expert, device][:, None]
        removed = denser[expert] - fewer[expert, device] - present[expert]
        return self._options.in_order(moved, removed, (thinner - present)[:, None] + more)

    def _changes(self, edit: Ids) -> Floats:
        """Return what each edit adds to the terms, float64[edits, TERMS, devices]."""
        expert, lost, got = self._options.edits[:, edit]
        rows, parts = np.arange(len(edit)), self._parts[expert]
        holders = self.holders[expert] + 0.0
        holders[rows[lost >= 0], lost[lost >= 0]] = 0.0
        holders[rows[got >= 0], got[got >= 0]] = 1.0
        change: Floats = self._costs.seconds(expert, holders, holders.sum(axis=1).astype(np.float64)) - parts
        return change

    def _take(self, *edits: int) -> None:
        expert, lost, got = self._options.edits[:, edits]
        holders = self.holders.copy()
        holders[expert[lost >= 0], lost[lost >= 0]] = False
        holders[expert[got >= 0], got[got >= 0]] = True
        self._replace(holders)

    def _replace(self, holders: NDArray[np.bool_]) -> None:
        self.holders = holders
        self._options = LayerSteps(holders, self._slots)
        copies = holders.sum(axis=1).astype(np.float64)
        self._parts: Floats = self._costs.seconds(np.arange(len(holders)), holders.astype(np.float64), copies)
        self._totals: Floats = self._parts.sum(axis=0)
