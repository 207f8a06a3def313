"""Publishes a rank's prefix cache in vLLM's format, for any router that listens.

A message has three frames: topic, number, batch. The last batches are kept for listeners that missed some. Sources:
vllm/distributed/kv_events.py and vllm/config/kv_events.py (field names, frames, replay, ports of data-parallel ranks).
"""

from __future__ import annotations

import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from moestro.config.launch_spec import KvEventsSettings
from moestro.core.processes import network_of
from moestro.engine.rank import CacheEvents, RemovedBlocks, StoredBlocks
from moestro.errors import ConfigError, MoestroError
from moestro.wire.zmtp import keep_alive
from moestro.worker.channel import WakePipe
from moestro.worker.kv_listeners import BatchLog, KvListener, ReplayReader, Stay, Subscriber

# The ports of a KV publisher. One thread serves them, in at most a tenth of one core's time.

MAX_LISTENERS = 256  # of a port; routers are few, and a process may often open 1,024 files
MAX_PER_NETWORK = 64  # of a port; routers behind one address translator share it

_TURN_S = 0.002  # of computing time in a turn; the listeners that are left come first in the next one
_REST = 9  # pause after a turn, by its computing time: whatever listeners send, the engine keeps nine tenths
_CHECK_S = 0.25  # between two looks for what takes too long
_ACCEPTED_A_LAP = 8  # so that a handshake ends before a flood of connections displaces it
_BACKLOG = 128
_SEND_BUFFER_BYTES, _RECEIVE_BUFFER_BYTES = 128 << 10, 8 << 10  # of the kernel, for each listener; Linux doubles them
_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface


class KvPort:
    """A listening socket and its connections.

    Args:
        endpoint: tcp://HOST:PORT, where HOST is *, an address, a name, or a network interface.
        kind: what connects to it.
        log: batches to send.

    Attributes:
        listeners: its connections, the oldest first.
        lap: those to serve before others are accepted, the next one first. Each is served once a lap.
        queue: those to serve in the next lap.
        is_knocked: whether a connection may wait to be accepted.

    Raises:
        OSError: the endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, kind: type[KvListener], log: BatchLog) -> None:
        self.listeners: dict[KvListener, None] = {}
        self.lap: dict[KvListener, None] = {}
        self.queue: dict[KvListener, None] = {}
        self.is_knocked = False
        self._kind = kind
        self._log = log
        self._socket = _bound(endpoint)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def close(self) -> None:
        """Accept no connection any more."""
        self._socket.close()

    def accept(self, now_s: float) -> KvListener | None:
        """Accept a connection, or return None without a waiting one.

        Raises:
            OSError: the connection is gone, or the process has no file left.
        """
        try:
            connection, address = self._socket.accept()
        except BlockingIOError:
            return None
        return self._kind(connection, network_of(address[0]), self._log, now_s)

    @property
    def has_work(self) -> bool:
        """Whether there is something to do at once."""
        return bool(self.lap or self.queue or self.is_knocked)

    def crowd_of(self, network: str) -> list[KvListener]:
        """Return the connections of which one has to go before `network` may have another; [] means none."""
        of_network = [each for each in self.listeners if each.network == network]
        if len(of_network) >= MAX_PER_NETWORK:
            return of_network
        return list(self.listeners) if len(self.listeners) >= MAX_LISTENERS else []


class KvServer:
    """Sends batches to subscribers, and replays them on request.

    A thread does it in turns: it serves each listener that has something to do with one small piece, and rests after
    each turn. Neither a listener nor any number of them delays the engine by more than the share of its turns.

    Args:
        log: batches to send; the thread owns it.
        events: endpoint of the subscribers.
        replay: endpoint of replays. None means no replay.

    Raises:
        OSError: an endpoint cannot be bound. `filename` is the endpoint.
    """

    def __init__(self, log: BatchLog, events: str, replay: str | None) -> None:
        self._log = log
        self._outbox: deque[bytes] = deque()
        self._to_send = WakePipe()
        self._is_closing = False
        self._port_of: dict[KvListener, KvPort] = {}
        self._check_at_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._ports: list[KvPort] = []
        try:
            self._ports.append(KvPort(events, Subscriber, log))
            if replay is not None:
                self._ports.append(KvPort(replay, ReplayReader, log))
        except OSError:
            self._end()
            raise
        self._selector.register(self._to_send.fd, selectors.EVENT_READ, None)
        for port in self._ports:
            self._selector.register(port, selectors.EVENT_READ, port)
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def publish(self, payload: bytes) -> None:
        """Send a batch; any thread may call it."""
        self._outbox.append(payload)
        self._to_send.wake()

    def close(self) -> None:
        """Disconnect all listeners. Batches that are under way may be lost."""
        self._is_closing = True
        self._to_send.wake()
        self._thread.join()

    # --- the thread

    def _run(self) -> None:
        while not self._is_closing:
            began_s = time.thread_time()  # without the time that it waits, for others to compute too
            self._turn(began_s)
            time.sleep(_REST * (time.thread_time() - began_s))
        self._end()

    def _turn(self, began_s: float) -> None:
        """Wait for something to do, and do a bounded part of it."""
        ready = self._selector.select(0 if any(port.has_work for port in self._ports) else _CHECK_S)
        now_s = time.monotonic()
        for key, _ in ready:
            if isinstance(key.data, KvPort):
                key.data.is_knocked = True
            elif key.data is None:
                self._take_batches()
            elif key.data in self._port_of:  # else it has just given way
                self._port_of[key.data].queue[key.data] = None
        if now_s >= self._check_at_s:
            self._check_at_s = now_s + _CHECK_S
            self._check(now_s)
        waiting = self._ports
        while waiting and time.thread_time() - began_s < _TURN_S:
            waiting = [port for port in self._ports if port.has_work]
            for port in waiting:  # one of each, so that a flood at one port delays nothing at the other
                if not port.lap:
                    self._accept(port, now_s)
                    port.lap, port.queue = port.queue, port.lap
                if port.lap:
                    self._serve(port, now_s)

    def _take_batches(self) -> None:
        self._to_send.clear()
        while self._outbox:
            self._log.append(self._outbox.popleft())
        subscribers = self._ports[0]
        subscribers.queue |= {each: None for each in subscribers.listeners if each.owes}

    def _accept(self, port: KvPort, now_s: float) -> None:
        if not port.is_knocked:
            return
        port.is_knocked = False  # the selector sets it again
        for _ in range(_ACCEPTED_A_LAP):
            try:
                listener = port.accept(now_s)
            except OSError:  # the peer has left, or no file is left; the next turn tries again
                return
            if listener is None:
                return
            if crowd := port.crowd_of(listener.network):
                leaving = min(crowd, key=lambda each: each.stay)  # the oldest of the lowest
                if leaving.stay == Stay.FIRM:
                    listener.close()
                    continue
                self._drop(leaving)
            port.listeners[listener] = port.queue[listener] = None
            self._port_of[listener] = port

    def _serve(self, port: KvPort, now_s: float) -> None:
        listener = next(iter(port.lap))
        del port.lap[listener]
        try:
            if listener.serve(now_s):
                port.queue[listener] = None
        except (MoestroError, OSError):
            self._drop(listener)
        else:
            self._watch(listener, now_s)

    def _check(self, now_s: float) -> None:
        """End connections that take too long, and wake those whose pause is over."""
        for listener, port in list(self._port_of.items()):
            try:
                listener.check(now_s)
            except MoestroError:
                self._drop(listener)
            else:
                if listener.has_input(now_s):
                    port.queue[listener] = None
                self._watch(listener, now_s)

    def _watch(self, listener: KvListener, now_s: float) -> None:
        """Wait for the events of the socket that the listener wants."""
        before, listener.watched = listener.watched, listener.wanted(now_s)
        if not listener.watched:
            if before:
                self._selector.unregister(listener)
        elif not before:
            self._selector.register(listener, listener.watched, listener)
        elif listener.watched != before:
            self._selector.modify(listener, listener.watched, listener)

    def _drop(self, listener: KvListener) -> None:
        port = self._port_of.pop(listener)
        del port.listeners[listener]
        port.lap.pop(listener, None)
        port.queue.pop(listener, None)
        if listener.watched:
            self._selector.unregister(listener)
        listener.close()

    def _end(self) -> None:
        for listener in list(self._port_of):
            self._drop(listener)
        for port in self._ports:
            port.close()
        self._selector.close()
        self._to_send.close()


def _bound(endpoint: str) -> socket.socket:
    """Bind a socket to an endpoint, and listen."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        address = _address_of(host.strip("[]"))
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server((address, int(port)), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
    except OSError as error:
        raise OSError(0, str(error), endpoint) from error
    listener.settimeout(0)
    # Connections inherit these options.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(listener)
    for option, num_bytes in ((socket.SO_SNDBUF, _SEND_BUFFER_BYTES), (socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)):
        listener.setsockopt(socket.SOL_SOCKET, option, num_bytes)
    return listener


def _address_of(host: str) -> str:
    """Return the address to bind for a host as ZeroMQ writes it."""
    if host == "*":
        return "0.0.0.0"  # noqa: S104 - the operator wrote it
    if sys.platform == "linux" and host in (name for _, name in socket.if_nameindex()):
        import fcntl  # noqa: PLC0415 - absent on Windows

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", host.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])


_DEVICE, _HOST = "GPU", "CPU"  # media as vLLM names them, also where the device is a CPU


class KvPublisher:
    """Publishes one rank's cache events. The rank's loop never waits for a listener.

    Args:
        settings: endpoints are those of rank 0; the ports of rank r are r higher.
        rank: rank of this cache.
        cache: source of the events.
        block_size: tokens of a block.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """

    def __init__(self, settings: KvEventsSettings, rank: int, cache: CacheEvents, block_size: int) -> None:
        self._cache = cache
        self._rank = rank
        self._block_size = block_size
        replay = None if settings.replay_endpoint is None else of_rank(settings.replay_endpoint, rank)
        log = BatchLog(settings.topic.encode(), settings.buffer_steps, settings.hwm)
        try:
            self._server = KvServer(log, of_rank(settings.endpoint, rank), replay)
        except OSError as error:
            raise ConfigError(f"--kv-events-config: {error.filename} cannot be bound: {error.strerror}") from None

    def publish(self) -> None:
        """Send the cache's events since the last call as one batch; without events, send nothing."""
        events = self._cache.take()
        if events:
            self._server.publish(encode_batch(time.time(), events, rank=self._rank, block_size=self._block_size))

    def close(self) -> None:
        """Disconnect all listeners."""
        self._server.close()


def encode_batch(ts_s: float, events: Sequence[StoredBlocks | RemovedBlocks], *, rank: int, block_size: int) -> bytes:
    """Encode one payload, as vLLM's listeners and `wire.kv_events.decode_batch` read it.

    Args:
        ts_s: present time, seconds since 1970.
    """
    return msgspec.msgpack.encode([ts_s, [_on_the_wire(each, block_size) for each in events], rank])


def of_rank(endpoint: str, rank: int) -> str:
    """Endpoint of one rank: `rank` ports above that of the first."""
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


def _on_the_wire(event: StoredBlocks | RemovedBlocks, block_size: int) -> dict[str, Any]:
    medium = _HOST if event.is_on_host else _DEVICE
    if isinstance(event, RemovedBlocks):
        return {"type": "BlockRemoved", "block_hashes": [_number(name) for name in event.names], "medium": medium}
    stored = {
        "type": "BlockStored",
        "block_hashes": [_number(name) for name in event.names],
        "parent_block_hash": None if event.parent is None else _number(event.parent),
        "token_ids": np.frombuffer(event.token_ids, np.int32).tolist(),
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }
    if event.cache_salt is not None:
        stored["extra_keys"] = [[event.cache_salt], *[None] * (len(event.names) - 1)]
    return stored


def _number(name: bytes) -> int:
    """Published name of a block: 64 bits, which every router can read and which suffice for any cache."""
    return int.from_bytes(name[:8], "big")
