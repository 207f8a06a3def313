"""Divides the tokens of replicated experts among their copies, so that devices are equally loaded.

With shares s of an expert with w seconds of tokens, prices x of devices change them by s_d (mean of x over the copies -
x_d). The loads then change by -K x exactly, where K is the Laplacian of the graph that copies of one expert join.
So one linear system gives the shares that equalise all loads, where none becomes negative; else it is one Newton step.
"""

from __future__ import annotations

import numpy as np

from moestro.core.expert_table import EMPTY
from moestro.placement.copies import Packing, live_counts
from moestro.placement.problem import TINY, PlaceProblem
from moestro.placement.traffic import Floats

RIDGE = 1e-4  # of the even load: joins devices that no expert joins, so that the system can be solved
KEPT = 0.05  # part of a share that a step keeps at least, so that the share can grow again


def share_out(problem: PlaceProblem, packing: Packing, target: Floats, num_steps: int) -> None:
    """Set the shares of all copies so that the largest load falls, in place.

    A batch whose largest load is at most its target is left alone, and so is one that no step improves.

    Args:
        target: float64[batches], seconds.
        num_steps: Newton steps at most.
    """
    best = problem.load(packing.work).max(axis=1)
    batch = np.flatnonzero(best > target)
    if not len(batch):
        return
    layers, now = problem.only_work(batch), packing.of_layers(batch)
    for _ in range(num_steps):
        share = _newton(layers, now)
        now = packing_of_shares(layers, now, share)
        largest = layers.load(now.work).max(axis=1)
        better = largest < best[batch]
        packing.put(batch[better], now.of_layers(np.flatnonzero(better)))
        best[batch] = np.minimum(best[batch], largest)
        left = np.flatnonzero(best[batch] > target[batch])
        if not len(left):
            return
        if len(left) < len(batch):
            batch, layers, now = batch[left], layers.only_work(left), now.of_layers(left)


def packing_of_shares(problem: PlaceProblem, packing: Packing, share: Floats) -> Packing:
    """Return the same copies with other shares."""
    return Packing(packing.expert, share, problem.work(packing.expert, share), packing.held)


def _newton(problem: PlaceProblem, packing: Packing) -> Floats:
    """Return float64[batches, devices, slots], shares after one step."""
    num_batches, num_experts, num_devices, _ = problem.shape
    counts = live_counts(packing.expert, num_experts)
    num_shared = int((counts > 1).sum(axis=1).max(initial=0))
    if not num_shared:
        return packing.share
    shared = np.argsort(-counts, axis=1, kind="stable")[:, :num_shared]  # the others among them have one copy
    place = np.full((num_batches, num_experts + 1), num_shared)
    rows = np.arange(num_batches)[:, None]
    place[rows, shared] = np.arange(num_shared)
    place[:, EMPTY] = num_shared
    parts = np.zeros(
        (num_batches, num_shared + 1, num_devices), np.float32
    )  # half the time, and steps correct each other
    row, device, _ = index = np.nonzero((packing.expert != EMPTY) & problem.room)
    which = place[row, packing.expert[index]]
    parts[row, which, device] = packing.share[index]
    parts = parts[:, :-1]
    load, even = problem.load(packing.work), problem.even_load(packing.work)
    unit = np.maximum(even, TINY)[:, None]
    weighted = parts * (problem.token_s[rows, shared] / unit).astype(np.float32)[:, :, None]
    graph = -weighted.swapaxes(1, 2) @ parts
    every = np.arange(num_devices)
    graph[:, every, every] += weighted.sum(axis=1) + np.float32(RIDGE)
    price = np.linalg.solve(graph, ((load / unit - 1) * problem.speed).astype(np.float32)[..., None])
    drop = price.swapaxes(1, 2) - parts @ price  # [batches, shared, devices]
    parts = _step(parts, drop)
    share = packing.share.copy()
    is_shared = which < num_shared
    index = tuple(each[is_shared] for each in index)
    share[index] = parts[row[is_shared], which[is_shared], device[is_shared]]
    return share


def _step(parts: Floats, drop: Floats) -> Floats:
    parts = parts * np.maximum(1 - drop, KEPT)
    parts /= np.maximum(parts.sum(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
    return parts
