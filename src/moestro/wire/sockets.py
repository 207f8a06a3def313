"""ZeroMQ sockets between processes: their encryption with CURVE, and whether a message has arrived."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from moestro.core.processes import CurveKeys

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
