"""The front of a port: accepts connections within the port's own budget, and refuses further ones."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address

from aiohttp import web

from moestro.core.hosts import in_address, network_of
from moestro.errors import ConfigError
from moestro.web.errors import ConnectionsFullError, error_json
from moestro.web.faults import Fault, Faults, Port, PortFaults
from moestro.web.framing import WRITE_S
from moestro.web.http_connection import HttpConnection
from moestro.web.rate_limits import AtATime

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 256 << 10
# Connections of an operators' port. Operators, their scrapers and pages are few.
MAX_OPERATOR_CONNECTIONS = 256
_BACKLOG = 1024
# Connections accepted in one turn of the loop: enough for a burst, and requests are served between two turns.
_MAX_ACCEPTED = 64
_RETRY_S = 1.0  # Time until a port tries again after the system has refused another open file.
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_OTHER_FILES = 128  # Other open files of the process: libraries, records, the event loop.
_FILES_PER_PROCESS = 8  # Open files for each child process and engine: pipes, sockets, probes.

OnLost = Callable[[], None]
ProtocolFactory = Callable[[OnLost], asyncio.Protocol]  # The protocol calls its argument when its connection is lost.


def bound_socket(host: str, port: int, flags: str = "--host or --port") -> socket.socket:
    """Return a bound socket. A server binds before it loads anything, so that a taken port is known at once.

    Args:
        host: address to listen on.
        port: port to listen on; 0 means any free one.
        flags: flags that choose the two, for the error.

    Raises:
        ConfigError: the address does not exist, or another program has the port.
    """
    listener = None
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        text = f"cannot listen on {host}:{port} ({error.strerror}): give another {flags}"
        raise ConfigError(text) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{in_address(host)}:{port}"


def warn_if_open(listener: socket.socket, api_keys: Collection[str]) -> None:
    """Log a warning if other machines can reach the server and no key is needed."""
    if not api_keys and not ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
        url = url_of(listener)
        logger.warning("listening on %s without --api-key: every host that reaches this machine can use it", url)


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """Limits of a port's connections.

    Attributes:
        max_connections: Most concurrent connections.
        max_per_address: Most concurrent connections of one client address; None means no limit.
        write_s: Time that a client may leave its answer unread, in seconds.
    """

    max_connections: int
    max_per_address: int | None = None
    write_s: float = WRITE_S


class Front:
    """Accepts the connections of one port.

    The port never has more open files than its limit and one: a connection beyond the limit is refused and closed
    before the next one is accepted. uvloop's own server accepts without a bound, and closes its listening socket for
    good when the process has no file left.

    The caller has raised the limit of open files before it loaded anything (`allow_open_files`).

    Args:
        listener: Bound socket, which `close` closes.
        make: Makes the protocol of a connection.

    Attributes:
        num_open: Open connections.
    """

    def __init__(
        self, port: Port, listener: socket.socket, make: ProtocolFactory, limits: FrontLimits, faults: Faults
    ) -> None:
        self._port = port
        self._listener = listener
        self._make = make
        self._limits = limits
        self._faults = faults
        self._of_address = None if limits.max_per_address is None else AtATime(limits.max_per_address)
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self.num_open = 0

    def open(self) -> Front:
        """Accept connections from now on. Returns the front itself."""
        # Accepted connections inherit this size. The kernel's default buffers megabytes for a client that does not
        # read.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._listener.settimeout(0)
        self._listener.listen(_BACKLOG)
        asyncio.get_running_loop().add_reader(self._listener, self._accept_some)
        return self

    def close(self) -> None:
        """Close the listener, so that further connections are refused; open ones stay."""
        if self._retry is not None:
            self._retry.cancel()
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

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Open a connection, or refuse it."""
        network = network_of(address)
        if self.num_open >= self._limits.max_connections:
            self._refuse(connection, Fault.TOO_MANY)
        elif self._of_address is not None and not self._of_address.enter(network):
            self._refuse(connection, Fault.TOO_MANY_OF_ADDRESS)
        else:
            self.num_open += 1
            slot = _Slot(partial(self._leave, network))
            task = asyncio.get_running_loop().create_task(self._open(connection, slot.release))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, on_lost: OnLost) -> None:
        try:
            connection.settimeout(0)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self._make(on_lost), connection)
        except (OSError, RuntimeError):  # The client has left before its connection was open.
            self._faults.count(self._port, Fault.CLIENT_LEFT)
            on_lost()
            connection.close()
        except BaseException:
            on_lost()
            connection.close()
            raise

    def _leave(self, network: str) -> None:
        self.num_open -= 1
        if self._of_address is not None:
            self._of_address.leave(network)

    def _refuse(self, connection: socket.socket, fault: Fault) -> None:
        """Answer before a request is read, and close at once."""
        self._faults.count(self._port, fault)
        with contextlib.suppress(OSError), connection:
            connection.settimeout(0)
            connection.send(_refusal())
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1 << 16)  # A close with unread data would reset the connection, and lose the answer.


class _Slot:
    """Releases a connection's place in its port's budget, once."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._is_taken = True

    def release(self) -> None:
        if self._is_taken:
            self._is_taken = False
            self._leave()


def http_front(
    port: Port, runner: web.AppRunner, listener: socket.socket, limits: FrontLimits, faults: Faults
) -> Front:
    """Return the front of an aiohttp `runner` that is set up."""
    server = runner.server
    assert server is not None, "the runner is not set up"

    def make(on_lost: OnLost) -> asyncio.Protocol:
        return HttpConnection(server, PortFaults(faults, port), limits.write_s, on_lost)

    return Front(port, listener, make, limits, faults)


def allow_open_files(num_connections: int, num_processes: int = 0) -> None:
    """Raise the limit of open files so that it covers the connections of all ports and the process's other files.

    Args:
        num_connections: Most connections of all ports together, those to engines included.
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
