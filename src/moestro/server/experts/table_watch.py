"""Tells what changed in a group's expert table since the last look, for the records of requests."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moestro.core.clock import NS_PER_S
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.scheduling_events import ExpertMove, ExpertsMoved

logger = logging.getLogger(__name__)

WATCH_S = 0.25  # between looks, each of which may take a millisecond where a network has many experts
MOST_MOVES = 32  # moves that an event names
NO_WORKER = -1  # source of a new copy, and target of a dropped one


class ServedTable(NamedTuple):
    """The table by which a group serves now.

    Attributes:
        layers: the network's layer of each of the table's layers.
        first: number of the worker in the table's first row.
    """

    table: ExpertTable
    layers: Sequence[int]
    first: int = 0


ReadTable = Callable[[], ServedTable | None]  # None means that the group has no table yet


class TableWatch:
    """Compares a group's table with the one of the last look.

    Args:
        read: reads the present table.
        on_change: receiver of each change.
    """

    def __init__(self, read: ReadTable, on_change: Callable[[ExpertsMoved], None]) -> None:
        self._read, self._on_change = read, on_change
        self._last: ExpertTable | None = None
        self._looked_ns: int | None = None

    def look(self, now_ns: int) -> None:
        """Report the difference between the present table and the last one. Looks are rare, and never raise."""
        if self._looked_ns is not None and now_ns - self._looked_ns < WATCH_S * NS_PER_S:
            return
        self._looked_ns = now_ns
        try:
            found = self._read()
            if found is None:
                return
            before, self._last = self._last, found.table
            if before is not None and _differ(before, found.table):
                self._on_change(describe_change(before, found, now_ns))
        except Exception:  # A record must not disturb the group.
            logger.debug("a change of the expert table could not be described", exc_info=True)


def _differ(before: ExpertTable, after: ExpertTable) -> bool:
    """Whether a version has changed, or slots within one, as at the end of a drain."""
    return before.version != after.version or not np.array_equal(before.logical_of, after.logical_of)


def describe_change(before: ExpertTable, after: ServedTable, now_ns: int) -> ExpertsMoved:
    """Describe the step from one table to another one of the same group."""
    moves = list(_moves(before, after))
    dead = {worker + after.first for worker in np.flatnonzero(~after.table.is_alive).tolist()}
    return ExpertsMoved(
        now_ns,
        after.table.version,
        layers=tuple(sorted({layer for layer, _ in moves})),
        num_moves=len(moves),
        moves=tuple(moves[:MOST_MOVES]),
        dead=tuple(sorted(dead)),
    )


def _moves(before: ExpertTable, served: ServedTable) -> Iterator[tuple[int, ExpertMove]]:
    """Pair the workers that lost a copy of an expert with those that got one."""
    after, layers, first = served
    if before.logical_of.shape[1] != after.logical_of.shape[1]:
        return
    for at in range(after.logical_of.shape[1]):
        old, new = _copies(before, at), _copies(after, at)
        if old == new:
            continue
        lost, gained = old - new, new - old
        for expert in sorted({expert for expert, _ in (lost | gained)}):
            sources = sorted(worker for each, worker in lost.elements() if each == expert)
            targets = sorted(worker for each, worker in gained.elements() if each == expert)
            for place in range(max(len(sources), len(targets))):
                source = sources[place] + first if place < len(sources) else NO_WORKER
                target = targets[place] + first if place < len(targets) else NO_WORKER
                yield layers[at], ExpertMove(expert, source, target)


def _copies(table: ExpertTable, layer: int) -> Counter[tuple[int, int]]:
    """Copies of a layer as (expert, worker)."""
    workers, slots = np.nonzero(table.logical_of[:, layer] != EMPTY)
    experts = table.logical_of[workers, layer, slots]
    return Counter(zip(experts.tolist(), workers.tolist(), strict=True))
