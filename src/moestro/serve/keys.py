"""API keys: compared by digest, in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


class ApiKeys:
    """The keys that open a door; falsy if there are none and the door is open.

    All digests are compared, in constant time: neither a key's length nor its beginning shows.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, authorization: str | bytes) -> bool:
        """Whether the value of an `Authorization` header is a bearer token that is one of the keys."""
        if isinstance(authorization, str):
            authorization = authorization.encode("utf-8", "surrogateescape")
        scheme, _, given = authorization.partition(b" ")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
