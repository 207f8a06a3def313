"""The groups of a server whose experts can move, in each mode that has one."""

from __future__ import annotations

from moestro.server.coordinator import Coordinator
from moestro.server.engine_client import EngineClient
from moestro.server.ep_migration import EpMigration
from moestro.server.placement_view import GroupPlaces, PlaceableGroup, group_places

ELSEWHERE = -1  # the worker of an engine that has no place for experts


def lock_step_group(migration: EpMigration, num_engines: int, engines: EngineClient) -> PlaceableGroup:
    """Return the group of mode `ep`, in which each engine holds experts."""
    places = group_places(range(num_engines), range(num_engines))
    return PlaceableGroup(
        migration=migration,
        places=lambda: places,
        layers=lambda: migration.layers,
        is_complete=lambda: all(engines.is_routable(engine) for engine in range(num_engines)),
        has_shares=True,
    )


def async_group(coordinator: Coordinator) -> PlaceableGroup:
    """Return the group of mode `async`. Tables have a row for each place from the first one that can have experts on.

    Its attention workers choose among copies by queues and distance, so shares of a table mean nothing to them.
    """

    def places() -> GroupPlaces:
        first = coordinator.table.first
        holders = [worker - first for worker in coordinator.present if worker >= first]
        return group_places(holders, [ELSEWHERE if first else home for home in range(coordinator.num_homes)])

    return PlaceableGroup(
        migration=coordinator.migration,
        places=places,
        layers=lambda: coordinator.table.experts.layers,
        is_complete=lambda: all(view.phase == "serving" for view in coordinator.views()),
        has_shares=False,
    )
