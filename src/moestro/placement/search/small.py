"""Searches small problems more thoroughly: from many starts, and over all neighbours of the best ones.

With few copies, a placement that no single exchange improves is often far from the best; with many, it hardly is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.devices import PlaceLimits
from moestro.placement.search.budget import allowance_of
from moestro.placement.search.copies import Packing, even_shares, held_by, live_counts, packing_of
from moestro.placement.search.packing import pack
from moestro.placement.search.pricing import Pricer
from moestro.placement.search.problem import Experts, PlaceProblem
from moestro.placement.search.replicas import copy_counts, suit_pairs
from moestro.placement.search.search import NEAR, STAY, SearchLimits, least_load, level, shorten
from moestro.placement.search.sharing import share_out
from moestro.placement.traffic import Floats

SMALL = 2048  # slots of all layers up to which a problem gets several starts
MOST_STARTS = 256
TINY_SLOTS = 24  # slots of a layer up to which all neighbours of a placement are priced
NUM_CLIMBERS = 12  # best starts of a layer from which neighbours are tried
MOST_CLIMBS = 12


def is_small(problem: PlaceProblem) -> bool:
    """Whether the problem is small enough for several starts."""
    num_batches, _, num_devices, num_slots = problem.shape
    return num_batches * num_devices * num_slots <= SMALL


@dataclass(frozen=True, slots=True, eq=False)
class SmallSearch:
    """A search of all layers of a small problem.

    Attributes:
        pricer, problem: What is placed, and what it costs.
        limits: How far the search goes.
        move_weight: Steps' seconds that a second of moving counts.
    """

    pricer: Pricer
    problem: PlaceProblem
    limits: SearchLimits
    move_weight: float

    def best(self, present: Packing) -> Packing:
        """Return the best placement found of every layer, the present one included."""
        num_layers = self.problem.shape[0]
        num_starts = min(MOST_STARTS, max(2, 2 * SMALL // present.expert.size))
        layers = np.tile(np.arange(num_layers), num_starts)
        expert = np.concatenate([self._starts(layers), present.expert])
        layers = np.append(layers, np.arange(num_layers))
        if self.problem.room.size <= TINY_SLOTS:
            climbed, of_climbed = self._climb(expert, layers)
            expert, layers = np.concatenate([expert, climbed]), np.append(layers, of_climbed)
        packing = packing_of(self.problem.of_layers(layers), expert, even_shares(expert, self.problem.shape[1]))
        if self.limits.num_share_steps:
            wide = self.problem.of_layers(layers)
            shared = packing.of_layers(np.arange(len(layers)))
            share_out(wide, shared, least_load(wide, shared) / self.limits.target, self.limits.num_share_steps)
            packing = _joined(packing, shared)
            layers = np.tile(layers, 2)
        cost = self._cost(packing, layers)
        order = np.lexsort((cost, layers))
        first = order[np.searchsorted(layers[order], np.arange(num_layers))]
        return packing.of_layers(first)

    def _starts(self, layers: NDArray[np.intp]) -> Experts:
        """Return int64[starts, devices, slots], packings that differ in copies, order, and what draws a copy.

        Half of them are leveled. The rest stay as drawn: few placements are level, and exchanges leave some out.
        """
        wide, rng, column = self.problem.of_layers(layers), np.random.default_rng(0), (len(layers), 1)
        is_leveled = np.arange(len(layers)) < len(layers) // 2
        noise = np.where(is_leveled, 0.5, 3.0)[:, None] * rng.random(column)
        stay, near = STAY * 10 ** rng.uniform(0, 3, column), NEAR * 10 ** rng.uniform(-2, 0, column)
        kept = rng.choice([1.0, 0.5, 0.0], column)
        first = np.arange(self.problem.shape[0])  # the first start of each layer is that of a large problem
        noise[first], stay[first], near[first], kept[first] = 0.0, STAY, NEAR, 1.0
        guess = replace(wide, token_s=wide.token_s * np.exp(noise * rng.standard_normal(wide.token_s.shape)))
        counts = copy_counts(guess)
        counts = suit_pairs(wide, counts) if wide.shape[3] == 2 else counts
        counts = 1 + rng.binomial(counts - 1, np.broadcast_to(kept, counts.shape))
        expert = pack(guess, counts, stay[..., None], near[..., None])
        rows = np.flatnonzero(is_leveled)
        some, unlimited = self.problem.of_layers(layers[rows]), allowance_of(PlaceLimits(), 1, wide.shape[2])
        packing = packing_of(some, expert[rows], even_shares(expert[rows], wide.shape[1]))
        level(some, packing, replace(self.limits, num_share_steps=0), unlimited)
        shorten(some, packing, self.limits, unlimited)
        expert[rows] = packing.expert
        return expert

    def _cost(self, packing: Packing, layers: NDArray[np.intp]) -> Floats:
        """Return float64[placements], seconds per step and of the move."""
        prices = self.pricer.price(packing, layers)
        cost: Floats = prices.step_s + self.move_weight * prices.receive_s.max(axis=1)
        return cost

    def _climb(self, expert: Experts, layers: NDArray[np.intp]) -> tuple[Experts, NDArray[np.intp]]:
        """Move the best placements of each layer to their best neighbours until none is better."""
        num_experts = self.problem.shape[1]
        best = np.full(self.problem.shape[0], np.inf)
        for _ in range(MOST_CLIMBS):
            # The order of slots makes no difference.
            _, index = np.unique(_keys(expert, layers), return_index=True)
            expert, layers = expert[index], layers[index]
            packing = packing_of(self.problem.of_layers(layers), expert, even_shares(expert, num_experts))
            cost = self._cost(packing, layers)
            order = np.lexsort((cost, layers))
            place = np.arange(len(order)) - np.searchsorted(layers[order], layers[order])
            expert, layers, first = expert[order], layers[order], cost[order][place == 0]
            expert, layers = expert[place < NUM_CLIMBERS], layers[place < NUM_CLIMBERS]
            if (first >= best * (1 - 1e-9)).all():
                break
            best = first
            further, origin = _neighbours(expert, num_experts, self.problem.room)
            expert, layers = np.concatenate([expert, further]), np.append(layers, layers[origin])
        return expert, layers


def _keys(expert: Experts, layers: NDArray[np.intp]) -> NDArray[np.bytes_]:
    """Return bytes[placements], equal for placements of a layer that differ in the order of slots only.

    They sort as the rows of numbers do, which NumPy would compare one number after the other.
    """
    held = np.sort(expert, axis=2).reshape(len(expert), -1)
    rows = np.append(held, layers[:, None], axis=1) - EMPTY
    return rows.astype(">u4").view(f"S{4 * rows.shape[1]}").ravel()


def _neighbours(expert: Experts, num_experts: int, room: NDArray[np.bool_]) -> tuple[Experts, NDArray[np.intp]]:
    """Return placements in which one slot holds another expert or none, or two slots were exchanged.

    Returns:
        int64[neighbours, devices, slots], those that cover all experts and have none twice on a device; and
        int64[neighbours], the placement from which each comes.
    """
    flat, slots = expert.reshape(len(expert), -1), np.flatnonzero(room.ravel())
    slot, other = (each.ravel() for each in np.meshgrid(slots, np.arange(EMPTY, num_experts), indexing="ij"))
    one, two = slots[np.array(np.triu_indices(len(slots), 1))]
    changed = np.repeat(flat[:, None], len(slot) + len(one), axis=1)
    changed[:, np.arange(len(slot)), slot] = other
    rows = len(slot) + np.arange(len(one))
    changed[:, rows, one], changed[:, rows, two] = flat[:, two], flat[:, one]
    found = changed.reshape(-1, *expert.shape[1:])
    counts = live_counts(found, num_experts)
    num_held = held_by(found, num_experts).sum(axis=(1, 2))
    is_valid = (counts > 0).all(axis=1) & (num_held == counts.sum(axis=1))
    return found[is_valid], np.repeat(np.arange(len(expert)), changed.shape[1])[is_valid]


def _joined(one: Packing, other: Packing) -> Packing:
    """Return the placements of both."""
    return Packing(
        np.concatenate([one.expert, other.expert]),
        np.concatenate([one.share, other.share]),
        np.concatenate([one.work, other.work]),
        np.concatenate([one.held, other.held]),
    )
