"""The last part of the search: the best of several placements of each layer, and steps from it by the price itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.contract import Floats, PlaceView, devices_last
from moestro.placement.eplb import rebalance_experts
from moestro.placement.kernel.choice import placement_kernel
from moestro.placement.score import idle_parts
from moestro.placement.search.packing import pack
from moestro.placement.search.problem import (
    TINY,
    Experts,
    LayerPrices,
    Packing,
    PlaceProblem,
    Pricer,
    StepPrices,
    even_shares,
    held_by,
    live_counts,
    packing_of,
)
from moestro.placement.search.replicas import copy_counts, copy_work, share_out
from moestro.placement.search.search import is_small

MOST_STEPS = 64  # of a layer
LEAST_GAIN = 1e-6  # of a layer's seconds; less is rounding
NONE = -1


def step_prices(pricer: Pricer, problem: PlaceProblem, *, may_receive: bool) -> StepPrices:
    """Return the prices of the pricer's layers.

    Args:
        problem: Problem of the same layers.
        may_receive: Whether devices may receive copies; without, copies are only dropped.
    """
    origin, live = pricer.origin, np.flatnonzero(pricer.view.devices.is_alive)
    own_s, node_s, far_s = pricer.view.prices.row_s
    owned, node_at = devices_last(origin.by_device, live), origin.node_at[live]
    near_s = devices_last(far_s * origin.total - (far_s - node_s) * origin.by_node, node_at)
    near_s -= 2 * (node_s - own_s) * owned
    return StepPrices(
        work_s=_work_by_copies(pricer, len(live)),
        near_s=near_s,
        sooner_s=(far_s - node_s) * owned,
        rest_s=far_s * owned.sum(axis=1),
        speed=problem.speed,
        node_at=np.ascontiguousarray(node_at),
        room=problem.room,
        moved=problem.moved,
        move_s=problem.move_s,
        may_receive=may_receive,
    )


def _work_by_copies(pricer: Pricer, num_devices: int) -> Floats:
    prices, total = pricer.view.prices, pricer.origin.total
    copies = np.arange(num_devices + 1)
    share = 1.0 / np.maximum(copies, 1)
    idle = np.repeat((1 - np.minimum(pricer.load.activated, 1.0))[:, :, None], len(copies), axis=2)
    reads = prices.expert_s * (1 - idle_parts(idle, np.broadcast_to(share, idle.shape)))
    work: Floats = prices.token_s * total[:, :, None] * share + reads
    work[:, :, 0] = 0.0
    return work


def lower_prices(prices: StepPrices, starts: Experts, num_best: int) -> Experts:
    """Take the steps that lower a layer's price most, one after the other, from its cheapest starts, until none does.

    Args:
        starts: int64[starts, layers, devices, slots].
        num_best: Starts of a layer from which steps are taken.

    Returns:
        int64[layers, devices, slots], the cheapest placement of each layer that was found.
    """
    kernel = placement_kernel.look()
    if kernel is not None:
        return kernel.lower_prices(prices, starts, (num_best, MOST_STEPS, LEAST_GAIN))
    found: Experts = np.empty_like(starts[0])
    for layer, of_layer in enumerate(starts.swapaxes(0, 1)):
        states = [_LayerPrice(prices, layer, start.copy()) for start in of_layer]
        states = sorted(states, key=lambda each: each.price_s)[:num_best]
        for state in states:
            for _ in range(MOST_STEPS):
                if not state.step():
                    break
        found[layer] = min(states, key=lambda each: each.price_s).expert
    return found


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
        expert: int64[devices, slots], changed in place by steps.
    """

    def __init__(self, prices: StepPrices, layer: int, expert: Experts) -> None:
        self._work_s, self._near_s = prices.work_s[layer], prices.near_s[layer]
        self._sooner_s, self._moved = prices.sooner_s[layer], prices.moved[layer]
        self._prices, self.expert = prices, expert
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

    @property
    def price_s(self) -> float:
        """Seconds per step, with those of the copies that devices have received."""
        received = int((self._held & self._moved[:-1]).sum())
        return float(self._compute_s.max() + self._rows_s.max() + received * self._prices.move_s)

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
        num_devices, num_slots = self.expert.shape
        room, held, copies = self._prices.room.ravel(), self._held, self._copies
        flat = self.expert.ravel()
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
        if not self._prices.may_receive:  # what is received less earns nothing
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
        flat = self.expert.reshape(-1)
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


# A layer of a large problem is left alone whose price is above its lower bound by a smaller part.
WORTH = 0.002
NUM_STARTS = 2  # of the placements of a layer of a small problem, the best ones, from which steps are taken
# Times that the best placement of a small problem is disturbed by random exchanges before steps are taken anew. Without
# them, one in ten of such problems is more than 0.2 % above a descent by smoothed maxima.
NUM_KICKS, KICK_EXCHANGES = 8, 3


@dataclass(frozen=True, slots=True, eq=False)
class PriceSearch:
    """Steps by the price of a layer, from the best of some placements.

    Attributes:
        pricer, problem: What is placed, and what it costs.
        move_weight: Steps' seconds that a second of moving counts.
        may_receive: Whether devices may receive copies.
        num_share_steps: Newton steps for shares; 0 leaves the copies of an expert equal parts.
    """

    pricer: Pricer
    problem: PlaceProblem
    move_weight: float
    may_receive: bool
    num_share_steps: int

    def worthwhile(self, step_s: Floats) -> NDArray[np.intp]:
        """Return the layers whose price may fall far enough, those that may fall most first.

        Args:
            step_s: float64[layers], seconds per step.
        """
        least_s = self._least_s(step_s)
        above = step_s / np.maximum(least_s, TINY)
        layers = np.argsort(-above, kind="stable")
        return layers[above[layers] > (1 if is_small(self.problem) else 1 + WORTH)]

    def _least_s(self, step_s: Floats) -> Floats:
        """Return float64[layers], seconds below which no placement with equal shares brings a layer.

        Args:
            step_s: float64[layers], seconds per step that a placement must not exceed.
        """
        view, origin, speed = self.pricer.view, self.pricer.origin, self.problem.speed
        total, (_, node_s, far_s) = origin.total, view.prices.row_s
        # Rows come and answers return; at best, all of them stay within their node, and those of a device on it.
        own = origin.most.sum(axis=1)
        rows_s: Floats = 2 * node_s * (total.sum(axis=1) - own) / len(speed)
        if len(set(view.prices.row_s)) > 1 and len(origin.by_node) > 1:
            in_node = origin.by_node.max(axis=0).sum(axis=1)
            rows_s += 2 * (far_s - node_s) * (total.sum(axis=1) - in_node) / len(speed)
        # In what is left, no device may compute for longer, so hot experts need copies, each of which is read.
        most = np.maximum((step_s - rows_s) * speed.max(), TINY)[:, None]
        copies = np.clip(np.ceil(view.prices.token_s * total / most), 1, len(speed))
        reads = copies * (1 - idle_parts(1 - np.minimum(view.load.activated, 1.0), 1 / copies))
        work_s = view.prices.token_s * total.sum(axis=1) + view.prices.expert_s * reads.sum(axis=1)
        least_s: Floats = rows_s + work_s / speed.sum()
        return least_s

    def best(self, starts: list[Experts], layers: NDArray[np.intp]) -> tuple[Packing, LayerPrices]:
        """Return the best placement found of each of some layers, and what it costs.

        Args:
            starts: int64[layers, devices, slots] each, of these layers.
            layers: Their numbers.
        """
        pricer, problem = self.pricer.of_layers(layers), self.problem.of_layers(layers)
        has_many = is_small(self.problem)
        prices = step_prices(pricer, problem, may_receive=self.may_receive)
        best = _Best(self, pricer, problem)
        best.take(lower_prices(prices, np.stack(starts), NUM_STARTS if has_many else 1))
        if self.may_receive and has_many:
            draws = np.random.default_rng(0)
            for _ in range(NUM_KICKS):
                expert = best.even.copy()
                _exchange_at_random(expert, self.problem.room, draws)
                best.take(lower_prices(prices, expert[None], 1))
        assert best.packing is not None
        return best.packing, pricer.price(best.packing)

    def cost_of(self, prices: LayerPrices) -> Floats:
        """Return float64[placements], seconds per step, with those of the moves."""
        cost: Floats = prices.step_s + self.move_weight * prices.receive_s.mean(axis=1)
        return cost

    def shared(self, problem: PlaceProblem, even: Packing) -> list[Packing]:
        """Return the placement with the tokens of copies divided so that devices are level, if copies may differ."""
        if not self.num_share_steps:
            return []
        shared = even.of_layers(np.arange(len(even.expert)))
        share_out(problem, shared, problem.even_load(shared.work), self.num_share_steps)
        return [shared]


class _Best:
    """The best placements so far.

    Args:
        search, pricer, problem: What is searched, with the pricer and the problem of these layers alone.

    Attributes:
        even: int64[layers, devices, slots], the best one of each layer with equal shares.
        packing: The best one of each layer, with shares where they make it better.
    """

    def __init__(self, search: PriceSearch, pricer: Pricer, problem: PlaceProblem) -> None:
        self._search, self._pricer, self._problem = search, pricer, problem
        num_layers = problem.shape[0]
        self._least, self._least_even = np.full(num_layers, np.inf), np.full(num_layers, np.inf)
        self.even: Experts = np.zeros((num_layers, *problem.room.shape), np.int64)
        self.packing: Packing | None = None

    def take(self, expert: Experts) -> None:
        """Take in a placement of each layer, int64[layers, devices, slots]."""
        even = packing_of(self._problem, expert, even_shares(expert, self._problem.shape[1]))
        for packing in (even, *self._search.shared(self._problem, even)):
            cost = self._search.cost_of(self._pricer.price(packing))
            if packing is even:
                better = cost < self._least_even
                self.even[better], self._least_even[better] = expert[better], cost[better]
            if self.packing is None:
                self.packing = packing.of_layers(np.arange(len(cost)))
            rows = np.flatnonzero(cost < self._least)
            self.packing.put(rows, packing.of_layers(rows))
            self._least = np.minimum(self._least, cost)


def _exchange_at_random(expert: Experts, room: NDArray[np.bool_], draws: np.random.Generator) -> None:
    """Exchange a few pairs of slots in each layer, in place, where no device then has an expert twice."""
    slots = np.flatnonzero(room.ravel())
    num_slots = room.shape[1]
    for layer in expert.reshape(len(expert), -1):
        by_device = layer.reshape(room.shape)
        for one, other in draws.choice(slots, (KICK_EXCHANGES, 2)).tolist():
            gives, takes = layer[one], layer[other]
            if gives not in by_device[other // num_slots] and takes not in by_device[one // num_slots]:
                layer[one], layer[other] = takes, gives


def thinned(problem: PlaceProblem, expert: Experts, counts: Experts) -> Experts:
    """Give up copies above the best numbers, so that devices stay level; no single one may make a step shorter.

    Args:
        expert: int64[layers, devices, slots], experts in the slots.
        counts: int64[layers, experts], the best numbers of copies.
    """
    held = held_by(expert, problem.shape[1])[:, :-1]
    work = copy_work(problem, counts)
    order = np.argsort(-work, axis=1, kind="stable")
    every, load, kept = np.arange(len(expert)), np.zeros((len(expert), problem.shape[2])), np.zeros_like(held)
    for what in order.T:
        key = np.where(held[every, what], load, np.inf)
        place = np.argsort(np.argsort(key, axis=1, kind="stable"), axis=1)
        taken = held[every, what] & (place < counts[every, what, None])
        kept[every, what] = taken
        load += taken * work[every, what, None]
    is_used = expert != EMPTY
    device = np.arange(expert.shape[1])[:, None]
    return np.where(is_used & kept[every[:, None, None], np.where(is_used, expert, 0), device], expert, EMPTY)


def pack_tokens(problem: PlaceProblem, total: Floats) -> Experts:
    """Fill all slots by tokens alone, the heaviest copies first, each on the least loaded device; ties as in FlashLB.

    Args:
        total: float64[batches, experts], tokens of the problem's layers.
    """
    plain = replace(problem, token_s=total, expert_s=0.0, row_s=None)
    return pack(plain, copy_counts(plain), 0.0, 0.0, are_plain=True)


def eplb_starts(view: PlaceView, problem: PlaceProblem, total: Floats) -> list[Experts]:
    """Return EPLB's placements, int64[batches, devices, slots], with nodes and without; none where it cannot place.

    The second copy of an expert on a device is left out.

    Args:
        total: float64[batches, experts], tokens of the problem's layers.
    """
    _, num_experts, num_devices, num_slots = problem.shape
    if not problem.room.all() or num_devices * num_slots < num_experts or not np.isfinite(total).all():
        return []
    node_of = view.devices.node_of[view.devices.is_alive]
    sizes = np.unique(node_of, return_counts=True)[1]
    kinds = [(1, 1)]
    if len(sizes) > 1 and len(set(sizes.tolist())) == 1 and view.num_groups % len(sizes) == 0:
        kinds.append((view.num_groups, len(sizes)))
    at = np.argsort(node_of, kind="stable")
    found = []
    for num_groups, num_nodes in kinds:
        physical, _, _ = rebalance_experts(total, num_devices * num_slots, num_groups, num_nodes, num_devices)
        expert = np.empty((len(physical), num_devices, num_slots), np.int64)
        expert[:, at] = physical.reshape(expert.shape)
        is_second = np.tril(expert[..., :, None] == expert[..., None, :], k=-1).any(axis=-1)
        expert[is_second] = EMPTY
        found.append(expert)
    return found
