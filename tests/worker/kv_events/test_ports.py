"""The ports of KV events speak with libzmq's sockets as a publisher of vLLM does."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest
import zmq
from support.kv_listener import free_ports
from support.published import TOPIC, batches_of_replay, ends, published, raw_peer, request, subscription
from support.running import wait_until

from moestro.config.launch_spec import KvEventsSettings
from moestro.errors import ConfigError
from moestro.wire.zmtp import greeting, ready
from moestro.worker.kv_listeners import BatchLog
from moestro.worker.kv_publisher import KvPublisher, KvServer

BATCHES = [bytes([number]) * size for number, size in enumerate((0, 1, 255, 256, 5000, 70_000, 3_000_000))]


def live(number: int, payload: bytes) -> list[bytes]:
    return [TOPIC, number.to_bytes(8, "big"), payload]


def test_a_subscriber_gets_batches_of_any_size_in_order():
    with published() as it:
        first, second = it.subscriber(), it.subscriber(b"")
        it.publish(*BATCHES)
        for subscriber in (first, second):
            assert [subscriber.recv_multipart() for _ in BATCHES] == [live(n, each) for n, each in enumerate(BATCHES)]


def test_a_subscriber_to_another_topic_gets_nothing_and_each_subscription_is_cancelled_by_itself():
    with published() as it:
        other, twice = it.subscriber(b"kvx"), it.subscriber()
        twice.subscribe(b"k")
        twice.unsubscribe(TOPIC)
        it.publish(b"a")
        assert twice.recv_multipart() == live(0, b"a")
        twice.unsubscribe(b"k")
        wait_until(lambda: it.num_subscribed == 0)
        it.publish(b"b")
        twice.subscribe(b"")
        wait_until(lambda: it.num_subscribed == 1)
        it.publish(b"c")
        assert twice.recv_multipart() == live(2, b"c")
        assert not other.poll(0)


def test_a_subscription_may_be_a_command_as_in_zmtp_3_1():
    with published() as it, raw_peer(it.events, b"SUB", b"\x04\x0c\x09SUBSCRIBEkv") as peer:
        wait_until(lambda: it.num_subscribed == 1)
        peer.sendall(b"\x04\x09\x06CANCELkv")
        wait_until(lambda: it.num_subscribed == 0)


@pytest.mark.parametrize(("start", "expected"), [(0, BATCHES), (5, BATCHES[5:]), (7, []), (1 << 63, [])])
def test_a_replay_has_the_batches_from_a_number_on(start, expected):
    with published() as it:
        it.publish(*BATCHES)
        assert it.replay_from(start) == expected


def test_a_replay_has_what_is_still_kept():
    with published(max_batches=3) as it:
        it.publish(*BATCHES)
        assert it.replay_from(0) == BATCHES[-3:]


def test_requests_on_one_connection_are_answered_in_turn_and_malformed_ones_are_left_out():
    with published() as it:
        it.publish(b"a", b"b")
        replayer = it.replayer()
        for frames in ([b"x"], [b"", b"short"], [b"id", bytes(8)], [b"", bytes(8), b""]):
            replayer.send_multipart(frames)
        for start in (0, 1):
            replayer.send_multipart([b"", start.to_bytes(8, "big")])
        numbers = [replayer.recv_multipart()[1] for _ in range(5)]
        assert numbers == [bytes(8), bytes(7) + b"\x01", b"\xff" * 8, bytes(7) + b"\x01", b"\xff" * 8]
        assert batches_of_replay(replayer, 0) == [b"a", b"b"]


def test_a_socket_of_type_req_gets_the_first_batch():
    with published() as it:
        it.publish(b"a", b"b")
        requester = it.replayer(zmq.REQ)
        requester.send(bytes(8))
        assert requester.recv_multipart() == [bytes(8), b"a"]


def test_pings_keep_an_idle_connection():
    with published() as it:
        options = {"HEARTBEAT_IVL": 30, "HEARTBEAT_TIMEOUT": 2000, "HEARTBEAT_TTL": 2000}
        subscriber = it.subscriber(**options)
        events = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        with raw_peer(it.events, b"SUB", b"\x04\x0b\x04PING\x00\x0aabcd") as peer:
            received = b""
            while b"PONGabcd" not in received:
                received += peer.recv(1000)
        assert not events.poll(500)
        it.publish(b"a")
        assert subscriber.recv_multipart() == live(0, b"a")


def test_a_slow_subscriber_is_disconnected_and_finds_the_rest_in_a_replay():
    """The subscriber has small buffers and does not read until it is behind; libzmq connects again by itself."""
    batches = [os.urandom(20_000) for _ in range(400)]
    with published(max_behind=50) as it:
        subscriber = it.subscriber(RCVHWM=1, RCVBUF=4096)
        for at in range(0, len(batches), 10):
            it.publish(*batches[at : at + 10])
        seen = []
        while subscriber.poll(1000):
            seen.append(int.from_bytes(subscriber.recv_multipart()[1], "big"))
        assert seen == list(range(len(seen)))
        assert 0 < len(seen) < 350
        wait_until(lambda: it.num_subscribed == 1)
        it.publish(b"last")
        assert subscriber.recv_multipart() == live(400, b"last")
        assert it.replay_from(len(seen)) == [*batches[len(seen) :], b"last"]


@pytest.mark.parametrize(
    "first",
    [
        greeting().replace(b"NULL\0", b"CURVE"),
        greeting()[:10] + b"\x01" + greeting()[11:],
        greeting() + ready(b"PUB"),
        b"GET / HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nX: 1234567890123456789012345678\r\n\r\n",
    ],
)
def test_other_protocols_and_sockets_are_disconnected(first):
    with published() as it:
        for port in (it.events, it.replay):
            peer = socket.create_connection(("127.0.0.1", port), timeout=300)
            peer.sendall(first)
            assert ends(peer)
        assert it.replay_from(0) == []


@pytest.mark.parametrize("host", ["*", "localhost", "127.0.0.1", "lo", "[::1]"])
def test_an_endpoint_names_an_address_or_an_interface(host):
    if host == "lo" and (not hasattr(socket, "if_nameindex") or "lo" not in dict(socket.if_nameindex()).values()):
        pytest.skip("no interface is called lo")
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("no IPv6")
    port, _ = free_ports(1)
    server = KvServer(BatchLog(b"", 1, 0), f"tcp://{host}:{port}", None)
    try:
        with socket.create_connection(("::1" if "::1" in host else "127.0.0.1", port), timeout=300) as peer:
            assert peer.recv(10) == greeting()[:10]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("tcp://127.0.0.1:{taken}", "tcp://127.0.0.1:[0-9]+ cannot be bound: .*in use"),
        ("tcp://nowhere.invalid:{free}", "tcp://nowhere.invalid:[0-9]+ cannot be bound"),
    ],
)
def test_an_endpoint_that_cannot_be_bound_is_named(endpoint, words):
    free, _ = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = endpoint.format(taken=taken.getsockname()[1], free=free)
        settings = KvEventsSettings(endpoint=f"tcp://127.0.0.1:{free}", replay_endpoint=given)
        with pytest.raises(ConfigError, match=words):
            KvPublisher(settings, 0, None, 16)
    socket.create_server(("127.0.0.1", free)).close()  # the first port is free again


def test_batches_that_leave_the_log_during_a_replay_are_left_out():
    with published(max_batches=100) as it:
        it.publish(*([bytes(50_000)] * 100))
        with raw_peer(it.replay, b"DEALER", request(0), receive_bytes=4096) as reader:
            wait_until(lambda: any(each.owes for each in it.listeners))
            it.publish(*([b"new"] * 100))
            assert it.log.first == 100
            with contextlib.suppress(TimeoutError):
                data = b""
                while b"\xff" * 8 not in data[-100:]:
                    data += reader.recv(1 << 16)
            assert b"new" not in data  # they were published after the request


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_subscription_before_the_handshake_ends_the_connection():
    with published() as it:
        peer = socket.create_connection(("127.0.0.1", it.events), timeout=300)
        peer.sendall(greeting() + subscription())
        assert ends(peer)
