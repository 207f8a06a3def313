"""Flags of both servers: how much one key or one address may ask, and which web pages may ask at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from moestro.errors import ConfigError

_ACCESS = Group("Access", help="Limits for one client, and web pages that may send requests.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AccessSettings:
    """Limits for each client, and CORS. None means no limit."""

    max_requests_per_minute_per_key: Annotated[int | None, Parameter(group=_ACCESS)] = None
    "Requests with one key in a minute; a further one is refused with 429 and Retry-After. Needs --api-key."
    max_requests_per_minute_per_address: Annotated[int | None, Parameter(group=_ACCESS)] = None
    "The same for one client address. IPv6 counts by /64 network; behind a proxy, all clients have its address."
    max_concurrent_requests_per_key: Annotated[int | None, Parameter(group=_ACCESS)] = None
    "Requests with one key that may be answered at a time; a further one is refused with 429. Needs --api-key."
    max_connections_per_address: Annotated[int | None, Parameter(group=_ACCESS)] = None
    "Connections of one client address at a time; a further one is refused with 503."
    allowed_origins: Annotated[tuple[str, ...], Parameter(group=_ACCESS, consume_multiple=True, json_list=True)] = ()
    "Web pages with access, by CORS: origins such as https://chat.example, or *. Unset: no answer has CORS headers."
    allowed_methods: Annotated[tuple[str, ...], Parameter(group=_ACCESS, consume_multiple=True, json_list=True)] = (
        "*",
    )
    "Methods that these pages may use."
    allowed_headers: Annotated[tuple[str, ...], Parameter(group=_ACCESS, consume_multiple=True, json_list=True)] = (
        "*",
    )
    "Headers that these pages may send."
    allow_credentials: Annotated[bool, Parameter(group=_ACCESS)] = False
    "Let these pages send cookies and other credentials; needs origins by name."

    def __post_init__(self) -> None:
        for name in ("requests_per_minute_per_key", "requests_per_minute_per_address", "concurrent_requests_per_key",
                     "connections_per_address"):  # fmt: skip
            value = getattr(self, f"max_{name}")
            if value is not None and value < 1:
                flag = f"--max-{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be at least 1, got {value}; leave it out for no limit")
        if self.allow_credentials and ("*" in self.allowed_origins or not self.allowed_origins):
            raise ConfigError("--allow-credentials needs --allowed-origins that names each origin, and not *")
