"""The page at `/` of `moestro serve` and `moestro route`: its files, and the headers under which browsers run them.

The files have no data and no keys, so that they need no key. The page asks its own port for data, with the user's key.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

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
