"""Fills the slots that a policy leaves empty, for engines that know no empty slot and divide tokens evenly."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.devices import PlaceLimits
from moestro.placement.search.budget import Allowance, allowance_of
from moestro.placement.search.copies import held_by
from moestro.placement.search.problem import Experts
from moestro.placement.traffic import Floats


@dataclass(frozen=True, slots=True, eq=False)
class PresentCopies:
    """Copies that devices have before slots are filled, and what filling may move.

    Attributes:
        expert: int64[layers, devices, slots], expert in each slot; EMPTY means none.
        limits: Bounds on what the whole change moves.
        expert_bytes: Weights of one expert in one layer.
    """

    expert: Experts
    limits: PlaceLimits = field(default_factory=PlaceLimits)
    expert_bytes: int = 0

    def missing(self, num_experts: int) -> Experts:
        """Return int64[layers, devices], copies that a device must receive to have an expert in every slot."""
        held = held_by(self.expert, num_experts)[:, :-1].sum(axis=1)
        missing: Experts = np.maximum(min(self.expert.shape[2], num_experts) - held, 0)
        return missing

    def limits_beside_filling(self, num_experts: int) -> PlaceLimits:
        """Return what the limits allow beside the copies that filling must move, whatever the placement.

        Raises:
            ValueError: Filling alone exceeds a limit; the text says which one.
        """
        missing, limits = self.missing(num_experts), self.limits
        num_bytes = int(missing.sum()) * self.expert_bytes
        most, num_layers = int(missing.sum(axis=0).max(initial=0)), int(missing.any(axis=1).sum())
        parts = {
            "moves {:,} bytes": (num_bytes, limits.max_bytes),
            "moves {:,} copies to one device": (most, limits.max_receives),
            "changes {:,} layers": (num_layers, limits.max_layers),
        }
        for what, (due, limit) in parts.items():
            if limit is not None and due > limit:
                raise ValueError(f"filling the empty slots {what.format(due)}, and the limit is {limit:,}")
        return replace(
            limits,
            max_bytes=None if limits.max_bytes is None else limits.max_bytes - num_bytes,
            max_receives=None if limits.max_receives is None else limits.max_receives - most,
            max_layers=None
            if limits.max_layers is None or limits.max_layers >= len(missing)
            else limits.max_layers - num_layers,
        )


def fill_empty(placed: Experts, load: Floats, present: PresentCopies | None = None) -> Experts:
    """Give each empty slot a further copy, because these engines know no empty slot.

    The slot's present expert stays if that makes no device slower than the slowest one, because it moves nothing.
    Otherwise the expert gets a copy that levels the devices best; where the limits leave no move, one of those that the
    device has now. Two copies on a device are left to devices that have more slots than there are experts.

    Args:
        placed: int64[layers, devices, slots], expert in each slot; EMPTY means none.
        load: float64[layers, experts], tokens of each expert.
        present: What is in these slots now, with the limits on moves; None means nothing, and no limits.

    Returns:
        int64[layers, devices, slots], without empty slots. Moves exceed the limits only where `placed` does, or where
        filling the present copies' own empty slots does.
    """
    filled, num_experts = placed.copy(), load.shape[1]
    budget = _Budget.of(placed, num_experts, present)
    for layer in np.flatnonzero((placed == EMPTY).any(axis=(1, 2))).tolist():
        slots = filled[layer]  # a view: writing changes `filled`
        copies = _LayerCopies(slots, load[layer])
        for device, slot in np.argwhere(slots == EMPTY).tolist():
            now = EMPTY if present is None else int(present.expert[layer, device, slot])
            had = budget.had[layer, :, device]
            expert = copies.add(device, now, None if budget.may_receive(layer, device) else had)
            budget.count(layer, device, is_moved=not had[expert] and expert not in slots[device])
            slots[device, slot] = expert
    return filled


@dataclass(slots=True, eq=False)
class _Budget:
    """Copies that devices may receive while empty slots are filled.

    Attributes:
        had: bool[layers, experts, devices], copies before the whole change.
        due: int64[layers, devices], copies that a device must receive, because it holds too few to fill its slots.
        spare: Copies that may move beyond these.
        is_changed: bool[layers], layers that change anyhow.
        spare_layers: Further layers that may change.
    """

    had: NDArray[np.bool_]
    due: Experts
    spare: Allowance
    is_changed: NDArray[np.bool_]
    spare_layers: float

    @classmethod
    def of(cls, placed: Experts, num_experts: int, present: PresentCopies | None) -> _Budget:
        """Return the budget before any slot is filled."""
        has = held_by(placed, num_experts)[:, :-1]
        had = np.zeros_like(has) if present is None else held_by(present.expert, num_experts)[:, :-1]
        lacking = np.minimum((placed == EMPTY).sum(axis=2), num_experts - has.sum(axis=1))
        due = np.maximum(lacking - (had & ~has).sum(axis=1), 0)
        received = (has & ~had).sum(axis=1) + due
        is_changed = (has != had).any(axis=(1, 2)) | due.any(axis=1)
        limits = PlaceLimits() if present is None else present.limits
        spare = allowance_of(limits, 0 if present is None else present.expert_bytes, placed.shape[1])
        spare.total -= float(received.sum())
        spare.each -= received.sum(axis=0)
        max_layers = np.inf if limits.max_layers is None else limits.max_layers
        return cls(had, due, spare, is_changed, float(max_layers - is_changed.sum()))

    def may_receive(self, layer: int, device: int) -> bool:
        """Whether a device may receive one more copy."""
        if self.due[layer, device]:
            return True
        may_change = bool(self.is_changed[layer]) or self.spare_layers >= 1
        return may_change and self.spare.total >= 1 and bool(self.spare.each[device] >= 1)

    def count(self, layer: int, device: int, *, is_moved: bool) -> None:
        """Count a slot that was filled."""
        if not is_moved:
            return
        if self.due[layer, device]:
            self.due[layer, device] -= 1
            return
        self.spare.total -= 1
        self.spare.each[device] -= 1
        self.spare_layers -= not self.is_changed[layer]
        self.is_changed[layer] = True


class _LayerCopies:
    """Copies of one layer's experts on devices, with equal parts of an expert's load.

    Args:
        slots: int64[devices, slots], expert in each slot; EMPTY means none.
        load: float64[experts].
    """

    def __init__(self, slots: Experts, load: Floats) -> None:
        self._load = load
        self._on: NDArray[np.float64] = np.zeros((len(load), len(slots)))  # [experts, devices], copies
        device, slot = np.nonzero(slots != EMPTY)
        np.add.at(self._on, (slots[device, slot], device), 1)

    def add(self, device: int, present: int, among: NDArray[np.bool_] | None = None) -> int:
        """Give an expert one more copy, on `device`, and return the expert.

        Args:
            device: Device with an empty slot.
            present: Expert whose weights are in that slot now; EMPTY means none.
            among: bool[experts], experts that the device had before; None allows all.
        """
        counts = self._on.sum(axis=1)
        part = self._load / counts
        devices = part @ self._on
        # Load of all devices [experts, devices] if this expert got the copy.
        after = devices + self._on * (self._load / (counts + 1) - part)[:, None]
        after[:, device] += self._load / (counts + 1)
        allowed = self._on[:, device] == 0
        if not allowed.any():
            allowed[:] = True
        elif among is not None:
            allowed &= among
        if present != EMPTY and allowed[present] and after[present].max() <= devices.max():
            expert = present
        else:
            expert = int(np.where(allowed, (after**2).sum(axis=1), np.inf).argmin())
        self._on[expert, device] += 1
        return expert
