"""The core of the picker: whatever messages come in whatever order, nothing is left counted."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from gateway.rig import reading_of, settings_of
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import DrainingError
from moestro.gateway.app import RouterApp, assemble
from moestro.web.ports.faults import Faults

pytest.importorskip("hpack")

from endpoint_picker.pickers import FULL_DUPLEX, SERVED, http_headers, metadata_of, request_headers, trailers
from support.http2_peer import HELLO, Writer, data_frame, packed

from moestro.gateway.picker import ext_proc_pb2
from moestro.gateway.picker.exchange import AfterSending, MessageOrderError, PickedExchange, PickerContext
from moestro.gateway.picker.ext_proc_pb2 import HttpBody, ProcessingRequest, ProcessingResponse
from moestro.gateway.picker.grpc_calls import PartialMessages, open_call
from moestro.gateway.picker.http2 import Http2Connection
from moestro.gateway.picker.http2_frames import Http2Code, reset
from moestro.gateway.picker.messages import BodyPiece
from moestro.gateway.picker.port import ProcessCall

MAX_BODY_BYTES = 100_000
ENDPOINTS = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
PATHS = ("/v1/completions", "/v1/chat/completions", "/sleep", "/v1/models", "//", "", "/health", "/v1/%63ompletions")
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(["x-request-id", "content-encoding", "authorization", "host", "via", "content-length", "te"]),
        st.sampled_from(["", "a", "gzip", "Bearer x", "99999999", "é", "a" * 300, "1.1 moestro"]),
    ),
    max_size=3,
)
BODIES = st.sampled_from([b"", b"{", b'{"prompt": "x"}', b'{"model": 1}', b"\xff" * 40, b"x" * 70_000, b"data: {}\n\n"])
SUBSETS = st.none() | st.lists(st.sampled_from([*ENDPOINTS, "", "x"]), max_size=3) | st.integers() | st.booleans()
ENDS = st.booleans()
HEADS = st.builds(
    request_headers,
    path=st.sampled_from(PATHS),
    method=st.sampled_from(["POST", "GET", "DELETE", ""]),
    has_body=ENDS,
    headers=HEADERS,
    subset=SUBSETS,
    client=st.sampled_from(["192.0.2.7:1", "[::1]:80", "", "x"]),
    mode=st.sampled_from([FULL_DUPLEX] * 4 + [0, 7]),
)
GOOD_HEADS = st.builds(request_headers, subset=st.none() | st.just(list(ENDPOINTS[:2])))
REQUEST_PIECES = st.builds(lambda body, end: {"request_body": HttpBody(body=body, end_of_stream=end)}, BODIES, ENDS)
LAST_PIECES = st.builds(lambda body: {"request_body": HttpBody(body=body, end_of_stream=True)}, BODIES)
ANSWER_PIECES = st.builds(lambda body, end: {"response_body": HttpBody(body=body, end_of_stream=end)}, BODIES, ENDS)
ANSWER_HEADS = st.builds(
    lambda status, served, end: {
        "response_headers": http_headers({":status": status, "content-type": "text/event-stream"}, end=end),
        "metadata_context": metadata_of({"envoy.lb": {SERVED: served}}),
    },
    st.sampled_from(["200", "200", "503", "500", "429", "", "x", "20"]),
    st.sampled_from([*ENDPOINTS, "192.0.2.1:80", ""]),
    ENDS,
)
TRAILERS = st.sampled_from([{"request_trailers": trailers()}, {"response_trailers": trailers()}, {}])
ANY = st.one_of(HEADS, REQUEST_PIECES, ANSWER_PIECES, ANSWER_HEADS, TRAILERS)
# What a proxy sends for one request, cut off anywhere, and with a message that does not belong there.
ORDERLY = st.builds(
    lambda head, last, answer, pieces, length, stray, place: [
        *[head, last, answer, *pieces][:length][:place],
        *stray,
        *[head, last, answer, *pieces][:length][place:],
    ],
    GOOD_HEADS,
    LAST_PIECES,
    ANSWER_HEADS,
    st.lists(ANSWER_PIECES, max_size=3),
    st.integers(1, 6),
    st.lists(ANY, max_size=1),
    st.integers(0, 6),
)
EXCHANGES = st.lists(st.one_of(ORDERLY, ORDERLY, st.lists(ANY, max_size=5)), min_size=4, max_size=4)


def router() -> tuple[RouterApp, PickerContext]:
    given = settings_of(engine=tuple(f"http://{endpoint}" for endpoint in ENDPOINTS))
    app = assemble(given, reading_of(given.routing), Faults())
    for endpoint in ENDPOINTS:
        fleet = app.shared.fleet
        [engine] = fleet.add(endpoint, f"http://{endpoint}", pool=FakePool(endpoint), head=None).engines
        engine.health.checked(time.monotonic_ns(), passed=True)
        fleet.look(engine, time.monotonic_ns())
    context = PickerContext(
        shared=app.shared,
        admission=app.admission,
        after=AfterSending(lambda run: None),
        memory=app.clients.memory,
        max_body_bytes=MAX_BODY_BYTES,
        max_endpoints=3,
        doubt=lambda engine: None,
    )
    return app, context


class FakePool:
    """Where an engine is; nothing connects to it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.arrived_ns = 0


@settings(max_examples=300)
@given(EXCHANGES, st.randoms(use_true_random=False), st.integers(-1, 10))
def test_law_whatever_comes_nothing_is_left_counted(scripts, order, hangs_at):
    """Messages of four exchanges, mixed; an engine hangs and a drain ends in the middle."""
    app, context = router()
    numbers = [number for number, script in enumerate(scripts) for _ in script]
    order.shuffle(numbers)
    scripts = [iter(script) for script in scripts]
    sent = [(number, next(scripts[number])) for number in numbers]
    pushed = []
    exchanges = [PickedExchange(context, "10.0.0.1", pushed.append) for _ in range(4)]
    for at, (number, fields) in enumerate(sent):
        exchange = exchanges[number]
        was_over = exchange.is_over
        try:
            responses = exchange.receive(ProcessingRequest(**fields), time.monotonic_ns())
            if exchange.is_complete:
                assert not responses
                request, model = app.admission.read(exchange.incoming, time.monotonic_ns())
                responses = exchange.pick(request, model, time.monotonic_ns())
                assert responses
            assert not (was_over and responses)
            for response in responses:
                assert ProcessingResponse.FromString(response).WhichOneof("response")
        except MessageOrderError:
            exchange.closed()
        if at == hangs_at:
            for request_id in app.shared.fleet.router.in_flight_on(0):
                app.shared.active[request_id].engine_hangs()
    for exchange in exchanges[:2]:
        exchange.closed()
    for running in list(app.shared.active.values()):
        running.expire()
        running.refuse(DrainingError())
    for exchange in exchanges:
        exchange.closed()
    assert app.shared.fleet.router.num_in_flight == 0
    assert not app.shared.active
    assert app.clients.memory.num_bytes == 0
    assert all(engine.num_streaming == 0 for engine in app.shared.fleet)


class Served:
    """A connection whose calls are exchanges, without sockets."""

    peer = "10.0.0.1"

    def __init__(self, context: PickerContext) -> None:
        self.context, self.partials = context, PartialMessages()
        self.connection = Http2Connection(self, 0)
        self.connection.receive(HELLO, 0)

    def opened(self, stream, fields):
        methods = {b"/service/Method": lambda call: ProcessCall(self.context, call)}
        return open_call(stream, fields, methods, self, self.partials)

    def flush(self) -> None:
        pass


WAYS_TO_END = {
    "reset": lambda served: served.connection.receive(reset(1, Http2Code.CANCEL), 0),
    "half closed": lambda served: served.connection.receive(data_frame(1, b"", ends=True), 0),
    "connection lost": lambda served: served.connection.lost(),
    "no message of Envoy's": lambda served: served.connection.receive(data_frame(1, packed(b"\xff")), 0),
    "a message out of order": lambda served: served.connection.receive(data_frame(1, packed(b"")), 0),
    "half a message": lambda served: served.connection.receive(data_frame(1, b"\0", ends=True), 0),
}


@pytest.mark.parametrize("way", WAYS_TO_END)
@pytest.mark.parametrize("num_messages", range(4))
def test_a_call_that_ends_in_any_way_leaves_nothing_counted(num_messages, way):
    app, context = router()
    served = Served(context)
    answer = {"response_headers": http_headers({":status": "200"}, end=False)}
    body = {"request_body": HttpBody(body=b'{"prompt": "x"}', end_of_stream=True)}
    messages = [ProcessingRequest(**fields).SerializeToString() for fields in (request_headers(), body, answer)]
    served.connection.receive(Writer().headers(1), 0)
    for message in messages[:num_messages]:
        served.connection.receive(data_frame(1, packed(message)), 0)
    assert app.shared.fleet.router.num_in_flight == (num_messages >= 2)
    assert served.connection.num_streams == 1
    WAYS_TO_END[way](served)
    assert app.shared.fleet.router.num_in_flight == 0
    assert not app.shared.active
    assert not served.connection.num_streams


ANSWER = {"response_headers": http_headers({":status": "200"}, end=False)}
LAST_OF_REQUEST = {"request_body": HttpBody(body=b'{"prompt": "x"}', end_of_stream=True)}
LAST_OF_ANSWER = {"response_body": HttpBody(body=b"{}", end_of_stream=True)}


def passes(app: RouterApp, exchange: PickedExchange, *messages: dict[str, object]) -> int:
    """Let messages arrive, and return the number of responses to the last one."""
    responses = []
    for fields in messages:
        responses = exchange.receive(ProcessingRequest(**fields), time.monotonic_ns())
        if exchange.is_complete:
            request, model = app.admission.read(exchange.incoming, time.monotonic_ns())
            responses = exchange.pick(request, model, time.monotonic_ns())
    return len(responses)


def test_an_answer_is_returned_before_it_is_counted():
    app, context = router()
    scheduled = []
    context.after = AfterSending(scheduled.append)
    exchange = PickedExchange(context, "10.0.0.1", [].append)
    assert passes(app, exchange, request_headers(), LAST_OF_REQUEST, ANSWER, LAST_OF_ANSWER) == 1
    assert exchange.is_over
    assert (app.shared.fleet.router.num_in_flight, len(app.shared.active)) == (1, 1)
    [run] = scheduled
    run()
    assert (app.shared.fleet.router.num_in_flight, len(app.shared.active)) == (0, 0)
    assert sum(engine.counts.statuses[200] for engine in app.shared.fleet) == 1


def test_a_decision_sees_an_answer_that_has_just_ended():
    app, context = router()
    first, second = (PickedExchange(context, "10.0.0.1", [].append) for _ in range(2))
    passes(app, first, request_headers(), LAST_OF_REQUEST)
    passes(app, second, request_headers())
    passes(app, first, ANSWER, LAST_OF_ANSWER)
    passes(app, second, LAST_OF_REQUEST)
    assert app.shared.fleet.router.num_in_flight == 1


def test_an_exchange_whose_note_fails_ends_and_the_others_are_counted():
    app, context = router()
    first, second = (PickedExchange(context, "10.0.0.1", [].append) for _ in range(2))
    for exchange in (first, second):
        passes(app, exchange, request_headers(), LAST_OF_REQUEST)
    first._sent_ns = None  # What a bug could leave.
    for exchange in (first, second):
        passes(app, exchange, ANSWER, LAST_OF_ANSWER)
    context.after.run()
    assert (app.shared.fleet.router.num_in_flight, len(app.shared.active)) == (0, 0)


def test_a_body_in_one_piece_and_an_empty_one_is_not_copied():
    _, context = router()
    exchange, body = PickedExchange(context, "10.0.0.1", [].append), b'{"prompt": "x"}'
    exchange.receive(ProcessingRequest(**request_headers()), 0)
    exchange.receive_piece(BodyPiece("request_body", body, is_last=False), 0)
    assert not exchange.is_complete
    exchange.receive_piece(BodyPiece("request_body", b"", is_last=True), 0)
    assert exchange.is_complete
    assert exchange.incoming.body is body


def test_messages_are_those_of_the_proto_file():
    source = Path(ext_proc_pb2.__file__).with_name("ext_proc.proto").read_text()
    fields = re.findall(r"^ +(?:repeated )?[\w.]+(?:<.*>)? (\w+) = (\d+);", source, re.MULTILINE)
    messages = ext_proc_pb2.DESCRIPTOR.message_types_by_name
    assert sorted(messages) == sorted(re.findall(r"^message (\w+)", source, re.MULTILINE))
    assert sorted((field.name, str(field.number)) for each in messages.values() for field in each.fields) == sorted(
        fields
    )
