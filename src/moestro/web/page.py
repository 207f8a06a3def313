"""The page at `/` of `moestro serve` and `moestro route`: its files, and the headers under which browsers run them.

The files have no data and no keys, so that they need no key. The page asks its own port for data, with the user's key.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from moestro import __version__

Program = Literal["serve", "route"]
Plane = Literal["clients", "operators"]

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Path of the page -> file in the folder of assets.
_FILES = {
    "/": "page.html",
    **{
        f"/page/{name}": name
        for name in (
            "page.css",
            "icon.svg",
            *("page.js", "dom.js", "server.js", "chat.js", "figures.js", "engines.js", "experts.js", "decisions.js"),
        )
    },
}
PAGE_PATHS = frozenset(_FILES)

# Everything comes from the page's own port. Text of models cannot become markup, because scripts must not make any.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    body: bytes
    content_type: str


@cache
def page_file(path: str, program: Program, plane: Plane) -> PageFile:
    """Return the file at `path`, which is one of `PAGE_PATHS`.

    Args:
        program: Program that serves the page.
        plane: Port that serves the page: that of clients or that of operators.
    """
    name = _FILES[path]
    body = (files("moestro") / "assets" / "page" / name).read_bytes()
    if path == "/":
        body = body.replace(b"{{program}}", program.encode()).replace(b"{{plane}}", plane.encode())
    return PageFile(body, _TYPES[name[name.rindex(".") :]])


# The version, and the probes of load balancers and orchestrators: the same paths and responses for every server.

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
