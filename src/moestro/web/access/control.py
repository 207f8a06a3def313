"""Access control of one server: API keys, limits and CORS."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from moestro.core.hosts import network_of
from moestro.errors import ConfigError
from moestro.web.access.access_settings import AccessSettings
from moestro.web.access.cors import Cors
from moestro.web.access.rate_limits import RequestLimits
from moestro.web.errors import AuthenticationError
from moestro.web.page import PAGE_PATHS
from moestro.web.probes import PROBES


class ApiKeys:
    """API keys of a server; falsy if there are none and no key is needed.

    All digests are compared in constant time, which reveals neither a key's length nor its beginning.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(_bytes(key)) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def num_keys(self) -> int:
        """Number of accepted keys."""
        return len(self._digests)

    def find(self, authorization: str | bytes, x_api_key: str | bytes) -> int | None:
        """Return the index of a request's key; None means no valid key, or two different ones.

        Args:
            authorization: Value of `Authorization`, a bearer token as OpenAI's clients send it; empty if absent.
            x_api_key: Value of `x-api-key`, a key as Anthropic's clients send it; empty if absent.
        """
        bearer, other = _bytes(authorization), _bytes(x_api_key)
        found = set()
        if bearer:
            scheme, _, token = bearer.partition(b" ")
            found.add(self._find(token.strip()) if scheme.lower() == b"bearer" else None)
        if other:
            found.add(self._find(other.strip()))
        return found.pop() if len(found) == 1 else None

    def _find(self, key: bytes) -> int | None:
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if any(matches) else None


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# Requested by the operator's machines, and by the page at `/`, once a second.
UNLIMITED = PROBES | PAGE_PATHS | {"/metrics", "/statistics"}
NO_LIMITS = AccessSettings()


@dataclass(frozen=True, slots=True)
class Access:
    """Checks that precede the handling of a request.

    Attributes:
        keys: API keys; empty means that no key is needed.
        limits: Request limits for each key and address.
        cors: CORS rules; None means no CORS headers.
    """

    keys: ApiKeys
    limits: RequestLimits
    cors: Cors | None

    @classmethod
    def of(cls, api_keys: Iterable[str], settings: AccessSettings = NO_LIMITS) -> Access:
        """Return the checks that a server's settings ask for.

        Raises:
            ConfigError: There are limits for each key, but no keys.
        """
        keys = ApiKeys(api_keys)
        if not keys and (settings.max_requests_per_minute_per_key or settings.max_concurrent_requests_per_key):
            raise ConfigError("limits for each key need keys: give --api-key, or limit each address")
        return cls(keys, RequestLimits(settings), Cors(settings) if settings.allowed_origins else None)

    def key_of(self, authorization: str | bytes, x_api_key: str | bytes) -> int | None:
        """Return the index of a request's key, from the values of two headers; None means that no key is needed.

        Raises:
            AuthenticationError: The request has no valid key, or two different ones.
        """
        if not self.keys:
            return None
        key = self.keys.find(authorization, x_api_key)
        if key is None:
            raise AuthenticationError
        return key

    def client_of(self, authorization: str | bytes, x_api_key: str | bytes, address: str) -> Hashable:
        """Return the name under which a client's failures, retries and bodies count together.

        It is the key where several keys tell clients apart, otherwise the network. A key that this server does not
        check would let one client be many.
        """
        key = self.keys.find(authorization, x_api_key) if self.keys.num_keys > 1 else None
        return network_of(address) if key is None else key
