"""Law: any JSON, any other text, and any packing of it end in a status below 500 and leave no traceback in a log.

The endpoints are those of the running applications: clients' and operators' ports of the server and of the router.
"""

from __future__ import annotations

import http.client
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from conftest import NAME
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import num_examples
from support.listing_server import ROUTES_FILE
from support.running import PATIENCE_S, Running, free_port

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from robustness.strangers.nasty_json import BODIES, nasty_body

LISTING = (sys.executable, str(Path(__file__).parents[1] / "support" / "listing_server.py"))
WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
# Paths with other methods whose handlers read no body, or none that is JSON.
NO_JSON = (
    *("/ping", "/v1/responses/", "/admin/experts/reset", "/admin/placement/plan"),
    *("/admin/placement/freeze", "/admin/placement/unfreeze", "/admin/placement/cancel"),
    *("/admin/engines/x/drain", "/admin/engines/x/resume"),
)


class Ports:
    """Both ports of a running product, and the routes of each."""

    def __init__(self, running: Running) -> None:
        self.running = running
        listed = (running.directory / ROUTES_FILE).read_text().splitlines()
        ports = running.address[1], running.admin_port
        self.endpoints = [
            (port, method if method != "*" else "POST", _filled(path))
            for port, routes in zip(ports, map(json.loads, listed), strict=True)
            for method, path in routes
        ]
        self._connections: dict[int, http.client.HTTPConnection] = {}
        self._num_read = 0

    def send(self, port: int, method: str, path: str, body: bytes, coding: str = "") -> tuple[int, bytes]:
        """Send a request on the connection of a port, or on a new one if the server has closed it."""
        headers = {"Content-Type": "application/json"} | ({"Content-Encoding": coding} if coding else {})
        for _ in range(2):
            known = self._connections.pop(port, None)
            connection = known or http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            try:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                status, text = answer.status, answer.read()
            except (http.client.HTTPException, ConnectionError):
                connection.close()
                if known is None:
                    raise
                continue
            if not answer.will_close:
                self._connections[port] = connection
            else:
                connection.close()
            return status, text
        raise AssertionError("a new connection is closed")

    def new_log(self) -> str:
        text = self.running.text
        new, self._num_read = text[self._num_read :], len(text)
        return new

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self.running.kill()


def _filled(path: str) -> str:
    """A path with a value for each of its variables."""
    while "{" in path:
        before, _, rest = path.partition("{")
        path = f"{before}x{rest.partition('}')[2]}"
    return path


@pytest.fixture(scope="module")
def products(demo_dir, tmp_path_factory) -> Iterator[dict[str, Ports]]:
    """A server before fake ranks, and a router before it that reads prompts as tokens."""
    started: dict[str, Ports] = {}

    def start(name: str, *flags: str) -> Running:
        directory = tmp_path_factory.mktemp(name)
        record = ("--record", str(directory / "record.jsonl"))
        running = Running((*LISTING, *flags, *record), directory, admin_port=free_port())
        started[name] = Ports(running)
        return running

    try:
        parsers = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1")
        server = start("server", str(demo_dir), "--served-model-name", NAME, "--trust-request-chat-template", *parsers)
        start("router", "route", "--engine", server.url, "--tokenizer", str(demo_dir))
        yield started
    finally:
        for each in started.values():
            each.close()


@pytest.fixture(scope="module")
def endpoints(products) -> list[tuple[str, int, str, str]]:
    """Each endpoint once, and those that read JSON several times."""
    found = [(name, *endpoint) for name, ports in products.items() for endpoint in ports.endpoints]
    return found + 12 * [each for each in found if each[3] in BODIES and each[2] not in WITHOUT_BODY]


def test_each_endpoint_that_reads_json_has_valid_bodies(products):
    others = set()
    for ports in products.values():
        for _, method, path in ports.endpoints:
            if method not in WITHOUT_BODY and path not in BODIES and not path.startswith(NO_JSON):
                others.add(path)
    own = {path for path in others if any(path == each for _, _, each in products["server"].endpoints)}
    assert not own, f"add valid bodies of {own} to nasty_json.py"


def assert_answered(
    products: dict[str, Ports], endpoint: tuple[str, int, str, str], body: bytes, coding: str = ""
) -> int:
    name, port, method, path = endpoint
    ports = products[name]
    status, text = ports.send(port, method, path, body, coding)
    assert status < 500, (name, method, path, status, text[:500])
    assert b"internal_error" not in text, (name, method, path, text[:500])
    for each in {ports, products["server"]}:
        assert "Traceback" not in each.new_log(), (name, method, path)
    return status


def test_each_body_is_valid_before_it_is_spoilt(products):
    server = products["server"]
    for port, method, path in server.endpoints:
        for body in BODIES.get(path, ()) if method == "POST" and port != server.running.admin_port else ():
            status, text = server.send(port, method, path, json.dumps(body).encode())
            assert status == 200, (path, body, text)


@settings(max_examples=num_examples(250, thorough=700))
@given(st.randoms(use_true_random=True))
def test_any_json_ends_in_a_status_below_500_and_leaves_no_traceback(products, endpoints, rng):
    endpoint = rng.choice(endpoints)
    assert_answered(products, endpoint, nasty_body(rng, endpoint[3]))


CODINGS = ("gzip", "gzip", "deflate", "x-gzip", "identity", "br", "zstd", "gzip, gzip", "deflate, gzip", "", " , ", "é")


def packed(rng: Random, path: str) -> tuple[bytes, str]:
    """A body and its Content-Encoding, which is most often true."""
    body = nasty_body(rng, path) if rng.randrange(2) else json.dumps(rng.choice(BODIES.get(path, ({},)))).encode()
    if rng.randrange(8) == 0:  # From a few bytes to a bomb.
        body += b" " * rng.choice((1000, 1000, 70_000, 70_000, 2 << 20, 40 << 20))
    coding = rng.choice(CODINGS)
    packer = zlib.compressobj(wbits=31 if "gzip" in coding else rng.choice((15, -15)))
    data = packer.compress(body) + packer.flush()
    match rng.randrange(8):
        case 0:
            data = data[: rng.randrange(len(data))]
        case 1:
            data = data * rng.choice((2, 100, 3000))
        case 2:
            data = rng.randbytes(rng.randrange(300))
        case 3:
            at = rng.randrange(len(data))
            data = data[:at] + rng.randbytes(1) + data[at + 1 :]
        case 4:
            data = zlib.compress(data)
    return (data, coding) if len(data) < 16 << 20 else (data[: 1 << 20], coding)


@settings(max_examples=num_examples(100, thorough=250))
@given(st.randoms(use_true_random=True))
def test_any_packed_body_ends_in_a_status_below_500_and_leaves_no_traceback(products, endpoints, rng):
    endpoint = rng.choice(endpoints)
    assert_answered(products, endpoint, *packed(rng, endpoint[3]))


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_packed_bodies_are_answered_as_plain_ones(products, coding):
    packer = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
    body = packer.compress(json.dumps(BODIES["/v1/completions"][0]).encode()) + packer.flush()
    for name, ports in products.items():
        assert (
            assert_answered(products, (name, ports.running.address[1], "POST", "/v1/completions"), body, coding) == 200
        )


def test_the_servers_still_answer(products):
    for ports in products.values():
        status, _ = ports.send(ports.running.address[1], "POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1}')
        assert status == 200
        assert "Traceback" not in ports.running.text


def test_bodies_are_functions_of_their_seed():
    assert nasty_body(Random(5), "/tokenize") == nasty_body(Random(5), "/tokenize")
