"""Moves the experts of a group in mode `ep`: one layer at a time, each committed by all ranks in the same step.

The API server sends all ranks the new placement of a layer. They move its experts between their steps, agree on the
step that commits it, and rank 0 reports it. Uses no sockets.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from moestro.core.experts.expert_table import ExpertLayers, ExpertTable, TableMessage
from moestro.core.experts.layer_moves import LayerPlan, SettledLayer, with_layer
from moestro.errors import NoEngineError
from moestro.wire.messages import (
    DropLayer,
    ExpertsPlaced,
    FromRank,
    LayerMoving,
    LayerSettled,
    MoveLayer,
    Ready,
    ToRank,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationProgress:
    """State of a migration, or of the last one.

    Attributes:
        num_layers: Layers whose experts move.
        num_committed: Those of them that the group serves by the new table.
        num_bytes: Bytes of weights moved so far.
        is_running: Whether moves go on.
        error: Why the migration ended early; "" means that it did not.
    """

    num_layers: int = 0
    num_committed: int = 0
    num_bytes: int = 0
    is_running: bool = False
    error: str = ""


class Migration(Protocol):
    """Moves the experts of a running group, one layer at a time, while it serves."""

    @property
    def table(self) -> ExpertTable:
        """The table that the whole group serves by now; its slots include empty ones."""
        ...

    @property
    def progress(self) -> MigrationProgress:
        """Progress of the present migration, or of the last one."""
        ...

    def start(self, target: ExpertTable, max_bytes_per_step: int) -> None:
        """Begin to move towards a table, and return at once.

        Args:
            target: Table with the shape of `table`; its version is ignored. Slots of dead workers are not filled.
            max_bytes_per_step: Bytes of weights that a worker sends or takes in between two steps, at most; one expert
                is the least.

        Raises:
            ValueError: A migration is running, or the target does not fit the group; the text says which.
        """
        ...

    def cancel(self) -> None:
        """End the migration after the layer that is being committed. Committed layers stay."""
        ...


class EpMigration:
    """Migration of a group in lock-step; implements `placement.live.migration.Migration`.

    Args:
        num_ranks: Ranks of the group.
        send: Callable that sends a message to a rank; raises `NoEngineError` if the rank cannot be reached.

    Invariants: The table is one that the ranks have committed, so a group that restarts can begin with it. At most one
    layer moves at a time.
    """

    def __init__(self, num_ranks: int, send: Callable[[int, ToRank], None]) -> None:
        self._num_ranks, self._send = num_ranks, send
        self._table: ExpertTable | None = None
        self._experts = ExpertLayers(num_layers=0, layers=(), num_experts=0)
        self._ready: set[int] = set()
        self._target: ExpertTable | None = None
        self._max_bytes_per_step = 0
        self._places: deque[int] = deque()  # Layers that have not moved yet, as indices of the table.
        self._version = 0  # Number of the last plan; the present one while the migration runs.
        self._why_ending = ""
        self._settled_bytes = 0  # Of the layers of this migration that have ended.
        self._progress = MigrationProgress()

    # --- for the control of placement

    @property
    def table(self) -> ExpertTable:
        """The table that the whole group serves by now. The group must have been ready once."""
        assert self._table is not None, "the group has not been ready yet"
        return self._table

    @property
    def layers(self) -> tuple[int, ...]:
        """The network's layer of each layer of the table."""
        return self._experts.layers

    @property
    def progress(self) -> MigrationProgress:
        """Progress of the present migration, or of the last one."""
        return self._progress

    def start(self, target: ExpertTable, max_bytes_per_step: int) -> None:
        """Implement `Migration.start`."""
        self._check(target, max_bytes_per_step)
        old = self.table
        is_other = (old.logical_of != target.logical_of) | ~np.isclose(old.slot_parts, target.slot_parts)
        self._places = deque(np.flatnonzero(is_other.any(axis=(0, 2))).tolist())
        self._target, self._max_bytes_per_step, self._why_ending = target, max_bytes_per_step, ""
        self._settled_bytes = 0
        self._progress = MigrationProgress(num_layers=len(self._places), is_running=bool(self._places))
        if self._places:
            self._move_next()

    def cancel(self) -> None:
        """Implement `Migration.cancel`."""
        if self._progress.is_running and not self._why_ending:
            self._end_early("cancelled")

    # --- from the supervisor

    @property
    def placed(self) -> TableMessage | None:
        """The committed table for a group that restarts; None before its first start."""
        return None if self._table is None else TableMessage.of_table(self._experts, self._table)

    def on_message(self, rank: int, message: FromRank) -> None:
        """Take in a message of a rank."""
        match message:
            case ExpertsPlaced(placed):
                self._table, self._experts = placed.table(), placed.experts
                self._version = max(self._version, placed.version)
            case Ready():
                self._ready.add(rank)
            case LayerMoving(version, num_bytes) if self._progress.is_running and version == self._version:
                self._progress = replace(self._progress, num_bytes=self._settled_bytes + num_bytes)
            case LayerSettled(settled) if self._progress.is_running and settled.version == self._version:
                self._settled(settled)
            case _:
                pass

    def ended(self, rank: int) -> None:
        """Note that a rank's process has ended, and with it the group. What was not committed stays as it was."""
        self._ready.clear()
        if self._progress.is_running:
            self._stop(self._why_ending or f"engine {rank} ended")

    # --- inside

    def _check(self, target: ExpertTable, max_bytes_per_step: int) -> None:
        """Raise the ValueError of `start`."""
        if self._progress.is_running:
            raise ValueError("a migration is running: cancel it, or wait for its end")
        if self._table is None or len(self._ready) < self._num_ranks:
            raise ValueError("the engines of the group are not ready")
        if max_bytes_per_step < 1:
            raise ValueError(f"max_bytes_per_step is {max_bytes_per_step}, and must be at least 1")
        shape, expected = target.logical_of.shape, self._table.logical_of.shape
        if shape != expected or target.num_experts != self._table.num_experts:
            raise ValueError(
                f"the target has {target.num_experts} experts in (engines, layers, slots) {shape}, and the group has"
                f" {self._table.num_experts} in {expected}"
            )
        if not target.is_alive.all():
            raise ValueError("the target has dead engines, and those of a group live and end together")

    def _move_next(self) -> None:
        """Send the plan of the next layer to all ranks."""
        target, place = self._target, self._places[0]
        assert target is not None, "a migration is running"
        self._version += 1
        rows = np.ascontiguousarray(target.logical_of[:, place], np.int32)
        parts = np.ascontiguousarray(target.slot_parts[:, place], np.float64)
        plan = LayerPlan(
            version=self._version,
            layer=self.layers[place],
            num_workers=self._num_ranks,
            logical_of=rows.tobytes(),
            parts=parts.tobytes(),
            max_bytes_per_step=self._max_bytes_per_step,
        )
        try:
            for rank in range(self._num_ranks):
                self._send(rank, MoveLayer(plan))
        except NoEngineError:
            # The ranks that know the plan would wait for those that do not.
            self._end_early(f"engine {rank} could not be reached")

    def _end_early(self, why: str) -> None:
        """Ask the ranks to drop the present layer; their report ends the migration."""
        self._why_ending = why
        for rank in range(self._num_ranks):
            try:
                self._send(rank, DropLayer(self._version))
            except NoEngineError:
                logger.warning("engine %d could not be reached to end the moves of experts", rank)

    def _settled(self, settled: SettledLayer) -> None:
        """Take in the end of the present layer, and go on with the next one."""
        self._settled_bytes += settled.num_bytes
        self._progress = replace(self._progress, num_bytes=self._settled_bytes)
        if settled.is_committed:
            target, place = self._target, self._places.popleft()
            assert target is not None, "a migration is running"
            rows, parts = target.logical_of[:, place], target.slot_parts[:, place]
            self._table = with_layer(self.table, settled.version, place, rows, parts)
            self._progress = replace(self._progress, num_committed=self._progress.num_committed + 1)
        if not self._places:
            self._stop("")
        elif self._why_ending or not settled.is_committed:
            self._stop(self._why_ending or "the engines dropped a layer")
        else:
            self._move_next()

    def _stop(self, error: str) -> None:
        """End the migration."""
        self._target, self._places = None, deque()
        self._progress = replace(self._progress, is_running=False, error=error)
        logger.info(
            "experts of %d of %d layers moved, %.1f MB%s", self._progress.num_committed, self._progress.num_layers,
            self._progress.num_bytes / 1e6, f"; ended early: {error}" if error else "",
        )  # fmt: skip
