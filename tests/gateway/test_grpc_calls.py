"""Calls of gRPC without sockets: messages that span frames, refusals with their status, and the health service."""

from __future__ import annotations

import struct

import pytest

pytest.importorskip("hpack")
pytest.importorskip("google.protobuf")

from support.http2_peer import HELLO, REQUEST, Answers, Handler, Reader, Writer, data_frame, packed

from moestro.gateway.picker import grpc_calls
from moestro.gateway.picker.grpc_calls import MAX_MESSAGE_BYTES, GrpcCall, GrpcStatus, PartialMessages, open_call
from moestro.gateway.picker.health_service import HealthService
from moestro.gateway.picker.http2 import Http2Connection, Http2Stream, StreamReceiver
from moestro.gateway.picker.http2_frames import END_HEADERS, MAX_FRAME_BYTES, RST_STREAM, Fields, frame


class Server:
    """A connection with the method `/service/Method` and the health service, and its client."""

    peer = "10.0.0.1"

    def __init__(self) -> None:
        self.handlers: list[Handler] = []
        self.health = HealthService()
        self.partials = PartialMessages()
        self.connection = Http2Connection(self, 0)
        self.writer, self.reader = Writer(), Reader()
        self.num_flushes = 0
        self.send(HELLO)

    def opened(self, stream: Http2Stream, fields: Fields) -> StreamReceiver:
        methods = {b"/service/Method": self._method, **self.health.methods}
        return open_call(stream, fields, methods, self, self.partials)

    def _method(self, call: GrpcCall) -> Handler:
        self.handlers.append(Handler(call))
        return self.handlers[-1]

    def flush(self) -> None:
        self.num_flushes += 1
        self.reader.read(self.connection.take())

    def send(self, data: bytes) -> Answers:
        self.connection.receive(data, 0)
        return self.reader.read(self.connection.take())

    def call(self, stream_id: int, *messages: bytes, path: str = "/service/Method", ends: bool = False) -> Answers:
        fields = [(name, path if name == ":path" else value) for name, value in REQUEST]
        body = b"".join(map(packed, messages))
        opened = self.writer.headers(stream_id, fields, ends=ends and not body)
        return self.send(opened + (data_frame(stream_id, body, ends=ends) if body else b""))

    def status_of(self, stream_id: int) -> tuple[int, str]:
        last = self.reader.found.heads[stream_id][-1]
        return int(last["grpc-status"]), last.get("grpc-message", "")


def test_a_call_gets_its_messages_back_and_a_status():
    server = Server()
    found = server.call(1, b"one", b"", b"three", ends=True)
    assert server.handlers[0].messages == [b"one", b"", b"three"]
    assert found.bodies[1] == packed(b"one") + packed(b"") + packed(b"three")
    assert found.heads[1] == [{":status": "200", "content-type": "application/grpc"}, {"grpc-status": "0"}]
    assert not found.resets
    assert server.handlers[0].call.handler is None  # so that no cycle is left for the collector


def test_messages_may_be_split_and_joined_anywhere():
    messages = [b"", b"a", b"bc" * 40, b"", bytes(300)]
    body = b"".join(map(packed, messages))
    for size in range(1, len(body) + 1):
        server = Server()
        server.call(1)
        for at in range(0, len(body), size):
            server.send(data_frame(1, body[at : at + size]))
        assert server.handlers[0].messages == messages, size
        assert server.partials.num_bytes == 0


def test_the_largest_message_passes_and_a_larger_one_is_refused():
    server = Server()
    server.call(1)
    body = packed(bytes(MAX_MESSAGE_BYTES))
    for at in range(0, len(body), MAX_FRAME_BYTES):
        server.send(data_frame(1, body[at : at + MAX_FRAME_BYTES]))
    assert [len(each) for each in server.handlers[0].messages] == [MAX_MESSAGE_BYTES]
    server.call(3)
    server.send(data_frame(3, struct.pack(">BL", 0, MAX_MESSAGE_BYTES + 1)))
    status, text = server.status_of(3)
    assert (status, text) == (GrpcStatus.RESOURCE_EXHAUSTED, "a message may have 8388608 bytes")
    assert server.handlers[1].num_closed == 1


def test_a_compressed_message_is_refused():
    server = Server()
    server.call(1)
    server.send(data_frame(1, packed(b"x", 1)))
    assert server.status_of(1)[0] == GrpcStatus.UNIMPLEMENTED
    assert server.handlers[0].num_closed == 1
    assert server.reader.found.resets == {1: 0}
    server.send(data_frame(1, packed(b"y")))
    assert not server.handlers[0].messages


def test_incomplete_messages_are_bounded_for_a_connection(monkeypatch):
    monkeypatch.setattr(grpc_calls, "_MAX_PARTIAL_BYTES", 100)
    server = Server()
    for number in (1, 3, 5):
        server.call(number)
        server.send(data_frame(number, packed(bytes(100))[:40]))
    assert server.status_of(5)[0] == GrpcStatus.RESOURCE_EXHAUSTED
    assert server.handlers[2].num_closed == 1
    assert server.partials.num_bytes == 80
    server.send(frame(RST_STREAM, 0, 1, bytes(4)))
    server.send(data_frame(3, bytes(65)))
    assert server.partials.num_bytes == 0
    assert server.handlers[0].num_closed == 1
    assert server.handlers[1].messages == [bytes(100)]


def test_a_call_that_ends_within_a_message_fails():
    server = Server()
    server.call(1)
    server.send(data_frame(1, b"\0\0", ends=True))
    assert server.status_of(1)[0] == GrpcStatus.INTERNAL
    assert server.handlers[0].num_closed == 1
    assert server.partials.num_bytes == 0


def test_a_client_that_leaves_closes_its_call_once():
    server = Server()
    server.call(1, b"x")
    server.send(frame(RST_STREAM, 0, 1, bytes(4)))
    server.connection.lost()
    assert server.handlers[0].num_closed == 1
    server.handlers[0].call.send(b"late")
    server.handlers[0].call.end()
    server.flush()
    assert server.reader.found.ended == set()


@pytest.mark.parametrize(
    ("changes", "head"),
    [
        ({":method": "GET"}, {":status": "405"}),
        ({"content-type": "application/json"}, {":status": "415"}),
        ({"content-type": "application/grpc+json"}, {":status": "415"}),
        ({"te": "-"}, {"grpc-status": "2", "grpc-message": "te: trailers is missing"}),
        ({":path": "/service/Other"}, {"grpc-status": "12", "grpc-message": "the method is unknown"}),
        ({":path": "*"}, {"grpc-status": "12"}),
    ],
)
def test_a_request_that_is_not_served_ends_with_its_head(changes, head):
    server = Server()
    fields = [(name, changes.get(name, value)) for name, value in REQUEST if changes.get(name) != "-"]
    found = server.send(server.writer.headers(1, fields) + data_frame(1, packed(b"x")))
    [only] = found.heads[1]
    assert head.items() <= only.items()
    assert only[":status"] == head.get(":status", "200")
    assert found.ended == {1}
    assert not server.handlers


@pytest.mark.parametrize("kind", ["application/grpc+proto", "application/grpc; charset=utf-8", "Application/gRPC"])
def test_the_usual_content_types_are_served(kind):
    server = Server()
    fields = [(name, kind if name == "content-type" else value) for name, value in REQUEST]
    server.send(server.writer.headers(1, fields))
    assert len(server.handlers) == 1


def test_a_status_has_its_text_in_percent_encoding():
    server = Server()
    server.call(1)
    server.handlers[0].call.end(GrpcStatus.INVALID_ARGUMENT, "100 % é\n" + "x" * 1000)
    server.flush()
    status, text = server.status_of(1)
    assert status == GrpcStatus.INVALID_ARGUMENT
    assert text == "100 %25 %C3%A9%0A" + "x" * 492


def test_constant_blocks_leave_the_clients_table_as_it_is():
    server = Server()
    server.call(1, b"x", ends=True)
    server.call(3, path="/none")
    # `Reader` decodes each block on its own; the entries of a table would be missing there.
    assert len(server.reader.found.heads[1]) + len(server.reader.found.heads[3]) == 3


# --- the health service

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
NAME = b"\x0a\x04name"  # HealthCheckRequest(service="name")


def statuses(body: bytes) -> list[int]:
    """The statuses of HealthCheckResponses."""
    found = []
    while body:
        assert body[:6] == b"\0\0\0\0\2\x08"
        found.append(body[6])
        body = body[7:]
    return found


def test_a_check_answers_the_status_of_a_name():
    server = Server()
    server.health.set("name", is_serving=True)
    found = server.call(1, NAME, path=CHECK, ends=True)
    assert (statuses(found.bodies[1]), server.status_of(1)[0]) == ([1], GrpcStatus.OK)
    server.health.set("name", is_serving=False)
    assert statuses(server.call(3, NAME, path=CHECK, ends=True).bodies[3]) == [2]
    assert statuses(server.call(5, b"", path=CHECK, ends=True).bodies[5]) == [1]  # the server itself
    server.call(7, b"\x0a\x05other", path=CHECK, ends=True)
    assert server.status_of(7)[0] == GrpcStatus.NOT_FOUND
    assert not found.resets


def test_a_watch_gets_each_change_until_it_ends():
    server = Server()
    found = server.call(1, NAME, path=WATCH, ends=True)
    assert statuses(found.bodies[1]) == [3]
    server.health.set("name", is_serving=True)
    server.health.set("another", is_serving=True)
    server.health.set("name", is_serving=False)
    assert statuses(found.bodies[1]) == [3, 1, 2]
    server.call(3, NAME, path=WATCH)
    server.send(frame(RST_STREAM, 0, 1, bytes(4)))
    num_flushes = server.num_flushes
    server.health.set("name", is_serving=True)
    assert server.num_flushes == num_flushes + 1
    assert statuses(found.bodies[3]) == [2, 1]
    server.health.close()
    assert server.status_of(3)[0] == GrpcStatus.UNAVAILABLE
    assert not server.connection.num_streams


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHECK, b"", GrpcStatus.INVALID_ARGUMENT),
        (WATCH, b"", GrpcStatus.INVALID_ARGUMENT),
        (CHECK, packed(b"\x0a\x09"), GrpcStatus.INTERNAL),
        (WATCH, packed(b"\x0a\x09"), GrpcStatus.INTERNAL),
        (WATCH, packed(NAME) + packed(NAME), GrpcStatus.INVALID_ARGUMENT),
    ],
)
def test_questions_that_are_none_are_refused(path, body, status):
    server = Server()
    server.call(1, path=path)
    server.send(data_frame(1, body, ends=True))
    assert server.status_of(1)[0] == status
    server.health.set("name", is_serving=True)
    assert not server.connection.num_streams


def test_a_block_with_a_long_field_has_its_length_in_several_bytes():
    for size in (126, 127, 128, 127 + 127, 127 + 128, 40_000):
        block = grpc_calls._field(b"a", b"x" * size)
        found = Reader().read(frame(1, END_HEADERS, 1, block))
        assert found.heads[1] == [{"a": "x" * size}]
