"""HTTPS at the port of clients of both servers, towards engines, and with certificates of clients."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.running import MOESTRO, PATIENCE_S, Running, call, free_port, wait_until

from moestro.errors import ConfigError
from moestro.web.ports import connections
from moestro.web.ports.faults import Faults, Port
from moestro.web.ports.tls import EngineTls, ServerTls
from moestro.web.settings import TlsSettings

trustme = pytest.importorskip("trustme")
HOST = "127.0.0.1"
BODY = {"prompt": "def f(x):", "max_tokens": 3}


@dataclass
class Certificates:
    """An authority, a server's certificate and a client's, as files."""

    directory: Path

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.authority)
        self.write(authority.issue_cert(HOST), self.server, self.server_key)
        self.write(authority.issue_cert("client.example"), self.client, self.client_key)

    def write(self, issued: trustme.LeafCert, chain: Path, key: Path) -> None:
        key.write_bytes(issued.private_key_pem.bytes())
        chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    @property
    def authority(self) -> Path:
        return self.directory / "ca.pem"

    @property
    def server(self) -> Path:
        return self.directory / "server.pem"

    @property
    def server_key(self) -> Path:
        return self.directory / "server.key"

    @property
    def client(self) -> Path:
        return self.directory / "client.pem"

    @property
    def client_key(self) -> Path:
        return self.directory / "client.key"

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--ssl-certfile", str(self.server), "--ssl-keyfile", str(self.server_key))

    def context(self, *, has_certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.authority)
        if has_certificate:
            context.load_cert_chain(self.client, self.client_key)
        return context


def complete_plainly(server: Running) -> int:
    return call(server, "POST", "/v1/completions", BODY).status


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def engine(fake_command, files, tmp_path_factory) -> Iterator[Running]:
    """A server that only clients with a certificate reach."""
    flags = (*files.flags, "--ssl-ca-certs", str(files.authority), "--max-connections", "8")
    running = Running((*fake_command, *flags), tmp_path_factory.mktemp("engine"), admin_port=free_port())
    yield running
    running.kill()


@pytest.fixture(scope="module")
def router(engine, files, tmp_path_factory) -> Iterator[Running]:
    """A router with HTTPS towards its clients, and with a certificate of its own towards the engine."""
    flags = ("--engine-ca-certs", files.authority, "--engine-certfile", files.client, "--engine-keyfile")
    command = (MOESTRO, "route", "--engine", engine.url, *map(str, flags), str(files.client_key), *files.flags)
    running = Running(command, tmp_path_factory.mktemp("router"), admin_port=free_port())
    yield running
    running.kill()


def complete(server: Running, context: ssl.SSLContext, **fields: object) -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection(*server.address, timeout=PATIENCE_S, context=context)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(BODY | fields), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


def test_a_request_passes_two_servers_with_tls_whole_and_streamed(router, files):
    assert router.url.startswith("https://")
    status, body = complete(router, files.context())
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 3
    status, body = complete(router, files.context(), stream=True)
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_client_without_a_certificate_is_refused_in_the_handshake_and_counted(engine, files):
    with pytest.raises((ssl.SSLError, ConnectionError)):
        complete(engine, files.context())
    assert complete(engine, files.context(has_certificate=True))[0] == 200
    wait_until(lambda: 'kind="tls_handshake"' in metrics(engine, files))


def metrics(server: Running, files: Certificates) -> str:
    context = files.context(has_certificate=True)
    connection = http.client.HTTPSConnection(*server.address, timeout=PATIENCE_S, context=context)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


def test_plain_http_at_the_port_gets_no_answer_and_no_traceback(router):
    with socket.create_connection(router.address, timeout=PATIENCE_S) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"HTTP/1.1" not in plain.recv(1 << 16)
    assert "Traceback" not in router.text


def test_silent_connections_give_way_to_a_client_although_their_handshake_has_not_ended(engine, files):
    silent = [socket.create_connection(engine.address, timeout=PATIENCE_S) for _ in range(20)]
    try:
        begun_s = time.monotonic()
        assert complete(engine, files.context(has_certificate=True))[0] == 200
        assert time.monotonic() - begun_s < PATIENCE_S / 2
    finally:
        for each in silent:
            each.close()


def test_a_client_that_sends_too_much_gets_its_refusal_over_tls(router, files):
    with files.context().wrap_socket(
        socket.create_connection(router.address, timeout=PATIENCE_S), server_hostname=HOST
    ) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 9999)
        assert b" 413 " in client.recv(1 << 16)


def test_new_connections_get_a_renewed_certificate_without_a_restart(fake_command, tmp_path):
    files = Certificates(tmp_path / "certificates")
    running = Running((*fake_command, *files.flags, "--enable-ssl-refresh"), tmp_path)
    try:
        assert complete(running, files.context())[0] == 200
        files.server.write_text("half a file")
        wait_until(lambda: "the certificate stays as it is" in running.text)
        assert complete(running, files.context())[0] == 200
        renewed = Certificates(tmp_path / "renewed")
        files.server_key.write_bytes(renewed.server_key.read_bytes())
        files.server.write_bytes(renewed.server.read_bytes())
        wait_until(lambda: "new connections get the renewed certificate" in running.text)
        assert complete(running, renewed.context())[0] == 200
        with pytest.raises(ssl.SSLError):
            complete(running, files.context())
    finally:
        running.kill()


def test_a_router_reads_renewed_authorities_of_engines_without_a_restart(fake_command, tmp_path):
    theirs, strangers = Certificates(tmp_path / "theirs"), Certificates(tmp_path / "strangers")
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(strangers.authority.read_bytes())
    with contextlib.ExitStack() as stack:
        (tmp_path / "engine").mkdir()
        engine = Running((*fake_command, *theirs.flags), tmp_path / "engine")
        stack.callback(engine.kill)
        quick = ("--health-interval", "0.2", "--engine-ca-certs", str(authorities))
        router = Running((MOESTRO, "route", "--engine", f"https://{HOST}:{engine.address[1]}", *quick), tmp_path)
        stack.callback(router.kill)
        assert complete_plainly(router) == 503
        authorities.write_bytes(theirs.authority.read_bytes())
        wait_until(lambda: complete_plainly(router) == 200)


def test_connections_to_engines_get_the_renewed_certificates(files, tmp_path):
    authorities, now_s = tmp_path / "ca.pem", 0.0
    authorities.write_bytes(files.authority.read_bytes())
    tls = EngineTls(authorities, None, None, lambda: now_s)
    before, others = tls.context, Certificates(tmp_path / "others")
    renewed = before.cert_store_stats()["x509_ca"] + 1
    authorities.write_bytes(files.authority.read_bytes() + others.authority.read_bytes())
    os.utime(authorities, (1, 1))
    assert tls.context is before, "the files are not looked at for each connection"
    now_s = 10.0
    assert tls.context.cert_store_stats()["x509_ca"] == renewed
    after = tls.context
    authorities.write_text("half a file")
    os.utime(authorities, (2, 2))
    now_s = 20.0
    assert tls.context is after, "a file that cannot be used changes nothing"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ssl_keyfile": Path("k")}, "--ssl-keyfile is for TLS: give --ssl-certfile too"),
        ({"enable_ssl_refresh": True}, "--enable-ssl-refresh is for TLS"),
        ({"ssl_certfile": Path("c"), "ssl_cert_reqs": 2}, "give --ssl-ca-certs with their authorities"),
    ],
)
def test_flags_that_do_not_go_together_are_named(given, text):
    with pytest.raises(ConfigError, match=text):
        TlsSettings(**given)


def test_files_that_cannot_be_used_are_named_with_the_cause(files, tmp_path):
    def cause(**given: object) -> str:
        with pytest.raises(ConfigError) as error:
            ServerTls.of(TlsSettings(**{"ssl_certfile": files.server, "ssl_keyfile": files.server_key} | given))
        return str(error.value)

    assert "No such file" in cause(ssl_certfile=tmp_path / "missing.pem")
    assert "key values mismatch" in cause(ssl_keyfile=files.client_key)
    (tmp_path / "text").write_text("no certificate")
    assert "--ssl-certfile" in cause(ssl_certfile=tmp_path / "text")
    assert "--ssl-ca-certs" in cause(ssl_ca_certs=tmp_path / "text")
    assert "OpenSSL knows no such cipher of TLS 1.2" in cause(ssl_ciphers="ROT13")
    assert "those of TLS 1.3 are always on" in cause(ssl_ciphers="TLS_AES_128_GCM_SHA256")
    with pytest.raises(ConfigError, match="--engine-ca-certs"):
        EngineTls(tmp_path / "text", None, None)
    with pytest.raises(ConfigError, match="--engine-certfile"):
        EngineTls(None, tmp_path / "text", None)


def test_a_key_with_a_password_is_refused_without_a_prompt(files, tmp_path):
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 trustme brings it

    key = serialization.load_pem_private_key(files.server_key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="without a password"):
        ServerTls.of(TlsSettings(ssl_certfile=files.server, ssl_keyfile=locked))


def test_unchanged_files_are_not_read_again(files, caplog):
    tls = ServerTls.of(TlsSettings(ssl_certfile=files.server, ssl_keyfile=files.server_key, enable_ssl_refresh=True))
    context = tls.context
    with caplog.at_level(logging.INFO):
        tls.renew()
    assert tls.context is context
    assert not caplog.records


def test_memory_that_many_closed_connections_with_tls_have_left_is_returned(files, monkeypatch):
    """A flood of half-open handshakes once left a GiB with the process for good."""
    returns: list[int] = []
    monkeypatch.setattr(connections, "_MANY_CLOSED", 3)
    monkeypatch.setattr(connections, "_RETURN_S", 0.02)
    monkeypatch.setattr(connections, "return_freed_memory", lambda: returns.append(1))

    async def flood() -> None:
        listener = connections.bound_socket(HOST, 0)
        tls = ServerTls.of(TlsSettings(ssl_certfile=files.server, ssl_keyfile=files.server_key))
        limits = connections.FrontLimits(8)
        front = connections.Front(Port.CLIENTS, listener, lambda _: asyncio.Protocol(), limits, Faults(), tls).open()
        for _ in range(3):
            assert not returns
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while not returns:  # noqa: ASYNC110 - the condition is plain state
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        front.close()

    asyncio.run(flood())
    assert len(returns) == 1, "nothing has closed since"
