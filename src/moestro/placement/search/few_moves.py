"""Exchanges under a small budget of moves: the budget goes to the layers whose largest load falls most per copy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.placement.devices import PlaceLimits
from moestro.placement.search.budget import Allowance, allowance_of
from moestro.placement.search.copies import Packing
from moestro.placement.search.descent import LEAST_GAIN, Goal, exchange
from moestro.placement.search.problem import Experts, PlaceProblem
from moestro.placement.traffic import Floats

# Exchanges tried in each layer, as a multiple of the mean number that the allowance permits. 4 gains nothing more
# (bench/simulator/placement_constants.py, for both constants).
WIDEST = 2.5
# Part of the devices, the lightest ones, that the heaviest device is paired with. With all of them the balance is .001
# higher to .0007 lower, depending on the allowance.
LIGHT_PART = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """Placements of all layers after 0, 1, 2, … exchanges in each layer.

    Attributes:
        packings: Placements.
        largest: float64[exchanges + 1, batches], seconds of the heaviest device.
        received: int64[exchanges + 1, batches, devices], copies that devices receive.
    """

    packings: list[Packing]
    largest: Floats
    received: Experts


def relieve_heaviest(
    problem: PlaceProblem, packing: Packing, goal: Goal, num_rounds: int, allowance: Allowance
) -> None:
    """Exchange copies of the heaviest device of each layer, one after the other, within a scarce allowance.

    The search first tries more exchanges in each layer than the allowance permits. The allowance then goes to the
    exchanges that lower a largest load most per received copy. The first exchange of one layer often gains less than
    the fourth exchange of another layer, so layers get different numbers of exchanges.

    Args:
        num_rounds: Exchanges of a layer at most.
    """
    total = min(allowance.total, float(allowance.each.sum()))
    widest = math.ceil(WIDEST * total / (2 * max(len(packing.expert), 1)))  # An exchange moves two copies.
    stages = _try_exchanges(problem, packing, goal, min(num_rounds, widest))
    stage = _best_stages(stages, allowance)
    for number in range(1, len(stages.packings)):
        batch = np.flatnonzero(stage == number)
        packing.put(batch, stages.packings[number].of_layers(batch))
    received = stages.received[stage, np.arange(len(stage))].sum(axis=0)
    allowance.total -= float(received.sum())
    allowance.each -= received


def _try_exchanges(problem: PlaceProblem, packing: Packing, goal: Goal, num_rounds: int) -> Stages:
    unlimited = allowance_of(PlaceLimits(), 1, problem.shape[2])
    every, before = np.arange(len(packing.expert)), _lacking(problem, packing)
    now, batch = packing.of_layers(every), every
    packings, largest, received = [packing], [problem.load(packing.work).max(axis=1)], [np.zeros_like(before)]
    for _ in range(num_rounds):
        batch = batch[largest[-1][batch] > goal.largest[batch] * (1 + LEAST_GAIN)]
        if not len(batch):
            break
        order = np.argsort(problem.load(now.work[batch]), axis=1, kind="stable")
        light = order[:, : max(round(LIGHT_PART * (order.shape[1] - 1)), 1)]
        pairs = batch, np.broadcast_to(order[:, -1:], light.shape), light
        batch = batch[exchange(problem, now, pairs, goal.each, unlimited, one_each=True)]
        packings.append(now.of_layers(every))
        largest.append(problem.load(now.work).max(axis=1))
        received.append(_lacking(problem, now) - before)
    return Stages(packings, np.stack(largest), np.stack(received))


def _lacking(problem: PlaceProblem, packing: Packing) -> Experts:
    """Return int64[batches, devices], copies that are where the present placement has none."""
    lacking: Experts = np.count_nonzero(packing.held & problem.moved, axis=1)
    return lacking


def _best_stages(stages: Stages, allowance: Allowance) -> NDArray[np.intp]:
    """Return int64[batches], the stage of each layer that the allowance is spent on."""
    saved = np.maximum.accumulate(stages.largest[0] - stages.largest, axis=0).T
    copies = stages.received.sum(axis=2).T
    num_batches, num_stages = saved.shape
    every = np.arange(num_batches)
    at, steps = np.zeros(num_batches, np.intp), []
    while True:  # along the upper hull of each layer: the next stage that saves most per copy from the present one on
        rest = np.arange(num_stages) > at[:, None]
        gain = np.where(rest, saved - saved[every, at][:, None], 0.0)
        rate = gain / np.maximum(copies - copies[every, at][:, None], 1)
        to = rate.argmax(axis=1)
        batch = np.flatnonzero(rate[every, to] > 0)
        if not len(batch):
            break
        steps.append(np.stack([-rate[batch, to[batch]], batch, to[batch]]))
        at[batch] = to[batch]
    return _within(steps, stages, allowance)


def _within(steps: list[Floats], stages: Stages, allowance: Allowance) -> NDArray[np.intp]:
    """Take the steps that save most per copy, as far as the allowance goes; a layer ends at its first misfit."""
    stage = np.zeros(stages.largest.shape[1], np.intp)
    if not steps:
        return stage
    every = np.concatenate(steps, axis=1)
    _, batches, to = every[:, np.argsort(every[0], kind="stable")]
    left, has_ended = allowance.each.copy(), np.zeros(len(stage), np.bool_)
    total = allowance.total
    for batch, number in zip(batches.astype(np.intp).tolist(), to.astype(np.intp).tolist(), strict=True):
        due = stages.received[number, batch] - stages.received[stage[batch], batch]
        if has_ended[batch] or due.sum() > total or (due > left).any():
            has_ended[batch] = True
            continue
        stage[batch], left, total = number, left - due, total - float(due.sum())
    return stage
