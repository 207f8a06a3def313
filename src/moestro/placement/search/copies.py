"""Copies of experts in the slots of devices, with what they weigh; the state that a search changes in place."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.search.problem import Experts, PlaceProblem
from moestro.placement.traffic import Floats


@dataclass(slots=True, eq=False)
class Packing:
    """Copies in slots, changed in place by exchanges.

    Attributes:
        expert: int64[batches, devices, slots].
        share: float64[batches, devices, slots].
        work: float64[batches, devices, slots], seconds of each copy at speed 1.
        held: bool[batches, experts + 1, devices], who holds what.
    """

    expert: Experts
    share: Floats
    work: Floats
    held: NDArray[np.bool_] = field(repr=False)

    def __post_init__(self) -> None:
        # Flat views change these arrays, and the compiled kernel takes their addresses.
        self.expert, self.share = np.ascontiguousarray(self.expert), np.ascontiguousarray(self.share)
        self.work, self.held = np.ascontiguousarray(self.work), np.ascontiguousarray(self.held)

    def of_layers(self, layers: NDArray[np.integer]) -> Packing:
        """Return a copy of some batches."""
        return Packing(self.expert[layers], self.share[layers], self.work[layers], self.held[layers])

    def put(self, layers: NDArray[np.integer], other: Packing) -> None:
        """Replace some batches."""
        self.expert[layers], self.share[layers] = other.expert, other.share
        self.work[layers], self.held[layers] = other.work, other.held


@dataclass(frozen=True, slots=True, eq=False)
class QueuedCopies:
    """Copies in the order in which they are placed.

    Attributes:
        items: int64[batches, copies], the expert of each; EMPTY pads.
        item_work: float64[batches, copies], seconds at speed 1.
        stay_s: float64[batches, copies], load that a device may have more to keep what it holds.
        far_s: float64[batches, experts + 1, devices], load that a copy may cost more where it is near, or None.
        adds: bool[batches, joined copies], of the first copies, whether each should take a device without any.
        joining_s: float64[batches, joined copies], load that a device of the other kind counts more.
        load: float64[batches, devices], loads at the beginning; changed.
    """

    items: Experts
    item_work: Floats
    stay_s: Floats
    far_s: Floats | None
    adds: NDArray[np.bool_]
    joining_s: Floats
    load: Floats


def packing_of(problem: PlaceProblem, expert: Experts, share: Floats) -> Packing:
    """Return the state that exchanges change."""
    return Packing(expert, share, problem.work(expert, share), held_by(expert, problem.shape[1]))


def live_counts(expert: Experts, num_experts: int) -> Experts:
    """Return int64[batches, experts], copies of each expert."""
    num_batches = len(expert)
    index = np.arange(num_batches)[:, None, None] * num_experts + expert
    counts = np.bincount(index[expert != EMPTY], minlength=num_batches * num_experts)
    return counts.reshape(num_batches, num_experts)


def even_shares(expert: Experts, num_experts: int) -> Floats:
    """Return float64[batches, devices, slots], equal parts for all copies of an expert; 0 for EMPTY."""
    counts = np.maximum(live_counts(expert, num_experts), 1)
    share: Floats = np.where(expert == EMPTY, 0.0, 1.0 / counts[np.arange(len(expert))[:, None, None], expert])
    return share


def held_by(expert: Experts, num_experts: int) -> NDArray[np.bool_]:
    """Return bool[batches, experts + 1, devices], who holds what; the last expert is EMPTY, which is never held."""
    num_batches, num_devices, _ = expert.shape
    held = np.zeros((num_batches, num_experts + 1, num_devices), np.bool_)
    batch, device, slot = np.nonzero(expert != EMPTY)
    held[batch, expert[batch, device, slot], device] = True
    return held


def normal_shares(expert: Experts, share: Floats, num_experts: int) -> Floats:
    """Scale shares so that those of each expert sum to 1; copies that have none at all become equal."""
    batch = np.arange(len(expert))[:, None, None]
    index = np.where(expert == EMPTY, 0, batch * num_experts + expert)
    share = np.where(expert == EMPTY, 0.0, share)
    totals = np.bincount(index.ravel(), share.ravel(), len(expert) * num_experts)[index]
    scaled: Floats = share / np.where(totals > 0, totals, 1.0)
    if (totals > 0).all():
        return scaled
    return np.where(totals > 0, scaled, even_shares(expert, num_experts))


def in_old_slots(packing: Packing, old: Experts) -> Packing:
    """Order the slots of each device so that an expert which it held stays in its slot.

    Args:
        old: int64[batches, devices, slots], experts before.
    """
    expert = packing.expert
    num_batches, num_devices, num_slots = expert.shape
    num_experts = packing.held.shape[1]  # EMPTY is the last one
    base = np.arange(num_batches * num_devices).reshape(num_batches, num_devices, 1)
    at = np.zeros(num_batches * num_devices * num_experts, np.int16)
    at[base * num_experts + old % num_experts] = np.arange(1, num_slots + 1)  # 0 stands for not held
    at[num_experts - 1 :: num_experts] = 0
    slot = at.take(base * num_experts + expert % num_experts).astype(np.int64) - 1
    is_kept, is_taken = slot >= 0, np.zeros(expert.shape, np.bool_)
    to = (base * num_slots + slot)[is_kept]
    is_taken.reshape(-1)[to] = True
    source = np.empty(
        expert.shape, np.int64
    )  # slot from which each slot is filled: what is new takes free slots in order
    source.reshape(-1)[to] = np.nonzero(is_kept)[2]
    source[~is_taken] = np.nonzero(~is_kept)[2]
    flat = base * num_slots + source
    share, work = packing.share.reshape(-1).take(flat), packing.work.reshape(-1).take(flat)
    return Packing(expert.reshape(-1).take(flat), share, work, packing.held)
