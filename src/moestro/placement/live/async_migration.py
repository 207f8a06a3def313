"""Moves experts between the workers of an `async` group while it serves: a state machine without clock and sockets.

    prepare   workers load experts into slots that no version of the table in use has
    commit    all homes get a table with the new slots and without those that are given up
    drain     each home says that it sends by this table, and waits for no slot outside of it
    release   the given-up slots are empty, and the next round may use them

A layer takes one round if its empty slots suffice, else several. A failure before the commit leaves the former table.

Moves of one layer are made in rounds: each loads experts into empty slots, then gives slots up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY, ExpertLayers, ExpertTable
from moestro.core.processes import Worker
from moestro.placement.live.ep_migration import MigrationProgress
from moestro.wire.messages import ExpertsPrepared, PrepareExperts, ToRank

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


Bools = NDArray[np.bool_]


class GroupTable:
    """Slots of all places of a group, in the layers that have experts.

    Args:
        experts: Layers of the network that have experts.
        slots: int32[places, slots], slots with which each place starts, the same in every layer; EMPTY means none.
        first: First place that can have experts; all later ones can.
        num_filled: Experts of a layer that an added worker gets.

    Attributes:
        experts, first: As given.
        logical_of: int32[places, layers, slots], logical expert in each slot; EMPTY means none. A worker that restarts
            loads these.
    """

    def __init__(self, experts: ExpertLayers, slots: Int32s, *, first: int, num_filled: int) -> None:
        self.experts, self.first = experts, first
        self._num_filled = num_filled
        self.logical_of: Int32s = np.repeat(slots[:, None], len(experts.layers), axis=1)

    def held(self) -> Bools:
        """bool[places, layers, experts], which experts each worker holds."""
        return held_by(self.logical_of, self.experts.num_experts)

    def used(self, takes: Bools, is_draining: Bools) -> Int32s:
        """int32[places, layers, slots], the experts whose tokens each worker gets; EMPTY means none.

        A worker gets the tokens of what it holds, or, while it may not run, of what no other one holds that takes any.

        Args:
            takes: bool[places], whether the worker runs and may get tokens.
            is_draining: bool[places], whether it gets none, whatever it holds.
        """
        is_covered = any_of(self.held()[takes])
        layer = np.arange(len(is_covered))[None, :, None]
        is_alone = ~is_covered[layer, self.logical_of] & ~is_draining[:, None, None]
        return np.where(takes[:, None, None] | is_alone, self.logical_of, EMPTY)

    def alone(self, worker: int, others: Iterable[int]) -> tuple[int, int] | None:
        """(layer of the network, expert) that a worker holds and none of `others` does. None means no such expert."""
        held = self.held()
        is_alone = held[worker] & ~any_of(held[list(others)])
        if not is_alone.any():
            return None
        layer, expert = np.argwhere(is_alone)[0].tolist()
        return self.experts.layers[layer], expert

    def fill(self, worker: int, others: Iterable[int]) -> None:
        """Give an added worker as many experts as one has at the start: those with the fewest copies at `others`."""
        copies = self.held()[list(others)].sum(axis=0)
        num = self._num_filled
        self.clear(worker)
        fewest = copies.argsort(axis=1, kind="stable")[:, :num]
        self.logical_of[worker, :, :num] = np.sort(fewest, axis=1)

    def clear(self, worker: int) -> None:
        """Empty the slots of a worker that is gone."""
        self.logical_of[worker] = EMPTY


def held_by(logical_of: Int32s, num_experts: int) -> Bools:
    """Compute which experts each worker holds, bool[workers, layers, experts].

    Args:
        logical_of: int32[workers, layers, slots], logical expert in each slot; EMPTY means none.
    """
    held = np.zeros((*logical_of.shape[:2], num_experts), np.bool_)
    worker, layer, slot = np.nonzero(logical_of != EMPTY)
    held[worker, layer, logical_of[worker, layer, slot]] = True
    return held


def any_of(held: Bools) -> Bools:
    """bool[layers, experts], which experts any of the workers of `held` has."""
    found: Bools = np.logical_or.reduce(held, axis=0)
    return found


class MovingGroup(Protocol):
    """What a migration needs of the coordinator of a group.

    Attributes:
        table: Slots of all workers.
        takes: bool[places], whether each worker may get tokens.
        homes_up: Workers with attention that listen to the others.
    """

    @property
    def table(self) -> GroupTable: ...  # noqa: D102 - an attribute

    @property
    def takes(self) -> NDArray[np.bool_]: ...  # noqa: D102 - an attribute

    @property
    def homes_up(self) -> set[int]: ...  # noqa: D102 - an attribute

    def served_slots(self) -> tuple[NDArray[np.bool_], int]:
        """bool[places], whether homes send to each worker or wait for it; and the version of the table that says so."""
        ...

    def send(self, worker: int, message: ToRank) -> None:
        """Send a message to a worker, if it runs."""
        ...

    def announce(self) -> int:
        """Send all workers the present table, and return its version."""
        ...

    def name(self, worker: int) -> Worker:
        """Return the name of a worker for messages."""
        ...


class _NextRound(NamedTuple):
    """A round, and its place among the moves.

    Attributes:
        at: Place of the layer among those with experts.
        is_first, is_last: Whether it is the layer's first round, and its last one.
    """

    at: int
    moves: MoveRound
    is_first: bool
    is_last: bool


@dataclass(slots=True)
class _Drain:
    """A table that is committed.

    Attributes:
        version: Number of the table.
        homes: Homes that may wait for slots of an earlier one.
        before: int32[places, layers, slots], slots before the commit.
    """

    version: int
    homes: set[int]
    before: NDArray[np.int32]


class AsyncMigration:
    """Implements `placement.live.migration.Migration`. Its workers are the places of the group that can have experts.

    The order of the experts within a worker's row has no meaning: an expert that stays on a worker stays in its slot.

    Args:
        group: The group, which passes on the workers' reports of moves.
    """

    def __init__(self, group: MovingGroup) -> None:
        self._group = group
        self._rounds: deque[_NextRound] = deque()
        self._ticket = 0  # of the last messages to workers; answers to earlier ones have no meaning
        self._max_bytes = 0
        self._loading: set[int] = set()  # workers that load experts for the next commit, or have loaded them
        self._preparing: set[int] = set()  # those of them that have not answered
        self._drain: _Drain | None = None
        self._is_cancelled = False
        self._progress = MigrationProgress()

    # --- Migration --------------------------------------------------------------------------------------------------

    @property
    def table(self) -> ExpertTable:
        """Implement `Migration.table`."""
        table = self._group.table
        alive, version = self._group.served_slots()
        logical_of = table.logical_of if self._drain is None else self._drain.before
        return ExpertTable(version, logical_of[table.first :].copy(), table.experts.num_experts, alive[table.first :])

    @property
    def progress(self) -> MigrationProgress:
        """Implement `Migration.progress`."""
        return self._progress

    def start(self, target: ExpertTable, max_bytes_per_step: int) -> None:
        """Implement `Migration.start`. Workers that do not run keep their slots as they are.

        Raises:
            ValueError: As of the protocol; or no slot is free to move an expert through.
        """
        if self._progress.is_running:
            raise ValueError("a migration is running: cancel it, or wait for its end")
        table, takes = self._group.table, self._group.takes
        present = table.logical_of[table.first :]
        if target.logical_of.shape != present.shape:
            raise ValueError(f"a table of shape {target.logical_of.shape} for slots of shape {present.shape}")
        if target.num_experts != table.experts.num_experts:
            raise ValueError(f"a table of {target.num_experts} experts for {table.experts.num_experts}")
        planned = list[tuple[int, list[MoveRound]]]()
        for at, layer in enumerate(table.experts.layers):
            try:
                rounds = plan_rounds(present[:, at], target.logical_of[:, at], takes[table.first :])
            except ValueError as error:
                raise ValueError(f"layer {layer}: {error}") from error
            planned += [(at, rounds)] if rounds else []
        self._rounds = deque(
            _NextRound(at, moves, number == 0, number == len(rounds) - 1)
            for at, rounds in planned
            for number, moves in enumerate(rounds)
        )
        self._max_bytes, self._is_cancelled = max_bytes_per_step, False
        self._progress = MigrationProgress(num_layers=len(planned), is_running=bool(planned))
        self._go_on()

    def cancel(self) -> None:
        """Implement `Migration.cancel`."""
        if self._progress.is_running:
            self._is_cancelled = True
            if self._drain is None and self._rounds[0].is_first:
                self._end("cancelled")

    # --- reports of workers -----------------------------------------------------------------------------------------

    def prepared(self, worker: int, answer: ExpertsPrepared) -> None:
        """Note that a worker has loaded experts, or cannot."""
        if answer.ticket != self._ticket or worker not in self._preparing:
            return
        if answer.error:
            self._end(f"{self._group.name(worker)} cannot load experts: {answer.error}")
            return
        self._preparing.discard(worker)
        self._progress = replace(self._progress, num_bytes=self._progress.num_bytes + answer.num_bytes)
        if not self._preparing:
            self._commit()

    def served(self, home: int, version: int) -> None:
        """Note that a home uses the table of `version`, and waits for no slot outside of it."""
        if self._drain is not None and version >= self._drain.version:
            self._drain.homes.discard(home)
            self._release_drained()

    def ended(self, worker: int) -> None:
        """Note that a worker's process has ended. Its successor loads what the present table says, and sends by it."""
        if worker in self._loading:
            self._end(f"{self._group.name(worker)} ended before the experts that it loaded were in use")
        elif self._drain is not None:
            self._drain.homes.discard(worker)
            self._release_drained()

    # --- rounds -----------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin the next round, or end."""
        if not self._rounds:
            self._end("")
            return
        if self._is_cancelled and self._rounds[0].is_first:
            self._end("cancelled")
            return
        at, moves, _, _ = self._rounds[0]
        table, takes = self._group.table, self._group.takes
        by_worker: dict[int, tuple[list[int], list[int]]] = {}
        for row, slot, expert in moves.loads:
            worker = table.first + row
            if not takes[worker] or table.logical_of[worker, at, slot] != EMPTY:
                self._end(f"{self._group.name(worker)} stopped, or was replaced, after the moves were planned")
                return
            slots, experts = by_worker.setdefault(worker, ([], []))
            slots.append(slot)
            experts.append(expert)
        self._ticket += 1
        self._loading, self._preparing = set(by_worker), set(by_worker)
        for worker, (slots, experts) in by_worker.items():
            question = PrepareExperts(
                ticket=self._ticket,
                layer=table.experts.layers[at],
                slots=tuple(slots),
                experts=tuple(experts),
                max_bytes=self._max_bytes,
            )
            self._group.send(worker, question)
        if not by_worker:
            self._commit()

    def _commit(self) -> None:
        """Make the round's table the one by which homes send, unless an expert would be left without a worker."""
        at, moves, _, _ = self._rounds[0]
        table, takes = self._group.table, self._group.takes
        after = table.logical_of.copy()
        for row, slot, expert in moves.loads:
            after[table.first + row, at, slot] = expert
        for row, slot, expert in moves.drops:
            if after[table.first + row, at, slot] == expert:  # Otherwise the worker was removed meanwhile.
                after[table.first + row, at, slot] = EMPTY
        lost = self._running(table.logical_of, takes)[at] & ~self._running(after, takes)[at]
        if lost.any():
            layer = table.experts.layers[at]
            self._end(f"the other workers that hold expert {lost.argmax()} of layer {layer} do not run any more")
            return
        self._loading.clear()
        before, table.logical_of = table.logical_of, after
        homes = self._group.homes_up
        self._drain = _Drain(self._group.announce(), homes, before)
        self._release_drained()

    def _running(self, logical_of: NDArray[np.int32], takes: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool[layers, experts], which experts have a copy on a worker that gets tokens."""
        return any_of(held_by(logical_of, self._group.table.experts.num_experts)[takes])

    def _release_drained(self) -> None:
        """Go on when no token waits for a slot that the round gave up."""
        if self._drain is not None and not self._drain.homes:
            self._drain = None
            if self._rounds.popleft().is_last:
                self._progress = replace(self._progress, num_committed=self._progress.num_committed + 1)
            self._go_on()

    def _end(self, error: str) -> None:
        """End the migration. What workers loaded for an uncommitted round stays in slots that no token visits."""
        self._rounds.clear()
        self._loading.clear()
        self._preparing.clear()
        self._ticket += 1
        self._progress = replace(self._progress, is_running=False, error=error)
