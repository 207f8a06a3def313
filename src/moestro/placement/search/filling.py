"""Fills slots that a policy leaves empty, and answers a death: lost experts get new copies, overloads are shared.

Filled slots are for engines that know no empty slot and divide tokens evenly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.contract import Floats, PlaceLimits
from moestro.placement.search.problem import (
    TINY,
    Allowance,
    Experts,
    Packing,
    PlaceProblem,
    allowance_of,
    held_by,
    live_counts,
)
from moestro.placement.search.replicas import KEPT, put_copies, share_out


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


# Swept by bench/simulator/placement_constants.py, as the others of this room are.
HARM_POWER = 16  # of loads, so that their sum stands for the largest
LAST_CHOICE = 1e6  # times the even load: above any load, so that other devices come first
NUM_SLOTS = 16  # least harmful slots of a layer in which a further copy is tried
# Times that copies are added before tokens are divided anew; copies each time; and Newton steps for the shares.
RELIEFS = 2
COPIES_A_RELIEF = 4
RELIEF_SHARE_STEPS = 2
LEAST_RELIEF = 1e-3  # of the even load; a copy that relieves a device by less is not worth its bytes


def restore(problem: PlaceProblem, packing: Packing, allowance: Allowance) -> NDArray[np.intp]:
    """Place every expert without a copy into an empty slot, or into that of an expert with further copies.

    Coverage comes before limits: a device that may receive nothing more is the last choice, but a choice.

    Returns:
        Batches that changed.
    """
    num_experts = problem.shape[1]
    changed = np.zeros(len(packing.expert), np.bool_)
    while True:
        counts = live_counts(packing.expert, num_experts)
        batch = np.flatnonzero((counts == 0).any(axis=1))
        if not len(batch):
            return np.flatnonzero(changed)
        changed[batch] = True
        lost = np.where(counts[batch] == 0, problem.token_s[batch], -1.0).argmax(axis=1)
        key = _harm(problem, packing, batch, problem.token_s[batch, lost])
        key += LAST_CHOICE * (allowance.each < 1)[:, None]
        slot = key.reshape(len(batch), -1).argmin(axis=1)
        put_copies(problem, packing, batch, slot, lost, np.ones(len(batch)))
        np.subtract.at(allowance.each, slot // key.shape[2], 1.0)
        allowance.total -= len(batch)


def _harm(problem: PlaceProblem, packing: Packing, batch: NDArray[np.intp], added_s: Floats) -> Floats:
    """Return float64[batches, devices, slots]: how much heavier heavy devices become if an expert takes the slot.

    The other copies of the expert in the slot take over its tokens, about evenly. The measure is the change of the sum
    of a power of loads, which stands for the largest. A slot that is no place for it has infinity.

    Args:
        batch: Batches to look at.
        added_s: float64[batches], seconds of the expert that comes.
    """
    num_experts, speed = problem.shape[1], problem.speed[:, None]
    expert, work = packing.expert[batch], packing.work[batch]
    even = problem.even_load(work)
    # Where a layer has lost all of its load, the expert that comes is all there is.
    unit = np.where(even > 0, even, np.maximum(added_s, TINY))[:, None, None]
    is_used = expert != EMPTY
    index = np.where(is_used, np.arange(len(batch))[:, None, None] * num_experts + expert, 0)
    counts = np.bincount(index[is_used], minlength=len(batch) * num_experts)[index]
    load = np.broadcast_to(problem.load(work)[:, :, None] / unit, work.shape)
    now = load**HARM_POWER
    taken = problem.token_s[batch[:, None, None], expert] / (np.maximum(counts * (counts - 1), 1) * unit * speed)
    grown = np.where(is_used, (load + taken) ** HARM_POWER - now, 0.0)
    others = np.bincount(index.ravel(), grown.ravel())[index] - grown
    harm = (
        (load + (added_s[:, None, None] - work) / (unit * speed)) ** HARM_POWER - now + np.where(is_used, others, 0.0)
    )
    harm[~np.where(is_used, counts > 1, problem.room)] = np.inf
    return harm


def recover(problem: PlaceProblem, packing: Packing, target: Floats, allowance: Allowance) -> None:
    """Level devices in place by further copies, which few bytes bring, and divide tokens anew.

    Args:
        target: float64[batches], load at which a batch is left alone.
    """
    for _ in range(RELIEFS):
        relieve(problem, packing, target, COPIES_A_RELIEF, allowance)
        share_out(problem, packing, target, RELIEF_SHARE_STEPS)


def relieve(problem: PlaceProblem, packing: Packing, target: Floats, num_rounds: int, allowance: Allowance) -> None:
    """Share experts of the heaviest devices with light ones, which receive one copy for each step.

    The copy takes an empty slot, or that of an expert that has other copies, which take over its tokens. An exchange of
    two copies would move twice as much.

    Args:
        target: float64[batches], load at which a batch is left alone.
        num_rounds: Rounds at most; in each one the heaviest device of every batch shares one expert at most.
    """
    num_slots = problem.shape[3]
    at_rest = np.zeros(len(target), np.bool_)
    for _ in range(num_rounds):
        load = problem.load(packing.work)
        batch = np.flatnonzero((load.max(axis=1) > target) & ~at_rest)
        if not len(batch) or allowance.total < 1:
            return
        item, slot, part, gain = _best_relief(problem, packing, batch, load[batch], target[batch])
        ok = gain > LEAST_RELIEF * target[batch]
        at_rest[batch[~ok]] = True
        batch, item, slot, part, gain = batch[ok], item[ok], slot[ok], part[ok], gain[ok]
        heavy, device = load[batch].argmax(axis=1), slot // num_slots
        expert = packing.expert[batch, heavy, item]
        if allowance.is_limited and len(batch):
            leaves = packing.expert[batch, device, slot % num_slots]
            receives = problem.moved[batch, expert, device].astype(np.int64) - problem.moved[batch, leaves, device]
            pairs = np.stack([device, device], axis=1)
            ok = allowance.admit(gain, pairs, np.stack([receives, np.zeros_like(receives)], axis=1))
            at_rest[batch[~ok]] = True
            batch, item, slot, part = batch[ok], item[ok], slot[ok], part[ok]
            heavy, expert = heavy[ok], expert[ok]
        if len(batch):
            share = packing.share[batch, heavy, item]
            packing.share[batch, heavy, item] = share * (1 - part)
            put_copies(problem, packing, batch, slot, expert, share * part)


def _best_relief(
    problem: PlaceProblem, packing: Packing, batch: NDArray[np.intp], load: Floats, floor: Floats
) -> tuple[Experts, Experts, Floats, Floats]:
    """Return the best copy for each batch: slot of the heaviest device, new slot over all devices, part, and gain.

    Args:
        load: float64[batches, devices].
        floor: float64[batches], load below which a device need not be.
    """
    num_slots, rows = problem.shape[3], np.arange(len(batch))
    heavy = load.argmax(axis=1)
    top = load[rows, heavy]
    slot, harm, taken = _slots_to_take(problem, packing, batch, load)
    column, device = rows[:, None], slot // num_slots
    leaves = packing.expert[batch[:, None], device, slot % num_slots]
    left = load[column, device] - packing.work[batch[:, None], device, slot % num_slots] / problem.speed[device]
    top_now = top[:, None] + np.where(packing.held[batch[:, None], leaves, heavy[:, None]], taken, 0.0)
    expert, work = packing.expert[batch, heavy], packing.work[batch, heavy]  # [batches, slots of the heaviest]
    slow, fast = 1 / problem.speed[heavy][:, None, None], 1 / problem.speed[device][:, None, :]
    # The first copy keeps a part of its share, because a share of 0 never grows again.
    given = np.clip((top_now - left)[:, None] / (slow + fast), 0.0, (1 - KEPT) * work[:, :, None])
    key = np.maximum(top_now[:, None] - given * slow, left[:, None] + given * fast)
    key = np.maximum(np.maximum(key, harm[:, None]), floor[:, None, None])
    # Copies of an expert that its device holds already, and empty slots, are no choice.
    is_open = (
        ~packing.held[batch[:, None, None], expert[:, :, None], device[:, None, :]] & (expert != EMPTY)[:, :, None]
    )
    flat = np.where(is_open, key, np.inf).reshape(len(batch), -1)
    best = flat.argmin(axis=1)
    item, nth = np.divmod(best, slot.shape[1])
    part = given[rows, item, nth] / np.maximum(work[rows, item], TINY)
    return item, slot[rows, nth], part, top - flat[rows, best]


def _slots_to_take(
    problem: PlaceProblem, packing: Packing, batch: NDArray[np.intp], load: Floats
) -> tuple[Experts, Floats, Floats]:
    """Return the slots of each batch that a further copy may take at the least harm.

    Returns:
        int64[batches, NUM_SLOTS], slots over all devices; float64 of the same shape, the largest load of devices with
        other copies of what leaves the slot, infinite for no choice; and the seconds which each of these takes over.
    """
    num_experts, num_slots = problem.shape[1], problem.shape[3]
    expert = packing.expert[batch].reshape(len(batch), -1)
    work = packing.work[batch].reshape(len(batch), -1)
    index = np.where(expert == EMPTY, len(batch) * num_experts, np.arange(len(batch))[:, None] * num_experts + expert)
    counts = np.bincount(index.ravel(), minlength=len(batch) * num_experts + 1)[index]
    of_slot = np.repeat(load, num_slots, axis=1)
    # Slots ordered by load, so that the last one of each expert is on its most loaded device.
    order = np.argsort(load, axis=1, kind="stable") + np.arange(len(batch))[:, None] * load.shape[1]
    order = (order[:, :, None] * num_slots + np.arange(num_slots)).ravel()
    heaviest, second = np.full(len(batch) * num_experts + 1, -1), np.full(len(batch) * num_experts + 1, -1)
    flat = index.ravel()
    heaviest[flat[order]] = order
    rest = order[heaviest[flat[order]] != order]
    second[flat[rest]] = rest
    own = np.arange(flat.size).reshape(index.shape)
    other = np.where(heaviest[index] == own, second[index], heaviest[index])
    taken = np.where(expert == EMPTY, 0.0, work / np.maximum(counts - 1, 1) / problem.speed.min())
    harm = np.where(expert == EMPTY, 0.0, of_slot.ravel()[other] + taken)
    is_open = np.where(expert == EMPTY, problem.room.ravel(), counts > 1)
    # The device must become light too.
    speed = np.repeat(problem.speed, num_slots)
    key = np.where(is_open, np.maximum(harm, of_slot - work / speed), np.inf)
    best = np.argpartition(key, min(NUM_SLOTS, key.shape[1]) - 1, axis=1)[:, :NUM_SLOTS]
    row = np.arange(len(batch))[:, None]
    return best, np.where(is_open[row, best], harm[row, best], np.inf), taken[row, best]
