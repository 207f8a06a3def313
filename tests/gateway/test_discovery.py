"""Engines that come from a file and from DNS while the router runs, end to end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket

import pytest
from gateway.rig import CHAT, FakeEngine, Rig, admin_of, looped, rig, say_ok

from moestro.errors import ConfigError
from moestro.gateway.discovery.discovery import Discovery, DnsNames


@contextlib.asynccontextmanager
async def started(*names: str, script=say_ok):
    engines = [FakeEngine(name, script) for name in names]
    for engine in engines:
        await engine.start()
    try:
        yield engines
    finally:
        for engine in engines:
            engine.die()


def lines(*engines: FakeEngine, **fields) -> str:
    listed = [{"url": f"http://127.0.0.1:{engine.port}", "name": engine.name, **fields} for engine in engines]
    return "".join(json.dumps(each) + "\n" for each in listed) or "[]"


def names(it: Rig) -> dict[str, str]:
    return {engine.name: str(engine.condition) for engine in it.app.shared.fleet}


def figure(it: Rig, name: str) -> float:
    text = it.app.exposition.text().decode()
    [line] = [line for line in text.splitlines() if line.startswith(f"moestro:route_discovery_{name} ")]
    return float(line.rsplit(" ", 1)[1])


async def trickle(engine: FakeEngine, wire, request) -> None:
    """An answer that goes on until the test has seen enough."""
    wire.open_stream()
    wire.chunk(b"data: one\n\n")
    await engine.may_end.wait()
    wire.chunk(b"data: [DONE]\n\n")
    wire.end_stream()


@looped
async def test_engines_of_a_file_come_and_go_and_running_requests_finish(tmp_path):
    file = tmp_path / "engines"
    async with started("a", "b", script=trickle) as (a, b):
        a.may_end = b.may_end = asyncio.Event()
        file.write_text(lines(a))
        async with rig(a, b, listed=True, engine_file=file) as it:
            assert names(it) == {"a": "up"}
            caller = await it.caller()
            caller.ask(CHAT, {"messages": [], "stream": True})
            assert (await caller.head())[0] == 200
            file.write_text(lines(b))
            await it.until(lambda: names(it) == {"a": "absent", "b": "up"})
            again = await it.caller()
            again.ask(CHAT, {"messages": [], "stream": True})
            assert (await again.head())[1]["x-moestro-engine"] == "b"
            a.may_end.set()
            assert b"".join([piece async for piece in caller.pieces()]).endswith(b"[DONE]\n\n")
            assert b"".join([piece async for piece in again.pieces()]).endswith(b"[DONE]\n\n")
            assert figure(it, 'engines{source="file"}') == 1


@looped
async def test_router_without_any_engine_yet_refuses_and_then_serves(tmp_path):
    file = tmp_path / "engines"
    async with started("a") as (a,), rig(a, listed=True, engine_file=file) as it:
        assert (await it.call()).status == 503
        file.write_text(lines(a))
        await it.until(lambda: names(it) == {"a": "up"})
        assert (await it.call()).status == 200


@looped
async def test_wrong_file_keeps_the_list_is_logged_once_and_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file = tmp_path / "engines"
    async with started("a", "b") as (a, b):
        file.write_text(lines(a))
        async with rig(a, listed=True, engine_file=file) as it:
            for bad in (lines(a, b)[:-20], "", "- {}", "- http://"):
                before = figure(it, 'reads_total{result="failed",source="file"}')
                file.write_text(bad)
                await it.until(lambda n=before: figure(it, 'reads_total{result="failed",source="file"}') > n)
                assert names(it) == {"a": "up"}
                assert (await it.call()).status == 200
            file.unlink()
            await it.until(lambda: "No such file" in caplog.text)
            await asyncio.sleep(1.2)
            assert caplog.text.count("No such file") == 1
            assert names(it) == {"a": "up"}
            replaced = tmp_path / "new"
            replaced.write_text(lines(a, b))
            replaced.rename(file)
            await it.until(lambda: names(it) == {"a": "up", "b": "up"})
            assert "can be read again: 2 engines" in caplog.text


@looped
async def test_list_that_is_written_piece_by_piece_is_read_when_complete(tmp_path):
    """Each prefix of whole lines is a good, shorter list, which must not remove engines."""
    file = tmp_path / "engines"
    async with started("a", "b", "c") as engines:
        file.write_text(lines(*engines))
        async with rig(*engines, listed=True, engine_file=file) as it:
            before = figure(it, 'reads_total{result="changed",source="file"}')
            with file.open("w") as out:
                for engine in (*engines, *engines[:0]):
                    out.write(lines(engine))
                    out.flush()
                    await asyncio.sleep(0.4)
                    assert names(it) == dict.fromkeys("abc", "up")
            await asyncio.sleep(1.2)
            assert figure(it, 'reads_total{result="changed",source="file"}') == before


def prompt(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text * 2000}], "max_tokens": 1}


@looped
async def test_what_is_known_of_a_vanished_engine_is_kept_for_its_return(tmp_path):
    file = tmp_path / "engines"
    async with started("a", "b") as (a, b):
        file.write_text(lines(a, b))
        async with rig(a, b, listed=True, engine_file=file, route_policy="moestro") as it:
            first = (await it.call(body=prompt("x"))).headers["x-moestro-engine"]
            kept, other = (a, b) if first == "a" else (b, a)
            row, index_bytes = it.engine(kept.name).row, it.app.shared.fleet.router.index_bytes
            file.write_text(lines(other))
            await it.until(lambda: names(it)[kept.name] == "absent")
            assert (await it.call(body=prompt("x"))).headers["x-moestro-engine"] == other.name
            assert it.app.shared.fleet.router.index_bytes > index_bytes
            file.write_text(lines(kept))
            await it.until(lambda: names(it) == {kept.name: "up", other.name: "absent"})
            assert it.engine(kept.name).row == row
            assert len(it.app.shared.fleet.router.prompts_sent(row)) == 1
            assert it.engine(kept.name).counts.num_decisions == 1


@looped
async def test_vanished_engine_that_dies_is_forgotten_at_once_and_others_after_their_time(tmp_path):
    file = tmp_path / "engines"
    async with started("a", "b") as (a, b):
        file.write_text(lines(a, b))
        async with rig(a, b, listed=True, engine_file=file, keep_vanished=2.0) as it:
            file.write_text("[]")
            await it.until(lambda: names(it) == {"a": "absent", "b": "absent"})
            a.die()
            await it.until(lambda: "a" not in names(it))
            assert names(it) == {"b": "absent"}
            await it.until(lambda: names(it) == {})


@looped
async def test_models_labels_speed_and_key_of_a_line_count_and_change_in_place(tmp_path):
    file, key = tmp_path / "engines", tmp_path / "key"
    key.write_text("first")
    async with started("a") as (a,):
        a.models = ()
        file.write_text(lines(a, model="m1", labels={"pool": "x"}, speed=2.0, api_key_file=str(key)))
        async with rig(a, listed=True, engine_file=file, selector=("pool=x",)) as it, admin_of(it) as admin:
            row = it.engine("a").row
            assert it.app.shared.fleet.router.table.speed[row] == 2.0
            view = (await (await admin.get("/admin/engines")).json())["engines"][0]
            assert view["labels"] == {"pool": "x"}
            await it.call()
            key.write_text("second")
            await it.until(lambda: it.engine("a").head.authorization == b"Bearer second")
            await it.call()
            assert [request.header("authorization") for request in a.received] == ["Bearer first", "Bearer second"]
            file.write_text(lines(a, labels={"pool": "x"}, speed=0.5, dp_ranks=2))
            await it.until(lambda: set(names(it)) == {"a@0", "a@1"})
            assert {it.app.shared.fleet.router.table.speed[each.row] for each in it.app.shared.fleet} == {0.5}
            file.write_text(lines(a, labels={"pool": "y"}))
            await it.until(lambda: set(names(it).values()) == {"absent"})


@looped
async def test_models_of_a_vanished_engine_are_not_listed_until_it_returns(tmp_path):
    file = tmp_path / "engines"
    async with started("a", "b") as (a, b):
        b.models = ("m", "special")
        file.write_text(lines(a, b))
        async with rig(a, b, listed=True, engine_file=file) as it:
            special = {"model": "special", "messages": []}
            assert (await it.call(body=special)).headers["x-moestro-engine"] == "b"
            file.write_text(lines(a))
            await it.until(lambda: names(it)["b"] == "absent")
            await asyncio.sleep(0.1)  # Health checks go on, and learn models.
            listed = (await it.call("/v1/models", method="GET")).json["data"]
            assert [card["id"] for card in listed] == ["m"]
            assert (await it.call(body=special)).headers["x-moestro-engine"] == "a"
            file.write_text(lines(a, b))
            await it.until_up("b")
            assert (await it.call(body=special)).headers["x-moestro-engine"] == "b"


@looped
async def test_operator_removes_a_listed_engine_until_he_adds_it_again(tmp_path, caplog):
    file = tmp_path / "engines"
    async with started("a", "b") as (a, b):
        file.write_text(lines(a, b))
        async with rig(a, b, listed=True, engine_file=file) as it, admin_of(it) as admin:
            assert (await admin.delete("/admin/engines/a")).status == 204
            assert (await admin.delete("/admin/engines/a")).status == 404
            for listed in (lines(b), lines(b, a)):  # Its list forgets it meanwhile.
                before = figure(it, 'reads_total{result="changed",source="file"}')
                file.write_text(listed)
                await it.until(lambda n=before: figure(it, 'reads_total{result="changed",source="file"}') > n)
                assert names(it) == {"b": "up"}
            assert "of file: the operator has removed it; it is left out" in caplog.text
            again = await admin.post("/admin/engines", json={"url": f"b=http://127.0.0.1:{b.port}"})
            assert again.status == 400
            own = await admin.post("/admin/engines", json={"url": f"a=http://127.0.0.1:{a.port}"})
            assert own.status == 201
            await it.until_up("a", "b")


@looped
async def test_draining_of_the_operator_survives_a_vanishing(tmp_path):
    file = tmp_path / "engines"
    async with started("a") as (a,):
        file.write_text(lines(a))
        async with rig(a, listed=True, engine_file=file) as it, admin_of(it) as admin:
            assert (await admin.post("/admin/engines/a/drain")).status == 200
            file.write_text("[]")
            await it.until(lambda: names(it) == {"a": "absent"})
            file.write_text(lines(a))
            await it.until(lambda: names(it) == {"a": "draining"})


@looped
async def test_drain_holds_when_an_engine_was_removed_and_is_listed_again(tmp_path):
    file = tmp_path / "engines"
    async with started("a") as (a,):
        file.write_text(lines(a))
        async with rig(a, listed=True, engine_file=file, keep_vanished=0.0) as it, admin_of(it) as admin:
            for action in ("drain", "resume", "drain"):
                assert (await admin.post(f"/admin/engines/a/{action}")).status == 200
            file.write_text("[]")
            await it.until(lambda: names(it) == {})
            file.write_text(lines(a))
            await it.until(lambda: names(it) == {"a": "draining"})
            assert (await admin.delete("/admin/engines/a")).status == 204
            url = {"url": f"a=http://127.0.0.1:{a.port}"}
            assert (await admin.post("/admin/engines", json=url)).status == 201
            await it.until(lambda: names(it) == {"a": "up"})  # the operator's own new engine


@looped
async def test_file_that_is_wrong_at_the_start_is_an_error(tmp_path):
    file = tmp_path / "engines"
    file.write_text("- nowhere")
    with pytest.raises(ConfigError, match="engine 1 nowhere: give http://HOST:PORT"):
        async with rig(engine_file=file, listed=True):
            pass


class Resolver:
    """Answers lookups as a DNS server would, through the same call as the system's resolver."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = list(hosts)
        self.fails = False

    async def __call__(self, host: str, port: int) -> list[str]:
        if self.fails:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self.hosts


@looped
async def test_certificates_that_are_wrong_at_the_start_are_an_error_also_before_a_list_names_an_engine(tmp_path):
    for flag in ("engine_ca_certs", "engine_certfile"):
        with pytest.raises(ConfigError, match=flag.replace("_", "-")):
            async with rig(engine_file=tmp_path / "engines", **{flag: tmp_path / "none"}):
                pass


@looped
async def test_addresses_of_a_name_are_engines_and_a_failed_lookup_keeps_them():
    async with started("a") as (a,), rig(is_up=False) as it:
        resolver = Resolver("127.0.0.1", "127.0.0.2")
        source = DnsNames([f"http://engines.test:{a.port}"], 0.05, resolver)
        admin = it.app.engine_admin
        async with Discovery([source], admin.listed, admin.tick).running(5.0):
            first, second = f"127.0.0.1:{a.port}", f"127.0.0.2:{a.port}"
            await it.until(lambda: names(it).get(first) == "up")
            assert set(names(it)) == {first, second}
            resolver.fails = True
            await asyncio.sleep(0.3)
            assert set(names(it)) == {first, second}
            resolver.fails, resolver.hosts = False, ["127.0.0.1", "::1"]
            await it.until(lambda: f"[::1]:{a.port}" in names(it))
            await it.until(lambda: second not in names(it))  # Nothing listens there, so nothing is kept.
            assert (await it.call()).headers["x-moestro-engine"] == first
            resolver.hosts = [f"10.0.{n // 256}.{n % 256}" for n in range(300)]
            await asyncio.sleep(0.3)
            assert first in names(it)


@looped
async def test_name_is_resolved_by_the_system():
    async with started("a") as (a,), rig(listed=True, is_up=False, engine_dns=(f"http://localhost:{a.port}",)) as it:
        await it.until(lambda: names(it).get(f"127.0.0.1:{a.port}") == "up")


@pytest.mark.parametrize("text", ["a=http://h:1", "h:1", "http://"])
def test_wrong_name_in_dns_is_an_error(text):
    with pytest.raises(ConfigError, match="--engine-dns"):
        DnsNames([text], 1.0)
