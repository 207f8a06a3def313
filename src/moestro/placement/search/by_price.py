"""The last part of the search: the best of several placements of each layer, and steps from it by the price itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.eplb import rebalance_experts
from moestro.placement.registry import PlaceView
from moestro.placement.search.copies import Packing, even_shares, held_by, packing_of
from moestro.placement.search.packing import pack
from moestro.placement.search.price_steps import lower_prices, step_prices
from moestro.placement.search.pricing import Pricer
from moestro.placement.search.problem import Experts, PlaceProblem
from moestro.placement.search.replicas import copy_counts, copy_work
from moestro.placement.search.sharing import share_out
from moestro.placement.search.small import is_small
from moestro.placement.traffic import Floats

# A layer is left alone whose price is above its lower bound by a smaller part.
WORTH = 0.001
NUM_STARTS = 2  # of the placements of a layer, the best ones, from which steps are taken
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
        """Return the layers whose price is far enough above what no placement can go below.

        Args:
            step_s: float64[layers], seconds per step.
        """
        view, origin, speed = self.pricer.view, self.pricer.origin, self.problem.speed
        activated = np.minimum(view.load.activated, 1.0)
        work_s = view.prices.token_s * origin.total.sum(axis=1) + view.prices.expert_s * activated.sum(axis=1)
        _, node_s, _ = view.prices.row_s
        # Rows come and answers return; at best, all of them stay within their node, and those of a device on it.
        own = origin.by_device[view.devices.is_alive].max(axis=0).sum(axis=1)
        rows_s = 2 * node_s * (origin.total.sum(axis=1) - own) / len(speed)
        if len(set(view.prices.row_s)) > 1 and len(origin.by_node) > 1:
            in_node = origin.by_node.max(axis=0).sum(axis=1)
            rows_s += 2 * (view.prices.row_s[2] - node_s) * (origin.total.sum(axis=1) - in_node) / len(speed)
        return np.flatnonzero(step_s > (1 + WORTH) * (work_s / speed.sum() + rows_s))

    def best(self, starts: list[Experts], layers: NDArray[np.intp]) -> Packing:
        """Return the best placement found of each of some layers.

        Args:
            starts: int64[layers, devices, slots] each, of all layers.
            layers: Layers to search.
        """
        some, num_experts = self.problem.of_layers(layers), self.problem.shape[1]
        tried = [start[layers] for start in starts]
        costs = [self.cost(packing_of(some, each, even_shares(each, num_experts)), layers) for each in tried]
        order = np.argsort(np.stack(costs), axis=0, kind="stable")[:NUM_STARTS]
        prices = step_prices(self.pricer.view, self.problem, self.pricer.origin, layers, may_receive=self.may_receive)
        best = _Best(self, some, layers)
        for nth in order:
            expert = np.ascontiguousarray(np.stack(tried)[nth, np.arange(len(layers))])
            lower_prices(prices, expert)
            best.take(expert)
        if self.may_receive and is_small(self.problem):
            draws = np.random.default_rng(0)
            for _ in range(NUM_KICKS):
                expert = best.even.copy()
                _exchange_at_random(expert, self.problem.room, draws)
                lower_prices(prices, expert)
                best.take(expert)
        assert best.packing is not None
        return best.packing

    def cost(self, packing: Packing, layers: NDArray[np.intp] | None = None) -> Floats:
        """Return float64[placements], seconds per step, with those of the moves."""
        prices = self.pricer.price(packing, layers)
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
        search, problem, layers: What is searched, with the problem of these layers alone.

    Attributes:
        even: int64[layers, devices, slots], the best one of each layer with equal shares.
        packing: The best one of each layer, with shares where they make it better.
    """

    def __init__(self, search: PriceSearch, problem: PlaceProblem, layers: NDArray[np.intp]) -> None:
        self._search, self._problem, self._layers = search, problem, layers
        self._least, self._least_even = np.full(len(layers), np.inf), np.full(len(layers), np.inf)
        self.even: Experts = np.zeros((len(layers), *problem.room.shape), np.int64)
        self.packing: Packing | None = None

    def take(self, expert: Experts) -> None:
        """Take in a placement of each layer, int64[layers, devices, slots]."""
        even = packing_of(self._problem, expert, even_shares(expert, self._problem.shape[1]))
        for packing in (even, *self._search.shared(self._problem, even)):
            cost = self._search.cost(packing, self._layers)
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


def pack_tokens(view: PlaceView, problem: PlaceProblem) -> Experts:
    """Fill all slots by tokens alone, the heaviest copies first, each on the least loaded device, as FlashLB does."""
    plain = replace(problem, token_s=view.load.total, expert_s=0.0, row_s=None)
    return pack(plain, copy_counts(plain), 0.0, 0.0)


def eplb_starts(view: PlaceView, problem: PlaceProblem) -> list[Experts]:
    """Return EPLB's placements, int64[layers, devices, slots], with nodes and without; none where it cannot place.

    The second copy of an expert on a device is left out.
    """
    _, num_experts, num_devices, num_slots = problem.shape
    if not problem.room.all() or num_devices * num_slots < num_experts or not np.isfinite(view.load.total).all():
        return []
    node_of = view.devices.node_of[view.devices.is_alive]
    sizes = np.unique(node_of, return_counts=True)[1]
    kinds = [(1, 1)]
    if len(sizes) > 1 and len(set(sizes.tolist())) == 1 and view.num_groups % len(sizes) == 0:
        kinds.append((view.num_groups, len(sizes)))
    at = np.argsort(node_of, kind="stable")
    found = []
    for num_groups, num_nodes in kinds:
        physical, _, _ = rebalance_experts(view.load.total, num_devices * num_slots, num_groups, num_nodes, num_devices)
        expert = np.empty((len(physical), num_devices, num_slots), np.int64)
        expert[:, at] = physical.reshape(expert.shape)
        is_second = np.tril(expert[..., :, None] == expert[..., None, :], k=-1).any(axis=-1)
        expert[is_second] = EMPTY
        found.append(expert)
    return found
