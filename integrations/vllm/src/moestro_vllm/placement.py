"""Answers vLLM's question where experts should live with one of Moestro's placement policies, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.devices import PlaceLimits, PlacePrices, even_devices
from moestro.placement.eplb import keep_slots
from moestro.placement.registry import PlacePolicy, PlaceView
from moestro.placement.search.filling import PresentCopies, fill_empty

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """The steps that vLLM's load figures cover, and those until the next placement.

    Attributes:
        num_steps: Steps that the load sums up, vLLM's `window_size`.
        horizon_steps: Steps until the next placement, vLLM's `step_interval`.
    """

    num_steps: int
    horizon_steps: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """Sizes that vLLM names in its question.

    Attributes:
        num_slots: Slots of a layer on all ranks (`num_replicas`), a multiple of `num_ranks`.
        num_groups: Groups of experts.
        num_nodes: Machines.
        num_ranks: Ranks, a multiple of `num_nodes`.

    Raises:
        ValueError: The numbers do not divide each other.
    """

    num_slots: int
    num_groups: int
    num_nodes: int
    num_ranks: int

    def __post_init__(self) -> None:
        if min(self.num_slots, self.num_groups, self.num_nodes, self.num_ranks) < 1:
            raise ValueError(f"vLLM asks with a number below 1: {self}")
        if self.num_slots % self.num_ranks or self.num_ranks % self.num_nodes:
            raise ValueError(f"vLLM asks with numbers that do not divide each other: {self}")


@dataclass(frozen=True, slots=True)
class Planner:
    """Asks a placement policy as vLLM asks its own.

    vLLM states the load of each expert over all ranks and all steps of its window. Two figures that policies read are
    therefore assumed: each rank sends an equal part of the tokens, and tokens come independently of each other, so that
    an expert is activated in a step with probability 1 - exp(-tokens of the step).

    vLLM gives every copy of an expert an equal part of its tokens. Shares of copies in the policy's answer are ignored.

    Attributes:
        policy: Placement policy.
        prices: What work and moves cost.
        window: What the load figures stand for.
    """

    policy: PlacePolicy
    prices: PlacePrices
    window: LoadWindow

    def place(self, load: NDArray[np.floating], fleet: Fleet, old: NDArray[np.integer] | None) -> Int64s:
        """Return int64[layers, slots], the expert in each slot; no slot is empty.

        Args:
            load: float[layers, experts], tokens of the window.
            fleet: Sizes.
            old: int[layers, slots], the expert in each slot now, negative for none; None where there is no placement.
                More slots than `fleet` has are the ones of ranks that go.

        Raises:
            ValueError: The load is negative or not finite, or the experts do not fit into the slots.
        """
        num_layers, num_experts = load.shape
        if num_experts > fleet.num_slots:
            raise ValueError(f"{num_experts} experts do not fit into {fleet.num_slots} slots")
        known = _fitted(old, num_layers, fleet)
        before = _covering(known, load, fleet.num_ranks)
        table = self.policy(self._view(load, fleet, before))
        wanted = np.concatenate(list(table.logical_of), axis=1).astype(np.int64)
        by_rank = (num_layers, fleet.num_ranks, -1)
        present = PresentCopies(known.reshape(by_rank))
        filled = fill_empty(wanted.reshape(by_rank), load.astype(np.float64), present)
        placed = filled.reshape(num_layers, -1)
        return keep_slots(placed, known, fleet.num_ranks)

    def _view(self, load: NDArray[np.floating], fleet: Fleet, before: Int64s) -> PlaceView:
        num_layers, num_experts = load.shape
        num_local = fleet.num_slots // fleet.num_ranks
        per_step = load.astype(np.float64) / self.window.num_steps
        tokens = np.broadcast_to(per_step / fleet.num_ranks, (fleet.num_ranks, num_layers, num_experts)).copy()
        activated = -np.expm1(-per_step)
        # A sum of independent arrivals has the variance of its mean.
        loads = ExpertLoad(tokens, per_step, activated, float(self.window.num_steps))
        logical_of = before.reshape(num_layers, fleet.num_ranks, num_local).swapaxes(0, 1)
        table = ExpertTable(0, logical_of.astype(np.int32), num_experts, np.ones(fleet.num_ranks, np.bool_))
        limits = PlaceLimits(horizon_steps=float(self.window.horizon_steps))
        devices = even_devices(fleet.num_ranks, num_local, fleet.num_nodes)
        return PlaceView(loads, table, devices, self.prices, limits, fleet.num_groups)


def _fitted(old: NDArray[np.integer] | None, num_layers: int, fleet: Fleet) -> Int64s:
    """int64[layers, slots], `old` on the ranks that stay and EMPTY on those that come."""
    fitted = np.full((num_layers, fleet.num_slots), EMPTY, np.int64)
    if old is not None:
        num_known = min(old.shape[1], fleet.num_slots)
        fitted[:, :num_known] = np.where(old[:, :num_known] < 0, EMPTY, old[:, :num_known])
    return fitted


def _covering(known: Int64s, load: NDArray[np.floating], num_ranks: int) -> Int64s:
    """Return a placement near `known` that a policy accepts: all experts, and no two copies of one on a rank.

    vLLM's own placements have two copies on a rank, and lack experts while ranks come or go.
    """
    covering = known.copy()
    covering[_is_second(covering, num_ranks)] = EMPTY
    for layer, slots in enumerate(covering):
        counts = np.bincount(slots[slots != EMPTY], minlength=load.shape[1])
        missing = np.flatnonzero(counts == 0)
        if not len(missing):
            continue
        free = np.flatnonzero(slots == EMPTY)
        # Experts without a slot take the place of copies that others have too, the least loaded first.
        for slot in sorted(np.flatnonzero(slots != EMPTY), key=lambda slot: load[layer, slots[slot]]):
            if len(free) >= len(missing):
                break
            if counts[slots[slot]] > 1:
                counts[slots[slot]] -= 1
                free = np.append(free, slot)
        slots[free[: len(missing)]] = missing
    return covering


def _is_second(placed: Int64s, num_ranks: int) -> NDArray[np.bool_]:
    """bool[layers, slots], whether an earlier slot of the same rank has the expert too."""
    local = placed.reshape(len(placed), num_ranks, -1)
    is_same = (local[..., :, None] == local[..., None, :]) & (local != EMPTY)[..., None]
    found: NDArray[np.bool_] = np.tril(is_same, k=-1).any(axis=-1).reshape(placed.shape)
    return found
