"""Searches a better placement: from the present one, or from none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.placement.budget import Allowance, allowance_of
from moestro.placement.copies import Packing, even_shares, packing_of
from moestro.placement.descent import balance, bring_near
from moestro.placement.devices import PlaceLimits
from moestro.placement.packing import pack
from moestro.placement.problem import PlaceProblem
from moestro.placement.replicas import add_copies, copy_counts, copy_work, suit_pairs
from moestro.placement.sharing import share_out
from moestro.placement.traffic import Floats

# Part of the even load above which a single copy is hard to pack.
HEAVY_COPY = 0.6
# A copy may weigh this much more than with the best numbers of copies before one of them moves.
HEAVIER_COPY = 1.05
SHARE_STEPS = 8  # Newton steps from shares of another load; few more gain nothing (sweep, 58 x 256 on 64 devices)
SHARE_STEPS_AGAIN = 3
STAY = 0.1  # load that a new packing may cost a copy more, as a part of the copy, so that it stays where it is held
# Slots of all layers up to which a problem is small enough for several starts, and how many it gets at most.
SMALL = 4096
MOST_STARTS = 64
NOISE = 0.3  # of the logarithm of loads, from which further starts take copies and order
SLOTS_A_TURN = 8  # devices with more slots take more turns, because each turn exchanges one of them
NEAR = 8.0  # weight of the way of rows in a new packing; a sweep from 0 to 8 shortened ways at no loss of balance


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """How far a search goes.

    Attributes:
        target: Mean load over largest load at which a layer is left alone.
        slack: Part of its load that a device may have more so that rows travel less.
        num_rounds: Rounds of exchanges for balance.
        num_turns: Rotations of pairs of devices that exchange copies so that rows travel less.
        num_share_steps: Newton steps for shares; 0 leaves the copies of an expert equal parts.
    """

    target: float
    slack: float
    num_rounds: int
    num_turns: int
    num_share_steps: int


def improve(problem: PlaceProblem, packing: Packing, limits: SearchLimits, allowance: Allowance) -> None:
    """Improve a placement in place, by as few moves as its target takes: shares, copies, exchanges, ways of rows."""
    even = problem.even_load(packing.work)
    share_out(problem, packing, least_load(problem, packing) / limits.target, limits.num_share_steps)
    counts = copy_counts(problem)
    peak = copy_work(problem, counts).max(axis=1)
    add_copies(problem, packing, np.maximum(HEAVIER_COPY * peak, HEAVY_COPY * even * problem.speed.max()), allowance)
    level(problem, packing, limits, allowance)
    shorten(problem, packing, limits, allowance)


def level(problem: PlaceProblem, packing: Packing, limits: SearchLimits, allowance: Allowance) -> None:
    """Exchange copies and divide tokens until devices are as equally loaded as the target asks."""
    goal = least_load(problem, packing) / limits.target
    balance(problem, packing, goal, limits.num_rounds, allowance)
    share_out(problem, packing, goal, min(SHARE_STEPS_AGAIN, limits.num_share_steps))


def shorten(problem: PlaceProblem, packing: Packing, limits: SearchLimits, allowance: Allowance) -> None:
    """Exchange copies so that rows travel less, for no more load than the slack."""
    if problem.row_s is None:
        return
    largest = problem.load(packing.work).max(axis=1)
    cap = largest * (1 + limits.slack)
    num_turns = limits.num_turns * -(-problem.room.shape[1] // SLOTS_A_TURN)
    bring_near(problem, packing, cap, num_turns, allowance)


def start_anew(problem: PlaceProblem, limits: SearchLimits) -> list[Packing]:
    """Place all copies anew, which may move almost all of them.

    Returns:
        Placements of all batches: one, or several of a small problem, where a single search often ends too early.
    """
    num_batches, num_experts, num_devices, num_slots = problem.shape
    num_starts = min(MOST_STARTS, max(1, SMALL // (num_batches * num_devices * num_slots)))
    wide = problem if num_starts == 1 else problem.of_layers(np.tile(np.arange(num_batches), num_starts))
    noise = np.random.default_rng(0).standard_normal(wide.token_s.shape) * NOISE
    noise[:num_batches] = 0.0  # the first start is as it is for large problems
    guess = replace(wide, token_s=wide.token_s * np.exp(noise)) if num_starts > 1 else wide
    counts = copy_counts(guess)
    if num_slots == 2:
        counts = suit_pairs(wide, counts)
    expert = pack(guess, counts, STAY, NEAR)
    packing = packing_of(wide, expert, even_shares(expert, num_experts))
    unlimited = allowance_of(PlaceLimits(), 1, num_devices)
    level(wide, packing, limits, unlimited)
    shorten(wide, packing, limits, unlimited)
    if num_starts == 1:
        return [packing]
    return [packing.of_layers(start * num_batches + np.arange(num_batches)) for start in range(num_starts)]


def is_level(problem: PlaceProblem, packing: Packing, target: float) -> NDArray[np.bool_]:
    """Return bool[batches], whether the least possible load over the largest load reaches the target."""
    largest: Floats = problem.load(packing.work).max(axis=1)
    return least_load(problem, packing) >= target * largest * (1 - 1e-9)


def least_load(problem: PlaceProblem, packing: Packing) -> Floats:
    """Return float64[batches], seconds below which no placement brings the largest load.

    Work is spread evenly at best. Without room for further copies, the fastest device that holds the heaviest expert
    also holds as many others as it has slots, at best the lightest.
    """
    even = problem.even_load(packing.work)
    num_slots = problem.room.sum(axis=1)
    if num_slots.sum() > problem.shape[1] or problem.expert_s > 0:
        return even
    ordered = np.sort(problem.token_s, axis=1)
    lightest = ordered[:, : max(0, int(num_slots[num_slots > 0].min()) - 1)].sum(axis=1)
    return np.maximum(even, (ordered[:, -1] + lightest) / problem.speed.max())


def is_small(problem: PlaceProblem) -> bool:
    """Whether the problem gets several starts."""
    num_batches, _, num_devices, num_slots = problem.shape
    return 2 * num_batches * num_devices * num_slots <= SMALL
