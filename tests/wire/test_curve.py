"""Sockets between machines: members exchange messages; strangers are refused and counted, and disturb nothing."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq
from support.running import PATIENCE_S, wait_until

from moestro.core.processes import CurveKeys
from moestro.wire.sockets import Doorkeeper, new_curve_keys, secure_client

ANY_PORT = "tcp://127.0.0.1:*"


@pytest.fixture
def keys() -> CurveKeys:
    return new_curve_keys()


@pytest.fixture
def listening(keys):
    """A protected socket, its doorkeeper and its address."""
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    doorkeeper = Doorkeeper(inbox, keys)
    inbox.bind(ANY_PORT)
    inbox.setsockopt(zmq.RCVTIMEO, 10_000)
    yield inbox, doorkeeper, inbox.getsockopt_string(zmq.LAST_ENDPOINT)
    inbox.close(linger=0)
    context.term()  # ends the doorkeeper


@contextlib.contextmanager
def sender(address: str, keys: CurveKeys | None):
    with zmq.Context() as context, context.socket(zmq.PUSH) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        secure_client(peer, keys)
        peer.connect(address)
        yield peer


def test_a_member_s_messages_arrive(listening, keys):
    inbox, doorkeeper, address = listening
    with sender(address, keys) as member:
        for number in range(100):
            member.send(b"%d" % number)
        assert [inbox.recv() for _ in range(100)] == [b"%d" % number for number in range(100)]
    assert doorkeeper.num_refused == 0


def without_keys(keys: CurveKeys) -> None:
    return None


def with_an_own_key(keys: CurveKeys) -> CurveKeys:
    """A stranger who has found the server's public key."""
    own = new_curve_keys()
    return CurveKeys(
        server_public=keys.server_public,
        server_secret=own.server_secret,
        client_public=own.client_public,
        client_secret=own.client_secret,
    )


def of_another_start(keys: CurveKeys) -> CurveKeys:
    return new_curve_keys()


@pytest.mark.parametrize("stranger_keys", [without_keys, with_an_own_key, of_another_start])
def test_a_stranger_is_refused_and_counted_and_disturbs_no_client(listening, keys, stranger_keys):
    inbox, doorkeeper, address = listening
    with sender(address, keys) as member, sender(address, stranger_keys(keys)) as stranger:
        member.send(b"before")
        stranger.send(b"let me in")
        assert inbox.recv() == b"before"
        wait_until(lambda: doorkeeper.num_refused > 0)
        member.send(b"after")
        assert inbox.recv() == b"after"
        assert not inbox.poll(50)


def connect(address: str) -> socket.socket:
    return socket.create_connection((urlsplit(address).hostname, urlsplit(address).port), timeout=300)


def test_what_speaks_another_protocol_is_disconnected(listening, keys):
    inbox, _, address = listening
    with connect(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(2000))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    with sender(address, keys) as member:
        member.send(b"hello")
        assert inbox.recv() == b"hello"


# RFC 23: signature, version 3.0, mechanism, client, filler
GREETING_WITHOUT_KEYS = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def test_a_flood_of_strangers_does_not_stop_a_member(listening, keys):
    inbox, doorkeeper, address = listening
    with sender(address, keys) as member:
        member.send(b"first")
        assert inbox.recv() == b"first"
        for _ in range(200):
            with contextlib.suppress(OSError), connect(address) as stranger:
                stranger.sendall(GREETING_WITHOUT_KEYS)
        wait_until(lambda: doorkeeper.num_refused > 100)
        member.send(b"last")
        assert inbox.recv() == b"last"


def test_what_a_member_sends_is_not_readable_on_the_wire(listening, keys):
    """A relay between the two, like a router in between, sees neither the text nor ZeroMQ's name of the frame."""
    inbox, _, address = listening
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as relay:
        with sender(f"tcp://127.0.0.1:{relay.getsockname()[1]}", keys) as member:
            near, _ = relay.accept()
            far = socket.create_connection((urlsplit(address).hostname, urlsplit(address).port))
            with near, far:
                member.send(b"the secret prompt" * 3)
                near.setblocking(False)
                far.setblocking(False)
                while not inbox.poll(1):
                    for source, sink in ((near, far), (far, near)):
                        with contextlib.suppress(BlockingIOError):
                            data = source.recv(65536)
                            seen += data
                            sink.sendall(data)
        assert inbox.recv() == b"the secret prompt" * 3
    assert b"CURVE" in seen
    assert b"secret" not in seen


def test_keys_do_not_get_into_logs(keys):
    assert keys.server_secret.decode() not in repr(keys) + str(keys)
    assert new_curve_keys() != keys


ORPHAN = """
import os, sys
from moestro.core.processes import CurveKeys
from moestro.wire.messages import Phase, identity_of
from moestro.worker.channel import Channel
import msgspec
keys = msgspec.msgpack.decode(sys.stdin.buffer.read(int(sys.argv[2])), type=CurveKeys)
channel = Channel(sys.argv[1], identity_of(0, 0), sys.stdin.fileno(), keys=keys)
channel.send(Phase("here", 0.0))
channel.receive(30)
"""


def test_a_rank_ends_when_its_connection_breaks(keys):
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    Doorkeeper(server, keys)
    server.bind(ANY_PORT)
    server.setsockopt(zmq.RCVTIMEO, 30_000)
    body = msgspec.msgpack.encode(keys)
    command = [sys.executable, "-c", ORPHAN, server.getsockopt_string(zmq.LAST_ENDPOINT), str(len(body))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as rank:
        rank.stdin.write(body)
        rank.stdin.flush()
        assert server.recv_multipart()[0] == b"rank-0.0"
        assert rank.poll() is None
        server.close(linger=0)
        assert rank.wait(PATIENCE_S) == 3
    context.term()
