"""The groups of a server whose experts can move, in each mode that has one."""

from __future__ import annotations

from moestro.placement.live.ep_migration import EpMigration
from moestro.placement.live.group_view import GroupPlaces, MachineOf, PlaceableGroup, group_places
from moestro.server.engines.engine_client import EngineClient
from moestro.server.experts.coordinator import Coordinator

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
