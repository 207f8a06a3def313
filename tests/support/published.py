"""A KV publisher of batches that a test makes, and raw connections to its ports."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import zmq
from support.kv_listener import free_ports
from support.running import wait_until

from moestro.wire.zmtp import SUBSCRIBE, greeting, message, ready
from moestro.worker.kv_listeners import BatchLog, KvListener
from moestro.worker.kv_publisher import KvServer

TOPIC = b"kv"
END = [b"", b"\xff" * 8, b""]


@dataclass
class Published:
    """A running server of KV events at two ports of this machine."""

    server: KvServer
    log: BatchLog
    events: int
    replay: int
    context: zmq.Context

    def publish(self, *payloads: bytes) -> None:
        """Publish batches, and wait until the server has them."""
        end = self.log.end + len(payloads)
        for payload in payloads:
            self.server.publish(payload)
        wait_until(lambda: self.log.end == end)

    def subscriber(self, topic: bytes = TOPIC, **options: int) -> zmq.Socket:
        """Return a SUB socket whose subscription the server knows."""
        before = self.subscribed
        found = self._connected(zmq.SUB, self.events, options)
        found.subscribe(topic)
        if TOPIC.startswith(topic):
            wait_until(lambda: self.subscribed - before)
        return found

    def replayer(self, kind: int = zmq.DEALER) -> zmq.Socket:
        return self._connected(kind, self.replay, {})

    def replay_from(self, start: int) -> list[bytes]:
        """Return the payloads of a replay to a new listener."""
        with contextlib.closing(self.replayer()) as found:
            return batches_of_replay(found, start)

    @property
    def listeners(self) -> list[KvListener]:
        return list(self.server._port_of)

    @property
    def subscribed(self) -> set[KvListener]:
        return {each for each in self.listeners if getattr(each, "_num_of", None)}

    @property
    def num_subscribed(self) -> int:
        return len(self.subscribed)

    @property
    def num_held_bytes(self) -> int:
        """Bytes that the server holds for its listeners: received, and to be sent beside the log's own."""
        return sum(each._reader.num_held_bytes + sum(map(len, [*each._unsent])) for each in self.listeners)

    def _connected(self, kind: int, port: int, options: dict[str, int]) -> zmq.Socket:
        found = self.context.socket(kind)
        found.setsockopt(zmq.RCVTIMEO, 20_000)
        for name, value in options.items():
            found.setsockopt(getattr(zmq, name), value)
        found.connect(f"tcp://127.0.0.1:{port}")
        return found


@contextlib.contextmanager
def published(max_batches: int = 10_000, max_behind: int = 0) -> Iterator[Published]:
    ports = free_ports(1)
    log = BatchLog(TOPIC, max_batches, max_behind)
    server = KvServer(log, *(f"tcp://127.0.0.1:{port}" for port in ports))
    context = zmq.Context()
    try:
        yield Published(server, log, *ports, context)
        assert server._thread.is_alive()
    finally:
        context.destroy(linger=0)
        server.close()


def batches_of_replay(replayer: zmq.Socket, start: int) -> list[bytes]:
    """Request a replay, and return its payloads."""
    replayer.send_multipart([b"", start.to_bytes(8, "big")])
    found = []
    while (frames := replayer.recv_multipart()) != END:
        assert frames[0] == b""
        found.append(frames[2])
    return found


def raw_peer(port: int, kind: bytes, first: bytes = b"", receive_bytes: int = 0) -> socket.socket:
    """Return a connection of no libzmq after its handshake, on which `first` is sent."""
    peer = socket.socket()
    if receive_bytes:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    peer.settimeout(20)
    peer.connect(("127.0.0.1", port))
    peer.sendall(greeting() + ready(kind) + first)
    return peer


def subscription(topic: bytes = TOPIC) -> bytes:
    return message((SUBSCRIBE + topic,))


def request(start: int) -> bytes:
    return message((b"", start.to_bytes(8, "big")))


def ends(peer: socket.socket) -> bool:
    """Whether the server ends the connection; what it sends before is dropped."""
    with contextlib.closing(peer):
        try:
            while peer.recv(1 << 16):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True
