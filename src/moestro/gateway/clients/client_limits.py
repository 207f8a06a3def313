"""Limits of a client's connection to `moestro route`."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.web.ports.heads import IDLE_S, LINGER_S, WRITE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits that apply to every connection.

    Attributes:
        max_body_bytes: largest request body, bytes.
        idle_s: time after which a connection without a request, or with an incomplete head, is closed, seconds.
        body_s: time for a request body to arrive, seconds.
        write_s: time that a client may leave its response unread, seconds.
        linger_s: time for a client to notice a refusal that arrives while it still sends, seconds.
    """

    max_body_bytes: int = 32 << 20
    idle_s: float = IDLE_S
    body_s: float = 60.0
    write_s: float = WRITE_S
    linger_s: float = LINGER_S
