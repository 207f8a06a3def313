"""Where the experts of a running group are, what routers learn of that, and what changed since the last look."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.config.serve_settings import ServeSettings
from moestro.core.clock import NS_PER_S
from moestro.core.experts.expert_load import expert_pressures
from moestro.core.experts.expert_table import (
    DISTANCES,
    EMPTY,
    SAME_DEVICE,
    ExpertTable,
    expert_shares,
    spread_evenly,
    visit_shares,
)
from moestro.core.load_figures import LoadFigures
from moestro.core.scheduling_events import ExpertMove, ExpertsMoved
from moestro.placement.live.ep_migration import EpMigration
from moestro.placement.live.plan import GroupPlaces, MachineOf, PlaceableGroup, group_places, machine_numbers
from moestro.routing.policy_contract import FRESH_NS
from moestro.routing.router import Router
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.engine_reports import EngineReport, ExpertLoads
from moestro.server.engines.request_state import Metrics
from moestro.server.experts.coordinator import Coordinator

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]

PERIOD_S = 2.0  # between questions: policies drop a figure after 5 s (FRESH_NS), so one late answer costs nothing
# Visits count half after this time. It is long against the period, so that a few tokens do not turn the figures, and as
# short as an answer, so that a change of the load or of the placement shows while it lasts. For sessions of 20 to 180 s
# the error is least at 5 to 10 s (`bench/simulator/pressure_constants.py`).
HALF_LIFE_NS = 10_000_000_000


class ExpertPlaces(Protocol):
    """Where the experts of a group are. Worker r is the device of engine r; later workers have experts alone."""

    def table(self, num_layers: int, num_experts: int) -> ExpertTable | None:
        """Return the table that the group serves by; None means none yet.

        Args:
            num_layers, num_experts: Shape of the engines' counts, with dense layers.
        """
        ...

    def machines(self) -> NDArray[np.int32]:
        """int32[workers], number of each worker's machine."""
        ...

    def oldest_s(self) -> Floats | None:
        """float64[workers], time for which the oldest token waits in each worker's queues, in seconds. None: no queues.

        A worker that reported nothing has 0.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSignal:
    """What a router can learn of one engine's experts.

    Attributes:
        pressure: As in `core.expert_pressure`.
        visits: Fractions of the visits of the engine's tokens by distance: device, machine, other machines. None means
            that the engine had none.
        as_of_ns: Time of the engine's report.
    """

    pressure: float
    visits: tuple[float, ...] | None
    as_of_ns: int


class ExpertSignals:
    """Keeps the recent visits of each engine's tokens, and reports the figures that follow from them.

    Args:
        loads: Reports of the engines.
        places: Where the experts are.
        router: Gets the figures.

    Attributes:
        num_engines: Number of engines.
        table_version: Version of the table of the last figures; None means that there are none.
        near_experts: float64[engines, 3, layers], fraction of each layer's experts by distance; None means unknown.
        layers: int64[layers], the network's layer of each layer of `near_experts`.
    """

    def __init__(self, loads: ExpertLoads, places: ExpertPlaces, router: Router) -> None:
        self._loads, self._places, self._router = loads, places, router
        self.num_engines = num_engines = len(loads.engines)
        self._visits: Floats | None = None  # [engines, layers, experts]
        self._counts: list[NDArray[np.int64] | None] = [None] * num_engines  # of each engine's last report
        self._signals: list[ExpertSignal | None] = [None] * num_engines
        self._updated_ns = 0
        self.table_version: int | None = None
        self.near_experts: Floats | None = None
        self.layers: NDArray[np.int64] = np.empty(0, np.int64)

    def of_engine(self, engine: int, now_ns: int) -> ExpertSignal | None:
        """Return an engine's figures; None means that there are none, or that they are older than `FRESH_NS`."""
        signal = self._signals[engine]
        return None if signal is None or now_ns - signal.as_of_ns > FRESH_NS else signal

    async def follow(self, metrics: Metrics, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Ask the engines from time to time, until cancelled. An idle server asks nothing.

        Args:
            metrics: Counts the tokens of each engine.
        """
        seen = 0
        while True:
            await asyncio.sleep(PERIOD_S)
            num_tokens = sum(each.num_prompt_tokens + each.num_generated_tokens for each in metrics.engines)
            if num_tokens == seen:
                continue
            seen = num_tokens
            await self._loads.read()
            try:
                self.update(now_ns())
            except Exception:  # Figures that routers lack must not end a server.
                logger.exception("the pressure of experts could not be computed")

    def update(self, now_ns: int) -> None:
        """Take in the last reports of all engines, and report the figures of those that answered lately.

        Visits count half after `HALF_LIFE_NS`. If no engine counted a token since the last update, nothing is reported,
        and the figures that routers have expire.
        """
        if not self._take_in(now_ns):
            return
        assert self._visits is not None, "some engine has counted"
        layers = np.flatnonzero(self._visits.sum(axis=(0, 2)) > 0)
        table = self._places.table(*self._visits.shape[1:])
        if table is None or not len(layers):
            return
        parts = table.parts if table.logical_of.shape[1] == len(layers) else table.parts[:, layers]
        visits, machines = self._visits[:, layers], self._places.machines()
        pressures = expert_pressures(visits, parts, self._places.oldest_s())
        travels = visit_shares(visits, parts, machines)
        if table.version != self.table_version or self.near_experts is None:
            self.near_experts = expert_shares(parts, machines, len(visits))
            self.table_version, self.layers = table.version, layers
        for engine, (pressure, shares) in enumerate(zip(pressures.tolist(), travels.tolist(), strict=True)):
            as_of_ns = self._loads.engines[engine].at_ns
            if as_of_ns is None or now_ns - as_of_ns > FRESH_NS:
                continue
            visited = None if np.isnan(shares[0]) else tuple(shares)
            self._signals[engine] = ExpertSignal(pressure=pressure, visits=visited, as_of_ns=as_of_ns)
            local = None if visited is None else visited[SAME_DEVICE]
            figures = LoadFigures(expert_pressure=pressure, expert_local_share=local)
            self._router.report(engine, figures, as_of_ns, now_ns)

    def _take_in(self, now_ns: int) -> bool:
        """Add what the engines counted since the last update, and return whether it is anything."""
        if self._visits is not None:
            self._visits *= 0.5 ** ((now_ns - self._updated_ns) / HALF_LIFE_NS)
        self._updated_ns, has_news = now_ns, False
        for engine, report in enumerate(self._loads.engines):
            fresh = self._counted(engine, report)
            if fresh is not None and fresh.any():
                if self._visits is None or self._visits.shape[1:] != fresh.shape:
                    self._visits = np.zeros((len(self._counts), *fresh.shape))
                self._visits[engine] += fresh
                has_news = True
        return has_news

    def _counted(self, engine: int, report: EngineReport) -> NDArray[np.int64] | None:
        """int64[layers, experts], visits that an engine counted since its last report; None means unknown."""
        if report.load is None or not report.load.num_steps:  # Nothing yet, or the report of an ended process.
            return None
        before, self._counts[engine] = self._counts[engine], report.load.counts
        if before is None or before.shape != report.load.counts.shape or (report.load.counts < before).any():
            return report.load.counts  # The first report of a process, whose counts begin at 0.
        return report.load.counts - before


@dataclass(frozen=True, slots=True, kw_only=True)
class NearView:
    """How near the experts of one engine are, as operators see it.

    Attributes:
        engine: Number of the engine.
        pressure: Its expert pressure; None means unknown or old.
        visits: Fraction of the visits of its tokens by distance; None means unknown or old.
        experts: Fraction of each layer's experts by distance.
    """

    engine: int
    pressure: float | None
    visits: dict[str, float] | None
    experts: dict[str, list[float]]


def near_views(signals: ExpertSignals, now_ns: int) -> list[NearView]:
    """Return how near the experts of each engine are; [] while no engine has counted a token."""
    if signals.near_experts is None:
        return []
    views = []
    for engine, experts in enumerate(signals.near_experts.tolist()):
        signal = signals.of_engine(engine, now_ns)
        visits = None if signal is None else signal.visits
        views.append(
            NearView(
                engine=engine,
                pressure=None if signal is None else signal.pressure,
                visits=None if visits is None else dict(zip(DISTANCES, visits, strict=True)),
                experts=dict(zip(DISTANCES, experts, strict=True)),
            )
        )
    return views


ELSEWHERE = -1  # the worker of an engine that has no place for experts


def lock_step_group(migration: EpMigration, num_engines: int, engines: EngineClient) -> PlaceableGroup:
    """Return the group of mode `ep`, in which each engine holds experts. It is on one machine (`docs/machines.md`)."""
    places = group_places(range(num_engines), range(num_engines))
    return PlaceableGroup(
        migration=migration,
        places=lambda: places,
        layers=lambda: migration.layers,
        is_complete=lambda: all(engines.is_routable(engine) for engine in range(num_engines)),
        has_shares=True,
    )


def async_group(coordinator: Coordinator, machine_of: MachineOf) -> PlaceableGroup:
    """Return the group of mode `async`. Tables have a row for each place from the first one that can have experts on.

    Its attention workers choose among copies by queues and distance, so shares of a table mean nothing to them.

    Args:
        coordinator: Knows the workers of the group.
        machine_of: Names the machine of each worker's process. A restarted worker may be on another one.
    """

    def places() -> GroupPlaces:
        first, homes = coordinator.table.first, range(coordinator.num_homes)
        holders = [worker for worker in coordinator.present if worker >= first]
        machines = [machine_of(worker) for worker in holders], [machine_of(home) for home in homes]
        sources = [ELSEWHERE if first else home for home in homes]
        return group_places([worker - first for worker in holders], sources, machines)

    return PlaceableGroup(
        migration=coordinator.migration,
        places=places,
        layers=lambda: coordinator.table.experts.layers,
        is_complete=lambda: all(view.phase == "serving" for view in coordinator.views()),
        has_shares=False,
    )


class LockStepExpertPlaces(ExpertPlaces):
    """The group of mode `ep`, whose engines hold all experts.

    Args:
        num_engines: Engines of the group.
        machine_of: Names the machine of each engine.
        migration: Has the table. None means a paced group, which keeps an even one.
    """

    def __init__(self, num_engines: int, machine_of: MachineOf, migration: EpMigration | None) -> None:
        self._num_engines, self._machine_of, self._migration = num_engines, machine_of, migration
        self._table: ExpertTable | None = None

    def table(self, num_layers: int, num_experts: int) -> ExpertTable:
        """Implement `ExpertPlaces.table`."""
        if self._migration is not None:
            return self._migration.table
        if self._table is None or self._table.num_experts != num_experts:
            engines = list(range(self._num_engines))
            self._table = spread_evenly(num_layers, num_experts, engines, self._num_engines)
        return self._table

    def machines(self) -> NDArray[np.int32]:
        """Implement `ExpertPlaces.machines`."""
        return machine_numbers([self._machine_of(engine) for engine in range(self._num_engines)])

    def oldest_s(self) -> None:
        """Implement `ExpertPlaces.oldest_s`: the group computes in step, so no token waits in a queue."""


class AsyncExpertPlaces(ExpertPlaces):
    """The group of mode `async`.

    Args:
        coordinator: Knows its workers.
        machine_of: Names the machine of each worker.
    """

    def __init__(self, coordinator: Coordinator, machine_of: MachineOf) -> None:
        self._coordinator, self._machine_of = coordinator, machine_of

    def table(self, num_layers: int, num_experts: int) -> ExpertTable | None:
        """Implement `ExpertPlaces.table`: None while no worker has some expert, because its process has just ended."""
        try:
            return self._coordinator.members().table.whole_table()
        except ValueError:
            return None

    def machines(self) -> NDArray[np.int32]:
        """Implement `ExpertPlaces.machines`."""
        return machine_numbers([self._machine_of(worker) for worker in range(self._coordinator.num_places)])

    def oldest_s(self) -> NDArray[np.float64]:
        """Implement `ExpertPlaces.oldest_s`."""
        oldest = np.zeros(self._coordinator.num_places)
        for worker in self._coordinator.present:
            figures = self._coordinator.view(worker).figures
            if figures is not None:
                oldest[worker] = max(figures.oldest_ns, default=0) / NS_PER_S
        return oldest


def places_of(
    settings: ServeSettings, machine_of: MachineOf, coordinator: Coordinator | None, migration: EpMigration | None
) -> ExpertPlaces | None:
    """Return where the experts of a server's group are; None means that each engine holds the whole network.

    Args:
        machine_of: Names the machine of each rank's process.
        coordinator: The group of mode `async`.
        migration: Moves of experts in mode `ep`; None there means a paced group.
    """
    if coordinator is not None:
        return AsyncExpertPlaces(coordinator, machine_of)
    if settings.stepping.mode != "ep":
        return None
    return LockStepExpertPlaces(settings.num_engines, machine_of, migration)


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
