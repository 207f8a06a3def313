"""Access control of one server: API keys, limits and CORS."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from moestro.core.hosts import network_of
from moestro.errors import ConfigError
from moestro.web.access.access_settings import AccessSettings
from moestro.web.access.cors import Cors
from moestro.web.access.keys import ApiKeys, KeyFile
from moestro.web.access.rate_limits import RequestLimits
from moestro.web.errors import AuthenticationError
from moestro.web.page import PAGE_PATHS
from moestro.web.probes import PROBES

# Requested by the operator's machines, and by the page at `/`, once a second.
UNLIMITED = PROBES | PAGE_PATHS | {"/metrics", "/statistics"}
NO_LIMITS = AccessSettings()
# By it a router names its client to a server that has the router's key. A router passes no client's own value on.
CLIENT_HEADER = "X-Moestro-Client"
_CLIENT_NAME = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Access:
    """Checks that precede the handling of a request.

    Attributes:
        keys: API keys; falsy means that no key is needed.
        limits: Request limits for each key and address.
        cors: CORS rules; None means no CORS headers.
    """

    keys: ApiKeys
    limits: RequestLimits
    cors: Cors | None

    @classmethod
    def of(
        cls, api_keys: Iterable[str], settings: AccessSettings = NO_LIMITS, router_keys: Sequence[str] = ()
    ) -> Access:
        """Return the checks that a server's settings ask for.

        Args:
            api_keys: Accepted keys of clients, beside those of the settings' file.
            router_keys: Accepted keys of routers, whose requests name their client.

        Raises:
            ConfigError: There are limits for each key, but no keys, or the file of keys cannot be used.
        """
        file = None if settings.api_key_file is None else KeyFile(settings.api_key_file)
        keys = ApiKeys(api_keys, router_keys, file)
        if not keys and (settings.max_requests_per_minute_per_key or settings.max_concurrent_requests_per_key):
            raise ConfigError("limits for each key need keys: give --api-key or --api-key-file, or limit each address")
        cors = Cors(settings) if settings.allowed_origins else None
        return cls(keys, RequestLimits(settings), cors)

    def key_of(self, authorization: str | bytes, x_api_key: str | bytes) -> Hashable | None:
        """Return the name of a request's key, from the values of two headers; None means that no key is needed.

        Keys of one tenant have one name.

        Raises:
            AuthenticationError: The request has no valid key, or two different ones.
        """
        if not self.keys:
            return None
        holder = self.keys.find(authorization, x_api_key)
        if holder is None:
            raise AuthenticationError
        return holder.name

    def client_of(self, authorization: str | bytes, x_api_key: str | bytes, address: str, named: str = "") -> Hashable:
        """Return the name under which a client's failures, retries and bodies count together.

        It is the tenant of the key, or the key where several keys tell clients apart, otherwise the network. A key that
        this server does not check would let one client be many. Behind a router with a router's key, it is the router's
        name of the client.

        Args:
            named: Value of `CLIENT_HEADER`, which counts only beside a router's key; empty if absent.
        """
        if not self.keys.tell_clients_apart:
            return network_of(address)
        holder = self.keys.find(authorization, x_api_key)
        if holder is None:
            return network_of(address)
        if holder.is_router:
            return named if _CLIENT_NAME.fullmatch(named) else holder.name
        return holder.name if holder.tenant or self.keys.num_clients > 1 else network_of(address)

    def tenant_of(self, authorization: str | bytes, x_api_key: str | bytes) -> str | None:
        """Return the tenant of a request's key; None if it has none."""
        if not self.keys.may_change:
            return None
        holder = self.keys.find(authorization, x_api_key)
        return holder.tenant or None if holder is not None else None
