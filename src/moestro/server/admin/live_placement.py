"""Live placement of a server: made of its settings and its group, or the reason why there is none."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from moestro.config.serve_settings import ServeSettings
from moestro.core.model_info import ModelInfo
from moestro.errors import ConfigError
from moestro.files.text_files import read_text
from moestro.placement.registry import PlacementError
from moestro.server.admin.placement_admin import NoPlacementAdmin, PlacementAdmin
from moestro.server.engines.expert_loads import ExpertLoads
from moestro.server.experts.placement_control import DecisionOutcome, PlacementControl, Trigger
from moestro.server.experts.placement_loop import PlacementLoop
from moestro.server.experts.placement_view import GroupView, PlaceableGroup, live_prices


@dataclass(frozen=True, slots=True)
class LivePlacement:
    """Live placement of a server.

    Attributes:
        loop: Controls the placement; None where nothing can be placed.
        why_not: Why nothing can be placed, as a sentence.
    """

    loop: PlacementLoop | None
    why_not: str = ""

    @property
    def control(self) -> PlacementControl | None:
        """State of live placement; None where nothing can be placed."""
        return None if self.loop is None else self.loop.control

    def routes(self) -> list[web.RouteDef]:
        """Return the operators' routes, which say why where nothing can be placed."""
        return NoPlacementAdmin(self.why_not).routes() if self.loop is None else PlacementAdmin(self.loop).routes()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Control the placement inside the block."""
        if self.loop is None:
            yield
            return
        async with self.loop.running():
            yield


def open_placement(
    settings: ServeSettings, info: ModelInfo, loads: ExpertLoads, group: PlaceableGroup | None
) -> LivePlacement:
    """Return what controls the placement of a group, or why nothing can be placed.

    Args:
        settings: Settings of the server.
        info: The loaded model.
        loads: Reports of the engines.
        group: The group, ready to serve; None in modes in which each engine has all experts.

    Raises:
        ConfigError: Flags ask for what this model or group cannot do.
    """
    live = settings.placement
    try:
        if not info.num_experts:
            raise ConfigError("The model is dense: it has no experts.")
        if group is None:
            raise ConfigError(_why_fixed(settings))
        if len(group.places().holders) < 2:
            raise ConfigError("One worker holds all experts, so there is nothing to place: start more workers.")
        view = GroupView(group, live_prices(settings, info.dtype), live.limits)
    except ConfigError as error:
        if live.plans_by_itself or live.init_expert_location is not None:
            raise ConfigError(f"--placement-policy and --init-expert-location: {error}") from None
        return LivePlacement(None, str(error))
    loop = PlacementLoop(PlacementControl(group.migration, live), view, loads)
    if live.init_expert_location is not None:
        _move_to_file(loop, live.init_expert_location)
    return LivePlacement(loop)


def _why_fixed(settings: ServeSettings) -> str:
    mode = settings.stepping.mode
    if mode in ("ep", "async"):
        return f"The experts of a paced group in --mode {mode} have no weights to move: serve a model without pacing."
    return f"In --mode {mode} each engine has all experts: start the server in --mode ep or async."


def _move_to_file(loop: PlacementLoop, path: Path) -> None:
    """Begin to move towards the placement of a file.

    Raises:
        ConfigError: The file cannot be read, or does not fit the group.
    """
    try:
        contents = json.loads(read_text(path))
        decision = loop.apply(loop.plan_of(path.name, contents), Trigger.START)
    except (OSError, ValueError, PlacementError) as error:
        raise ConfigError(f"--init-expert-location {path}: {error}") from None
    if decision.outcome is DecisionOutcome.FAILED:
        raise ConfigError(f"--init-expert-location {path}: {decision.reason}")
