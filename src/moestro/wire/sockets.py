"""Sockets between processes: ZeroMQ sockets with CURVE, and streams and exchanges within one machine.

Each message of a stream has its length in front. Sender and reader write and read the socket themselves. With ZeroMQ,
two more threads would pass each message on.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils import z85

from moestro.core.processes import CurveKeys
from moestro.errors import GroupLostError
from moestro.wire.messages import MAX_MESSAGE_BYTES

# Encryption and admission of ZeroMQ's sockets between machines, with CURVE and ZAP (RFC 26 and 27 of ZeroMQ).

_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # RFC 27
_ZAP_VERSION = b"1.0"
_REFUSALS = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
_HANDSHAKE_MS = 5_000  # after which a connection that has not proved its keys is closed
# A machine that is gone answers no probe of its kernel for so long. A stopped process does not matter: kernels answer.
_SILENT_AFTER_S, _PROBE_EVERY_S, _NUM_PROBES = 5, 2, 3
_UNACKNOWLEDGED_MS = 11_000  # The same for sent data.


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where a socket listens.

    Attributes:
        address: ZeroMQ address; the port * lets the system choose one.
        keys: Keys of the group. None means an ipc address in a directory that only this user can enter.
    """

    address: str
    keys: CurveKeys | None = None


def new_curve_keys() -> CurveKeys:
    """Draw the keys of one start of a server."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return CurveKeys(
        server_public=server_public,
        server_secret=server_secret,
        client_public=client_public,
        client_secret=client_secret,
    )


def allow_ipv6(socket: zmq.Socket[Any], address: str) -> None:
    """Let a socket bind or connect to `address` if it is an IPv6 one; a socket keeps to IPv4 otherwise."""
    if "//[" in address:
        socket.setsockopt(zmq.IPV6, 1)


def secure_client(socket: zmq.Socket[Any], keys: CurveKeys | None) -> None:
    """Make `socket` encrypt, and connect only to holders of the server's key. Call it before `connect`."""
    if keys is None:
        return
    socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret
    socket.curve_serverkey = keys.server_public
    _notice_lost_machines(socket)


def _notice_lost_machines(socket: zmq.Socket[Any]) -> None:
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, _SILENT_AFTER_S),
        (zmq.TCP_KEEPALIVE_INTVL, _PROBE_EVERY_S),
        (zmq.TCP_KEEPALIVE_CNT, _NUM_PROBES),
        (zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS),
        (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
    ):
        socket.setsockopt(option, value)


class Doorkeeper:
    """Admits only holders of the client's key to a listening socket, and counts the connections that it refuses.

    A thread answers ZeroMQ's questions about keys and reads the socket's events, so that strangers cannot fill a queue.
    It ends with the context.

    Args:
        socket: Socket that is going to listen, the only one of its context that does.
        keys: Keys of the group.

    Attributes:
        num_refused: Refused connections of ZeroMQ's protocol. It closes those of other protocols without an event.
    """

    def __init__(self, socket: zmq.Socket[Any], keys: CurveKeys) -> None:
        context = socket.context
        self.num_refused = 0
        self._client_key = z85.decode(keys.client_public)
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP_ADDRESS)  # Before the first connection: without it, ZeroMQ would admit every key.
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.server_public, keys.server_secret
        socket.zap_domain = b"moestro"
        _notice_lost_machines(socket)
        self._events = socket.get_monitor_socket(_REFUSALS)
        threading.Thread(target=self._run, name="doorkeeper", daemon=True).start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    if socket is self._zap:
                        self._zap.send_multipart(self._verdict(self._zap.recv_multipart()))
                    else:
                        self._events.recv_multipart()
                        self.num_refused += 1
        except zmq.ContextTerminated:
            pass
        finally:
            self._zap.close(linger=0)
            self._events.close(linger=0)

    def _verdict(self, frames: list[bytes]) -> list[bytes]:
        """Answer one request of ZAP: version, id, domain, address, identity, mechanism, credentials."""
        request_id = frames[1] if len(frames) > 1 else b""
        is_member = len(frames) == 7 and frames[5] == b"CURVE" and frames[6] == self._client_key
        status, text = (b"200", b"OK") if is_member else (b"400", b"unknown key")
        return [_ZAP_VERSION, request_id, status, text, b"member" if is_member else b"", b""]


# Asks a ZeroMQ socket for messages.

_READABLE = int(zmq.POLLIN)


def is_readable(socket: zmq.Socket[Any]) -> bool:
    """Whether a message has arrived. 1.5 us; an exception of `recv` or the attribute `EVENTS` would cost more."""
    return bool(int(socket.get(zmq.EVENTS)) & _READABLE)


# Streams of messages between two processes of one machine.

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16  # Of a flood, the reader takes so much before it does other things.


class FrameError(Exception):
    """A message is longer than `MAX_MESSAGE_BYTES`, or what arrives is no message."""


class FrameReader:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._num_needed = 0  # Bytes without which `_rest` holds no message.

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes.

        Raises:
            FrameError: A message would be too long.
        """
        if not self._rest and int.from_bytes(data[: _LENGTH.size], "little") == len(data) - _LENGTH.size:
            return [data[_LENGTH.size :]]  # One whole message, as most often.
        if self._rest:
            self._rest += data
            if len(self._rest) < self._num_needed:
                return []  # Looking into a long message at each of its parts would take quadratic time.
            data = bytes(self._rest)
            self._rest.clear()
        messages, at = [], 0
        while len(data) - at >= _LENGTH.size:
            begin = at + _LENGTH.size
            (length,) = _LENGTH.unpack_from(data, at)
            if length > MAX_MESSAGE_BYTES:
                raise FrameError(f"a message of {length} bytes")
            if begin + length > len(data):
                self._num_needed = begin + length - at
                break
            messages.append(data[begin : begin + length])
            at = begin + length
        else:
            self._num_needed = _LENGTH.size
        if at < len(data):
            self._rest += data[at:]
        return messages


class LocalStream:
    """One end of a connection. No method blocks.

    Only one thread at a time may call `receive`, and only one at a time the others.

    Args:
        connection: Connected stream socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(0)
        self._socket = connection
        self._reader = FrameReader()
        self._unsent: deque[memoryview] = deque()

    @property
    def num_queued(self) -> int:
        """Messages that the kernel has not taken completely."""
        return len(self._unsent)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def send(self, message: bytes) -> bool:
        """Send `message`, or queue what the kernel does not take now. Returns whether nothing is queued.

        Raises:
            OSError: The connection is gone.
        """
        frame = _LENGTH.pack(len(message)) + message
        if not self._unsent:
            num_sent = self._try(frame)
            if num_sent == len(frame):
                return True
            frame = frame[num_sent:]
        self._unsent.append(memoryview(frame))
        return False

    def flush(self) -> None:
        """Send what is queued, as far as the kernel takes it; raises as `send` does."""
        while self._unsent:
            frame = self._unsent[0]
            num_sent = self._try(frame)
            if num_sent < len(frame):
                self._unsent[0] = frame[num_sent:]
                return
            self._unsent.popleft()

    def _try(self, frame: bytes | memoryview) -> int:
        """Return the number of bytes that the kernel takes."""
        try:
            return self._socket.send(frame)
        except BlockingIOError:
            return 0

    def receive(self) -> list[bytes] | None:
        """Return the messages that have arrived, perhaps not all of them; None at the end of the connection.

        Raises:
            FrameError: What arrives is no message.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:  # Reset by the other end.
            return None
        return self._reader.feed(data) if data else None

    def close(self) -> None:
        """Close the connection; what is queued is lost."""
        self._socket.close()


def local_path(address: str) -> str:
    """Return the path of the socket of an address ipc://PATH."""
    return address.removeprefix("ipc://")


# The exchange of rows between the workers of a group on one machine.

Int64s = NDArray[np.int64]

_NUMBER = struct.Struct("=i")  # what both workers say first on a connection: their number
_PART = struct.Struct("=QQ")  # in front of each part: number of the exchange, and bytes that follow
_OWNER = struct.Struct("=iII")  # what Linux knows of the process at the other end: process, user, group


class AddressStore(Protocol):
    """A store of values that all workers of a group read and write, such as `torch.distributed.TCPStore`."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a value, after waiting for it."""
        ...


class _Incoming:
    """A part that a worker sends: its head, and memory for the bytes behind it."""

    def __init__(self, head: bytearray, body: memoryview) -> None:
        self.head, self.body = head, body
        self.rest = [memoryview(head), body]  # what has not come

    @property
    def has_head(self) -> bool:
        """Whether the head has come as a whole."""
        return sum(map(len, self.rest)) <= len(self.body)


class SocketExchange:
    """Exchanges bytes of host memory between the workers of a group, over a Unix socket for each pair.

    gloo takes 3 to 9 times as long for messages of up to 64 KiB (`bench/micro/group_exchange.py`), since it passes
    each one through its own threads. Linux names the user at the other end of each socket, and other users are
    refused. Each part has the number of its exchange and its length in front, so that workers that have lost step are
    noticed. After an error all sockets are closed, so that no other worker waits for this one.

    Args:
        worker, num_workers: number of this worker, and of all. The call returns when all workers have made it.
        timeout_s: longest wait for another worker, in seconds.
        store: common store of the workers; a new one for each start of the group.

    Raises:
        GroupLostError: another worker did not join in time.
    """

    def __init__(self, worker: int, num_workers: int, timeout_s: float, store: AddressStore) -> None:
        self._worker, self._num_workers, self._timeout_s = worker, num_workers, timeout_s
        self._sockets: dict[int, socket.socket] = {}  # by worker
        self._num_swaps = 0
        with self._losing_group():
            try:
                self._connect(store)
            except OSError as error:
                absent = ", ".join(str(each) for each in range(num_workers) if each not in {worker, *self._sockets})
                raise ConnectionError(f"engine {absent} did not connect: {error}") from error
            for connection in self._sockets.values():
                connection.settimeout(0)

    def _connect(self, store: AddressStore) -> None:
        """Connect to the workers with lower numbers, and let the others connect."""
        name = f"moestro-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{name}")  # in Linux' abstract namespace, which leaves no file behind
            listener.listen(self._num_workers)
            listener.settimeout(self._timeout_s)
            store.set(f"socket-{self._worker}", name)
            for other in range(self._worker):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(self._timeout_s)
                connection.connect(f"\0{store.get(f'socket-{other}').decode()}")
                if self._greet(connection) != other:
                    raise PermissionError(f"the socket of engine {other} is another one's")
            while len(self._sockets) < self._num_workers - 1:
                connection, _ = listener.accept()
                connection.settimeout(self._timeout_s)
                self._greet(connection)

    def _greet(self, connection: socket.socket) -> int:
        """Exchange numbers with the worker at the other end, keep its socket, and return its number.

        A socket of another user, or of no worker that is still to come, is closed; then the number is -1.
        """
        other = -1
        if _user_of(connection) == os.getuid():
            with contextlib.suppress(ConnectionError):
                connection.sendall(_NUMBER.pack(self._worker))
                answer = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
                other = _NUMBER.unpack(answer)[0] if len(answer) == _NUMBER.size else -1
        if other in self._sockets or other == self._worker or not 0 <= other < self._num_workers:
            connection.close()
            return -1
        self._sockets[other] = connection
        return other

    def gather(self, numbers: Int64s) -> Int64s:
        """Gather numbers from all workers, as int64[workers, n]. `numbers`: int64[n], of this worker."""
        gathered = np.empty((self._num_workers, len(numbers)), np.int64)
        own = np.ascontiguousarray(numbers, np.int64).view(np.uint8).data
        self.swap([own] * len(gathered), [row.data for row in gathered.view(np.uint8)])
        return gathered

    def swap(self, sent: Sequence[memoryview], received: Sequence[memoryview]) -> None:
        """Send bytes to each worker, and take in those from each.

        Args:
            sent: bytes by worker.
            received: memory by worker, to be filled; as long as what that worker sends.

        Raises:
            GroupLostError: another worker ended, or did not answer in time.
        """
        with self._losing_group():
            received[self._worker][:] = sent[self._worker]
            sending, receiving = {}, {}
            for other in self._sockets:
                head = memoryview(_PART.pack(self._num_swaps, len(sent[other])))
                sending[other] = [head, sent[other]]
                receiving[other] = _Incoming(bytearray(_PART.size), received[other])
            while sending or receiving:
                sending = {other: rest for other, parts in sending.items() if (rest := self._send(other, parts))}
                receiving = {other: part for other, part in receiving.items() if not self._receive(other, part)}
                if sending or receiving:
                    self._wait(sending, receiving)
        self._num_swaps += 1

    def _send(self, other: int, parts: list[memoryview]) -> list[memoryview]:
        """Send what the socket takes now, and return the rest."""
        try:
            num_bytes = self._sockets[other].sendmsg(parts)
        except BlockingIOError:
            return parts
        except ConnectionError as error:
            raise _ended(other) from error
        return _after(parts, num_bytes)

    def _receive(self, other: int, part: _Incoming) -> bool:
        """Take in what has come, and return whether the part is there as a whole."""
        try:
            num_bytes = self._sockets[other].recvmsg_into(part.rest)[0]
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise _ended(other) from error
        if not num_bytes:
            raise _ended(other)
        part.rest = _after(part.rest, num_bytes)
        if part.has_head and _PART.unpack(part.head) != (self._num_swaps, len(part.body)):
            raise ConnectionError(f"engine {other} is at another exchange")
        return not part.rest

    def _wait(self, sending: Mapping[int, object], receiving: Mapping[int, object]) -> None:
        """Wait until a socket can go on."""
        poll = select.poll()
        for other, connection in self._sockets.items():
            wanted = select.POLLOUT * (other in sending) | select.POLLIN * (other in receiving)
            if wanted:
                poll.register(connection, wanted)
        if not poll.poll(1e3 * self._timeout_s):
            late = ", ".join(map(str, sorted({*sending, *receiving})))
            raise TimeoutError(f"engine {late} did not answer within {self._timeout_s:.0f} s")

    def close(self) -> None:
        """Close all sockets."""
        for connection in self._sockets.values():
            connection.close()

    @contextlib.contextmanager
    def _losing_group(self) -> Iterator[None]:
        """Turn an error into a `GroupLostError`. No exchange is possible afterwards."""
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            self.close()
            raise GroupLostError(f"the exchange with the other engines of the group failed: {error}") from error


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of parts behind so many bytes."""
    while parts and num_bytes >= len(parts[0]):
        num_bytes -= len(parts[0])
        parts = parts[1:]
    return [parts[0][num_bytes:], *parts[1:]] if parts else []


def _ended(other: int) -> ConnectionError:
    return ConnectionError(f"engine {other} ended")


def _user_of(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    _, user, _ = _OWNER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _OWNER.size))
    return int(user)
