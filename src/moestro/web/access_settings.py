"""Limits for each key and address, and CORS: settings of both servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from moestro.core.setting_checks import CheckedSettings, at_least
from moestro.errors import ConfigError

_ACCESS = Group("Access", help="Limits for each client, and the web pages that may send requests.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AccessSettings(CheckedSettings):
    """Limits for each client, and CORS. None means no limit."""

    max_requests_per_minute_per_key: Annotated[int | None, at_least(1), Parameter(group=_ACCESS)] = None
    "Requests with one key in a minute; one more is refused with 429 and Retry-After. Needs --api-key."
    max_requests_per_minute_per_address: Annotated[int | None, at_least(1), Parameter(group=_ACCESS)] = None
    "Requests of one client address in a minute. IPv6 addresses count by their /64 network; a proxy counts as one."
    max_concurrent_requests_per_key: Annotated[int | None, at_least(1), Parameter(group=_ACCESS)] = None
    "Requests with one key that run at a time; one more is refused with 429. Needs --api-key."
    max_connections_per_address: Annotated[int | None, at_least(1), Parameter(group=_ACCESS)] = None
    "Connections of one client address at a time; a further one is refused with 503."
    allowed_origins: Annotated[tuple[str, ...], Parameter(group=_ACCESS, consume_multiple=True, json_list=True)] = ()
    "Web pages that may send requests, by CORS: origins such as https://chat.example, or *. Unset: no CORS headers."
    allowed_methods: Annotated[tuple[str, ...], Parameter(group=_ACCESS, consume_multiple=True, json_list=True)] = (
        "*",
    )
    "Methods that these pages may use."
    allowed_headers: Annotated[tuple[str, ...], Parameter(group=_ACCESS, consume_multiple=True, json_list=True)] = (
        "*",
    )
    "Headers that these pages may send."
    allow_credentials: Annotated[bool, Parameter(group=_ACCESS)] = False
    "Let these pages send credentials such as cookies; needs origins by name."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.allow_credentials and ("*" in self.allowed_origins or not self.allowed_origins):
            raise ConfigError("--allow-credentials needs --allowed-origins that names each origin, and not *")
