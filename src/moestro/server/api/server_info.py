"""What `GET /server_info` shows: version, models, settings without secrets, and the phases of the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moestro import __version__
from moestro.config.config_sources import SECRETS, settings_in
from moestro.config.serve_settings import ServeSettings
from moestro.core.model_info import ModelInfo
from moestro.wire.messages import Phase


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `GET /server_info`.

    Attributes:
        settings: Value of each setting by the name of its flag, without keys.
        engines: Information of each engine's model, by number.
        start_s: Duration of each phase of the start, in seconds.
    """

    version: str
    served_model_names: tuple[str, ...]
    settings: dict[str, Any]
    engines: list[ModelInfo]
    start_s: dict[str, float]


def server_info(settings: ServeSettings, infos: Sequence[ModelInfo], phases: Sequence[Phase]) -> ServerInfo:
    """Return the information of a server that has started."""
    return ServerInfo(
        version=__version__,
        served_model_names=settings.server.served_model_name,
        settings={
            name: value if isinstance(value, str | int | float | tuple | None) else str(value)
            for name, value in settings_in(settings)
            if name not in SECRETS
        },
        engines=list(infos),
        start_s={phase.name: round(phase.seconds, 3) for phase in phases},
    )
