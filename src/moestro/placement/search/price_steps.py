"""Steps of single copies that lower the price of a layer itself: its slowest device and its busiest receiver.

The searches of loads balance one figure a device, where the price is a sum of two maxima. Where reading weights or
receiving rows is dear, or copies are worth less than the reads that they cost, these steps go on from there.
Copies of an expert have equal shares here. The compiled kernel does the same (`kernel/source/price_steps.cpp`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.kernel.choice import search_kernel
from moestro.placement.registry import PlaceView
from moestro.placement.search.activation import idle_parts
from moestro.placement.search.copies import held_by, live_counts
from moestro.placement.search.problem import Experts, PlaceProblem, StepPrices
from moestro.placement.traffic import Floats, TokenOrigins

MOST_STEPS = 64  # of a layer
LEAST_GAIN = 1e-6  # of a layer's seconds; less is rounding
NONE = -1


def step_prices(
    view: PlaceView, problem: PlaceProblem, origin: TokenOrigins, layers: NDArray[np.intp], *, may_receive: bool
) -> StepPrices:
    """Return the prices of some layers.

    Args:
        problem: The view as the search has it.
        origin: Sums of the view's load.
        may_receive: Whether devices may receive copies; without, copies are only dropped.
    """
    prices, live = view.prices, np.flatnonzero(view.devices.is_alive)
    own_s, node_s, far_s = prices.row_s
    total = origin.total[layers]
    owned = origin.by_device[live][:, layers].transpose(1, 2, 0)
    node_at = origin.node_at[live]
    of_node = origin.by_node[:, layers][node_at].transpose(1, 2, 0)
    sooner_s = (far_s - node_s) * owned
    near_s = far_s * total[:, :, None] - (far_s - node_s) * of_node - 2 * (node_s - own_s) * owned
    return StepPrices(
        work_s=_work_by_copies(view, total, layers, len(live)),
        near_s=np.ascontiguousarray(near_s),
        sooner_s=np.ascontiguousarray(sooner_s),
        rest_s=far_s * owned.sum(axis=1),
        speed=problem.speed,
        node_at=np.ascontiguousarray(node_at),
        room=problem.room,
        moved=np.ascontiguousarray(problem.moved[layers]),
        move_s=problem.move_s if may_receive else np.inf,
    )


def _work_by_copies(view: PlaceView, total: Floats, layers: NDArray[np.intp], num_devices: int) -> Floats:
    prices = view.prices
    copies = np.arange(num_devices + 1)
    share = 1.0 / np.maximum(copies, 1)
    idle = np.repeat((1 - np.minimum(view.load.activated[layers], 1.0))[:, :, None], len(copies), axis=2)
    reads = prices.expert_s * (1 - idle_parts(idle, np.broadcast_to(share, idle.shape)))
    work: Floats = prices.token_s * total[:, :, None] * share + reads
    work[:, :, 0] = 0.0
    return work


def lower_prices(prices: StepPrices, expert: Experts) -> None:
    """Take the steps that lower each layer's price most, one after the other, until none does. In place.

    Args:
        expert: int64[layers, devices, slots], contiguous.
    """
    kernel = search_kernel()
    if kernel is not None:
        kernel.lower_prices(prices, expert, MOST_STEPS, LEAST_GAIN)
        return
    for layer in range(len(expert)):
        state = _LayerPrice(prices, layer, expert[layer])
        for _ in range(MOST_STEPS):
            if not state.step():
                break


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Steps, each of which changes the copies of two experts; int64[steps] each.

    Attributes:
        expert: int64[2, steps], the expert; NONE changes nothing.
        more: int64[2, steps], copies that it gets more.
        leaves, enters: int64[2, steps], device that loses and that gets a copy; NONE means none.
        slot: int64[2, 2, steps], for the kernel's twin: slots, numbered over all devices, and what each then has.
    """

    expert: Experts
    more: Experts
    leaves: Experts
    enters: Experts
    slot: Experts

    def of(self, index: NDArray[np.intp]) -> _Steps:
        return _Steps(*(getattr(self, name)[..., index] for name in ("expert", "more", "leaves", "enters", "slot")))


class _LayerPrice:
    """One layer's copies and what they cost.

    Args:
        expert: int64[devices, slots], changed in place.
    """

    def __init__(self, prices: StepPrices, layer: int, expert: Experts) -> None:
        self._work_s, self._near_s = prices.work_s[layer], prices.near_s[layer]
        self._sooner_s, self._moved = prices.sooner_s[layer], prices.moved[layer]
        self._prices, self._expert = prices, expert
        self._slow = 1 / prices.speed
        num_experts, num_devices = self._near_s.shape
        self._same_node = prices.node_at[:, None] == prices.node_at
        self._held = held_by(expert[None], num_experts)[0][:-1]
        self._copies = live_counts(expert[None], num_experts)[0]
        self._in_node = self._held.astype(np.int64) @ self._same_node.astype(np.int64)  # copies on each device's node
        compute_s, rows_s = np.zeros(num_devices), prices.rest_s[layer].copy()
        for what in range(num_experts):
            share = 1.0 / max(int(self._copies[what]), 1)
            compute_s += self._held[what] * self._work_s[what, self._copies[what]] * self._slow
            rows_s += share * (self._held[what] * self._near_s[what] - self._sooner_s[what] * self._in_node[what])
        self._compute_s, self._rows_s = compute_s, rows_s

    def step(self) -> bool:
        """Take the best step, and return whether there is one."""
        now = self._compute_s.max() + self._rows_s.max()
        slowest, busiest = int(self._compute_s.argmax()), int(self._rows_s.argmax())
        steps = self._steps([slowest] if slowest == busiest else [slowest, busiest])
        enough = now - LEAST_GAIN * now
        probes = [np.full(steps.expert.shape[1], slowest), np.full(steps.expert.shape[1], busiest)]
        probes += [np.maximum(each, 0) for each in (*steps.leaves, *steps.enters)]
        move_s = self._move_s(steps)
        compute_s, rows_s = self._after(steps, np.stack(probes, axis=1))
        kept = np.flatnonzero(compute_s.max(axis=1) + rows_s.max(axis=1) + move_s < enough)
        if not len(kept):
            return False
        steps = steps.of(kept)
        compute_s, rows_s = self._after(
            steps, np.broadcast_to(np.arange(len(self._slow)), (len(kept), len(self._slow)))
        )
        value = compute_s.max(axis=1) + rows_s.max(axis=1) + move_s[kept]
        best = int(value.argmin())
        if not value[best] < enough:
            return False
        self._take(steps.of(np.array([best])))
        self._compute_s, self._rows_s = compute_s[best], rows_s[best]
        return True

    def _steps(self, heavy: list[int]) -> _Steps:
        """Return the steps that change one of the devices `heavy`."""
        num_devices, num_slots = self._expert.shape
        room, held, copies = self._prices.room.ravel(), self._held, self._copies
        flat = self._expert.ravel()
        here = np.repeat(np.arange(num_devices), num_slots)
        spare = np.where(flat == EMPTY, room, copies[np.maximum(flat, 0)] > 1)  # slots that may take a copy
        found = []
        for device in heavy:
            for slot in range(device * num_slots, (device + 1) * num_slots):
                what = int(flat[slot])
                if what != EMPTY:
                    # Exchange it for the copy in another slot, or for nothing.
                    is_free = (flat == EMPTY) | ~held[np.maximum(flat, 0), device]
                    to = np.flatnonzero(room & ~held[what, here] & is_free)
                    found.append(_exchanges(what, slot, device, flat[to], to, here[to]))
                    # Give it one more copy in another slot.
                    to = np.flatnonzero(spare & ~held[what, here])
                    found.append(_further(np.full(len(to), what), to, here[to], flat[to]))
                    if copies[what] > 1:
                        found.append(_dropped(what, slot, device))
                # Put a copy of any expert into it.
                if spare[slot]:
                    more = np.flatnonzero(~held[:, device])
                    every = np.full(len(more), slot)
                    found.append(_further(more, every, np.full(len(more), device), np.full(len(more), what)))
        return _Steps(*(np.concatenate(parts, axis=-1) for parts in zip(*found, strict=True)))

    def _move_s(self, steps: _Steps) -> Floats:
        """Return float64[steps], seconds per step of the copies that devices receive."""
        received = np.zeros(steps.expert.shape[1], np.int64)
        for side in range(2):
            what = np.maximum(steps.expert[side], 0)
            for devices, sign in ((steps.enters[side], 1), (steps.leaves[side], -1)):
                counts = (devices != NONE) & self._moved[what, np.maximum(devices, 0)]
                received += sign * counts
        if np.isinf(self._prices.move_s):  # nothing may be received; what is received less earns nothing
            return np.where(received > 0, np.inf, 0.0)
        return received.astype(np.float64) * self._prices.move_s

    def _after(self, steps: _Steps, device: Experts) -> tuple[Floats, Floats]:
        """Return float64[steps, devices] twice, seconds of some devices after each step."""
        compute_s, rows_s = self._compute_s[device], self._rows_s[device]
        for side in range(2):
            expert = steps.expert[side]
            is_used = (expert != NONE)[:, None]
            what = np.maximum(expert, 0)[:, None]
            now, then = self._copies[what], self._copies[what] + steps.more[side][:, None]
            before, after = 1.0 / now, 1.0 / np.maximum(then, 1)
            held = self._held[what, device] * 1.0
            slow = self._slow[device]
            near_s, sooner_s = self._near_s[what, device], self._sooner_s[what, device]
            work_s = self._work_s[what, then]
            compute_s = compute_s + is_used * (held * (work_s - self._work_s[what, now]) * slow)
            part = (after - before) * (held * near_s - sooner_s * self._in_node[what, device])
            rows_s = rows_s + is_used * part
            for devices, sign in ((steps.leaves[side], -1.0), (steps.enters[side], 1.0)):
                at = devices[:, None]
                is_there = (is_used & (at == device)) * sign
                is_near = (is_used & (at != NONE) & self._same_node[np.maximum(at, 0), device]) * sign
                compute_s = compute_s + is_there * (work_s * slow)
                rows_s = rows_s + is_there * (after * near_s)
                rows_s = rows_s - is_near * (after * sooner_s)
        return compute_s, rows_s

    def _take(self, steps: _Steps) -> None:
        flat = self._expert.reshape(-1)
        for side in range(2):
            slot, what = steps.slot[side, :, 0]
            if slot != NONE:
                flat[slot] = what
        for side in range(2):
            what = int(steps.expert[side, 0])
            if what == NONE:
                continue
            self._copies[what] += steps.more[side, 0]
            for devices, is_held in ((steps.leaves, False), (steps.enters, True)):
                at = int(devices[side, 0])
                if at != NONE:
                    self._held[what, at] = is_held
                    self._in_node[what] += np.where(is_held, 1, -1) * self._same_node[at]


Parts = tuple[Experts, Experts, Experts, Experts, Experts]  # the fields of `_Steps`


def _exchanges(what: int, slot: int, device: int, other: Experts, to: Experts, there: Experts) -> Parts:
    ones, none = np.ones(len(to), np.int64), np.full(len(to), NONE)
    is_copy = other != EMPTY
    return (
        np.stack([what * ones, np.where(is_copy, other, NONE)]),
        np.stack([0 * ones, 0 * ones]),
        np.stack([device * ones, np.where(is_copy, there, NONE)]),
        np.stack([there, np.where(is_copy, device, none)]),
        np.stack([np.stack([slot * ones, other]), np.stack([to, what * ones])]),
    )


def _further(what: Experts, to: Experts, there: Experts, other: Experts) -> Parts:
    ones, none = np.ones(len(to), np.int64), np.full(len(to), NONE)
    is_copy = other != EMPTY
    return (
        np.stack([what, np.where(is_copy, other, NONE)]),
        np.stack([ones, np.where(is_copy, -ones, 0)]),
        np.stack([none, np.where(is_copy, there, NONE)]),
        np.stack([there, none]),
        np.stack([np.stack([to, what]), np.stack([none, none])]),
    )


def _dropped(what: int, slot: int, device: int) -> Parts:
    none = np.full(1, NONE)
    return (
        np.array([[what], [NONE]]),
        np.array([[-1], [0]]),
        np.array([[device], [NONE]]),
        np.stack([none, none]),
        np.array([[[slot], [EMPTY]], [[NONE], [NONE]]]),
    )
