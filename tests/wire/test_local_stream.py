"""Messages over a local stream socket: whole and in order, however the stream is cut, and never too long."""

from __future__ import annotations

import random
import socket
import struct

import pytest

from moestro.wire.messages import MAX_MESSAGE_BYTES
from moestro.wire.sockets import FrameError, FrameReader, LocalStream


def frame(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def test_law_messages_do_not_depend_on_how_the_stream_is_cut():
    rng = random.Random(0)
    for _ in range(300):
        messages = [rng.randbytes(rng.choice((0, 1, 5, 300))) for _ in range(rng.randrange(20))]
        data, reader, got = b"".join(map(frame, messages)), FrameReader(), []
        while data:
            cut = rng.choice((1, 3, 4, 7, 200, 5000))
            got += reader.feed(data[:cut])
            data = data[cut:]
        assert got == messages


def test_a_message_that_is_too_long_is_refused_at_its_first_bytes():
    reader = FrameReader()
    assert reader.feed(frame(b"good") + struct.pack("<I", MAX_MESSAGE_BYTES)) == [b"good"]
    with pytest.raises(FrameError):
        FrameReader().feed(struct.pack("<I", MAX_MESSAGE_BYTES + 1))


def test_what_the_kernel_does_not_take_is_queued_and_sent_later():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sender, reader = map(LocalStream, ends)
    messages = [bytes([i]) * 100_000 for i in range(20)]
    for message in messages:
        sender.send(message)
    assert sender.num_queued > 1
    got = []
    while len(got) < len(messages):
        got += reader.receive()
        sender.flush()
    assert got == messages
    assert sender.num_queued == 0
    assert reader.receive() == []
    sender.close()
    assert reader.receive() is None
    with pytest.raises(OSError, match=r"."):
        reader.send(b"to no reader")
    reader.close()
