"""A publisher of KV events that sends what none should: the subscription goes on, holds little, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
from gateway.rig import looped
from support.fake_publisher import BLOCK_SIZE, MODEL, Sink, payload, stored

from moestro.gateway.engines.kv_subscriber import KvSubscription, ZmtpConnection
from moestro.gateway.part_settings import KvSource
from moestro.routing.kv_events import BATCH_BYTES, KvFeed, KvFeedSettings, StreamRules
from moestro.web.ports.faults import LogLimit
from moestro.wire.kv_events import MAX_MESSAGE_BYTES
from moestro.wire.kv_names import NamingRules
from moestro.wire.zmtp import greeting, message, ready

END = (b"", b"", b"\xff" * 8, b"")
MAX_WAITING = 100_000
Serve = Callable[["Peer"], asyncio.Future[None]]


class Peer:
    """One accepted connection, after the handshake."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *frames: bytes) -> None:
        self.writer.write(message(frames))
        await self.writer.drain()


class Stranger:
    """Two listening sockets that speak ZMTP, and serve each connection by `events` or `replay`.

    Attributes:
        feed: the feed of the subscription to them.
        most_waiting: most bytes that the stream held back.
    """

    def __init__(self, events: Serve, replay: Serve) -> None:
        self._serve = {b"PUB": events, b"ROUTER": replay}
        self.num_open = 0
        self.most_waiting = 0
        naming = NamingRules(model=MODEL, block_size=BLOCK_SIZE)
        rules = StreamRules(max_waiting_bytes=MAX_WAITING)
        settings = KvFeedSettings(engine=0, name="e", naming=naming, can_replay=True, stream=rules)
        self.log = LogLimit(logging.getLogger("test"))
        self.sink = Sink()
        self.feed = KvFeed(self.sink, settings, self.log.warning)

    @contextlib.asynccontextmanager
    async def subscribed(self) -> AsyncIterator[None]:
        """Run a subscription while the block lasts. It must not have ended by itself."""
        servers = [await asyncio.start_server(self._accepted(kind), "127.0.0.1", 0) for kind in self._serve]
        events, replay = (f"tcp://127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in servers)
        task = asyncio.create_task(KvSubscription(KvSource(events, replay), self.feed, lambda: 0, self.log).run())
        try:
            yield
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for server in servers:
                server.close()
            await self.until(lambda: self.num_open == 0)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            self.most_waiting = max(self.most_waiting, self.feed.stream.num_waiting_bytes)
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("waited in vain")

    def _accepted(self, kind: bytes):
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_open += 1
            with contextlib.suppress(OSError, RuntimeError, asyncio.IncompleteReadError):
                writer.write(greeting() + ready(kind))
                await reader.readexactly(64 + 2 + 25 + 13 + (3 if kind == b"PUB" else 6) - 3)
                await self._serve[kind](Peer(reader, writer))
            writer.transport.abort()
            self.num_open -= 1

        return serve


async def end_at_once(peer: Peer) -> None:
    """Answer a replay: nothing is kept."""
    await peer.send(*END)
    await peer.reader.read()


def kv(seq: int, body: bytes) -> tuple[bytes, bytes, bytes]:
    return b"kv", seq.to_bytes(8, "big"), body


def block(number: int) -> bytes:
    return payload(stored([number], None, [number] * BLOCK_SIZE))


@pytest.mark.parametrize(
    ("how", "words"), [("one frame", "the limit is 4,194,304"), ("frames without end", "more than 16 frames")]
)
@looped
async def test_a_message_beyond_the_limit_gives_the_index_up_and_it_comes_back(how, words, caplog):
    is_honest = asyncio.Event()

    async def events(peer: Peer) -> None:
        await asyncio.sleep(0.1)  # until the replay is answered
        await peer.send(*kv(0, block(1)))
        if not is_honest.is_set():
            if how == "one frame":
                await peer.send(*kv(1, bytes(MAX_MESSAGE_BYTES)))
            while True:
                peer.writer.write(b"\x03" + (1 << 16).to_bytes(8, "big") + bytes(1 << 16))
                await peer.writer.drain()
        await peer.reader.read()

    async def replay(peer: Peer) -> None:
        await end_at_once(peer)

    it = Stranger(events, replay)
    async with it.subscribed():
        await it.until(lambda: "is given up" in caplog.text)
        assert words in caplog.text
        assert not it.feed.is_complete
        assert it.feed.num_blocks == 0
        is_honest.set()
        await it.until(lambda: it.feed.is_complete and it.feed.num_blocks == 1)


@looped
async def test_a_replay_that_drips_holds_no_more_back_than_the_limit(caplog):
    async def events(peer: Peer) -> None:
        await asyncio.sleep(0.1)
        for seq in range(200):
            await peer.send(*kv(seq + 5, block(seq)))
        for seq in range(2000, 2100):
            await peer.send(*kv(seq, bytes(5000)))
        await peer.reader.read()

    async def replay(peer: Peer) -> None:
        while True:
            await peer.send(b"", b"kv", (0).to_bytes(8, "big"), block(1))
            await asyncio.sleep(0.02)

    it = Stranger(events, replay)
    async with it.subscribed():
        await it.until(lambda: "wait for a replay" in caplog.text)
        assert not it.feed.is_complete
    assert 0 < it.most_waiting <= MAX_WAITING + BATCH_BYTES + 5000


@pytest.mark.parametrize("seed", range(3))
@looped
async def test_noise_in_place_of_a_publisher_ends_connections_and_nothing_else(seed):
    rng = np.random.default_rng(seed)
    num_served = 0

    async def noise(peer: Peer) -> None:
        nonlocal num_served
        num_served += 1
        sent = b"".join(message(kv(seq, block(seq))) for seq in range(20)) + b"\x04\x0a\x04PING\x00\x01ctx"
        data = bytearray(sent)
        for _ in range(rng.integers(0, 30)):
            data[rng.integers(len(data))] = rng.integers(256)
        for at in range(0, len(data), 50):
            peer.writer.write(bytes(data[at : at + 50]))
            await asyncio.sleep(0)
        await peer.writer.drain()
        await asyncio.sleep(0.02)
        peer.writer.transport.abort()

    it = Stranger(noise, noise)
    async with it.subscribed():
        await it.until(lambda: num_served > 8)


@looped
async def test_a_connection_that_nothing_takes_from_slows_the_publisher_down():
    """A publisher at full rate fills the queue of the connection, and then its own: memory does not grow with time."""
    num_sent, ended = 0, asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        writer.write(greeting() + ready(b"PUB"))
        with contextlib.suppress(OSError, RuntimeError):
            while True:
                writer.write(message(kv(num_sent, bytes(10_000))))
                await writer.drain()
                num_sent += 1
        ended.set()

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    connection = ZmtpConnection(b"SUB", frozenset({b"PUB"}), lambda: None)
    connection.open(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", b"")
    try:
        for _ in range(200):
            connection.take() if not connection.is_made else None
            await asyncio.sleep(0.005)
        assert connection._reader.num_held_bytes < 1 << 20
        before = num_sent
        await asyncio.sleep(0.1)
        assert num_sent == before > 20
        assert len([frames for _ in range(60) if (frames := connection.take())]) > 20
    finally:
        connection.close()
        server.close()
        await ended.wait()
