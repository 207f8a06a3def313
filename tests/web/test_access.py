"""Keys, limits and CORS without sockets, and in `moestro serve`."""

from __future__ import annotations

import contextlib
import json
import random
import socket

import pytest
from support.running import PATIENCE_S, Running, call, open_stream, wait_until

from moestro.core.processes import network_of
from moestro.errors import ConfigError
from moestro.web.access import Access, ApiKeys, Cors
from moestro.web.errors import AuthenticationError, HttpError
from moestro.web.rate_limits import AtATime, RateLimitError, RequestLimits, RequestRate
from moestro.web.settings import AccessSettings

PAGE = "https://chat.example"


# --- keys


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "found"),
    [
        ("Bearer a", "", 0),
        ("bearer  b ", "", 1),
        ("", "b", 1),
        (b"Bearer a", b"a", 0),
        ("Bearer a", "b", None),
        ("Bearer a", "wrong", None),
        ("Basic a", "a", None),
        ("Basic a", "", None),
        ("a", "", None),
        ("", "Bearer a", None),
        ("Bearer ", "", None),
        ("", "", None),
    ],
)
def test_a_key_comes_in_either_header_and_two_that_differ_are_none(authorization, x_api_key, found):
    holder = ApiKeys(["a", "b"]).find(authorization, x_api_key)
    assert (holder and holder.name) == found


# --- limits


def test_a_bucket_holds_a_minute_and_fills_evenly():
    rate = RequestRate(per_minute=6)
    assert [rate.take("a", 0.0) for _ in range(6)] == [0.0] * 6
    assert rate.take("a", 0.0) == pytest.approx(10.0)
    assert rate.take("b", 0.0) == 0.0
    assert rate.take("a", 9.0) == pytest.approx(1.0)
    assert rate.take("a", 10.0) == 0.0
    assert rate.take("a", 10.0) > 0
    assert [rate.take("a", 1000.0) for _ in range(6)] == [0.0] * 6
    assert rate.take("a", 1000.0) > 0


def test_law_no_minute_has_more_than_two_buckets_and_the_wait_is_the_truth():
    rng = random.Random(0)
    for _ in range(50):
        per_minute = rng.choice([1, 2, 7, 60, 1000])
        rate, now_s, taken = RequestRate(per_minute), 0.0, []
        for _ in range(300):
            now_s += rng.expovariate(per_minute / 30)
            wait_s = rate.take("a", now_s)
            if wait_s:
                now_s += wait_s
                assert rate.take("a", now_s) == 0.0
            taken.append(now_s)
            assert sum(at_s > now_s - 60 for at_s in taken) <= 2 * per_minute
            assert len(taken) <= per_minute + now_s * per_minute / 60 + 1e-6


def test_however_many_addresses_come_so_many_are_remembered():
    rate = RequestRate(per_minute=1, max_subjects=10)
    for i in range(1000):
        assert rate.take(i, 0.0) == 0.0
        assert rate.take(max(0, i - 2), 0.0) > 0
        assert len(rate) <= 10


def test_what_is_counted_at_a_time_is_forgotten_when_it_ends():
    slots = AtATime(2)
    assert [slots.enter("a"), slots.enter("a"), slots.enter("a"), slots.enter("b")] == [True, True, False, True]
    slots.leave("a")
    assert slots.enter("a")
    for name in "aab":
        slots.leave(name)
    assert len(slots) == 0


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_ipv6_client_is_its_network(address, network):
    assert network_of(address) == network


def test_an_address_and_a_key_are_limited_each_by_itself():
    limits = RequestLimits(AccessSettings(max_requests_per_minute_per_key=2, max_requests_per_minute_per_address=3))
    limits.take(0, "a", 0.0)
    limits.take(0, "b", 0.0)
    with pytest.raises(RateLimitError, match=r"This key may send 2 requests a minute. Retry in 30 s.") as refused:
        limits.take(0, "c", 0.0)
    assert (refused.value.http_status, refused.value.code, refused.value.retry_after_s) == (
        429,
        "rate_limit_exceeded",
        30,
    )
    limits.take(1, "a", 0.0)
    limits.take(1, "a", 0.0)
    with pytest.raises(RateLimitError, match="This address may send 3"):
        limits.take(2, "a", 0.0)


@pytest.mark.parametrize(
    "given",
    [
        {"max_requests_per_minute_per_key": 0},
        {"max_connections_per_address": -1},
        {"allow_credentials": True},
        {"allow_credentials": True, "allowed_origins": ("*",)},
    ],
)
def test_impossible_settings_are_refused_when_made(given):
    with pytest.raises(ConfigError, match=r"--\w"):
        AccessSettings(**given)


def test_limits_for_keys_need_keys():
    with pytest.raises(ConfigError, match="--api-key"):
        Access.of([], AccessSettings(max_concurrent_requests_per_key=1))


def test_a_router_names_its_clients_and_no_client_names_itself():
    routed = Access.of(["a"], router_keys=["r"])
    assert routed.client_of("Bearer r", "", "10.0.0.1", "10.0.0.7") == "10.0.0.7"
    assert routed.client_of("", "r", "10.0.0.1", "3") == "3"
    for bad in ("", " ", "a b", "é", "x" * 129, "a\r\nb"):
        assert routed.client_of("Bearer r", "", "10.0.0.1", bad) == "router 0", "then all its clients are one"
    for key in ("Bearer a", "Bearer wrong", ""):
        assert routed.client_of(key, "", "10.0.0.1", "10.0.0.7") == "10.0.0.1"
    assert Access.of(["a", "b"], router_keys=["r"]).client_of("Bearer b", "", "10.0.0.1", "0") == 1
    assert Access.of(["a", "b"]).client_of("Bearer b", "", "10.0.0.1", "0") == 1
    assert Access.of([]).client_of("", "", "10.0.0.1", "0") == "10.0.0.1"


def test_a_server_with_a_routers_key_alone_needs_a_key():
    access = Access.of([], router_keys=["r"])
    with pytest.raises(AuthenticationError):
        access.key_of("", "")
    assert access.key_of("Bearer r", "") == "router 0"


# --- CORS


def test_any_page_may_read_answers_where_the_operator_says_so():
    cors = Cors(AccessSettings(allowed_origins=("*",)))
    assert cors.answer_headers(PAGE)["Access-Control-Allow-Origin"] == "*"
    assert cors.answer_headers(None) == {}
    preflight = cors.preflight_headers(PAGE, "POST", "authorization,x-stainless-os")
    assert preflight["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
    assert "POST" in preflight["Access-Control-Allow-Methods"]


def test_pages_by_name_are_distinguished_also_by_caches():
    cors = Cors(AccessSettings(allowed_origins=(PAGE,), allow_credentials=True))
    assert cors.answer_headers(PAGE)["Access-Control-Allow-Origin"] == PAGE
    assert cors.answer_headers(PAGE)["Access-Control-Allow-Credentials"] == "true"
    for origin in (PAGE, "https://evil.example", "null", None):
        headers = cors.answer_headers(origin)
        assert headers["Vary"] == "Origin"
        assert ("Access-Control-Allow-Origin" in headers) == (origin == PAGE)


def test_a_preflight_for_a_header_that_is_no_ascii_is_refused():
    cors = Cors(AccessSettings(allowed_origins=("*",), allowed_headers=("*",)))
    with pytest.raises(HttpError, match="allowed-headers"):
        cors.preflight_headers(PAGE, "POST", "\udcff")


@pytest.mark.parametrize(
    "wanted",
    [("https://evil.example", "POST", ""), (PAGE, "PUT", ""), (PAGE, "POST", "x-other"), (PAGE, "POST", "a, x-other")],
)
def test_a_preflight_that_asks_for_more_is_refused(wanted):
    rules = AccessSettings(allowed_origins=(PAGE,), allowed_methods=("POST",), allowed_headers=("Authorization", "a"))
    assert Cors(rules).preflight_headers(PAGE, "POST", "authorization, Content-Type, A")
    with pytest.raises(HttpError) as refused:
        Cors(rules).preflight_headers(*wanted)
    assert (refused.value.http_status, refused.value.code) == (400, "cors_not_allowed")


# --- moestro serve


@pytest.fixture(scope="module")
def locked(fake_command, tmp_path_factory):
    """A server with keys, limits for each of them, and a page that may ask."""
    flags = ("--api-key", "k1", "k2", "k3", "k4", "--max-requests-per-minute-per-key", "5")
    pages = ("--max-concurrent-requests-per-key", "1", "--allowed-origins", json.dumps([PAGE]))
    running = Running((*fake_command, *flags, *pages), tmp_path_factory.mktemp("locked"))
    yield running
    running.kill()


def test_serve_takes_a_key_in_either_header(locked):
    assert call(locked, "GET", "/v1/models", X_Api_Key="k1").status == 200
    assert call(locked, "GET", "/v1/models", X_Api_Key="k1", Authorization="Bearer k1").status == 200
    for headers in ({"X_Api_Key": "wrong"}, {"X_Api_Key": "k1", "Authorization": "Bearer k2"}):
        reply = call(locked, "GET", "/v1/models", **headers)
        assert (reply.status, reply.json["error"]["code"]) == (401, "invalid_api_key")


def test_serve_limits_the_requests_of_each_key(locked):
    statuses = [call(locked, "GET", "/v1/models", X_Api_Key="k2").status for _ in range(6)]
    assert statuses == [200] * 5 + [429]
    reply = call(locked, "GET", "/v1/models", Authorization="Bearer k2", Origin=PAGE)
    assert (reply.status, reply.json["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(reply.headers["retry-after"]) <= 12
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert call(locked, "GET", "/v1/models", X_Api_Key="k3").status == 200
    for _ in range(10):
        assert call(locked, "GET", "/health").status == 200
        assert call(locked, "GET", "/metrics", X_Api_Key="k2").status == 200
    samples = call(locked, "GET", "/metrics", X_Api_Key="k2").body.decode()
    assert 'moestro:requests_refused_total{reason="rate_limit_exceeded"} 2.0' in samples


def test_serve_limits_what_a_key_has_at_a_time(locked):
    key = {"Authorization": "Bearer k4"}
    body = json.dumps({"prompt": "def f(x):", "stream": True, "ignore_eos": True, "max_tokens": 4000}).encode()
    with contextlib.closing(socket.create_connection(locked.address)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: k4\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(9) == b"HTTP/1.1 "
        reply = call(locked, "GET", "/v1/models", **key)
        assert (reply.status, reply.json["error"]["code"]) == (429, "rate_limit_exceeded")
    wait_until(lambda: call(locked, "GET", "/v1/models", **key).status == 200)


def test_serve_answers_a_preflight_without_a_key_and_errors_and_streams_have_the_headers_too(locked):
    wanted = {
        "Origin": PAGE,
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization",
    }
    for path in ("/v1/chat/completions", "/nothing"):
        reply = call(locked, "OPTIONS", path, **wanted)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["access-control-allow-headers"] == "authorization"
    assert call(locked, "OPTIONS", "/v1/models", **wanted | {"Origin": "https://evil.example"}).status == 400
    for key, status in (("wrong", 401), ("k3", 200)):
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        reply = call(locked, "POST", "/v1/completions", body, X_Api_Key=key, Origin=PAGE)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, PAGE)
        assert reply.headers["vary"] == "Origin"
    assert "access-control-allow-origin" not in call(locked, "GET", "/health", Origin="https://evil.example").headers


def test_without_flags_there_is_no_limit_and_no_cors(fake):
    for _ in range(50):
        assert call(fake, "GET", "/version", Origin=PAGE).status == 200
    reply = call(fake, "OPTIONS", "/v1/models", Origin=PAGE, Access_Control_Request_Method="GET")
    assert reply.status == 405
    assert not any(name.startswith("access-control") for name in reply.headers)


def test_serve_limits_each_address(fake_command, tmp_path):
    flags = ("--max-requests-per-minute-per-address", "10", "--max-connections-per-address", "2")
    server = Running((*fake_command, *flags), tmp_path)
    try:
        streams = [open_stream(server, max_tokens=4000) for _ in range(2)]
        with contextlib.closing(socket.create_connection(server.address)) as third:
            head, _, body = third.recv(4096).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert json.loads(body)["error"]["code"] == "too_many_connections"
        for stream in streams:
            stream.close()
        wait_until(lambda: status_of(server, "/health") == 200)
        assert [status_of(server, "/version") for _ in range(9)] == [200] * 8 + [429]
    finally:
        server.kill()


def status_of(server: Running, path: str) -> int | None:
    try:
        return call(server, "GET", path).status
    except ConnectionError:  # refused before the request was read
        return None


def test_serve_refuses_impossible_limits_before_anything_is_started(fake_command, tmp_path):
    server = Running((*fake_command, "--max-concurrent-requests-per-key", "1"), tmp_path, wait=False)
    assert server.process.wait(PATIENCE_S) == 2
    assert "give --api-key" in server.text.splitlines()[-1]


def test_serve_refuses_more_connections_than_open_files_before_anything_is_loaded(fake_command, tmp_path):
    server = Running((*fake_command, "--max-connections", "100000000"), tmp_path, wait=False)
    assert server.process.wait(PATIENCE_S) == 2
    assert "open files" in server.text
    assert "lower --max-connections" in server.text
    assert "engine 0" not in server.text
