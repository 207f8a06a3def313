"""Access settings of both servers: limits for each key and address, and CORS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from moestro.core.setting_checks import CheckedSettings, at_least
from moestro.errors import ConfigError

_ACCESS = Group("Access", help="Keys, limits for each client, and the web pages that may send requests.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AccessSettings(CheckedSettings):
    """Keys of a file, limits for each client, and CORS. None means no limit."""

    api_key_file: Annotated[Path | None, Parameter(group=_ACCESS)] = None
    (
        "File with accepted keys and their tenants, KEY: TENANT on each line, or keys alone. A change counts within two"
        " seconds. Requests of one tenant share limits and places, whatever key and address they have."
    )
    max_requests_per_minute_per_key: Annotated[int | None, at_least(1), Parameter(group=_ACCESS)] = None
    "Most requests in a minute with one API key; a further one gets 429 and Retry-After. Needs --api-key or its file."
    max_requests_per_minute_per_address: Annotated[int | None, at_least(1), Parameter(group=_ACCESS)] = None
    "Most requests in a minute from one client address, or IPv6 /64 network; a proxy counts as one address."
    max_concurrent_requests_per_key: Annotated[int | None, at_least(1), Parameter(group=_ACCESS)] = None
    "Most concurrent requests with one API key; a further one gets 429. Needs --api-key or its file."
    max_connections_per_address: Annotated[int | None, at_least(1), Parameter(group=_ACCESS)] = None
    "Most concurrent connections from one client address; a further one gets 503."
    allowed_origins: Annotated[tuple[str, ...], Parameter(group=_ACCESS, consume_multiple=True, json_list=True)] = ()
    "Origins whose web pages may send requests (CORS), such as https://chat.example, or *. Unset: no CORS headers."
    allowed_methods: Annotated[tuple[str, ...], Parameter(group=_ACCESS, consume_multiple=True, json_list=True)] = (
        "*",
    )
    "HTTP methods that these pages may use."
    allowed_headers: Annotated[tuple[str, ...], Parameter(group=_ACCESS, consume_multiple=True, json_list=True)] = (
        "*",
    )
    "Headers that these pages may send."
    allow_credentials: Annotated[bool, Parameter(group=_ACCESS)] = False
    "Let these pages send credentials such as cookies; needs explicit origins."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.allow_credentials and ("*" in self.allowed_origins or not self.allowed_origins):
            raise ConfigError("--allow-credentials needs --allowed-origins with explicit origins, not *")
