"""The two ports of a server, bound before anything is loaded, and the files that their connections may open."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from moestro.config.serve_settings import ServerSettings, ServeSettings
from moestro.web.ports.connections import MAX_OPERATOR_CONNECTIONS, allow_open_files, bound_socket, files_of_port

ADMIN_HOST = "127.0.0.1"
# A placement of DeepSeek-V3 on 320 devices with its shares and moves takes 2 MB.
ADMIN_BODY_BYTES = 8 << 20


@contextlib.contextmanager
def bound_ports(settings: ServerSettings) -> Iterator[tuple[socket.socket, socket.socket | None]]:
    """Bind the ports of clients and of operators before anything is loaded, and close them with the block."""
    with contextlib.ExitStack() as ports:
        clients = ports.enter_context(bound_socket(settings.host, settings.port))
        operators = None
        if settings.admin_port is not None:
            operators = ports.enter_context(bound_socket(ADMIN_HOST, settings.admin_port, "--admin-port"))
        yield clients, operators


def allow_files(settings: ServeSettings) -> None:
    """Let this process open a file for each connection and process that it may have."""
    num_processes = settings.num_engines
    if settings.stepping.mode == "async":
        num_processes = settings.group.num_places
    num_operators = 0 if settings.server.admin_port is None else files_of_port(MAX_OPERATOR_CONNECTIONS)
    allow_open_files(files_of_port(settings.server.max_connections) + num_operators, num_processes)
