"""The conversation that a request's headers name, read as `moestro route` reads it."""

from __future__ import annotations

from collections.abc import Mapping

from moestro.server.validation import MAX_USER_CHARS

_HEADERS = ("x-session-affinity", "x-session-id")  # The first one that is given counts.


def session_in(headers: Mapping[str, str]) -> str | None:
    """Return the name of the conversation in `headers`, or None; the body may name one too, which counts less."""
    name = next((name for header in _HEADERS if (name := headers.get(header))), None)
    return name[:MAX_USER_CHARS] if name else None
