"""A client of HTTP/2 as tests play it, which writes any frames and reads those of the server; and servers for it."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpack import Decoder, Encoder

from moestro.gateway.picker.grpc_calls import GrpcCall
from moestro.gateway.picker.http2 import Http2Connection, Http2Stream
from moestro.gateway.picker.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Fields,
    frame,
    settings,
    unpack_head,
)

REQUEST = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/service/Method"),
    (":authority", "picker"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
HELLO = PREFACE + settings({})


@dataclass
class Frame:
    kind: int
    flags: int
    stream_id: int
    payload: bytes


def frames_in(data: bytes) -> Iterator[Frame]:
    at = 0
    while at < len(data):
        high, low, kind, flags, stream_id = unpack_head(data, at)
        end = at + 9 + (high << 16 | low)
        assert end <= len(data), "the server has sent a part of a frame"
        yield Frame(kind, flags, stream_id, data[at + 9 : end])
        at = end


class Writer:
    """Writes the frames of a client, with the state of its header table."""

    def __init__(self) -> None:
        self._encoder = Encoder()

    def block(self, fields: Sequence[tuple[str, str]] = REQUEST) -> bytes:
        return self._encoder.encode(fields)

    def headers(self, stream_id: int, fields: Sequence[tuple[str, str]] = REQUEST, *, ends: bool = False) -> bytes:
        return frame(HEADERS, END_HEADERS | (END_STREAM if ends else 0), stream_id, self.block(fields))

    def split_headers(self, stream_id: int, size: int) -> bytes:
        """A request in as many frames as its block has pieces of `size` bytes."""
        block = self.block()
        parts = [block[at : at + size] for at in range(0, len(block), size)]
        kinds = [HEADERS, *[CONTINUATION] * (len(parts) - 1)]
        flags = [*[0] * (len(parts) - 1), END_HEADERS]
        return b"".join(
            frame(kind, flag, stream_id, part) for kind, flag, part in zip(kinds, flags, parts, strict=True)
        )


def data_frame(stream_id: int, data: bytes, *, ends: bool = False) -> bytes:
    return frame(DATA, END_STREAM if ends else 0, stream_id, data)


@dataclass
class Answers:
    """What a server has sent, by stream."""

    bodies: dict[int, bytes] = field(default_factory=dict)
    heads: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    resets: dict[int, int] = field(default_factory=dict)
    credits: dict[int, int] = field(default_factory=dict)
    others: list[Frame] = field(default_factory=list)
    goaway: int | None = None
    text: str = ""


class Reader:
    """Reads what a server sends. Its header blocks must be readable on their own, whatever was sent before."""

    def __init__(self) -> None:
        self.found = Answers()

    def read(self, data: bytes) -> Answers:
        found = self.found
        for each in frames_in(data):
            if each.kind == DATA:
                assert each.stream_id not in found.ended
                found.bodies[each.stream_id] = found.bodies.get(each.stream_id, b"") + each.payload
            elif each.kind == HEADERS:
                assert each.flags & END_HEADERS
                assert each.stream_id not in found.ended
                found.heads.setdefault(each.stream_id, []).append(dict(Decoder().decode(each.payload)))
                if each.flags & END_STREAM:
                    found.ended.add(each.stream_id)
            elif each.kind == RST_STREAM:
                found.resets[each.stream_id] = int.from_bytes(each.payload)
            elif each.kind == WINDOW_UPDATE:
                found.credits[each.stream_id] = found.credits.get(each.stream_id, 0) + int.from_bytes(each.payload)
            elif each.kind == GOAWAY:
                found.goaway, found.text = int.from_bytes(each.payload[4:8]), each.payload[8:].decode()
            else:
                found.others.append(each)
        return found

    @property
    def num_acks(self) -> int:
        return sum(each.kind == SETTINGS and each.flags == 1 for each in self.found.others)


class Recorder:
    """Receives the streams of a connection, and writes down what happens on each."""

    def __init__(self, *, echoes: bool = False) -> None:
        self.echoes = echoes
        self.streams: dict[int, Recorded] = {}

    def opened(self, stream: Http2Stream, fields: Fields) -> Recorded:
        self.streams[stream.stream_id] = made = Recorded(stream, fields, self.echoes)
        return made


class Recorded:
    def __init__(self, stream: Http2Stream, fields: Fields, echoes: bool) -> None:
        self.stream, self.fields, self.echoes = stream, fields, echoes
        self.body = bytearray()
        self.is_half_closed = self.is_closed = False

    def received(self, data: bytes, begin: int, end: int) -> None:
        assert begin < end
        if self.echoes:
            if not self.body:
                self.stream.send_head(b"\x88")
            self.stream.send(data[begin:end])
        self.body += data[begin:end]

    def half_closed(self) -> None:
        assert not self.is_half_closed
        self.is_half_closed = True
        if self.echoes:
            self.stream.end(b"\x88")

    def closed(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class Pair:
    """A server's connection and the client before it. The server's first frames have been read."""

    def __init__(self, *, echoes: bool = False, hello: bytes = HELLO) -> None:
        self.host = Recorder(echoes=echoes)
        self.connection = Http2Connection(self.host, 0)
        self.writer, self.reader = Writer(), Reader()
        self.now_ns = 0
        self.send(hello)

    def send(self, data: bytes) -> Answers:
        """Let the server read `data`, and return all that it has sent so far."""
        self.connection.receive(data, self.now_ns)
        return self.reader.read(self.connection.take())

    @property
    def answers(self) -> Answers:
        return self.reader.found


def packed(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BL", flag, len(message)) + message


class Handler:
    """Answers a call of gRPC: sends each message back, and ends with its client."""

    def __init__(self, call: GrpcCall) -> None:
        self.call = call
        self.messages: list[bytes] = []
        self.num_closed = 0

    def message(self, data: bytes) -> None:
        self.messages.append(data)
        self.call.send(data)

    def half_closed(self) -> None:
        self.call.end()

    def closed(self) -> None:
        self.num_closed += 1
