"""ZMTP as a client of publishers that may send anything. The gateway's tests use libzmq as the other end."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.wire.zmtp import ZmtpError, ZmtpReader, greeting, message, message_head, ready

MOST = 1000
PEERS = frozenset({b"PUB", b"XPUB"})
HANDSHAKE = greeting() + ready(b"PUB")


def read(data: bytes, sizes: list[int] | None = None) -> tuple[ZmtpReader, list[list[bytes]], bytes]:
    """Read `data` in pieces of `sizes`. Returns the reader, the messages and the answers."""
    reader, messages, answers = ZmtpReader(PEERS, MOST), [], b""
    at = 0
    for size in sizes or [len(data)]:
        reader.add(data[at : at + size])
        at += size
        while not reader.wants_more:
            frames, answer = reader.take()
            answers += answer
            if frames is not None:
                messages.append(frames)
    return reader, messages, answers


def frame(flags: int, body: bytes) -> bytes:
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


@pytest.mark.parametrize("seed", range(20))
def test_messages_are_the_same_however_they_are_cut(seed):
    rng = np.random.default_rng(seed)
    sent = [[rng.bytes(rng.integers(0, 300)) for _ in range(rng.integers(1, 4))] for _ in range(20)]
    data = HANDSHAKE + b"".join(message(tuple(frames)) for frames in sent)
    cuts = np.sort(rng.integers(0, len(data), rng.integers(0, 200))).tolist()
    sizes = np.diff([0, *cuts, len(data)]).tolist()
    reader, messages, _ = read(data, sizes)
    assert messages == sent
    assert (reader.num_held_bytes, reader.is_made) == (0, True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n".ljust(64), "does not speak ZeroMQ"),
        (greeting()[:10] + b"\x01" + greeting()[11:], "version 1"),
        (greeting().replace(b"NULL\0", b"CURVE"), "security mechanism"),
        (greeting() + frame(4, b"\x05ERROR\x00"), "in place of READY"),
        (greeting() + ready(b"ROUTER"), "expected PUB or XPUB"),
        (greeting() + message((b"early",)), "precedes the handshake"),
        (greeting() + frame(4, b"\x05READY" + bytes(5000)), "a command has 5,006 bytes"),
        (HANDSHAKE + b"\x02" + (1 << 40).to_bytes(8, "big"), "at least 1,099,511,627,776 bytes"),
        (HANDSHAKE + frame(1, bytes(600)) + frame(0, bytes(600)), "at least 1,200 bytes"),
        (HANDSHAKE + b"\x01\x00" * 100, "more than 16 frames"),
        (HANDSHAKE + b"\x80\x00", "unknown flags"),
    ],
)
def test_a_peer_that_breaks_a_bound_is_refused_in_words(data, words):
    with pytest.raises(ZmtpError, match=words):
        read(data)


def test_a_ping_is_answered_with_its_context():
    _, messages, answers = read(HANDSHAKE + frame(4, b"\x04PING\x00\x0acontext") + message((b"x",)))
    assert messages == [[b"x"]]
    assert answers == b"\x04\x0c\x04PONGcontext"


@pytest.mark.parametrize("size", [0, 255, 256, 70_000])
def test_a_message_is_its_head_and_its_last_frame(size):
    frames = (b"kv", bytes(300), bytes(size))
    assert message(frames) == message_head(frames[:-1], size) + frames[-1]
    assert read(HANDSHAKE + message((b"x", bytes(min(size, 900)))))[1] == [[b"x", bytes(min(size, 900))]]


def test_a_subscription_is_a_message_or_a_command():
    reader = ZmtpReader(frozenset({b"SUB"}), MOST)
    reader.add(greeting() + ready(b"SUB") + message((b"\x01kv",)))
    reader.add(frame(4, b"\x09SUBSCRIBEkv") + frame(4, b"\x06CANCELkv") + frame(4, b"\x07UNKNOWN"))
    found = []
    while not reader.wants_more:
        found.append(reader.take())
    assert [frames for frames, _ in found if frames] == [[b"\x01kv"], [b"\x01kv"], [b"\x00kv"]]
    assert read(HANDSHAKE + frame(4, b"\x09SUBSCRIBEkv"))[1] == []  # a publisher does not subscribe


@pytest.mark.parametrize("seed", range(4))
def test_of_damaged_bytes_no_more_is_held_than_a_message(seed):
    rng = np.random.default_rng(seed)
    num_refused = 0
    for _ in range(100):
        sent = b"".join(message((b"kv", rng.bytes(8), rng.bytes(rng.integers(0, 400)))) for _ in range(5))
        data = bytearray(HANDSHAKE + sent)
        for _ in range(rng.integers(1, 6)):
            data[rng.integers(len(HANDSHAKE) - 30, len(data))] = rng.integers(256)
        reader = ZmtpReader(PEERS, MOST)
        try:
            for byte in data:
                reader.add(bytes([byte]))
                reader.take()
                assert reader.num_held_bytes <= MOST + 9
        except ZmtpError:
            num_refused += 1
    assert num_refused > 5
