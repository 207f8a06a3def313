"""API keys: compared by digest, in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


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
