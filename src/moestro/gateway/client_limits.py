"""Bounds of a client's connection to `moestro route`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Bounds of every connection.

    Attributes:
        max_body_bytes: of one request.
        max_held_bytes: of all requests whose answers have not begun, without the first 64 KiB of each.
        idle_s: until a connection without a request, or with half a head of one, is closed.
        body_s: for a body to arrive.
        write_s: that a client may leave its answer unread.
        linger_s: for a client that is refused in the middle of its request to notice it.
    """

    max_body_bytes: int = 32 << 20
    max_held_bytes: int = 256 << 20
    idle_s: float = 75.0
    body_s: float = 60.0
    write_s: float = 60.0
    linger_s: float = 3.0
