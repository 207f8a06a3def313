"""The conversation that a request's headers name, read as `moestro route` reads it."""

from __future__ import annotations

from collections.abc import Mapping

from moestro.server.validation import MAX_USER_CHARS

_HEADERS = ("x-session-affinity", "x-session-id")  # The first one that is given counts.


def session_in(headers: Mapping[str, str]) -> str | None:
    """Return the name of the conversation in `headers`, or None; the body may name one too, which counts less."""
    name = next((name for header in _HEADERS if (name := headers.get(header))), None)
    # aiohttp has surrogates for bytes that are no UTF-8; no message to an engine can carry them.
    return name.encode("utf-8", "surrogateescape").decode("latin-1")[:MAX_USER_CHARS] if name else None
