"""Routers that know each other's requests, prompts and engines, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway.rig import FakeEngine, Received, Rig, Wire, looped, rig
from support.running import PATIENCE_S

from moestro.cli.recorded.explain import _attempt_lines
from moestro.errors import ConfigError
from moestro.gateway import peers
from moestro.gateway.part_settings import PeerAddress, RouterPeerSettings
from moestro.gateway.peers import Identity, PeerChannel, PeerRefusedError, dial
from moestro.gateway.settings import EngineUrl
from moestro.routing.replication.journal import Digest, HistoryPart, OperationBatch, RouterRun, Snapshot
from moestro.web.ports.connections import bound_socket
from moestro.web.ports.faults import Fault, Port
from moestro.web.ports.tls import MutualTls
from moestro.web.settings import CertificateFiles

trustme = pytest.importorskip("trustme")
TEXT = "one router has seen this, the other has not; " * 60


def body(text: str = TEXT, **fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


@contextlib.asynccontextmanager
async def routers(
    num: int, *engines: FakeEngine, key: str | None = "secret", **settings: object
) -> AsyncIterator[list[Rig]]:
    """Routers before the same engines that are peers of each other."""
    for engine in engines:
        await engine.start()
    urls = tuple(f"{engine.name}=http://127.0.0.1:{engine.port}" for engine in engines)
    listeners = [bound_socket("127.0.0.1", 0) for _ in range(num)]
    ports = [listener.getsockname()[1] for listener in listeners]
    made: list[Rig] = []
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            stack.callback(engine.die)
        for listener, port in zip(listeners, ports, strict=True):
            it = await stack.enter_async_context(
                rig(
                    engine=urls,
                    peer=tuple(f"http://127.0.0.1:{each}" for each in ports),  # its own among them
                    peer_key=key,
                    peer_name=f"router:{port}",
                    **settings,
                )
            )
            assert it.app.peers is not None
            await stack.enter_async_context(it.app.peers.running(listener, it.app.shared.faults))
            made.append(it)
        for it in made:
            await it.until(
                lambda it=it: it.app.peers.num_links == num - 1 and it.app.peers.replica.num_peers == num - 1
            )
        yield made


def loads(it: Rig) -> dict[str, int]:
    return {engine.name: it.app.shared.fleet.router.load_on(engine.row) for engine in it.app.shared.fleet}


async def stay(engine: FakeEngine, wire: Wire, request: Received) -> None:
    """Begin an answer and leave it open until the test lets go."""
    wire.open_stream()
    wire.chunk(b"data: {}\n\n")
    await asyncio.Event().wait()


@looped
async def test_each_router_counts_the_requests_of_all():
    engines = [FakeEngine(name, stay) for name in "ab"]
    async with routers(3, *engines, route_policy="least_loaded") as them:
        callers = []
        for i in range(9):
            it = them[i % 3]
            caller = await it.caller()
            caller.ask(body=json.loads(body(f"hello {i}")))
            callers.append((it, caller))
            await caller.head()
            for other in them:
                await it.until(lambda other=other, i=i: sum(loads(other).values()) == i + 1)
        for it in them:
            assert sorted(loads(it).values()) == [4, 5], "each decided on what all have sent"
            assert it.num_in_flight == 3, "its own"
        for _, caller in callers:
            caller.hang_up()
        for it in them:
            await it.until(lambda it=it: not any(loads(it).values()))
            assert it.app.peers.replica.counts.num_differences == 0


def certificates(directory: Path) -> dict[str, Path]:
    """Flags of files that `issue` writes."""
    return {"peer_ssl_certfile": directory / "router.pem", "peer_ssl_ca_certs": directory / "authority.pem"}


def issue(directory: Path, authority: Any, name: str = "router.example") -> dict[str, Path]:
    """Write a certificate with its key, and the authority, and return their flags."""
    made = certificates(directory)
    directory.mkdir(exist_ok=True)
    authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(made["peer_ssl_certfile"])
    authority.cert_pem.write_to_path(made["peer_ssl_ca_certs"])
    return made


@looped
async def test_routers_speak_tls_with_each_other_alone(tmp_path):
    authority = trustme.CA()
    engines, flags = [FakeEngine(name, stay) for name in "ab"], issue(tmp_path, authority)
    async with routers(2, *engines, key=None, route_policy="least_loaded", **flags) as (one, other):
        caller = await one.caller()
        caller.ask(body=json.loads(body()))
        await caller.head()
        await other.until(lambda: sum(loads(other).values()) == 1)
        caller.hang_up()
        await other.until(lambda: not any(loads(other).values()))
        known = one.app.peers._identity
        host, port = "127.0.0.1", int(known.origin.name.rpartition(":")[2])
        identity = Identity(RouterRun("stranger", 1), known.reading)
        with pytest.raises((OSError, TimeoutError, PeerRefusedError)):
            await dial(identity, host, port)  # without TLS
        strangers = issue(tmp_path / "strangers", trustme.CA())
        files = CertificateFiles("--peer-ssl", strangers["peer_ssl_certfile"], None, strangers["peer_ssl_ca_certs"])
        tls = MutualTls(files).client
        tls.verify_mode = ssl.CERT_NONE  # It takes any router; the router does not take it.
        with pytest.raises((OSError, PeerRefusedError)):
            await dial(identity, host, port, tls)
        own = CertificateFiles("--peer-ssl", flags["peer_ssl_certfile"], None, flags["peer_ssl_ca_certs"])
        channel = await dial(identity, host, port, MutualTls(own).client)
        channel.close()


def test_a_renewed_certificate_counts_for_new_connections(tmp_path):
    flags = issue(tmp_path, trustme.CA())
    files = CertificateFiles("--peer-ssl", flags["peer_ssl_certfile"], None, flags["peer_ssl_ca_certs"])
    tls, before = MutualTls(files), MutualTls(files)
    renewed = trustme.CA()
    issue(tmp_path, renewed)
    long_ago = time.time() - 60
    for file in files.paths:
        os.utime(file, (long_ago, long_ago))
    tls.renew()
    assert _shake(tls, before) == (False, False), "the old authority counts no more"
    assert _shake(tls, MutualTls(files)) == (True, True), "both ends have renewed"
    files.certfile.write_text("no certificate")
    os.utime(files.certfile, (long_ago + 1, long_ago + 1))
    tls.renew()
    issue(tmp_path, renewed)
    assert _shake(tls, MutualTls(files)) == (True, True), "a file that cannot be used leaves the old one in place"


@looped
async def test_a_running_router_takes_renewed_certificates_of_peers(tmp_path, monkeypatch):
    monkeypatch.setattr("moestro.web.ports.tls._SETTLED_S", 0.2)
    flags = issue(tmp_path, trustme.CA())
    files = CertificateFiles("--peer-ssl", flags["peer_ssl_certfile"], None, flags["peer_ssl_ca_certs"])
    async with routers(2, FakeEngine("a"), key=None, route_policy="least_loaded", **flags) as (one, _):
        known = one.app.peers._identity
        host, port = "127.0.0.1", int(known.origin.name.rpartition(":")[2])
        identity = Identity(RouterRun("other", 1), known.reading)

        async def is_taken(tls: MutualTls) -> bool:
            try:
                (await dial(identity, host, port, tls.client)).close()
            except (OSError, TimeoutError, PeerRefusedError):
                return False
            return True

        assert await is_taken(MutualTls(files))
        issue(tmp_path, trustme.CA())
        renewed = MutualTls(files)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if await is_taken(renewed):
                    break
                await asyncio.sleep(0.1)


@looped
async def test_strangers_in_a_handshake_take_a_bounded_number_of_places_and_none_from_peers(tmp_path, monkeypatch):
    monkeypatch.setattr("moestro.gateway.peers.MAX_PEER_CONNECTIONS", 4)
    flags = issue(tmp_path, trustme.CA())
    async with routers(2, FakeEngine("a"), key=None, route_policy="least_loaded", **flags) as (one, _):
        host, port = "127.0.0.1", int(one.app.peers._identity.origin.name.rpartition(":")[2])
        strangers = [await asyncio.open_connection(host, port) for _ in range(20)]
        await one.until(lambda: one.app.shared.faults.counts[Port.PEERS, Fault.DISPLACED] >= 16)
        assert one.app.peers.num_links == one.app.peers.replica.num_peers == 1
        for _, writer in strangers:
            writer.close()


def _shake(one: MutualTls, other: MutualTls) -> tuple[bool, bool]:
    """Whether two ends accept each other, whichever connects."""
    found = []
    for server, client in ((one.context, other.client), (other.context, one.client)):
        pipes = [ssl.MemoryBIO() for _ in range(2)]
        ends = [
            server.wrap_bio(pipes[0], pipes[1], server_side=True),
            client.wrap_bio(pipes[1], pipes[0], server_hostname="any"),
        ]
        is_done = [False, False]
        for _ in range(6):
            for at, end in enumerate(ends):
                try:
                    end.do_handshake()
                    is_done[at] = True
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLError:
                    is_done[at] = False
        found.append(all(is_done))
    return found[0], found[1]


@looped
async def test_a_prompt_goes_where_another_router_has_sent_it():
    engines = [FakeEngine(name) for name in "abcdef"]
    async with routers(2, *engines, route_policy="lmetric:hotspots=off") as (one, other):
        chosen = (await one.call(body=body())).headers["x-moestro-engine"]
        row = other.engine(chosen).row
        await other.until(lambda: other.app.shared.fleet.router.prompts_sent(row) != [])
        for _ in range(4):
            assert (await other.call(body=body())).headers["x-moestro-engine"] == chosen


@looped
async def test_a_session_keeps_its_engine_at_another_router():
    engines = [FakeEngine(name) for name in "abcdef"]
    async with routers(2, *engines, route_policy="user_affinity") as (one, other):
        chosen = {}
        for i in range(12):
            answer = await one.call(body=body("hi", user=f"user {i}"))
            chosen[f"user {i}"] = answer.headers["x-moestro-engine"]
        await one.until(lambda: other.app.peers.replica.counts.num_operations >= 24)
        for user, engine in chosen.items():
            assert (await other.call(body=body("hi", user=user))).headers["x-moestro-engine"] == engine


@looped
async def test_a_router_that_joins_learns_prompts_and_requests_in_flight():
    engines = [FakeEngine(name) for name in "abcdef"]
    for engine in engines:
        await engine.start()
    urls = tuple(f"{engine.name}=http://127.0.0.1:{engine.port}" for engine in engines)
    listeners = [bound_socket("127.0.0.1", 0) for _ in range(2)]
    peers = tuple(f"http://127.0.0.1:{each.getsockname()[1]}" for each in listeners)
    given = {"engine": urls, "peer": peers, "route_policy": "lmetric:hotspots=off"}
    async with rig(**given, peer_name="one") as one, one.app.peers.running(listeners[0], one.app.shared.faults):
        chosen = (await one.call(body=body())).headers["x-moestro-engine"]
        for engine in engines:
            engine.script = stay
        caller = await one.caller()
        caller.ask(body=json.loads(body("another text")))
        await caller.head()
        async with rig(**given, peer_name="two") as two, two.app.peers.running(listeners[1], two.app.shared.faults):
            router = two.app.shared.fleet.router
            await two.app.peers.catch_up(PATIENCE_S)
            assert sum(loads(two).values()) == 1
            assert router.prompts_sent(two.engine(chosen).row), "it was sent before this router began"
            caller.hang_up()
            await two.until(lambda: not any(loads(two).values()))
    for engine in engines:
        engine.die()


@looped
async def test_lost_connections_free_their_compression_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        async with routers(2, FakeEngine("a")) as (one, other):
            for _ in range(5):
                (lost,) = other.app.peers._links
                lost.channel._writer.transport.abort()
                await other.until(lambda lost=lost: lost not in other.app.peers._links)
                await other.until(lambda: other.app.peers.num_links == 1)
            await one.until(lambda: len(one.app.peers._accepted) == 1)
            del lost
            channels = [each for each in gc.get_objects() if isinstance(each, PeerChannel)]
            assert sum(each._packer is not None for each in channels) <= 4, "one for each end of two connections"
    finally:
        gc.enable()


@looped
async def test_requests_of_a_router_that_dies_stop_counting_and_count_again_when_it_returns(monkeypatch):
    engine = FakeEngine("a", stay)
    async with routers(2, engine) as (one, other):
        caller = await one.caller()
        caller.ask(body=json.loads(body()))
        await caller.head()
        await other.until(lambda: loads(other) == {"a": 1})
        for link in list(one.app.peers._links):  # the router is stopped: no message leaves
            monkeypatch.setattr(link.outlet, "next_due", lambda now_ns: None)
        await other.until(lambda: loads(other) == {"a": 0})
        assert one.num_in_flight == 1
        for link in list(one.app.peers._links):
            link.channel.close()
        await other.until(lambda: loads(other) == {"a": 1})


@looped
async def test_a_router_with_two_addresses_gets_each_operation_once():
    """So have the workers of a machine whose own address is among those of a --peer."""
    engine = FakeEngine("a")
    await engine.start()
    listeners = [bound_socket("0.0.0.0", 0) for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    addresses = tuple(f"http://127.0.0.{host}:{port}" for port in ports for host in (1, 2))
    given = {"engine": (f"a=http://127.0.0.1:{engine.port}",), "peer": addresses}
    async with (
        rig(**given, peer_name="one") as one,
        one.app.peers.running(listeners[0], one.app.shared.faults),
        rig(**given, peer_name="two") as two,
        two.app.peers.running(listeners[1], two.app.shared.faults),
    ):
        for it in (one, two):
            await it.until(lambda it=it: it.app.peers.num_links == it.app.peers.replica.num_peers == 1)
        for _ in range(5):
            await one.call(body=body())
        await two.until(lambda: two.app.peers.replica.counts.num_operations >= 10)
        assert two.app.peers.replica.counts.num_repeated == 0
        assert one.app.peers.num_links == two.app.peers.num_links == 1
    engine.die()


@looped
async def test_a_name_that_cannot_be_resolved_keeps_the_routers_that_it_stood_for(monkeypatch):
    monkeypatch.setattr(peers, "_RESOLVE_S", 0.01)
    resolved, num_failed = peers._resolved, 0

    async def fail(address: PeerAddress) -> list[tuple[str, int]]:
        nonlocal num_failed
        num_failed += 1
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    async with routers(2, FakeEngine("a")) as (one, other):
        links = {it: list(it.app.peers._links) for it in (one, other)}
        monkeypatch.setattr(peers, "_resolved", fail)
        await one.until(lambda: num_failed > 20)
        monkeypatch.setattr(peers, "_resolved", resolved)
        assert {it: list(it.app.peers._links) for it in (one, other)} == links


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such limit")
@looped
async def test_connections_end_when_the_other_machine_acknowledges_nothing(monkeypatch):
    """TCP repeats for a quarter of an hour, at intervals that double, so a repaired network stayed unused for long."""
    accepted, accept = [], peers.accept

    async def kept(identity: Identity, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerChannel:
        accepted.append(writer)
        return await accept(identity, reader, writer)

    monkeypatch.setattr(peers, "accept", kept)
    async with routers(2, FakeEngine("a")) as them:
        made = [link.channel._writer for it in them for link in it.app.peers._links]
        assert len(accepted) >= len(made) == 2
        for writer in (*accepted, *made):
            if not writer.is_closing():
                end = writer.get_extra_info("socket")
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2000
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


@looped
async def test_an_engine_that_one_router_cannot_reach_is_checked_by_the_others_at_once():
    engines = [FakeEngine(name) for name in "ab"]
    async with routers(2, *engines, health_interval=30.0) as (one, other):
        engines[0].die()
        one.app.shared.fleet.unreachable(one.engine("a").address, "refused", 10**18)
        await other.until(lambda: other.engine("a").condition == "down")
        assert other.engine("b").condition == "up"


@looped
async def test_an_engine_that_others_can_reach_stays_whatever_one_router_reports():
    engines = [FakeEngine(name) for name in "ab"]
    async with routers(2, *engines, health_interval=30.0) as (one, other):
        num_checks = other.app.peers.replica.counts.num_operations
        one.app.shared.fleet.on_failure(one.engine("a").row)
        await other.until(lambda: other.app.peers.replica.counts.num_operations > num_checks)
        await asyncio.sleep(0.2)
        assert other.engine("a").condition == "up"


@looped
async def test_an_engine_that_is_added_later_counts_what_peers_have_there():
    engines = [FakeEngine(name, stay) for name in "ab"]
    async with routers(2, engines[0]) as (one, other):
        await engines[1].start()
        one.app.engine_admin.add(EngineUrl.parse(f"b=http://127.0.0.1:{engines[1].port}"))
        await one.until_up("b")
        callers = [await one.caller() for _ in range(2)]
        for caller in callers:
            caller.ask(body=json.loads(body()))
            await caller.head()
        await other.until(lambda: other.app.peers.replica.num_flights == 2)
        num_known = sum(loads(other).values())
        other.app.engine_admin.add(EngineUrl.parse(f"b=http://127.0.0.1:{engines[1].port}"))
        await other.until(lambda: sum(loads(other).values()) == 2)
        assert num_known < 2 or loads(one)["b"] == 0
        for caller in callers:
            caller.hang_up()
        await other.until(lambda: not any(loads(other).values()))
    engines[1].die()


@looped
async def test_an_explained_decision_shows_how_old_the_knowledge_of_other_routers_was():
    async with routers(3, FakeEngine("a")) as (one, *others):
        request_id = (await one.call(body=body())).headers["x-request-id"]
        trace = one.app.shared.decision_log.trace(request_id)
        assert trace is not None
        ages = trace.attempts[0].peer_ages_s
        assert set(ages) == {it.app.peers._identity.origin.name for it in others}
        assert all(0 <= age_s < 2 for age_s in ages.values())
        lines = "\n".join(line for line in _attempt_lines(trace.attempts[0]) if isinstance(line, str))
        assert "age of what was known of other routers: router:" in lines


# --- strangers


async def stranger(it: Rig, *sent: bytes) -> bytes:
    """Write to the port for routers, and return what it answers until it closes the connection."""
    host, port = it.app.peers._settings.peer[0].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for data in sent:
        writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def until_closed(channel: PeerChannel) -> None:
    with contextlib.suppress(OSError, PeerRefusedError):
        while True:
            await asyncio.wait_for(channel.receive(), 10)
    assert channel._reader.at_eof()
    channel.close()


@looped
async def test_a_stranger_changes_nothing():
    engine = FakeEngine("a", stay)
    async with routers(2, engine) as (one, other):
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(64), b"\xff" * 64, b"\0\0\0\5hello"):
            await stranger(one, sent)
        wrong = Identity(RouterRun("stranger", 1), one.app.peers._identity.reading, b"wrong")
        port = int(one.app.peers._settings.peer[0].rpartition(":")[2])
        with pytest.raises(PeerRefusedError, match="of the two routers differs"):
            await dial(wrong, "127.0.0.1", port)
        assert one.app.peers.counts.num_refused >= 4
        assert one.app.peers.replica.num_peers == 1
        assert loads(one) == loads(other) == {"a": 0}


@looped
async def test_a_frame_that_was_changed_or_is_out_of_place_ends_the_connection():
    engine = FakeEngine("a")
    async with routers(2, engine) as (one, other):
        port = int(one.app.peers._settings.peer[0].rpartition(":")[2])
        known = Identity(RouterRun("third", 1), one.app.peers._identity.reading, b"secret")
        message = OperationBatch(RouterRun("third", 1), 1, 0, 0, Digest(0, 0))
        for what in ("repeated", "flipped", "wrong code", "out of place", "another's name", "long"):
            channel = await dial(known, "127.0.0.1", port)
            if what == "repeated":
                frames: list[bytes] = []
                write, channel._writer.write = channel._writer.write, frames.append
                await channel.send(message)
                channel._writer.write = write
                write(frames[0] + frames[0])
            elif what == "flipped":
                write = channel._writer.write
                channel._writer.write = lambda data, write=write: write(data[:-1] + bytes([data[-1] ^ 1]))
                await channel.send(message)
            elif what == "wrong code":  # of a message that could be read
                write = channel._writer.write
                channel._writer.write = lambda data, write=write: write(data[:4] + bytes([data[4] ^ 1]) + data[5:])
                await channel.send(message)
            elif what == "out of place":
                await channel.send(HistoryPart("x", [], []))
            elif what == "another's name":
                await channel.send(Snapshot(RouterRun("router", 5), 1, 0, 0, True, []))
            else:
                channel._writer.write((1 << 30).to_bytes(4) + bytes(64))
            await until_closed(channel)
        assert one.app.peers.counts.num_refused >= 6
        assert other.app.peers.replica.num_peers >= 1


@looped
async def test_a_bomb_of_zeros_is_refused_before_it_is_unpacked():
    async with routers(2, FakeEngine("a")) as (one, _):
        port = int(one.app.peers._settings.peer[0].rpartition(":")[2])
        known = Identity(RouterRun("third", 1), one.app.peers._identity.reading, b"secret")
        channel = await dial(known, "127.0.0.1", port)
        data = channel._packer.compress(bytes(1 << 28)) + channel._packer.flush(0)
        assert len(data) < 1 << 20
        channel._writer.write(len(data).to_bytes(4) + channel._send_code.of(data) + data)
        await until_closed(channel)


@looped
async def test_routers_that_compare_prompts_otherwise_refuse_each_other():
    listeners = [bound_socket("127.0.0.1", 0) for _ in range(2)]
    peers = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in listeners)
    engine = FakeEngine("a")
    await engine.start()
    url = (f"a=http://127.0.0.1:{engine.port}",)
    async with (
        rig(engine=url, peer=peers, peer_name="one") as one,
        one.app.peers.running(listeners[0], one.app.shared.faults),
        rig(engine=url, peer=peers, peer_name="two", text_block_bytes=64) as two,
        two.app.peers.running(listeners[1], two.app.shared.faults),
    ):
        await one.until(lambda: one.app.peers.counts.num_refused > 0 and two.app.peers.counts.num_refused > 0)
        assert one.app.peers.num_links == two.app.peers.num_links == 0
    engine.die()


# --- settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"peer": ("ftp://x:1",)}, "give http://HOST:PORT"),
        ({"peer": ("http://x:99999",)}, "--peer http://x:99999"),
        ({"peer": ("http://x:1/path",)}, "give http://HOST:PORT"),
        ({"peer": ("",)}, "give http://HOST:PORT"),
        ({"peer": ("x",), "peer_key": ""}, "--peer-key is empty"),
        ({"peer": ("x",), "peer_host": "0.0.0.0"}, "give --peer-key or --peer-ssl-certfile too"),
        ({"peer": ("https://x:1",)}, "speaks TLS: give --peer-ssl-certfile"),
        ({"peer": ("x",), "peer_ssl_certfile": Path("c")}, "needs --peer-ssl-ca-certs"),
        ({"peer": ("x",), "peer_ssl_keyfile": Path("k")}, "give --peer-ssl-certfile too"),
        ({"peer_port": 70000}, "70000"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        RouterPeerSettings(**given)


def test_addresses_of_peers():
    given = RouterPeerSettings(peer=("http://a:1", "b:2", "c", "https://[::1]:3"), **certificates(Path("c")))
    addresses = [PeerAddress("a", 1), PeerAddress("b", 2), PeerAddress("c", 8082), PeerAddress("::1", 3)]
    assert list(given.addresses) == addresses
    assert not RouterPeerSettings().has_peers
