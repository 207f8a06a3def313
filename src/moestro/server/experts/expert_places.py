"""Where the experts of a running group are: its table, its workers' machines, and their queues."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.config.serve_settings import ServeSettings
from moestro.core.clock import NS_PER_S
from moestro.core.experts.expert_table import ExpertTable, spread_evenly
from moestro.placement.live.ep_migration import EpMigration
from moestro.placement.live.group_view import GroupPlaces, MachineOf, PlaceableGroup, group_places, machine_numbers
from moestro.server.engines.engine_client import EngineClient
from moestro.server.experts.coordinator import Coordinator
from moestro.server.experts.expert_signals import ExpertPlaces

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
