"""The front of a port: accepts connections within the port's own budget, and refuses further ones."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from aiohttp import web

from moestro.core.processes import in_address, network_of
from moestro.errors import ConfigError
from moestro.web.errors import ConnectionsFullError, error_json
from moestro.web.ports.faults import Fault, Faults, Port, PortFaults
from moestro.web.ports.heads import WRITE_S
from moestro.web.ports.http_connection import ConnectionSlot, ConnectionTable, HttpConnection
from moestro.web.ports.lifecycle import return_freed_memory
from moestro.web.ports.tls import ServerTls

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 256 << 10
# Connections of an operators' port. Operators, their scrapers and pages are few.
MAX_OPERATOR_CONNECTIONS = 256
# Connections of the endpoint picker's port. A proxy has one for each of its threads.
MAX_PICKER_CONNECTIONS = 1024
# Connections of the port for other routers. Each of them has one.
MAX_PEER_CONNECTIONS = 512
_BACKLOG = 1024
# Connections accepted in one turn of the loop: enough for a burst, and requests are served between two turns.
_MAX_ACCEPTED = 64
_RETRY_S = 1.0  # Time until a port tries again after the system has refused another open file.
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_OTHER_FILES = 128  # Other open files of the process: libraries, records, the event loop.
_FILES_PER_PROCESS = 8  # Open files for each child process and engine: pipes, sockets, probes.
# Connections beyond a port's limit, as a part of it, for addresses that have few: a sixteenth of the limit, of which an
# address may have a 32nd. They matter where all others carry requests, which never give way.
_SPARE_PART, _SPARE_ADDRESSES = 16, 32
_HANDSHAKE_S = 10.0  # Time in which a client must complete the TLS handshake.
_CLOSE_NOTIFY_S = 5.0  # Time in which a client must answer the end of TLS.
_MANY_CLOSED = 1000  # Connections with TLS, of some 60 kB at least, that may leave memory behind when they end.
_RETURN_S = 10.0  # Time between two looks at their number.

ProtocolFactory = Callable[[ConnectionSlot], asyncio.Protocol]  # The protocol releases its slot with its connection.


def bound_socket(host: str, port: int, flags: str = "--host or --port", *, is_shared: bool = False) -> socket.socket:
    """Return a bound socket. A server binds before it loads anything, so that a taken port is known at once.

    Args:
        host: address to listen on.
        port: port to listen on; 0 means any free one.
        flags: flags that choose the two, for the error.
        is_shared: whether other sockets of this user may have the port too; the kernel spreads connections over those
            that listen.

    Raises:
        ConfigError: the address does not exist, or another program has the port.
    """
    listener = None
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        text = f"cannot listen on {host}:{port} ({error.strerror}): give another {flags}"
        raise ConfigError(text) from error
    return listener


def url_of(listener: socket.socket, *, is_tls: bool = False) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if is_tls else 'http'}://{in_address(host)}:{port}"


def warn_if_open(listener: socket.socket, tls: ServerTls | None, *, needs_key: bool) -> None:
    """Log a warning if other machines can reach the server and neither a key nor a certificate is needed."""
    if needs_key or (tls is not None and tls.needs_certificates):
        return
    if not ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
        url = url_of(listener, is_tls=tls is not None)
        logger.warning("listening on %s without --api-key: every host that reaches this machine can use it", url)


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """Limits of a port's connections.

    Attributes:
        max_connections: Most concurrent connections, apart from spare ones for addresses that have few.
        max_per_address: Most concurrent connections of one client address; None means no limit.
        write_s: Time that a client may leave its answer unread, in seconds.
    """

    max_connections: int
    max_per_address: int | None = None
    write_s: float = WRITE_S

    @property
    def num_spare(self) -> int:
        """Connections beyond the limit, for addresses that have few."""
        return max(1, self.max_connections // _SPARE_PART)

    def has_spare(self, table: ConnectionTable, address: str) -> bool:
        """Return whether an address may have one of the spare connections of a full port."""
        most = max(1, self.num_spare // _SPARE_ADDRESSES)
        return table.num_of(address) < most and table.num_open < self.max_connections + self.num_spare


class Front:
    """Accepts the connections of one port.

    On a full port, connections without a complete request give way to new ones, those of the address that has most
    first (`ConnectionTable.giving_way_to`). So one address may have all connections, as a proxy does, and keeps none
    from others. Where all connections carry requests, an address that has few gets a spare one; all else is refused.

    The number of open files is bounded (`files_of_port`): a connection is refused or displaced before the next one is
    accepted. uvloop's own server accepts without a bound, and closes its listening socket for good when the process has
    no file left.

    The caller has raised the limit of open files before it loaded anything (`allow_open_files`).

    Args:
        listener: Bound socket, which `close` closes.
        make: Makes the protocol of a connection.
        tls: TLS of the port; None means plain HTTP.
    """

    def __init__(
        self,
        port: Port,
        listener: socket.socket,
        make: ProtocolFactory,
        limits: FrontLimits,
        faults: Faults,
        tls: ServerTls | None = None,
    ) -> None:
        self._port = port
        self._listener = listener
        self._make = make
        self._limits = limits
        self._faults = faults
        self._table = ConnectionTable()
        self._tls = tls
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._renewal: asyncio.TimerHandle | None = None
        self._returning: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        """Open connections."""
        return self._table.num_open

    def open(self) -> Front:
        """Accept connections from now on. Returns the front itself."""
        # Accepted connections inherit this size. The kernel's default buffers megabytes for a client that does not
        # read.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._listener.settimeout(0)
        self._listener.listen(_BACKLOG)
        asyncio.get_running_loop().add_reader(self._listener, self._accept_some)
        if self._tls is not None:
            self._return_memory(0)
            if self._tls.refresh_s is not None:
                self._renew(self._tls, self._tls.refresh_s)
        return self

    def close(self) -> None:
        """Close the listener, so that further connections are refused; open ones stay."""
        for timer in (self._retry, self._renewal, self._returning):
            if timer is not None:
                timer.cancel()
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()

    def _accept_some(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _OUT_OF_FILES:
                    self._pause()
                    return
                continue  # The client has given up in the meantime.
            self._admit(connection, str(address[0]))

    def _pause(self) -> None:
        """Stop for a while: the loop would otherwise report the same waiting client again and again."""
        self._faults.count(self._port, Fault.OUT_OF_FILES)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._retry = loop.call_later(_RETRY_S, loop.add_reader, self._listener, self._accept_some)

    def _renew(self, tls: ServerTls, refresh_s: float) -> None:
        tls.renew()
        self._renewal = asyncio.get_running_loop().call_later(refresh_s, self._renew, tls, refresh_s)

    def _return_memory(self, num_closed: int) -> None:
        """Return what connections with TLS leave behind. The heap would keep a GiB of a flood of them.

        Args:
            num_closed: Connections that had ended at the last time.
        """
        if self._table.num_closed - num_closed >= _MANY_CLOSED:
            num_closed = self._table.num_closed
            return_freed_memory()
        self._returning = asyncio.get_running_loop().call_later(_RETURN_S, self._return_memory, num_closed)

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Open a connection, or refuse it."""
        limits, table, network = self._limits, self._table, network_of(address)
        if limits.max_per_address is not None and table.num_of(network) >= limits.max_per_address:
            self._refuse(connection, Fault.TOO_MANY_OF_ADDRESS)
        elif self._has_place(network):
            slot = table.enter(network)
            if self._tls is not None:
                slot.opened(_Handshake(connection))  # It may give way as any other without a complete request.
            task = asyncio.get_running_loop().create_task(self._open(connection, slot))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            self._refuse(connection, Fault.TOO_MANY)

    def _has_place(self, network: str) -> bool:
        """Return whether there is a place for a connection of `network`, for which another one may have to give way."""
        table = self._table
        if table.num_open < self._limits.max_connections:
            return True
        slot = table.giving_way_to(network)
        if slot is None:
            return self._limits.has_spare(table, network)
        slot.displace()
        self._faults.count(self._port, Fault.DISPLACED)
        return True

    async def _open(self, connection: socket.socket, slot: ConnectionSlot) -> None:
        tls = self._tls
        try:
            connection.settimeout(0)
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(slot),
                connection,
                ssl=None if tls is None else tls.context,
                ssl_handshake_timeout=None if tls is None else _HANDSHAKE_S,
                ssl_shutdown_timeout=None if tls is None else _CLOSE_NOTIFY_S,
            )
            slot.opened(transport)
        except (OSError, RuntimeError):  # The client has left before its connection was open.
            self._faults.count(self._port, Fault.CLIENT_LEFT if tls is None else Fault.HANDSHAKE)
            slot.release()
            connection.close()
        except BaseException:
            slot.release()
            connection.close()
            raise

    def _refuse(self, connection: socket.socket, fault: Fault) -> None:
        """Answer before a request is read, and close at once."""
        self._faults.count(self._port, fault)
        with contextlib.suppress(OSError), connection:
            connection.settimeout(0)
            if self._tls is not None:
                return  # There is no answer before a handshake, which a full port has no place for.
            connection.send(_refusal())
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1 << 16)  # A close with unread data would reset the connection, and lose the answer.


class _Handshake:
    """A connection in its TLS handshake, as the table of connections sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def http_front(
    port: Port,
    runner: web.AppRunner,
    listener: socket.socket,
    limits: FrontLimits,
    faults: Faults,
    tls: ServerTls | None = None,
) -> Front:
    """Return the front of an aiohttp `runner` that is set up."""
    server = runner.server
    assert server is not None, "the runner is not set up"

    def make(slot: ConnectionSlot) -> asyncio.Protocol:
        return HttpConnection(server, PortFaults(faults, port), limits.write_s, slot)

    return Front(port, listener, make, limits, faults, tls)


def files_of_port(max_connections: int) -> int:
    """Return the most open files of a port, with spare connections and those that close because they gave way."""
    return max_connections + FrontLimits(max_connections).num_spare + _MAX_ACCEPTED


def allow_open_files(num_connections: int, num_processes: int = 0) -> None:
    """Raise the limit of open files so that it covers the connections of all ports and the process's other files.

    Args:
        num_connections: Most open files of all ports together (`files_of_port`), those to engines included.
        num_processes: Child processes and engines.

    Raises:
        ConfigError: The system does not allow so many open files.
    """
    wanted = num_connections + _OTHER_FILES + _FILES_PER_PROCESS * num_processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise ConfigError(
            f"the connections of all ports need {wanted} open files, and this system allows {hard}:"
            " lower --max-connections, or raise the limit (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _refusal() -> bytes:
    error = ConnectionsFullError()
    body = error_json(error)
    head = (
        f"HTTP/1.1 {error.http_status} Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {error.retry_after_s}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
