"""The group of a server whose experts can move, in either mode that has one."""

from __future__ import annotations

from moestro.config.serve_settings import ServeSettings
from moestro.server.engine_client import EngineClient
from moestro.server.live_placement import MovingGroup
from moestro.server.migration import Migration
from moestro.server.placement_view import group_places


def lock_step_group(settings: ServeSettings, engines: EngineClient, migration: Migration | None) -> MovingGroup | None:
    """Return the group of mode `ep`, in which each engine holds experts; None where none can move.

    Args:
        settings: Settings of the server.
        engines: Client of the engines.
        migration: Moves between the engines; None in other modes, and for paced engines.
    """
    if migration is None:
        return None
    every = range(settings.num_engines)
    places = group_places(every, every)
    return MovingGroup(
        migration=migration,
        places=lambda: places,
        is_complete=lambda: all(engines.is_routable(engine) for engine in every),
    )
