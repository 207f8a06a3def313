"""A stranger at the ports of KV events costs the engine a bounded number of bytes, connections and computing time."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.published import Published, batches_of_replay, ends, published, raw_peer, request, subscription
from support.running import wait_until

from moestro.wire.zmtp import SUBSCRIBE, greeting, message, ready
from moestro.worker import kv_listeners, kv_publisher
from moestro.worker.kv_listeners import MAX_REQUEST_BYTES, READ_BYTES, SEND_BYTES
from moestro.worker.kv_publisher import MAX_LISTENERS, MAX_PER_NETWORK

# What one listener may hold: a message, a piece that was read, and what was lined up for it.
MAX_HELD_BYTES = 2 * MAX_REQUEST_BYTES + READ_BYTES
PORTS = ((b"SUB", "events"), (b"DEALER", "replay"))
PING = b"\x04\x0b\x04PING\x00\x0aabcd"


def flood(peer: socket.socket, data: bytes, most_bytes: int) -> int:
    """Send `data` again and again until the connection ends. Returns the number of bytes that were sent."""
    num_sent = 0
    with contextlib.closing(peer), contextlib.suppress(ConnectionError):
        while num_sent < most_bytes:
            peer.sendall(data)
            num_sent += len(data)
    return num_sent


def is_served(it: Published) -> None:
    """Assert that a new subscriber and a new reader of a replay get what they should."""
    with contextlib.closing(it.subscriber()) as subscriber:

        def is_received() -> bool:  # what is published before the subscription is known does not count
            it.publish(b"served")
            return bool(subscriber.poll(100)) and subscriber.recv_multipart()[2] == b"served"

        wait_until(is_received)
    assert it.replay_from(it.log.end - 1) == [b"served"]


@pytest.mark.parametrize(("kind", "port"), PORTS)
@pytest.mark.parametrize(
    "data",
    [
        b"\x02" + struct.pack(">Q", 3 << 30) + bytes(1 << 20),  # one frame of 3 GB
        b"\x03" + struct.pack(">Q", 4096) + bytes(4096),  # frames without end, each of which is small
        b"\x01\x00" * 1000,
        b"\x06" + struct.pack(">Q", 1 << 20) + bytes(1 << 20),  # a command
    ],
)
def test_a_message_beyond_the_bounds_ends_the_connection(kind, port, data):
    with published() as it:
        assert flood(raw_peer(getattr(it, port), kind), data, 100 << 20) < 100 << 20
        is_served(it)


@pytest.mark.parametrize(("kind", "port"), PORTS)
@pytest.mark.parametrize("data", [PING * 200, message((SUBSCRIBE,)) * 200, request(0) * 200])
def test_messages_without_end_fill_no_more_than_a_listeners_share(kind, port, data):
    """They are well formed, so nothing ends the connection: what is not read waits in the sender's own buffers."""
    with published() as it:
        it.publish(*[bytes(5000)] * 200)
        peer = raw_peer(getattr(it, port), kind, receive_bytes=4096)
        peer.settimeout(1)
        with peer:
            num_sent = most_held = 0
            with contextlib.suppress(TimeoutError):
                while num_sent < 100_000:
                    num_sent += peer.send(data)
                    most_held = max(most_held, it.num_held_bytes)
            is_served(it)
        assert most_held <= MAX_HELD_BYTES + SEND_BYTES + 5000 + 256


@pytest.mark.parametrize("first", [b"", greeting()[:10], greeting(), greeting() + ready(b"SUB")[:20]])
def test_a_handshake_that_does_not_end_is_ended(first, monkeypatch):
    monkeypatch.setattr(kv_listeners, "HANDSHAKE_S", 0.3)
    with published() as it:
        for port in (it.events, it.replay):
            peer = socket.create_connection(("127.0.0.1", port), timeout=300)
            peer.sendall(first)
            assert ends(peer)


@pytest.mark.parametrize("first", [b"", greeting()[:33]])
def test_of_many_unfinished_connections_the_oldest_give_way(first):
    with published() as it, contextlib.ExitStack() as peers:
        established = it.subscriber()
        for _ in range(4):
            for port in (it.events, it.replay):
                for _ in range(MAX_PER_NETWORK):
                    peer = peers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300))
                    peer.sendall(first)
            is_served(it)
            assert len(it.listeners) <= 2 * MAX_PER_NETWORK
        it.publish(b"still here")
        while established.recv_multipart()[2] != b"still here":
            pass


def test_idle_readers_of_replays_give_way_and_subscribers_do_not():
    with published() as it, contextlib.ExitStack() as peers:
        for _ in range(2 * MAX_PER_NETWORK):
            peers.enter_context(raw_peer(it.replay, b"DEALER"))
        assert it.replay_from(0) == []
        subscribers = [peers.enter_context(raw_peer(it.events, b"SUB", subscription())) for _ in range(MAX_PER_NETWORK)]
        wait_until(lambda: it.num_subscribed == MAX_PER_NETWORK)
        assert ends(socket.create_connection(("127.0.0.1", it.events), timeout=300))
        it.publish(b"to all")
        for subscriber in subscribers:
            received = b""
            while not received.endswith(b"to all"):
                data = subscriber.recv(1000)
                assert data, "a subscriber was disconnected"
                received += data


def test_connections_of_all_addresses_together_are_bounded():
    """Each address of 127.0.0.0/8 counts by itself."""
    with published() as it, contextlib.ExitStack() as peers:
        for at in range(MAX_LISTENERS + 50):
            source = (f"127.0.1.{1 + at // 40}", 0)
            peers.enter_context(socket.create_connection(("127.0.0.1", it.events), 20, source))
        is_served(it)
        subscribers = [each for each in it.listeners if isinstance(each, kv_listeners.Subscriber)]
        assert len(subscribers) <= MAX_LISTENERS  # the reader of `is_served` counts at the other port


def test_silent_readers_of_replays_hold_one_piece_each_and_are_ended(monkeypatch):
    monkeypatch.setattr(kv_listeners, "STALLED_S", 1.0)
    num_readers, batch = 40, bytes(5000)
    with published() as it, contextlib.ExitStack() as peers:
        it.publish(*[batch] * 1000)
        for _ in range(num_readers):
            peers.enter_context(raw_peer(it.replay, b"DEALER", request(0) * 50, receive_bytes=4096))
        wait_until(lambda: sum(each.owes for each in it.listeners) == num_readers)
        assert it.replay_from(0) == [batch] * 1000
        assert it.num_held_bytes <= num_readers * (MAX_HELD_BYTES + SEND_BYTES + len(batch) + 256)
        wait_until(lambda: not it.listeners)


def test_a_flood_of_replays_takes_its_share_of_time_and_honest_listeners_are_served(monkeypatch):
    """The thread rests nine times as long as it computes; a busy machine changes neither."""
    rests_s = []

    def rest(seconds: float) -> None:
        rests_s.append(seconds)
        time.sleep(seconds)

    clocks = SimpleNamespace(monotonic=time.monotonic, thread_time=time.thread_time, sleep=rest)
    monkeypatch.setattr(kv_publisher, "time", clocks)
    with published() as it:
        it.publish(*[bytes(1000)] * 2000)
        subscriber, is_over = it.subscriber(), threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError), raw_peer(it.replay, b"DEALER", request(0) * 20) as peer:
                    while not is_over.is_set() and peer.recv(1 << 20):
                        pass

        strangers = [threading.Thread(target=ask) for _ in range(4)]
        for each in strangers:
            each.start()
        clock = time.pthread_getcpuclockid(it.server._thread.ident)
        used_s, num_rests = time.clock_gettime(clock), len(rests_s)
        try:
            for number in range(20):
                it.publish(b"live %d" % number)
                assert subscriber.recv_multipart()[2] == b"live %d" % number
            with contextlib.closing(it.replayer()) as reader:
                for _ in range(2):
                    assert len(batches_of_replay(reader, 0)) == 2020
            rested_s, used_s = sum(rests_s[num_rests:]), time.clock_gettime(clock) - used_s
        finally:
            is_over.set()
            for each in strangers:
                each.join()
        assert rested_s > 8 * used_s > 0


# --- any bytes

PIECES = st.one_of(
    st.sampled_from((
        greeting(), ready(b"SUB"), ready(b"DEALER"), ready(b"PUB"), subscription(), message((b"\x00kv",)), request(0),
        request(1 << 63), PING, b"\x04\x0c\x09SUBSCRIBEkv", b"\x01\x00", b"\x00\x00", b"\x06" + bytes(8), b"\xff" * 70,
        b"\x02" + struct.pack(">Q", 1 << 62), b"\x01\xff" + bytes(255), b"\x04\x00", b"\x04\x01\xff",
    )),
    st.binary(max_size=300),
)  # fmt: skip
STREAMS = st.tuples(st.sampled_from(PORTS), st.booleans(), st.lists(PIECES, max_size=30))


@pytest.fixture(scope="module")
def long_lived():
    with published(max_batches=50) as it:
        it.publish(*[bytes(700)] * 60)
        yield it


@settings(max_examples=150, deadline=None)
@given(streams=st.lists(STREAMS, min_size=1, max_size=6))
def test_whatever_bytes_arrive_the_server_goes_on_and_holds_little(long_lived, streams):
    it = long_lived
    with contextlib.ExitStack() as peers:
        for (kind, port), begins_well, pieces in streams:
            peer = peers.enter_context(socket.create_connection(("127.0.0.1", getattr(it, port)), timeout=300))
            with contextlib.suppress(ConnectionError):
                peer.sendall((greeting() + ready(kind) if begins_well else b"") + b"".join(pieces))
        assert len(it.replay_from(0)) == 50
        assert it.num_held_bytes <= len(streams) * (MAX_HELD_BYTES + SEND_BYTES)
    assert it.server._thread.is_alive()


def test_the_property_test_can_fail(monkeypatch):
    """A server that reads whatever comes holds more than the bound."""
    monkeypatch.setattr(kv_listeners, "MAX_REQUEST_BYTES", 1 << 30)
    monkeypatch.setattr(kv_publisher, "_RECEIVE_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(kv_listeners, "READ_BYTES", 1 << 20)
    with published() as it, raw_peer(it.events, b"SUB", b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)):
        wait_until(lambda: it.num_held_bytes > MAX_HELD_BYTES + SEND_BYTES)
