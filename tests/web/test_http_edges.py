"""What `moestro serve` says to requests at the edge of HTTP, byte by byte."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from dataclasses import dataclass
from typing import Any

import pytest
from support.running import Running, call, complete, is_idle, stream_request, wait_until

POST = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
GARBAGE = b"GARBAGE\r\n\r\n"
BODY = b'{"prompt": "def f(x):", "max_tokens": 2}'
SECRET = b"do-not-repeat-me"


@dataclass
class Received:
    """An answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers["content-type"].startswith("application/json")
        error = json.loads(self.body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error


class Raw:
    """A connection on which bytes are sent as they stand."""

    def __init__(self, server: Running) -> None:
        self.socket = socket.create_connection(server.address, timeout=300)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> Received:
        response = http.client.HTTPResponse(self.socket)
        response.fp = _Unbuffered(self.socket)
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Received(response.status, headers, response.read())

    def is_closed(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True


class _Unbuffered:
    """Reads no more than is requested: what follows is the next answer's."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def readline(self, limit: int = -1) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (byte := self._socket.recv(1)):
            line += byte
        return line

    def read(self, size: int = -1) -> bytes:
        data = b""
        while len(data) != size and (piece := self._socket.recv(size - len(data) if size >= 0 else 65536)):
            data += piece
        return data

    def close(self) -> None:
        pass

    def flush(self) -> None:
        pass


MALFORMED = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SECRET, 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no version": (b"GET /" + SECRET + b"\r\n\r\n", 400),
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /version HTTP/1.1\r\nHost: x\r\nHost: " + SECRET + b"\r\n\r\n", 400),
    "two lengths": (POST.encode() + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
    "length and chunks": (POST.encode() + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a zero byte": (b"GET /version HTTP/1.1\r\nHost: x\r\nX-Key: " + SECRET + b"\x00\r\n\r\n", 400),
    "a folded header": (b"GET /version HTTP/1.1\r\nHost: x\r\nA: b\r\n " + SECRET + b"\r\n\r\n", 400),
    "a space before the colon": (b"GET /version HTTP/1.1\r\nHost: x\r\n" + SECRET + b" : b\r\n\r\n", 400),
    "no path": (b"GET " + SECRET + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "chunks inside": (POST.encode() + b"Transfer-Encoding: chunked, gzip\r\n\r\n", 400),
    "a bad chunk": (POST.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + SECRET + b"\r\n", 400),
    "a long header": (b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: " + SECRET * 5000 + b"\r\n\r\n", 431),
    "a long path": (b"GET /" + SECRET * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    "many headers": (b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 129 + b"\r\n", 431),
}


@pytest.mark.parametrize(("data", "status"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_http_is_refused_in_openais_form_without_an_echo_and_the_connection_ends(fake, data, status):
    with Raw(fake) as raw:
        raw.send(data)
        answer = raw.answer()
        assert answer.status == status
        assert answer.error["code"] == ("head_too_large" if status == 431 else "bad_request")
        assert SECRET not in answer.body
        assert raw.is_closed()


def test_malformed_http_is_one_line_of_the_log_a_minute_without_a_traceback_or_an_echo(fake):
    for data, _ in MALFORMED.values():
        with Raw(fake) as raw:
            raw.send(data)
            raw.answer()
    assert fake.text.count("sent bytes that are not valid HTTP") == 1
    assert "Traceback" not in fake.text
    assert SECRET.decode() not in fake.text


@pytest.mark.parametrize("parts", [(GET + GET + GARBAGE + GET,), (GET, GET, GARBAGE, GET)], ids=["one", "many"])
def test_what_came_before_garbage_is_answered_first_in_one_read_or_in_many(fake, parts):
    with Raw(fake) as raw:
        for part in parts:
            raw.send(part)
            time.sleep(0.02)
        assert [raw.answer().status for _ in range(3)] == [200, 200, 400]
        assert raw.is_closed()


def test_a_client_that_goes_on_sending_hears_why_it_is_refused(fake):
    with Raw(fake) as raw:
        raw.send(b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 70_000)
        for _ in range(2):  # closed at once, the connection is reset by the first, and the answer is lost
            time.sleep(0.1)
            raw.send(b"x" * 20_000)
        time.sleep(0.1)
        assert raw.answer().status == 431
        assert raw.is_closed()


@pytest.mark.parametrize("pause_s", [0, 0.05])
def test_a_stream_that_runs_when_garbage_comes_ends_well(fake, pause_s):
    with Raw(fake) as raw:
        raw.send(stream_request(max_tokens=100) + (b"" if pause_s else GARBAGE))
        if pause_s:
            time.sleep(pause_s)
            raw.send(GARBAGE)
        stream = raw.answer()
        assert stream.status == 200
        assert stream.body.endswith(b"data: [DONE]\n\n")
        assert raw.answer().status == 400
        assert raw.is_closed()


def test_requests_that_are_sent_ahead_are_answered_in_order(fake):
    with Raw(fake) as raw:
        paths = [("/version", 200), ("/nothing", 404), ("/health", 200)] * 40  # more than aiohttp keeps in its queue
        raw.send(b"".join(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for path, _ in paths))
        assert [raw.answer().status for _ in paths] == [status for _, status in paths]


def test_a_request_that_arrives_with_the_end_of_a_body_is_answered_too(fake):
    for framing, body in (
        ("Content-Length: 40", BODY),
        ("Transfer-Encoding: chunked", b"28\r\n" + BODY + b"\r\n0\r\n\r\n"),
    ):
        with Raw(fake) as raw:
            raw.send(f"{POST}Expect: 100-continue\r\n{framing}\r\n\r\n".encode())
            assert raw.socket.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"  # The head is read alone.
            raw.send(body + GET + GET)
            assert [raw.answer().status for _ in range(3)] == [200, 200, 200]


@pytest.mark.parametrize("pause_s", [0, 0.05])
def test_a_body_that_breaks_off_is_refused_at_once(fake, pause_s):
    body = b"5\r\n{    \r\nzz\r\n"
    with Raw(fake) as raw:
        raw.send(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode() + (b"" if pause_s else body))
        if pause_s:
            time.sleep(pause_s)
            raw.send(body)
        answer = raw.answer()
        # After the minute that a body may take, the answer would be a 408.
        assert (answer.status, answer.error["code"]) == (400, "bad_request")
        assert raw.is_closed()
    assert "Traceback" not in fake.text


def test_a_body_that_cannot_be_unpacked_is_refused_and_the_connection_goes_on(fake):
    with Raw(fake) as raw:
        raw.send(f"{POST}Content-Encoding: gzip\r\nContent-Length: 40\r\n\r\n".encode() + b"x" * 40 + GET)
        answer = raw.answer()
        assert (answer.status, answer.error["code"]) == (400, "bad_request")
        assert raw.answer().status == 200


@pytest.mark.parametrize("framing", ["Content-Length: 33554433", "Content-Length: 99999999999999"])
@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
def test_a_body_that_is_too_large_is_refused_before_100_continue(fake, framing, path):
    with Raw(fake) as raw:
        raw.send(f"{POST.replace('/v1/completions', path)}Expect: 100-continue\r\n{framing}\r\n\r\n".encode())
        answer = raw.answer()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert answer.headers["connection"] == "close"


def test_a_client_that_expects_100_continue_gets_it(fake):
    with Raw(fake) as raw:
        raw.send(f"{POST}Expect: 100-continue\r\nContent-Length: {len(BODY)}\r\n\r\n".encode())
        assert raw.socket.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.send(BODY)
        assert raw.answer().status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
def test_what_is_expected_and_not_known_is_417(fake, path):
    reply = call(fake, "POST", path, BODY, Expect="tea")
    assert (reply.status, reply.json["error"]["code"]) == (417, "expectation_failed")
    assert b"tea" not in reply.body


def test_a_coding_that_is_not_known_is_501_and_the_connection_ends(fake):
    with Raw(fake) as raw:
        raw.send(f"{POST}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n".encode() + GET)
        answer = raw.answer()
        assert (answer.status, answer.error["code"]) == (501, "unsupported_transfer_encoding")
        assert raw.is_closed()


@pytest.mark.parametrize("name", ["Host", "Authorization", "X-Api-Key"])
def test_what_may_be_there_once_is_not_there_twice(fake, name):
    with Raw(fake) as raw:
        raw.send(f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{name}: Bearer a\r\n{name}: Bearer b\r\n\r\n".encode())
        answer = raw.answer()
        assert (answer.status, answer.error["code"]) == (400, "bad_request")


def test_a_wrong_method_is_405_with_those_that_are_allowed(fake):
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("DELETE", "/v1/models", "GET,HEAD")):
        reply = call(fake, method, path)
        assert (reply.status, reply.json["error"]["code"]) == (405, "method_not_allowed")
        assert reply.headers["allow"] == allowed
        assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    "name", ["X-Session-Id", "X-Session-Affinity", "X-Request-Id", "Content-Encoding", "Content-Type"]
)
@pytest.mark.parametrize("value", [b"\xff", b"\xed\xa0\x80", b"\xc3\xa9", b"a\x80b"])
def test_a_header_that_is_no_ascii_is_read_or_refused(fake, name, value):
    with Raw(fake) as raw:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        if name == "Content-Type":
            head = head.partition(b"Content-Type")[0]
        raw.send(b"%b%b: %b\r\nContent-Length: %d\r\n\r\n%b" % (head, name.encode(), value, len(BODY), BODY))
        assert raw.answer().status == (415 if name.startswith("Content") else 200)
    assert "Traceback" not in fake.text


def test_a_client_that_leaves_with_a_request_sent_ahead_frees_its_sequence(fake):
    with contextlib.closing(socket.create_connection(fake.address)) as connection:
        connection.sendall(stream_request(max_tokens=4000) + stream_request(max_tokens=4000))
        assert connection.recv(9) == b"HTTP/1.1 "
    wait_until(lambda: is_idle(fake))
    assert complete(fake, max_tokens=1).status == 200
