"""The conversation that a request's headers name; the server and the router read the same headers."""

from __future__ import annotations

from collections.abc import Callable

MAX_SESSION_CHARS = 1024
# The first header that is given counts. The last two come from Codex and Claude Code.
SESSION_HEADERS = ("x-session-affinity", "x-session-id", "session-id", "x-claude-code-session-id")


def session_in(header: Callable[[str], str | None]) -> str | None:
    """Return the name of the conversation; None means that the body may name one, which counts less.

    Args:
        header: Returns the value of a header by its name in lower case; None or an empty text without it.
    """
    name = next((name for each in SESSION_HEADERS if (name := header(each))), None)
    # aiohttp has surrogates for bytes that are no UTF-8; no message to an engine can carry them.
    return name.encode("utf-8", "surrogateescape").decode("latin-1")[:MAX_SESSION_CHARS] if name else None
