"""Moves of a layer's experts between the slots of a group: which copies a new placement needs, and in which rounds.

All workers of a group compute the same moves and the same rounds, because both depend on nothing but the two
placements. So no message says who sends what.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY, ExpertTable


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
