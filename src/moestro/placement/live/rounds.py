"""Moves of one layer's experts in rounds: each loads experts into empty slots, then gives slots up. Plain arithmetic.

After each round, every expert has a copy on a worker that takes tokens, if it had one before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY

Int32s = NDArray[np.int32]


class SlotLoad(NamedTuple):
    """An expert that a worker loads into an empty slot."""

    worker: int
    slot: int
    expert: int


class SlotDrop(NamedTuple):
    """A slot that a worker gives up, and the expert in it."""

    worker: int
    slot: int
    expert: int


class MoveRound(NamedTuple):
    """What one commit changes.

    Attributes:
        loads: Experts that are there before the commit.
        drops: Slots that are empty once the tokens of the former table have left.
    """

    loads: list[SlotLoad]
    drops: list[SlotDrop]


def plan_rounds(slots: Int32s, target: Int32s, takes: NDArray[np.bool_]) -> list[MoveRound]:
    """Plan the moves from one placement of a layer to another one.

    Args:
        slots: int32[workers, slots], logical expert in each slot; EMPTY means none.
        target: int32[workers, slots], the same for the goal. The order within a worker has no meaning.
        takes: bool[workers], which workers run; the slots of the others stay as they are.

    Returns:
        The rounds in order; none if the placements are alike.

    Raises:
        ValueError: An expert would have no copy on a worker that runs, or no slot is free.
    """
    layer = _Layer(slots, target, takes)
    layer.check()
    rounds = []
    while not layer.is_done:
        before, loads = layer.copy_slots(), layer.loads()
        drops = layer.drops() or ([] if loads else layer.make_room(loads))
        rounds.append(MoveRound(loads, drops))
        assert before != layer.slots, "a round changes nothing"
    return rounds


class _Layer:
    """Slots of a layer while its moves are planned.

    Attributes:
        slots: Experts in the slots of each worker.
        wanted: Experts that each worker is to have.
    """

    def __init__(self, slots: Int32s, target: Int32s, takes: NDArray[np.bool_]) -> None:
        self.slots: list[list[int]] = slots.tolist()
        self.wanted = [set(row) - {EMPTY} for row in np.where(takes[:, None], target, slots).tolist()]
        self._workers: list[int] = takes.nonzero()[0].tolist()

    def copy_slots(self) -> list[list[int]]:
        return [list(row) for row in self.slots]

    def check(self) -> None:
        """Raise ValueError if the goal lacks an expert that runs now."""
        for worker in self._workers:
            for expert in self._held(worker):
                if not any(expert in self.wanted[other] for other in self._workers):
                    raise ValueError(f"expert {expert} would have no copy on a worker that runs")

    @property
    def is_done(self) -> bool:
        return all(self._held(worker) == self.wanted[worker] for worker in self._workers)

    def _held(self, worker: int) -> set[int]:
        return set(self.slots[worker]) - {EMPTY}

    def _pending(self, worker: int) -> list[int]:
        """Experts that a worker lacks."""
        return sorted(self.wanted[worker] - self._held(worker))

    def _movers(self, worker: int) -> list[int]:
        """Those of them that stand only where they are to leave, in slots that others may need."""
        return [expert for expert in self._pending(worker) if self._is_mover(expert)]

    def _is_mover(self, expert: int) -> bool:
        return not any(expert in self.wanted[worker] for worker in self._holders(expert))

    def _holders(self, expert: int) -> list[int]:
        return [worker for worker in self._workers if expert in self.slots[worker]]

    def loads(self) -> list[SlotLoad]:
        """Fill empty slots: experts that have to move, and further copies only once none has to. Returns the loads."""
        pending = [(worker, self._movers(worker)) for worker in self._workers]
        found = [each for worker, experts in pending for each in self._load(worker, experts)]
        if not any(self._movers(worker) for worker in self._workers):
            pending = [(worker, self._pending(worker)) for worker in self._workers]
            found += [each for worker, experts in pending for each in self._load(worker, experts)]
        return found

    def _load(self, worker: int, experts: list[int]) -> list[SlotLoad]:
        empty = [slot for slot, expert in enumerate(self.slots[worker]) if expert == EMPTY]
        loads = [SlotLoad(worker, slot, expert) for slot, expert in zip(empty, experts, strict=False)]
        for _, slot, expert in loads:
            self.slots[worker][slot] = expert
        return loads

    def drops(self) -> list[SlotDrop]:
        """Give up copies that are not wanted, except the last one of an expert."""
        found = []
        for expert in sorted({each for worker in self._workers for each in self._held(worker)}):
            holders = self._holders(expert)
            unwanted = [worker for worker in holders if expert not in self.wanted[worker]]
            if len(unwanted) == len(holders):  # One stays, where no other expert needs its slot.
                unwanted.remove(next((each for each in unwanted if not self._movers(each)), unwanted[0]))
            found += [self._drop(worker, expert) for worker in unwanted]
        return found

    def _drop(self, worker: int, expert: int) -> SlotDrop:
        slot = self.slots[worker].index(expert)
        self.slots[worker][slot] = EMPTY
        return SlotDrop(worker, slot, expert)

    def make_room(self, loads: list[SlotLoad]) -> list[SlotDrop]:
        """Free a slot, when all workers that lack a moving expert are full and hold last copies.

        An expert that is to leave goes to an empty slot elsewhere for a while; `loads` gets this detour. Without such a
        slot, a copy that is wanted is given up for a while, because the expert has another one.

        Raises:
            ValueError: There is neither.
        """
        full = next(worker for worker in self._workers if self._movers(worker))
        for other in self._workers:
            if EMPTY in self.slots[other]:
                leaving = min(self._held(full) - self.wanted[full])
                loads += self._load(other, [leaving])
                return self.drops()
        for worker in self._workers:
            for expert in sorted(self._held(worker)):
                if len(self._holders(expert)) > 1:
                    return [self._drop(worker, expert)]
        raise ValueError("no slot is free to move experts through: give --num-redundant-experts")
