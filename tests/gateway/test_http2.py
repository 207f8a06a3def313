"""The server's end of HTTP/2 without sockets: its answers to frames in any pieces, and to frames that no peer sends."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("hpack")

from support.http2_peer import HELLO, REQUEST, Pair, data_frame

from moestro.gateway.picker.http2 import (
    CONNECTION_WINDOW,
    MAX_STREAMS,
    MAX_UNSENT_BYTES,
    STREAM_WINDOW,
)
from moestro.gateway.picker.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_BYTES,
    MAX_FRAME_SIZE,
    MAX_HEADER_BYTES,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    FrameBudget,
    Http2Code,
    frame,
    reset,
    settings,
    window_update,
)

# --- a usual conversation


def test_the_first_frames_state_limits_and_windows_and_settings_are_acknowledged():
    pair = Pair()
    [first, acknowledged] = [each for each in pair.answers.others if each.kind == SETTINGS]
    given = {first.payload[at + 1]: int.from_bytes(first.payload[at + 2 : at + 6]) for at in range(0, 18, 6)}
    assert given == {3: MAX_STREAMS, 4: STREAM_WINDOW, 6: MAX_HEADER_BYTES}
    assert (acknowledged.flags, acknowledged.payload) == (ACK, b"")
    assert pair.answers.credits == {0: CONNECTION_WINDOW - 65_535}


def test_a_ping_comes_back_with_its_bytes_and_an_acknowledged_one_does_not():
    pair = Pair()
    pair.send(frame(PING, 0, 0, b"12345678") + frame(PING, ACK, 0, b"abcdefgh"))
    assert [(each.flags, each.payload) for each in pair.answers.others if each.kind == PING] == [(ACK, b"12345678")]


def conversation(pair: Pair) -> bytes:
    """Frames of all kinds that a client sends."""
    writer = pair.writer
    opening = writer.headers(1)  # The first block, because the blocks after it use its table.
    padded = frame(DATA, PADDED, 1, bytes((3,)) + b"padded" + bytes(3))
    with_priority = frame(HEADERS, END_HEADERS | HAS_PRIORITY | PADDED, 3, b"\2" + bytes(5) + writer.block() + bytes(2))
    return b"".join(
        (
            HELLO,
            opening,
            data_frame(1, b"one"),
            frame(PING, 0, 0, bytes(8)),
            with_priority,
            frame(PRIORITY, 0, 3, bytes(5)),
            padded,
            frame(0x20, 0xFF, 3, b"unknown"),
            data_frame(3, b"three"),
            window_update(0, 1000),
            window_update(3, 1000),
            data_frame(1, b"", ends=True),
            writer.split_headers(5, 3),
            data_frame(5, b"five", ends=True),
            frame(SETTINGS, ACK, 0),
            writer.headers(3, [("x-checksum", "1")], ends=True),
        )
    )


def outcome(pair: Pair) -> tuple[object, ...]:
    streams = {number: (each.body, each.is_half_closed, each.fields) for number, each in pair.host.streams.items()}
    found = pair.answers
    return streams, found.bodies, found.ended, found.resets, found.goaway, len(found.others)


def test_a_conversation_split_at_every_byte_has_the_same_outcome():
    whole = Pair(echoes=True, hello=b"")
    data = conversation(whole)
    whole.send(data)
    expected = outcome(whole)
    assert whole.answers.bodies == {1: b"onepadded", 3: b"three", 5: b"five"}
    assert whole.answers.ended == {1, 3, 5}
    assert whole.answers.goaway is None
    for at in range(1, len(data)):
        pair = Pair(echoes=True, hello=b"")
        pair.send(data[:at])
        pair.send(data[at:])
        assert outcome(pair) == expected, at
    bytewise = Pair(echoes=True, hello=b"")
    for byte in data:
        bytewise.send(bytes((byte,)))
    assert outcome(bytewise) == expected


def test_streams_that_interleave_keep_their_bytes_apart():
    pair, numbers = Pair(echoes=True), range(1, 400, 2)
    randoms = random.Random(3)
    pieces = {number: [b"%d:%d;" % (number, at) for at in range(5)] for number in numbers}
    pair.send(b"".join(pair.writer.headers(number) for number in numbers))
    order = [number for number in numbers for _ in range(5)]
    randoms.shuffle(order)
    left = {number: iter(pieces[number]) for number in numbers}
    for number in order:
        pair.send(data_frame(number, next(left[number])))
    pair.send(b"".join(data_frame(number, b"", ends=True) for number in numbers))
    assert pair.answers.bodies == {number: b"".join(pieces[number]) for number in numbers}
    assert pair.answers.ended == set(numbers)
    assert not pair.connection.num_streams


def test_an_answer_that_ends_before_its_request_stops_the_request_without_an_error():
    pair = Pair()
    pair.send(pair.writer.headers(1) + data_frame(1, b"x"))
    pair.host.streams[1].stream.end(b"\x88")
    pair.send(data_frame(1, b"late") + pair.writer.headers(1, [("a", "b")], ends=True) + reset(1, Http2Code.CANCEL))
    assert pair.answers.ended == {1}
    assert pair.answers.resets == {1: Http2Code.NO_ERROR}
    assert pair.host.streams[1].body == b"x"
    assert not pair.host.streams[1].is_closed
    assert pair.answers.goaway is None


def test_a_reset_of_the_peer_closes_the_stream_alone():
    pair = Pair(echoes=True)
    pair.send(pair.writer.headers(1) + pair.writer.headers(3) + reset(1, Http2Code.CANCEL))
    assert pair.host.streams[1].is_closed
    pair.send(data_frame(3, b"x", ends=True))
    assert pair.answers.bodies == {3: b"x"}
    assert not pair.answers.resets


def test_a_drain_lets_streams_finish_and_refuses_new_ones():
    pair = Pair(echoes=True)
    pair.send(pair.writer.headers(1))
    pair.connection.drain()
    pair.send(pair.writer.headers(3) + data_frame(1, b"x", ends=True))
    assert pair.answers.goaway == Http2Code.NO_ERROR
    assert pair.answers.resets == {3: Http2Code.REFUSED_STREAM}
    assert pair.answers.bodies == {1: b"x"}
    assert not pair.connection.is_over


def test_a_lost_connection_closes_its_streams():
    pair = Pair()
    pair.send(pair.writer.headers(1) + pair.writer.headers(3))
    pair.connection.lost()
    assert all(each.is_closed for each in pair.host.streams.values())
    pair.host.streams[1].stream.end(b"\x88")
    assert pair.send(data_frame(1, b"x")).ended == set()


# --- header blocks


def test_repeated_requests_are_read_as_the_table_is_now():
    """Blocks with indices alone mean something else once another block has changed the table."""
    pair, other = Pair(), [*REQUEST, ("x-a", "1")]
    expected = []
    requests = [REQUEST, REQUEST, other, REQUEST, other, [*REQUEST, ("x-b", "2")], other, REQUEST]
    for number, fields in enumerate(requests):
        pair.send(pair.writer.headers(2 * number + 1, fields))
        expected.append({name.encode(): value.encode() for name, value in fields})
    assert [each.fields for each in pair.host.streams.values()] == expected


def test_the_same_indices_after_another_insertion_are_another_request():
    """The block 0xbe is the newest entry of the table, whatever that is."""
    pair = Pair()
    static = b"\x83\x86\x84"  # POST, http, /
    for number, value in enumerate((b"1", b"2", b"3")):
        inserted = static + b"\x40\x01a\x01" + value
        pair.send(frame(HEADERS, END_HEADERS, 4 * number + 1, inserted))
        pair.send(frame(HEADERS, END_HEADERS, 4 * number + 3, static + b"\xbe"))
        assert pair.host.streams[4 * number + 3].fields[b"a"] == value


BAD_REQUESTS = [
    [each for each in REQUEST if each[0] != ":method"],
    [each for each in REQUEST if each[0] != ":path"],
    [each for each in REQUEST if each[0] != ":scheme"],
    [(name, "" if name == ":path" else value) for name, value in REQUEST],
    [*REQUEST, (":path", "/late")],
    [(":path", "/twice"), *REQUEST],
    [(":status", "200"), *REQUEST],
    [*REQUEST, ("Upper", "x")],
    [*REQUEST, ("connection", "close")],
    [*REQUEST, ("transfer-encoding", "chunked")],
    [*REQUEST, ("te", "gzip")],
    [*REQUEST, ("a", "b\r\nc: d")],
    [*REQUEST, ("a\n", "b")],
    [*REQUEST, ("a", "\0")],
]


@pytest.mark.parametrize("fields", BAD_REQUESTS)
def test_a_request_that_is_not_valid_is_reset_and_others_go_on(fields):
    pair = Pair(echoes=True)
    pair.send(pair.writer.headers(1, fields) + data_frame(1, b"x"))
    pair.send(pair.writer.headers(3) + data_frame(3, b"x", ends=True))
    assert pair.answers.resets == {1: Http2Code.PROTOCOL_ERROR}
    assert pair.answers.bodies == {3: b"x"}
    assert pair.answers.goaway is None


@pytest.mark.parametrize(
    "block",
    [
        b"\xff" * 15_000,  # an index of as many digits
        b"\x7f" + b"\xff" * 9_000 + b"\x01",
        b"\x80",
        b"\xff\xff\x01",
        b"\x40\x05abc",
        b"\x40\x01a\xff\xff\xff\x7f",
        b"\x3f\xff\xff\x7f",
        b"\x82\x20",
        b"\x00\x81\xff\x01a",
        b"\x40",
    ],
)
def test_a_header_block_that_cannot_be_decoded_ends_the_connection(block):
    pair = Pair()
    pair.send(frame(HEADERS, END_HEADERS, 1, block))
    assert pair.answers.goaway == Http2Code.COMPRESSION_ERROR
    assert not pair.host.streams


def test_a_header_list_that_grows_when_unpacked_ends_the_connection():
    pair = Pair()
    field = b"\x40\x01a" + b"\x7f\x80\x1e" + b"x" * 3967  # an entry of the table with almost 4 KiB
    pair.send(frame(HEADERS, END_HEADERS, 1, field + b"\xbe" * 400))
    assert pair.answers.goaway == Http2Code.COMPRESSION_ERROR


# --- flow control


def test_no_more_is_sent_than_tiny_windows_let_pass():
    pair = Pair(echoes=True, hello=PREFACE + settings({INITIAL_WINDOW_SIZE: 3}))
    body = bytes(range(100))
    pair.send(pair.writer.headers(1) + data_frame(1, body, ends=True))
    for size in range(3, 100):
        assert pair.answers.bodies[1] == body[:size]
        assert not pair.answers.ended
        pair.send(window_update(1, 1))
    assert pair.answers.bodies[1] == body
    assert pair.answers.ended == {1}
    assert not pair.answers.resets


def test_the_connections_window_is_shared_and_serves_all_streams():
    pair, numbers = Pair(echoes=True), range(1, 21, 2)
    bodies = {number: bytes((number,)) * 10_000 for number in numbers}
    for number, body in bodies.items():
        pair.send(pair.writer.headers(number) + data_frame(number, body, ends=True))
    assert sum(map(len, pair.answers.bodies.values())) == 65_535
    for _ in range(7):
        before = sum(map(len, pair.answers.bodies.values()))
        pair.send(window_update(0, 5_000))
        assert sum(map(len, pair.answers.bodies.values())) == min(100_000, before + 5_000)
    assert pair.answers.bodies == bodies
    assert pair.answers.ended == set(numbers)


def test_a_smaller_first_window_makes_windows_negative():
    pair = Pair(echoes=True)
    pair.send(pair.writer.headers(1) + data_frame(1, bytes(1000)))
    pair.send(settings({INITIAL_WINDOW_SIZE: 500}))
    pair.send(data_frame(1, b"x" * 10))
    assert len(pair.answers.bodies[1]) == 1000
    pair.send(window_update(1, 500))
    assert len(pair.answers.bodies[1]) == 1000  # the window is 0 now
    pair.send(window_update(1, 4))
    assert pair.answers.bodies[1] == bytes(1000) + b"xxxx"
    pair.send(settings({INITIAL_WINDOW_SIZE: 65_535}))
    assert pair.answers.bodies[1] == bytes(1000) + b"x" * 10


def test_what_is_received_is_credited_in_halves_of_the_windows():
    pair, part = Pair(), bytes(MAX_FRAME_BYTES)
    pair.send(pair.writer.headers(1))
    before = pair.answers.credits[0]
    for _ in range(CONNECTION_WINDOW // MAX_FRAME_BYTES):
        pair.send(data_frame(1, part))
    assert pair.answers.credits == {0: before + CONNECTION_WINDOW, 1: CONNECTION_WINDOW}
    assert pair.answers.goaway is None
    assert not pair.answers.resets


def test_a_stream_whose_receiver_is_busy_gets_one_window_and_no_more():
    pair, part = Pair(), bytes(MAX_FRAME_BYTES)
    pair.send(pair.writer.headers(1) + pair.writer.headers(3))
    held = pair.host.streams[1]
    held.stream.is_held = True
    for _ in range(STREAM_WINDOW // MAX_FRAME_BYTES):
        pair.send(data_frame(1, part))
    assert 1 not in pair.answers.credits
    held.stream.release()
    pair.send(b"")
    assert pair.answers.credits[1] == STREAM_WINDOW
    held.stream.is_held = True
    for _ in range(STREAM_WINDOW // MAX_FRAME_BYTES + 1):
        pair.send(data_frame(1, part))
    assert pair.answers.resets == {1: Http2Code.FLOW_CONTROL_ERROR}
    assert held.is_closed
    assert not pair.host.streams[3].is_closed


def test_a_peer_that_takes_no_answers_can_send_no_more_on_the_stream():
    pair, part = Pair(echoes=True, hello=PREFACE + settings({INITIAL_WINDOW_SIZE: 0})), bytes(MAX_FRAME_BYTES)
    pair.send(pair.writer.headers(1))
    while 1 not in pair.answers.resets:
        pair.send(data_frame(1, part))
    assert len(pair.host.streams[1].body) <= 2 * STREAM_WINDOW
    assert pair.answers.resets == {1: Http2Code.FLOW_CONTROL_ERROR}
    assert pair.answers.goaway is None


def test_answers_that_are_not_taken_are_bounded_for_all_streams_together():
    pair = Pair()
    pair.send(pair.writer.headers(1) + pair.writer.headers(3))
    for number in (1, 3):
        pair.host.streams[number].stream.send(bytes(MAX_UNSENT_BYTES // 2))
    pair.send(b"")
    assert pair.answers.goaway is None  # the window has let 64 KiB pass
    pair.host.streams[1].stream.send(bytes(70_000))
    pair.send(b"")
    assert pair.answers.goaway == Http2Code.ENHANCE_YOUR_CALM
    assert pair.host.streams[1].is_closed
    assert pair.host.streams[3].is_closed


# --- floods

FLOODS = {
    "PING": frame(PING, 0, 0, bytes(8)),
    "acknowledged PING": frame(PING, ACK, 0, bytes(8)),
    "SETTINGS": settings({INITIAL_WINDOW_SIZE: 100}),
    "acknowledged SETTINGS": frame(SETTINGS, ACK, 0),
    "empty DATA": frame(DATA, 0, 1),
    "padded DATA": frame(DATA, PADDED, 1, bytes((9,)) + bytes(9)),
    "DATA of a stream that has ended": frame(DATA, 0, 3, b"x"),
    "PRIORITY": frame(PRIORITY, 0, 1, bytes(5)),
    "unknown": frame(0x77, 0, 0, b""),
    "GOAWAY": frame(GOAWAY, 0, 0, bytes(8)),
    "WINDOW_UPDATE": window_update(1, 1),
    "WINDOW_UPDATE of the connection": window_update(0, 1),
    "RST_STREAM of a stream that has ended": reset(3, Http2Code.CANCEL),
    "trailers of a stream that has ended": frame(HEADERS, END_HEADERS | END_STREAM, 3, b"\x82"),
}


def before_a_flood() -> Pair:
    pair = Pair()
    pair.send(pair.writer.headers(1) + pair.writer.headers(3) + reset(3, Http2Code.CANCEL))
    return pair


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_frames_that_carry_nothing_ends_the_connection(name):
    pair = before_a_flood()
    pair.send(FLOODS[name] * (FrameBudget.BURST + 1))
    assert pair.answers.goaway == Http2Code.ENHANCE_YOUR_CALM
    assert pair.host.streams[1].is_closed


@pytest.mark.parametrize("name", FLOODS)
def test_the_same_frames_at_a_usual_rate_are_no_flood(name):
    pair = before_a_flood()
    for _ in range(1500):
        pair.now_ns += 10**9
        pair.send(FLOODS[name] * 10)
    assert pair.answers.goaway is None


def test_requests_that_are_given_up_at_once_are_a_flood():
    pair = Pair()
    for number in range(1, FrameBudget.BURST, 2):
        pair.send(pair.writer.headers(number) + reset(number, Http2Code.CANCEL))
    assert pair.answers.goaway == Http2Code.ENHANCE_YOUR_CALM
    assert len(pair.host.streams) <= FrameBudget.BURST // 10 + 1


def test_answered_requests_that_end_with_a_reset_are_no_flood():
    """A proxy ends each exchange so."""
    pair = Pair(echoes=True)
    for number in range(1, 6 * FrameBudget.BURST // 5, 2):
        pair.send(pair.writer.headers(number) + data_frame(number, b"x") + window_update(0, 1))
        pair.send(reset(number, Http2Code.CANCEL))
    assert pair.answers.goaway is None


def test_a_header_block_without_end_ends_the_connection():
    for part, most in ((b"", FrameBudget.BURST), (b"\x82" * 1000, 20)):
        pair = Pair()
        pair.send(frame(HEADERS, 0, 1, b"\x82"))
        for _ in range(most + 1):
            pair.send(frame(CONTINUATION, 0, 1, part))
        assert pair.answers.goaway == Http2Code.ENHANCE_YOUR_CALM


def test_header_blocks_that_take_long_to_decode_are_a_flood():
    pair, block = Pair(), b"\x20" * 15_000
    for number in range(1, 400, 2):
        pair.send(frame(HEADERS, END_HEADERS, number, block))
    assert pair.answers.goaway == Http2Code.ENHANCE_YOUR_CALM


def test_more_streams_than_announced_are_refused():
    pair = Pair()
    for number in range(1, 2 * MAX_STREAMS + 4, 2):
        pair.send(pair.writer.headers(number))
    last = 2 * MAX_STREAMS + 1
    assert pair.answers.resets == {last: Http2Code.REFUSED_STREAM, last + 2: Http2Code.REFUSED_STREAM}
    pair.send(reset(1, Http2Code.CANCEL) + pair.writer.headers(last + 4))
    assert len(pair.answers.resets) == 2
    assert pair.answers.goaway is None


# --- frames that no peer sends

OPEN = b"\x83\x86\x84"  # the fields POST, http and /
MALFORMED = {
    "no preface": (b"GET / HTTP/1.1\r\n\r\n", Http2Code.PROTOCOL_ERROR),
    "half a preface, then another": (PREFACE[:10] + b"x" * 20, Http2Code.PROTOCOL_ERROR),
    "no SETTINGS first": (PREFACE + frame(PING, 0, 0, bytes(8)), Http2Code.PROTOCOL_ERROR),
    "DATA first": (PREFACE + frame(DATA, 0, 1, b"x"), Http2Code.PROTOCOL_ERROR),
    "an acknowledgement first": (PREFACE + frame(SETTINGS, ACK, 0), Http2Code.PROTOCOL_ERROR),
    "a frame too large": (HELLO + frame(DATA, 0, 1, bytes(MAX_FRAME_BYTES + 1))[:9], Http2Code.FRAME_SIZE_ERROR),
    "DATA of the connection": (HELLO + frame(DATA, 0, 0, b"x"), Http2Code.PROTOCOL_ERROR),
    "DATA of an idle stream": (HELLO + frame(DATA, 0, 1, b"x"), Http2Code.PROTOCOL_ERROR),
    "DATA of a stream of the server": (HELLO + frame(DATA, 0, 2, b"x"), Http2Code.PROTOCOL_ERROR),
    "HEADERS of the connection": (HELLO + frame(HEADERS, END_HEADERS, 0, OPEN), Http2Code.PROTOCOL_ERROR),
    "HEADERS of an even stream": (HELLO + frame(HEADERS, END_HEADERS, 2, OPEN), Http2Code.PROTOCOL_ERROR),
    "HEADERS with too much padding": (
        HELLO + frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09" + OPEN),
        Http2Code.PROTOCOL_ERROR,
    ),
    "HEADERS without its padding": (HELLO + frame(HEADERS, END_HEADERS | PADDED, 1), Http2Code.FRAME_SIZE_ERROR),
    "HEADERS without its priority": (
        HELLO + frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, b"\0"),
        Http2Code.FRAME_SIZE_ERROR,
    ),
    "DATA with too much padding": (
        HELLO + frame(HEADERS, END_HEADERS, 1, OPEN) + frame(DATA, PADDED, 1, b"\x05abc"),
        Http2Code.PROTOCOL_ERROR,
    ),
    "CONTINUATION alone": (HELLO + frame(CONTINUATION, END_HEADERS, 1, OPEN), Http2Code.PROTOCOL_ERROR),
    "DATA in a header block": (
        HELLO + frame(HEADERS, 0, 1, OPEN) + frame(DATA, 0, 1, b"x"),
        Http2Code.PROTOCOL_ERROR,
    ),
    "PING in a header block": (
        HELLO + frame(HEADERS, 0, 1, OPEN) + frame(PING, 0, 0, bytes(8)),
        Http2Code.PROTOCOL_ERROR,
    ),
    "CONTINUATION of another stream": (
        HELLO + frame(HEADERS, 0, 1, OPEN) + frame(CONTINUATION, END_HEADERS, 3, b""),
        Http2Code.PROTOCOL_ERROR,
    ),
    "RST_STREAM of an idle stream": (HELLO + reset(1, Http2Code.CANCEL), Http2Code.PROTOCOL_ERROR),
    "RST_STREAM of the connection": (HELLO + reset(0, Http2Code.CANCEL), Http2Code.PROTOCOL_ERROR),
    "RST_STREAM of a wrong size": (HELLO + frame(RST_STREAM, 0, 1, b"123"), Http2Code.FRAME_SIZE_ERROR),
    "SETTINGS of a stream": (HELLO + frame(SETTINGS, 0, 1), Http2Code.PROTOCOL_ERROR),
    "SETTINGS of a wrong size": (HELLO + frame(SETTINGS, 0, 0, b"12345"), Http2Code.FRAME_SIZE_ERROR),
    "an acknowledgement with settings": (HELLO + frame(SETTINGS, ACK, 0, bytes(6)), Http2Code.FRAME_SIZE_ERROR),
    "a push setting of 2": (HELLO + settings({ENABLE_PUSH: 2}), Http2Code.PROTOCOL_ERROR),
    "frames too small": (HELLO + settings({MAX_FRAME_SIZE: 16_383}), Http2Code.PROTOCOL_ERROR),
    "frames too large": (HELLO + settings({MAX_FRAME_SIZE: 1 << 24}), Http2Code.PROTOCOL_ERROR),
    "a first window too large": (HELLO + settings({INITIAL_WINDOW_SIZE: 1 << 31}), Http2Code.FLOW_CONTROL_ERROR),
    "many settings": (HELLO + settings(dict.fromkeys(range(100, 300), 0)), Http2Code.ENHANCE_YOUR_CALM),
    "PUSH_PROMISE": (HELLO + frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), Http2Code.PROTOCOL_ERROR),
    "PING of a stream": (HELLO + frame(PING, 0, 1, bytes(8)), Http2Code.PROTOCOL_ERROR),
    "PING of a wrong size": (HELLO + frame(PING, 0, 0, bytes(7)), Http2Code.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of a wrong size": (HELLO + frame(WINDOW_UPDATE, 0, 0, bytes(3)), Http2Code.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of nothing": (HELLO + window_update(0, 0), Http2Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE of an idle stream": (HELLO + window_update(1, 1), Http2Code.PROTOCOL_ERROR),
    "a window too large": (HELLO + window_update(0, (1 << 31) - 1), Http2Code.FLOW_CONTROL_ERROR),
    "windows too large by settings": (
        HELLO
        + frame(HEADERS, END_HEADERS, 1, OPEN)
        + window_update(1, (1 << 31) - 65_536)
        + settings({INITIAL_WINDOW_SIZE: 65_536}),
        Http2Code.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_frame_that_no_peer_sends_ends_the_connection_with_its_code(name):
    data, code = MALFORMED[name]
    for size in (len(data), 1):
        pair = Pair(hello=b"")
        for at in range(0, len(data), size):
            pair.send(data[at : at + size])
        assert pair.answers.goaway == code
        assert pair.connection.is_over
        assert pair.connection.has_failed
        assert not pair.connection.num_streams
        pair.send(HELLO)
        assert pair.connection.take() == b""


STREAM_FAULTS = {
    "DATA after the end": (data_frame(1, b"", ends=True) + data_frame(1, b"x"), Http2Code.STREAM_CLOSED),
    "HEADERS after the end": (
        data_frame(1, b"", ends=True) + frame(HEADERS, END_HEADERS | END_STREAM, 1, b""),
        Http2Code.STREAM_CLOSED,
    ),
    "trailers without the end": (frame(HEADERS, END_HEADERS, 1, b"\x82"), Http2Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE of nothing": (window_update(1, 0), Http2Code.PROTOCOL_ERROR),
    "a window too large": (window_update(1, (1 << 31) - 1), Http2Code.FLOW_CONTROL_ERROR),
}


@pytest.mark.parametrize("name", STREAM_FAULTS)
def test_a_fault_of_one_stream_resets_it_alone(name):
    data, code = STREAM_FAULTS[name]
    pair = Pair()
    pair.send(pair.writer.headers(1) + pair.writer.headers(3) + data)
    assert pair.answers.resets == {1: code}
    assert pair.host.streams[1].is_closed
    assert not pair.host.streams[3].is_closed
    assert pair.answers.goaway is None


def test_random_frames_never_raise_and_end_the_connection_or_are_answered():
    """A fuzz with a fixed seed: conversations whose bytes change, and frames of random fields."""
    randoms = random.Random(20_26)
    num_over = 0
    for _ in range(600):
        pair = Pair(echoes=True, hello=b"")
        data = bytearray(conversation(pair))
        if randoms.random() < 0.5:
            for _ in range(randoms.randrange(1, 6)):
                data[randoms.randrange(len(data))] = randoms.randrange(256)
        else:
            for _ in range(randoms.randrange(1, 40)):
                kind, flags = randoms.randrange(12), randoms.choice((0, 1, 4, 5, 8, 0x20, 0x2D, randoms.randrange(256)))
                payload = randoms.randbytes(randoms.choice((0, 1, 4, 5, 6, 8, 9, 40)))
                data += frame(kind, flags, randoms.choice((0, 1, 3, 5, 7, 9, 2, 1 << 31 | 7)), payload)
        at = 0
        while at < len(data):
            size = randoms.randrange(1, 200)
            pair.send(bytes(data[at : at + size]))
            at += size
        num_over += pair.connection.is_over
        assert pair.connection.is_over == (pair.answers.goaway is not None)
        if not pair.connection.is_over and not pair.connection._rest:
            pair.send(frame(PING, 0, 0, b"still on"))
            assert pair.connection.is_over or pair.answers.others[-1].payload == b"still on"
        pair.connection.lost()
        assert not pair.connection.num_streams
        assert all(each.is_closed or each.stream.is_over for each in pair.host.streams.values())
    assert 100 < num_over < 590
