"""The version, and the probes of load balancers and orchestrators: the same paths and responses for every server."""

from __future__ import annotations

import msgspec

from moestro import __version__
from moestro.web.page import PAGE_PATHS

HEALTH_PATHS = ("/health", "/ping")
READY_PATHS = ("/ready", "/readyz")
PROBES = frozenset(HEALTH_PATHS + READY_PATHS)

# Paths that say the same to everybody, so that they need no key.
PUBLIC = PROBES | PAGE_PATHS | {"/docs", "/openapi.json"}

VERSION_BODY = msgspec.json.encode({"version": __version__})


def probe_status(path: str, *, is_healthy: bool, is_draining: bool) -> int:
    """Return the HTTP status of a probe's answer.

    Args:
        path: One of `PROBES`. A health probe passes while a server drains; a readiness probe does not.
        is_healthy: Whether any engine takes requests.
        is_draining: Whether the server refuses new requests because it stops.
    """
    passes = is_healthy and not (is_draining and path in READY_PATHS)
    return 200 if passes else 503
