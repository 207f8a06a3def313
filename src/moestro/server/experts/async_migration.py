"""Moves experts between the workers of an `async` group while it serves: a state machine without clock and sockets.

    prepare   workers load experts into slots that no version of the table in use has
    commit    all homes get a table with the new slots and without those that are given up
    drain     each home says that it sends by this table, and waits for no slot outside of it
    release   the given-up slots are empty, and the next round may use them

A layer takes one round if its empty slots suffice, else several. A failure before the commit leaves the former table.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.worker_names import Worker
from moestro.server.experts.expert_rounds import MoveRound, plan_rounds
from moestro.server.experts.group_table import GroupTable, any_of, held_by
from moestro.server.experts.migration import MigrationProgress
from moestro.wire.messages import ExpertsPrepared, PrepareExperts, ToRank


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

    def tell(self, worker: int, message: ToRank) -> None:
        """Send a message to a worker, if it runs."""
        ...

    def announce(self) -> int:
        """Tell all workers of the present table, and return its version."""
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
    """Implements `server.migration.Migration`. Its workers are the places of the group that can have experts.

    The order of the experts within a worker's row has no meaning: an expert that stays on a worker stays in its slot.

    Args:
        group: The group, which passes on what workers tell of moves.
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

    # --- what workers tell ------------------------------------------------------------------------------------------

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
            self._group.tell(worker, question)
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
        """End the migration. What workers load for a round that is not committed stays in slots that nobody uses."""
        self._rounds.clear()
        self._loading.clear()
        self._preparing.clear()
        self._ticket += 1
        self._progress = replace(self._progress, is_running=False, error=error)
