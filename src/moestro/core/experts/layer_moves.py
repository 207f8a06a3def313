"""Moves of a layer's experts between the slots of a group: rounds of copies, and the step that commits them.

All workers of a group compute the same moves and the same rounds, because both depend on nothing but the two
placements. So no message says who sends what. Workers in lock-step tell each other their numbers when a step opens.
From the same numbers they draw the same conclusion: they move in the same steps, and change to the new placement in the
same step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY, ExpertLayers, ExpertTable, TableMessage
from moestro.errors import InvariantError


class LayerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """New placement of the experts of one layer.

    Attributes:
        version: number of the table that has this placement; larger than that of every earlier plan.
        layer: the network's layer.
        num_workers: workers of the group.
        logical_of: int32[workers, slots] as bytes, logical expert in each slot; EMPTY means none.
        parts: float64[workers, slots] as bytes, part of its expert's tokens that each slot gets.
        max_bytes_per_step: bytes of weights that a worker sends, or takes in, between two steps; one expert is the
            least.
    """

    version: int
    layer: int
    num_workers: int
    logical_of: bytes
    parts: bytes
    max_bytes_per_step: int

    def rows(self) -> NDArray[np.int32]:
        """int32[workers, slots], logical expert in each slot."""
        return np.frombuffer(self.logical_of, np.int32).reshape(self.num_workers, -1)

    def part_rows(self) -> NDArray[np.float64]:
        """float64[workers, slots], part of its expert's tokens that each slot gets."""
        return np.frombuffer(self.parts, np.float64).reshape(self.num_workers, -1)


class SettledLayer(msgspec.Struct, frozen=True, kw_only=True):
    """End of a layer's moves.

    Attributes:
        version: number of the plan.
        is_committed: whether the group serves by the plan from now on. False means that the old placement stays.
        num_bytes: bytes of weights that went from one worker to another.
    """

    version: int
    is_committed: bool
    num_bytes: int


def with_layer(
    table: ExpertTable, version: int, place: int, rows: NDArray[np.int32], parts: NDArray[np.float64]
) -> ExpertTable:
    """Return a table with another placement of one layer.

    Args:
        version: number of the new table.
        place: index of the layer in the table.
        rows: int32[workers, slots], logical expert in each slot of the layer.
        parts: float64[workers, slots], part of its expert's tokens that each slot gets.

    Raises:
        ValueError: as `ExpertTable`.
    """
    logical_of, all_parts = table.logical_of.copy(), table.slot_parts.copy()
    logical_of[:, place], all_parts[:, place] = rows, parts
    even = ExpertTable(version, logical_of, table.num_experts, table.is_alive)
    # A table of equal parts says so: policies compare it with others by that.
    if np.allclose(even.slot_parts, all_parts):
        return even
    return ExpertTable(version, logical_of, table.num_experts, table.is_alive, all_parts)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMoves:
    """Copies that a new placement of a layer needs, one after the other.

    Attributes:
        expert: int64[moves], the logical expert.
        source, source_slot: int64[moves], worker and slot that have it in the old placement.
        worker, slot: int64[moves], worker and slot that get it. Equal workers mean a copy inside a worker.
    """

    expert: NDArray[np.int64]
    source: NDArray[np.int64]
    source_slot: NDArray[np.int64]
    worker: NDArray[np.int64]
    slot: NDArray[np.int64]

    @property
    def crosses(self) -> NDArray[np.bool_]:
        """bool[moves], whether the copy goes from one worker to another."""
        crosses: NDArray[np.bool_] = np.not_equal(self.source, self.worker)
        return crosses


def moves_between(old: NDArray[np.int32], new: NDArray[np.int32]) -> ExpertMoves:
    """Compute the copies that lead from one placement of a layer to another one.

    A worker that has the expert in another slot copies it there. Else the holder that has sent least sends it; experts
    with few holders choose first.

    Args:
        old, new: int32[workers, slots], logical expert in each slot; EMPTY means none. Every expert of `new` is in
            `old`.
    """
    worker, slot = np.nonzero((new != EMPTY) & (new != old))
    expert = new[worker, slot].astype(np.int64)
    holder, holder_slot = np.nonzero(old != EMPTY)
    held = old[holder, holder_slot]
    source, source_slot = np.zeros_like(expert), np.zeros_like(expert)
    num_sent = np.zeros(len(old), np.int64)
    num_holders = np.bincount(held, minlength=int(expert.max(initial=0)) + 1)
    for move in np.argsort(num_holders[expert], kind="stable").tolist():
        copies = np.flatnonzero(held == expert[move])
        own = copies[holder[copies] == worker[move]]
        chosen = own[0] if len(own) else copies[num_sent[holder[copies]].argmin()]
        source[move], source_slot[move] = holder[chosen], holder_slot[chosen]
        num_sent[source[move]] += not len(own)
    return ExpertMoves(expert, source, source_slot, worker, slot)


def rounds_of(moves: ExpertMoves, num_workers: int, per_round: int) -> list[NDArray[np.int64]]:
    """Divide moves into rounds, in each of which no worker sends or takes in more than so many experts.

    Moves of the workers that have most left to send or to take in come first, so the rounds are near the least number.
    A copy inside a worker counts as sent and taken in, because it takes the worker's time too.

    Args:
        per_round: experts, at least 1.

    Returns:
        int64[moves of the round] for each round, indices of its moves, ascending.
    """
    rounds: list[NDArray[np.int64]] = []
    left = np.arange(len(moves.expert))
    while len(left):
        source, worker = moves.source[left], moves.worker[left]
        to_send = np.bincount(source, minlength=num_workers)
        to_take = np.bincount(worker, minlength=num_workers)
        urgency = np.maximum(to_send[source], to_take[worker])
        sends, takes = np.zeros(num_workers, np.int64), np.zeros(num_workers, np.int64)
        chosen = np.zeros(len(left), np.bool_)
        for at in np.argsort(-urgency, kind="stable").tolist():
            if sends[source[at]] < per_round and takes[worker[at]] < per_round:
                sends[source[at]] += 1
                takes[worker[at]] += 1
                chosen[at] = True
        rounds.append(left[chosen])
        left = left[~chosen]
    return rounds


NUM_NUMBERS = 4
_VERSION, _KNOWN, _PREPARED, _CANCELLED = range(NUM_NUMBERS)


class MoveAction(Enum):
    """Action of a group on a layer in an opened step."""

    REST = "no layer moves"
    WAIT = "some workers do not know the plan yet"
    MOVE = "experts move"
    COMMIT = "from this step on, all workers use the new placement"
    DROP = "the old placement stays, and what has moved is dropped"


class MoveAgreement:
    """One worker's part of the agreement. A group has one plan at a time.

    Args:
        version: number of the table that all workers use.

    Attributes:
        version: number of the table that all workers use.
        plan: the layer that moves, as far as this worker knows.
        is_prepared: whether this worker has all experts of the plan.
        over: number of the last plan that has ended.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.plan: LayerPlan | None = None
        self.is_prepared = False
        self.over = version
        self._cancelled = 0

    def take(self, plan: LayerPlan) -> None:
        """Take a plan from the API server. A plan that the group has dropped meanwhile is ignored."""
        if plan.version > self.over:
            self.plan, self.is_prepared = plan, False

    def cancel(self, version: int) -> None:
        """Ask for the end of a plan. A plan that has ended is ignored."""
        if version > self.over:
            self._cancelled = version

    def numbers(self) -> NDArray[np.int64]:
        """int64[NUM_NUMBERS], numbers of this worker for the opening of a step."""
        known = 0 if self.plan is None else self.plan.version
        return np.array([self.version, known, known if self.is_prepared else 0, self._cancelled], np.int64)

    def decide(self, gathered: NDArray[np.int64]) -> MoveAction:
        """Return what the group does in the opened step; the same for all workers.

        After COMMIT and DROP the plan is over; it stays readable until `settled`.

        Args:
            gathered: int64[workers, NUM_NUMBERS], numbers of all workers.

        Raises:
            InvariantError: the workers use different tables.
        """
        if (gathered[:, _VERSION] != self.version).any():
            raise InvariantError(
                f"the engines of a group have tables {gathered[:, _VERSION].tolist()} of their experts"
            )
        newest, cancelled = int(gathered[:, _KNOWN].max()), int(gathered[:, _CANCELLED].max())
        if newest and (gathered[:, _PREPARED] == newest).all():
            # Also when a worker asks for its end: it asks too late.
            self.version = self.over = newest
            return MoveAction.COMMIT
        if cancelled and newest <= cancelled:
            self.over = cancelled
            return MoveAction.DROP
        if not newest:
            return MoveAction.REST
        return MoveAction.MOVE if (gathered[:, _KNOWN] == newest).all() else MoveAction.WAIT

    def settled(self) -> None:
        """Forget the plan after COMMIT or DROP."""
        self.plan, self.is_prepared, self._cancelled = None, False, 0


class LayerCarrier(Protocol):
    """Moves the weights of one layer, some in each step; `model.experts.expert_slots.LayerMover` implements it.

    Attributes:
        num_bytes: bytes of weights that went from one worker to another so far, of all workers.
    """

    num_bytes: int

    @property
    def is_done(self) -> bool:
        """Whether all experts have arrived."""
        ...

    def step(self) -> None:
        """Move the experts of the next round. All workers make this call in the same step."""
        ...

    def commit(self) -> None:
        """Make the new placement that of the slots."""
        ...

    def drop(self) -> None:
        """Forget what has arrived; the old placement stays."""
        ...


class MovingTable:
    """One worker's table of experts, and its part in the moves that change it. A real and a priced worker have one.

    Args:
        table: placement at the start, over all layers of the network.
        begin: callable that begins to move a layer, from the present table and the plan.

    Attributes:
        table: placement by which the group computes now.
        is_moving: whether experts move, so that the group opens the next step even without tokens.
        on_moved: called after each step in which experts move, with the version of the plan and the bytes of weights
            that went from one worker to another so far.
        on_settled: called when the moves of a layer end, with what became of them.
    """

    def __init__(self, table: ExpertTable, begin: Callable[[ExpertTable, LayerPlan], LayerCarrier]) -> None:
        self.table, self._begin = table, begin
        self._agreement = MoveAgreement(table.version)
        self._carrier: LayerCarrier | None = None
        self.is_moving = False
        self.on_moved: Callable[[int, int], None] = lambda _version, _num_bytes: None
        self.on_settled: Callable[[SettledLayer], None] = lambda _: None

    def placed(self, layers: tuple[int, ...]) -> TableMessage:
        """Return the placement of the layers with experts, by which the group computes now."""
        table, shares = self.table, self.table.shares
        own = ExpertTable(
            table.version,
            table.logical_of[:, layers],
            table.num_experts,
            table.is_alive,
            None if shares is None else shares[:, layers],
        )
        experts = ExpertLayers(num_layers=table.logical_of.shape[1], layers=layers, num_experts=table.num_experts)
        return TableMessage.of_table(experts, own)

    def take(self, plan: LayerPlan) -> None:
        """Move the experts of a layer, from the first step on that opens when all workers know the plan."""
        self._agreement.take(plan)

    def cancel(self, version: int) -> None:
        """End the moves of the plan of this version, unless they are committed before all workers agree."""
        self._agreement.cancel(version)

    def numbers(self) -> NDArray[np.int64]:
        """int64[NUM_NUMBERS], numbers of this worker for the opening of a step."""
        return self._agreement.numbers()

    def open_step(self, gathered: NDArray[np.int64]) -> LayerPlan | None:
        """Do the group's part of a step that concerns moving experts.

        Args:
            gathered: int64[workers, NUM_NUMBERS], numbers of all workers.

        Returns:
            The plan that the group has committed in this step. None means that the table has not changed.

        Raises:
            InvariantError: the workers use different tables.
        """
        action, plan = self._agreement.decide(gathered), self._agreement.plan
        self.is_moving = action in {MoveAction.WAIT, MoveAction.MOVE}
        if action is MoveAction.MOVE:
            assert plan is not None, "all workers know the plan"
            self._move(plan)
        elif action in {MoveAction.COMMIT, MoveAction.DROP}:
            is_committed = action is MoveAction.COMMIT
            self._settle(plan, is_committed=is_committed)
            return plan if is_committed else None
        return None

    def _move(self, plan: LayerPlan) -> None:
        if self._carrier is None:
            self._carrier = self._begin(self.table, plan)
        if not self._carrier.is_done:
            self._carrier.step()
            self.on_moved(plan.version, self._carrier.num_bytes)
        self._agreement.is_prepared = self._carrier.is_done

    def _settle(self, plan: LayerPlan | None, *, is_committed: bool) -> None:
        """End the moves of a layer. `plan`: None where this worker never learnt of the plan that is dropped."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None and is_committed:
            carrier.commit()
        elif carrier is not None:
            carrier.drop()
        if plan is not None and is_committed:
            self.table = with_layer(self.table, plan.version, plan.layer, plan.rows(), plan.part_rows())
        self._agreement.settled()
        num_bytes = 0 if carrier is None else carrier.num_bytes
        self.on_settled(SettledLayer(version=self._agreement.over, is_committed=is_committed, num_bytes=num_bytes))
