"""Detection of a machine that vanished without closing its connection."""

from __future__ import annotations

import socket

# After 5 s of silence, within 15 s. Some systems lack one of the options.
_OPTIONS = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3))


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel probe a silent TCP connection, and end it if the other machine does not answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
