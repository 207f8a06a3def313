"""Divides the tokens of replicated experts among their copies, so that devices are equally loaded.

With shares s of an expert with w seconds of tokens, prices x of devices change them by s_d (mean of x over the copies -
x_d). The loads then change by -K x exactly, where K is the Laplacian of the graph that copies of one expert join.
So one linear system gives the shares that equalise all loads, where none becomes negative; else it is one Newton step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.search.activation import idle_parts
from moestro.placement.search.copies import Packing, live_counts
from moestro.placement.search.problem import TINY, Experts, PlaceProblem
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
    if not len(batch) or not num_steps:
        return
    copies = _shared_copies(problem, packing, batch)
    if not len(copies.row):
        return
    for _ in range(num_steps):
        copies = replace(copies, share=copies.stepped())
        largest = copies.load().max(axis=1)
        before = best[copies.batch]
        better = largest < before
        best[copies.batch] = np.minimum(before, largest)
        copies.of_rows(better).put(packing)
        left = better & (largest > target[copies.batch])
        if not left.any():
            return
        if not left.all():
            copies = copies.of_rows(left)


@dataclass(frozen=True, slots=True, eq=False)
class _SharedCopies:
    """Copies of the experts with several copies, in some batches. Arrays of copies have an entry for each one.

    Attributes:
        batch: int64[rows], numbers of the batches; a row is one of them.
        fixed: float64[rows, devices], seconds of all other copies at speed 1.
        speed: float64[devices].
        expert_s: Seconds in which a device of speed 1 reads the weights of one activated expert.
        row, device, slot: int64[copies], where each copy is.
        which: int64[copies], its expert, numbered within the row.
        token_s, idle: float64[copies], of its expert, as in the problem.
        share: float64[copies].
    """

    batch: NDArray[np.intp]
    fixed: Floats
    speed: Floats
    expert_s: float
    row: Experts
    device: Experts
    slot: Experts
    which: Experts
    token_s: Floats
    idle: Floats
    share: Floats

    def of_rows(self, is_kept: NDArray[np.bool_]) -> _SharedCopies:
        """Return some rows."""
        in_kept, number = is_kept[self.row], np.cumsum(is_kept) - 1
        names = [each.name for each in fields(self)][4:]
        copies = {name: getattr(self, name)[in_kept] for name in names}
        copies["row"] = number[copies["row"]]
        return replace(self, batch=self.batch[is_kept], fixed=self.fixed[is_kept], **copies)

    def work(self) -> Floats:
        """Return float64[copies], seconds of each copy at speed 1."""
        work: Floats = self.token_s * self.share
        if self.expert_s > 0:
            work += np.where(self.share > 0, self.expert_s * (1 - idle_parts(self.idle, self.share)), 0.0)
        return work

    def load(self) -> Floats:
        """Return float64[rows, devices], seconds of each device."""
        shape = self.fixed.shape
        shared = np.bincount(self.row * shape[1] + self.device, self.work(), self.fixed.size).reshape(shape)
        load: Floats = (self.fixed + shared) / self.speed
        return load

    def put(self, packing: Packing) -> None:
        """Set the shares of these copies in a placement."""
        where = (self.batch[self.row], self.device, self.slot)
        packing.share[where], packing.work[where] = self.share, self.work()

    def stepped(self) -> Floats:
        """Return float64[copies], shares after one step that leaves some of each; those of an expert sum to 1."""
        num_rows, num_devices = self.fixed.shape
        load = self.load()
        unit = np.maximum((load * self.speed).sum(axis=1) / self.speed.sum(), TINY)
        weight = self.share * self.token_s / unit[self.row]
        # In single precision, which takes half the time: the next step corrects what this one rounds.
        num_experts = int(self.which.max(initial=0)) + 1
        parts = np.zeros((num_rows, num_experts, num_devices), np.float32)
        weighted = np.zeros_like(parts)
        index = self.row * num_experts + self.which
        flat = index * num_devices + self.device  # half of the time of an index by axis
        parts.reshape(-1)[flat], weighted.reshape(-1)[flat] = self.share, weight
        graph = -(weighted.swapaxes(1, 2) @ parts)
        every = np.arange(num_devices)
        graph[:, every, every] += weighted.sum(axis=1) + np.float32(RIDGE)
        excess = ((load / unit[:, None] - 1) * self.speed).astype(np.float32)
        price = np.linalg.solve(graph, excess[..., None])
        mean = (parts @ price)[..., 0]
        drop = price[self.row, self.device, 0] - mean[self.row, self.which]
        kept = self.share * np.maximum(1 - drop.astype(np.float64), KEPT)
        totals = np.bincount(index, kept, num_rows * num_experts)
        share: Floats = kept / np.maximum(totals, TINY)[index]
        return share


def _shared_copies(problem: PlaceProblem, packing: Packing, batch: NDArray[np.intp]) -> _SharedCopies:
    """Find the copies of experts with several ones in some batches."""
    num_experts = problem.shape[1]
    expert, work = packing.expert[batch], packing.work[batch]
    is_shared = np.append(live_counts(expert, num_experts) > 1, np.zeros((len(batch), 1), np.bool_), axis=1)
    of_slot = is_shared[np.arange(len(batch))[:, None, None], expert] & (expert != EMPTY)
    row, device, slot = np.nonzero(of_slot)
    what = expert[row, device, slot]
    return _SharedCopies(
        batch,
        np.where(of_slot, 0.0, work).sum(axis=2),
        problem.speed,
        problem.expert_s,
        row,
        device,
        slot,
        (np.cumsum(is_shared, axis=1) - 1)[row, what],
        problem.token_s[batch[row], what],
        problem.idle[batch[row], what],
        packing.share[batch[row], device, slot],
    )
