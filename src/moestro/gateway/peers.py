"""Exchange with other routers (`routing/replication/`): sends them this router's requests, and applies theirs.

Both ends of a channel prove the shared key, then exchange frames that no stranger can forge. A frame is its length
(4 bytes), its code (16 bytes) and a part of a compressed stream, in which repeated names of blocks and URLs cost next
to nothing. Without TLS frames are not encrypted: they name engines by URLs, blocks by hashes, sessions and users.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import IO, Annotated, TypeVar, cast

import msgspec
import zstandard
from msgspec import Meta
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.gateway.engines.fleet import Fleet
from moestro.gateway.part_settings import PeerAddress, RouterPeerSettings
from moestro.routing.replication.journal import (
    MAX_MESSAGE_BYTES,
    HistoryPart,
    HistoryReader,
    Journal,
    Message,
    OperationBatch,
    Outlet,
    RouterRun,
    Snapshot,
    Want,
    WantHistory,
    decode_message,
    encode_message,
    history_parts,
)
from moestro.routing.replication.replica import Replica, ReplicaRules
from moestro.web.ports.connections import MAX_PEER_CONNECTIONS, Front, FrontLimits
from moestro.web.ports.faults import Faults, LogLimit, Port
from moestro.web.ports.http_connection import ConnectionSlot
from moestro.web.ports.lifecycle import wait_until
from moestro.web.ports.tls import MutualTls

logger = logging.getLogger(__name__)


HANDSHAKE_S = 5.0
_READ_BYTES = 1 << 18  # that are read ahead of a connection's reader
_CONNECT_S = 1.0  # until TCP is connected; while the network is cut, attempts follow each other soon
# The first one ends a connection with data under way, the others one that only receives, which a router does four times
# a second.
_SILENCE = (("TCP_USER_TIMEOUT", 2000), ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))
_GREETING = b"moestro peers 1\n"
_NONCE_BYTES = 16
_MAC_BYTES = 16
_LENGTH_BYTES = 4
_MAX_HELLO_BYTES = 8 << 10
_MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + (64 << 10)
_WINDOW_LOG = 20  # 1 MiB, the names of 65,536 blocks
_LEVEL = 3


_Kind = TypeVar("_Kind", "_Hello", "_Welcome")


class PeerRefusedError(Exception):
    """The other end cannot be a peer; the text says why."""


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """First frame of the end that connects."""

    origin: RouterRun
    reading: Annotated[str, Meta(max_length=1024)]
    nonce: Annotated[bytes, Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]
    proof: Annotated[bytes, Meta(max_length=64)] = b""


class _Welcome(msgspec.Struct, frozen=True, array_like=True):
    """Answer to it. A refusal comes with its cause."""

    origin: RouterRun
    refusal: Annotated[str, Meta(max_length=2048)]
    proof: Annotated[bytes, Meta(max_length=64)] = b""


class Identity(msgspec.Struct, frozen=True):
    """What an end says of itself.

    Attributes:
        reading: method of comparing prompts, in words, which all routers must share.
        key: shared key; empty means that none is needed.
    """

    origin: RouterRun
    reading: str
    key: bytes = b""


class PeerChannel:
    """One connection to another router, after the handshake.

    Args:
        secret: key of this connection's frames.
        is_dialer: whether this end connected.

    Attributes:
        peer: the other router.
        num_sent_bytes, num_received_bytes: bytes of frames.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        secret: bytes,
        peer: RouterRun,
        *,
        is_dialer: bool,
    ) -> None:
        self.peer = peer
        self.num_sent_bytes = self.num_received_bytes = 0
        self._reader = reader
        self._writer = writer
        self._send_code = _FrameCode(secret, b"d" if is_dialer else b"l")
        self._receive_code = _FrameCode(secret, b"l" if is_dialer else b"d")
        parameters = zstandard.ZstdCompressionParameters.from_level(_LEVEL, window_log=_WINDOW_LOG)
        packer = zstandard.ZstdCompressor(compression_params=parameters)
        self._packer: zstandard.ZstdCompressionObj | None = packer.compressobj()
        self._plain = _Bounded()
        unpacker = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
        self._unpacker: zstandard.ZstdDecompressionWriter | None = unpacker.stream_writer(cast(IO[bytes], self._plain))

    async def send(self, message: Message) -> None:
        """Send a message, and wait while the other end is slow.

        Raises:
            OSError: the connection is lost.
        """
        if self._packer is None:
            raise ConnectionResetError("the connection is closed")
        data = self._packer.compress(encode_message(message))
        data += self._packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        frame = len(data).to_bytes(_LENGTH_BYTES) + self._send_code.of(data) + data
        self.num_sent_bytes += len(frame)
        self._writer.write(frame)
        await self._writer.drain()

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            OSError: the connection is lost.
            PeerRefusedError: the other end sent what no router sends.
        """
        data = await _read_frame(self._reader, _MAX_FRAME_BYTES, self._receive_code)
        self.num_received_bytes += len(data) + _LENGTH_BYTES + _MAC_BYTES
        self._plain.clear()
        if self._unpacker is None:
            raise ConnectionResetError("the connection is closed")
        try:
            self._unpacker.write(data)
            return decode_message(self._plain.data)
        except (zstandard.ZstdError, ValueError) as error:
            raise PeerRefusedError(str(error)) from None

    def close(self) -> None:
        """Close the connection, and free the megabytes of its compression: an error may keep this object in a cycle."""
        self._writer.close()
        self._packer = self._unpacker = None


async def dial(identity: Identity, host: str, port: int, tls: ssl.SSLContext | None = None) -> PeerChannel:
    """Connect to another router.

    Args:
        tls: context of the connection; None means no TLS.

    Raises:
        OSError: it cannot be reached.
        PeerRefusedError: it refuses this router, or does not prove the key.
    """
    connected = await _connected(host, port)
    async with asyncio.timeout(HANDSHAKE_S):
        name = None if tls is None else host
        reader, writer = await asyncio.open_connection(sock=connected, limit=_READ_BYTES, ssl=tls, server_hostname=name)
        try:
            return await _greet(identity, reader, writer)
        except BaseException:
            writer.close()
            raise


async def _connected(host: str, port: int) -> socket.socket:
    connected = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        connected.settimeout(0)  # the event loop waits for it
        _end_without_acknowledgements(connected)
        async with asyncio.timeout(_CONNECT_S):
            await asyncio.get_running_loop().sock_connect(connected, (host, port))
    except BaseException:
        connected.close()
        raise
    return connected


def _end_without_acknowledgements(connection: socket.socket) -> None:
    """Let a connection end soon after the network was cut: TCP itself tries for minutes, at intervals that double."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENCE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _greet(identity: Identity, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerChannel:
    greeting = await _exactly(reader, len(_GREETING) + _NONCE_BYTES)
    if not greeting.startswith(_GREETING):
        raise PeerRefusedError("the other end is no --peer-port of a router of this version")
    nonces = greeting[len(_GREETING) :] + secrets.token_bytes(_NONCE_BYTES)
    hello = _Hello(identity.origin, identity.reading, nonces[_NONCE_BYTES:])
    hello = msgspec.structs.replace(hello, proof=_proof(identity.key, b"hello", nonces, _body(hello)))
    writer.write(_framed(msgspec.msgpack.encode(hello)))
    welcome = _decoded(await _read_frame(reader, _MAX_HELLO_BYTES), _Welcome)
    if not hmac.compare_digest(welcome.proof, _proof(identity.key, b"welcome", nonces, _body(welcome))):
        raise PeerRefusedError(welcome.refusal or "the other end does not have this router's --peer-key")
    if welcome.refusal:
        raise PeerRefusedError(welcome.refusal)
    return PeerChannel(reader, writer, _secret(identity.key, nonces), welcome.origin, is_dialer=True)


async def accept(identity: Identity, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerChannel:
    """Let another router connect.

    Raises:
        OSError: the connection is lost.
        PeerRefusedError: the other end is no peer; it has been notified.
    """
    async with asyncio.timeout(HANDSHAKE_S):
        nonce = secrets.token_bytes(_NONCE_BYTES)
        writer.write(_GREETING + nonce)
        hello = _decoded(await _read_frame(reader, _MAX_HELLO_BYTES), _Hello)
        nonces = nonce + hello.nonce
        is_proved = hmac.compare_digest(hello.proof, _proof(identity.key, b"hello", nonces, _body(hello)))
        refusal = _refusal_of(identity, hello) if is_proved else "the --peer-key of the two routers differs"
        welcome = _Welcome(identity.origin if is_proved else RouterRun("-", 0), refusal)
        if is_proved:
            proof = _proof(identity.key, b"welcome", nonces, _body(welcome))
            welcome = msgspec.structs.replace(welcome, proof=proof)
        writer.write(_framed(msgspec.msgpack.encode(welcome)))
        await writer.drain()
        if refusal:
            raise PeerRefusedError(refusal)
        return PeerChannel(reader, writer, _secret(identity.key, nonces), hello.origin, is_dialer=False)


def _refusal_of(identity: Identity, hello: _Hello) -> str:
    """Return why a router with the right key cannot be a peer; empty if it can."""
    if hello.origin == identity.origin:
        return SELF
    if hello.origin.name == identity.origin.name:
        return f"both routers have the name {identity.origin.name}: give them different host names or ports"
    if hello.reading != identity.reading:
        return f"one router compares prompts {hello.reading}, the other {identity.reading}"
    return ""


SELF = "this is the router itself"


class _FrameCode:
    """Makes the codes of the frames of one direction, each of which depends on the number of frames before."""

    def __init__(self, secret: bytes, direction: bytes) -> None:
        self._secret = secret
        self._direction = direction
        self._num = 0

    def of(self, data: bytes) -> bytes:
        """Return the code of the next frame."""
        self._num += 1
        number = self._num.to_bytes(8)
        return blake2b(number + data, digest_size=_MAC_BYTES, key=self._secret, person=self._direction).digest()


class _Bounded:
    """Receives the unpacked bytes of one frame, which are as many as a message may have."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    @property
    def data(self) -> bytes:
        """The unpacked bytes."""
        return b"".join(self._pieces)

    def clear(self) -> None:
        """Begin a frame."""
        self._pieces, self._num_bytes = [], 0

    def write(self, piece: bytes) -> int:
        """Add unpacked bytes."""
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has more than {MAX_MESSAGE_BYTES} bytes")
        self._pieces.append(bytes(piece))
        return len(piece)


async def _read_frame(reader: asyncio.StreamReader, most: int, code: _FrameCode | None = None) -> bytes:
    num_bytes = int.from_bytes(await _exactly(reader, _LENGTH_BYTES))
    if num_bytes > most:
        raise PeerRefusedError(f"a frame has {num_bytes} bytes, and may have {most}")
    given = b"" if code is None else await _exactly(reader, _MAC_BYTES)
    data = await _exactly(reader, num_bytes)
    if code is not None and not hmac.compare_digest(given, code.of(data)):
        raise PeerRefusedError("a frame was changed on its way")
    return data


async def _exactly(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    try:
        return await reader.readexactly(num_bytes)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the other router closed the connection") from None


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES) + data


def _decoded(data: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerRefusedError(f"the handshake cannot be read: {error}") from None


def _body(message: _Hello | _Welcome) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(message, proof=b""))


def _proof(key: bytes, purpose: bytes, nonces: bytes, body: bytes) -> bytes:
    return hmac.digest(key, purpose + nonces + body, "sha256")


def _secret(key: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, b"frames" + nonces, "sha256")


class PeerCollector(Collector):
    """Exposes the counts of an exchange as Prometheus metric families."""

    def __init__(self, exchange: PeerExchange) -> None:
        self._exchange = exchange

    def collect(self) -> Iterator[Metric]:
        """Yield all families with their current values."""
        exchange = self._exchange
        links, counts = exchange.counts, exchange.replica.counts
        for name, text, value in (
            ("peers", "Other routers that sent a message lately.", exchange.replica.num_peers),
            ("peer_links", "Open connections that this router made to others.", exchange.num_links),
            ("peer_in_flight", "Requests of other routers that count here.", exchange.replica.num_flights),
        ):
            yield GaugeMetricFamily(f"moestro:route_{name}", text, value=value)
        for name, text, value in (
            ("peer_messages", "Messages sent to other routers.", links.num_messages),
            ("peer_refused", "Connections of routers that either end refused.", links.num_refused),
            ("peer_operations", "Operations of other routers that were applied.", counts.num_operations),
            ("peer_repeated", "Operations of other routers that came again.", counts.num_repeated),
            ("peer_gaps", "Requests for missing operations.", counts.num_gaps),
            ("peer_snapshots", "Snapshots of other routers that were applied.", counts.num_snapshots),
            ("peer_differences", "Digests that did not equal the copy here.", counts.num_differences),
            ("peer_expired", "Times that a router was silent for too long to count.", counts.num_expired),
        ):
            yield CounterMetricFamily(f"moestro:route_{name}", text, value=value)
        text = "Bytes exchanged with other routers."
        family = CounterMetricFamily("moestro:route_peer_bytes", text, labels=("direction",))
        family.add_metric(("sent",), links.num_sent_bytes)
        family.add_metric(("received",), links.num_received_bytes)
        yield family


_FLUSH_S = 0.01  # time over which operations gather to one message
_RESOLVE_S = 5.0  # time between two looks at what a peer's name resolves to
_AGAIN_S, _LONGEST_AGAIN_S = 0.05, 1.0  # time between two attempts to connect, which doubles
_REFUSED_AGAIN_S = 5.0  # the same after a refusal, whose cause an operator must remove
_TICK_S = 0.1
_ERRORS = (OSError, TimeoutError, PeerRefusedError)


@dataclass(slots=True)
class PeerLinkCounts:
    """Cumulative counts of all connections to other routers.

    Attributes:
        num_refused: connections that ended with a refusal of either end.
    """

    num_sent_bytes: int = 0
    num_received_bytes: int = 0
    num_messages: int = 0
    num_refused: int = 0


@dataclass(slots=True, eq=False)
class _Link:
    """A connection that this router made.

    Attributes:
        changed: set when the journal has grown, or the peer wants something.
    """

    channel: PeerChannel
    outlet: Outlet
    changed: asyncio.Event = field(default_factory=asyncio.Event)


_Begin = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


class _AcceptedStream(asyncio.StreamReaderProtocol):
    """A connection that another router made, with its place at the port.

    Args:
        begin: called with the two streams of the connection once it is open.
    """

    def __init__(self, slot: ConnectionSlot, begin: _Begin) -> None:
        super().__init__(asyncio.StreamReader(limit=_READ_BYTES), begin)
        self._slot = slot

    def connection_lost(self, exc: Exception | None) -> None:
        self._slot.release()
        super().connection_lost(exc)


class PeerExchange:
    """Connects to all other routers, and lets all of them connect.

    A router sends its own operations over the connections that it made. What its peers lack comes back on the same
    connection. The first peer that is reached also gives the prompts that it knows of.

    Args:
        name: name of this router, which no other has.
        reading: method of comparing prompts, in words.
    """

    def __init__(self, settings: RouterPeerSettings, fleet: Fleet, name: str, reading: str) -> None:
        router = fleet.router
        origin = RouterRun(name, time.time_ns())
        self.rules = ReplicaRules()
        self.counts = PeerLinkCounts()
        self.replica = Replica(origin, router, fleet.row_of, fleet.check_soon, self.rules)
        self._settings = settings
        self._fleet = fleet
        self._identity = Identity(origin, reading, (settings.peer_key or "").encode("utf-8", "surrogateescape"))
        self._journal = router.journal = Journal(origin, lambda row: fleet[row].url, has_prompts=router.needs.hits)
        self._journal.on_change = self._notify
        fleet.on_failure = self._journal.engine_failed
        self._links: set[_Link] = set()
        self._accepted: set[asyncio.Task[None]] = set()
        self._log = LogLimit(logger)
        self._tls = None if settings.files.certfile is None else MutualTls(settings.files)
        self._has_history = False
        self._unseen: set[tuple[str, int]] | None = None  # addresses not tried yet; None means not resolved yet
        self._peer_is_there = asyncio.Event()  # wakes those who wait until they try to connect again

    @contextlib.asynccontextmanager
    async def running(self, listener: socket.socket, faults: Faults) -> AsyncIterator[None]:
        """Exchange with other routers inside the block."""
        limits = FrontLimits(MAX_PEER_CONNECTIONS)
        server = Front(Port.PEERS, listener, self._accept, limits, faults, self._tls).open()
        tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._find_peers())]
        try:
            yield
        finally:
            server.close()
            for task in [*tasks, *self._accepted]:
                task.cancel()
            await asyncio.gather(*tasks, *self._accepted, return_exceptions=True)

    async def catch_up(self, seconds: float) -> None:
        """Wait until the state of all peers that can be reached is here, at most `seconds`."""
        await wait_until(self._has_all, seconds)

    def _has_all(self) -> bool:
        names = {link.channel.peer.name for link in self._links}
        return self._unseen == set() and (
            not names or (self._has_history and all(self.replica.knows(name) for name in names))
        )

    @property
    def num_links(self) -> int:
        """Number of open connections that this router made."""
        return len(self._links)

    def ages_s(self) -> dict[str, float]:
        """Return the time since each peer's last message, seconds."""
        return {name: ns * 1e-9 for name, ns in self.replica.ages_ns(time.monotonic_ns()).items()}

    # --- other routers connect

    def _accept(self, slot: ConnectionSlot) -> asyncio.Protocol:
        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(reader, writer, slot))
            self._accepted.add(task)
            task.add_done_callback(self._accepted.discard)

        return _AcceptedStream(slot, begin)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slot: ConnectionSlot) -> None:
        """Let a router connect, and apply what it sends."""
        try:
            _end_without_acknowledgements(writer.get_extra_info("socket"))
            channel = await accept(self._identity, reader, writer)
            slot.begins()  # A peer gives way to no stranger.
            self._peer_is_there.set()
            self._peer_is_there.clear()
            with contextlib.closing(channel):
                await self._receive_all(channel)
        except _ERRORS as error:
            if isinstance(error, PeerRefusedError) and str(error) != SELF:
                self.counts.num_refused += 1
                self._log.warning("refused", f"a router's connection is refused: {error}")
        finally:
            writer.close()

    async def _receive_all(self, channel: PeerChannel) -> None:
        """Apply what the other router sends, until it is gone."""
        giving: asyncio.Task[None] | None = None
        try:
            while True:
                num_bytes = channel.num_received_bytes
                message = await channel.receive()
                self.counts.num_received_bytes += channel.num_received_bytes - num_bytes
                match message:
                    case OperationBatch() | Snapshot() if message.origin == channel.peer:
                        want = self.replica.receive(message, time.monotonic_ns())
                        if want is not None:
                            await self._send(channel, want)
                    case WantHistory() if giving is None:
                        giving = asyncio.create_task(self._give_history(channel))
                    case _:
                        raise PeerRefusedError(f"{channel.peer.name} sent a {type(message).__name__} out of place")
        finally:
            if giving is not None:
                giving.cancel()

    async def _give_history(self, channel: PeerChannel) -> None:
        engines = [(engine.url, engine.row) for engine in self._fleet]
        with contextlib.suppress(*_ERRORS):
            for part in history_parts(self._fleet.router, engines):
                await self._send(channel, part)
                await asyncio.sleep(0)

    async def _send(
        self, channel: PeerChannel, message: Want | HistoryPart | WantHistory | OperationBatch | Snapshot
    ) -> None:
        num_bytes = channel.num_sent_bytes
        await channel.send(message)
        self.counts.num_messages += 1
        self.counts.num_sent_bytes += channel.num_sent_bytes - num_bytes

    # --- this router connects

    async def _find_peers(self) -> None:
        """Keep a connection to each address of each peer."""
        tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        last: dict[PeerAddress, list[tuple[str, int]]] = {}
        try:
            while True:
                for address in self._settings.addresses:
                    try:
                        last[address] = await _resolved(address)
                    except OSError as error:  # The last addresses stay: their routers may be well.
                        self._log.warning(
                            f"resolve {address.host}", f"--peer {address.host} cannot be resolved: {error}"
                        )
                found = {each for addresses in last.values() for each in addresses}
                if self._unseen is None:
                    self._unseen = set(found)
                for gone in [each for each in tasks if each not in found]:
                    tasks.pop(gone).cancel()
                for each in found:
                    if each not in tasks or tasks[each].done():
                        tasks[each] = asyncio.create_task(self._stay_connected(*each))
                await asyncio.sleep(_RESOLVE_S)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _stay_connected(self, host: str, port: int) -> None:
        """Connect to an address again and again, unless it is this router's own."""
        pause_s = _AGAIN_S
        while True:
            try:
                tls = None if self._tls is None else self._tls.client
                channel = await dial(self._identity, host, port, tls)
                pause_s = _AGAIN_S
                self._tried(host, port)
                if any(link.channel.peer == channel.peer for link in self._links):
                    channel.close()  # Another address of this router is connected, and gets all operations.
                    await asyncio.sleep(_RESOLVE_S)
                    continue
                await self._publish(channel)
            except PeerRefusedError as error:
                self._tried(host, port)
                if str(error) == SELF:
                    return
                self.counts.num_refused += 1
                pause_s = _REFUSED_AGAIN_S
                self._log.warning("no peer", f"--peer {host}:{port} is no peer: {error}")
            except (OSError, TimeoutError) as error:
                self._tried(host, port)
                self._log.info("unreachable", f"--peer {host}:{port} cannot be reached: {error or 'timed out'}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._peer_is_there.wait()  # A router that starts is connected at once.
            pause_s = min(_LONGEST_AGAIN_S, 2 * pause_s)

    def _tried(self, host: str, port: int) -> None:
        """Note that an address was tried, so that `catch_up` waits for it no longer unless it is connected."""
        if self._unseen is not None:
            self._unseen.discard((host, port))

    async def _publish(self, channel: PeerChannel) -> None:
        """Send the journal until the connection ends."""
        link = _Link(channel, Outlet(self._journal, self.rules.beat_ns))
        self._links.add(link)
        logger.info("router %s is connected", channel.peer.name)
        reading = asyncio.create_task(self._receive_wants(link))
        reading.add_done_callback(lambda _: link.changed.set())
        try:
            await self._send_all(link, reading)
        finally:
            self._links.discard(link)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            channel.close()
            logger.info("router %s is disconnected", channel.peer.name)

    async def _send_all(self, link: _Link, reading: asyncio.Task[None]) -> None:
        """Send what is due until the other end is gone, which `reading` notices first."""
        if not self._has_history:
            await self._send(link.channel, WantHistory())
        while not reading.done():
            link.changed.clear()
            while (message := link.outlet.next_due(time.monotonic_ns())) is not None:
                await self._send(link.channel, message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.rules.beat_ns * 1e-9):
                    await link.changed.wait()
                    await asyncio.sleep(_FLUSH_S)
        reading.result()

    async def _receive_wants(self, link: _Link) -> None:
        history = HistoryReader()
        while True:
            message = await link.channel.receive()
            match message:
                case Want():
                    link.outlet.wanted(message)
                    link.changed.set()
                case HistoryPart():
                    await self._take_history(history, message)
                case _:
                    raise PeerRefusedError(f"{link.channel.peer.name} sent a {type(message).__name__} out of place")

    async def _take_history(self, history: HistoryReader, part: HistoryPart) -> None:
        """Learn prompts that a peer knows of; engines unknown here are left out."""
        try:
            for prompt in history.prompts(part):
                row = self._fleet.row_of(part.engine)
                if row is not None and not self._has_history:
                    self._fleet.router.sent_elsewhere(row, prompt, time.monotonic_ns())
        except ValueError as error:
            raise PeerRefusedError(str(error)) from None
        self._has_history |= part.is_last
        await asyncio.sleep(0)

    def _notify(self) -> None:
        for link in self._links:
            link.changed.set()

    async def _tick(self) -> None:
        names = self._fleet.names
        while True:
            await asyncio.sleep(_TICK_S)
            now_ns = time.monotonic_ns()
            self.replica.tick(now_ns)
            if self._fleet.names is not names:
                names = self._fleet.names
                self.replica.engines_changed(now_ns)


async def _resolved(address: PeerAddress) -> list[tuple[str, int]]:
    """Return the addresses that a name stands for now; OSError if it cannot be resolved."""
    found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return list({(str(each[4][0]), address.port) for each in found})
