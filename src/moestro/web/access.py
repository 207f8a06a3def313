"""Who may enter: keys, limits and CORS of one server, together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moestro.errors import ConfigError
from moestro.web.access_settings import AccessSettings
from moestro.web.api_keys import ApiKeys
from moestro.web.cors import Cors
from moestro.web.errors import AuthenticationError
from moestro.web.probes import PROBES
from moestro.web.rate_limits import RequestLimits

UNLIMITED = PROBES | {"/metrics"}  # Asked for by the operator's machines.
NO_LIMITS = AccessSettings()


@dataclass(frozen=True, slots=True)
class Access:
    """What a request is checked against before it is looked at.

    Attributes:
        keys: One of which a request must have; empty means that none is needed.
        cors: None means that no answer has CORS headers.
    """

    keys: ApiKeys
    limits: RequestLimits
    cors: Cors | None

    @classmethod
    def of(cls, api_keys: Iterable[str], settings: AccessSettings = NO_LIMITS) -> Access:
        """Build it from a server's flags.

        Raises:
            ConfigError: There are limits for each key, and no keys.
        """
        keys = ApiKeys(api_keys)
        if not keys and (settings.max_requests_per_minute_per_key or settings.max_concurrent_requests_per_key):
            raise ConfigError("limits for each key need keys: give --api-key, or limit each address")
        return cls(keys, RequestLimits(settings), Cors(settings) if settings.allowed_origins else None)

    def key_of(self, authorization: str | bytes, x_api_key: str | bytes) -> int | None:
        """Return which key a request has, from the values of two headers; None means that none is needed.

        Raises:
            AuthenticationError: It has none of the keys, or two.
        """
        if not self.keys:
            return None
        key = self.keys.find(authorization, x_api_key)
        if key is None:
            raise AuthenticationError
        return key
