"""Keys of a file and their tenants: the file itself, in `moestro route` and in `moestro serve`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest
from gateway.rig import FakeEngine, looped, rig, say_ok
from support.running import PATIENCE_S, Running, call, wait_until

from moestro.errors import ConfigError
from moestro.web.access import Access, ApiKeys, KeyFile
from moestro.web.settings import AccessSettings


def written(path: Path, text: str) -> Path:
    """Write a file whose change counts at once, as one that was renamed to its place."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.utime(new, (1, time.time() - 10))
    new.rename(path)
    return path


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("sk-a: team-a\nsk-b: team-b\n12345: team-a\n", {"sk-a": "team-a", "sk-b": "team-b", "12345": "team-a"}),
        ("sk-a:\nsk-b: null\n", {"sk-a": "", "sk-b": ""}),
        ("- sk-a\n- 0x10\n", {"sk-a": "", "0x10": ""}),
        ("sk-a\nsk-b\n", {"sk-a": "", "sk-b": ""}),
        ("sk-a", {"sk-a": ""}),
        ('{"sk-a": "team-a"}', {"sk-a": "team-a"}),
        ("# keys of May\nyes: no\n", {"yes": "no"}),
    ],
)
def test_forms_of_a_file(tmp_path, text, keys):
    assert KeyFile(written(tmp_path / "keys", text)).keys == keys


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "has no key"),
        ("[]", "has no key"),
        ("null\n", "has no key"),
        ("sk-secret: [a]", "line 1: write KEY: TENANT"),
        ("sk-secret: two words", "a tenant has letters"),
        ("'sk secret': a", "a key has printable ASCII"),
        ("sk-secret: a\nsk-secret: b", "line 2: the key stands for two tenants"),
        ("sk-secret: *sk-secret", "is not YAML"),
        ("sk-secret: 'x", "is not YAML"),
        ("%sk-secret", "is not YAML"),
        ("clé", "a key has printable ASCII"),
        ("x" * (1 << 21), "has more than"),
        ("[" * 3000, "is not YAML"),
    ],
)
def test_wrong_file_has_a_clear_error_without_any_key(tmp_path, text, error):
    with pytest.raises(ConfigError) as found:
        KeyFile(written(tmp_path / "keys", text))
    assert error in str(found.value)
    assert "--api-key-file" in str(found.value)
    assert "secret" not in str(found.value)


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        Access.of([], AccessSettings(api_key_file=tmp_path / "none"))


def test_key_of_a_router_may_not_be_in_the_file(tmp_path):
    settings = AccessSettings(api_key_file=written(tmp_path / "keys", "r: a"))
    with pytest.raises(ConfigError, match="give routers keys of their own"):
        Access.of([], settings, ["r"])


def test_key_of_a_router_may_not_come_into_the_file_later(tmp_path, caplog):
    path, now = written(tmp_path / "keys", "k1: a"), [0.0]
    keys = ApiKeys([], ["r"], KeyFile(path, ["r"]), now_s=lambda: now[0])
    written(path, "k1: a\nr: b\nk2: c")
    now[0] += 1.1
    assert keys.find("Bearer k2", "") is None
    assert keys.find("Bearer k1", "").tenant == "a"
    assert "give routers keys of their own" in caplog.text


def test_keys_of_a_tenant_are_one_client_wherever_they_come_from(tmp_path):
    text = "first-key: team-a\na2: team-a\nb1: team-b\nlone:\n"
    access = Access.of(["own"], AccessSettings(api_key_file=written(tmp_path / "keys", text)))
    clients = {
        key: access.client_of(f"Bearer {key}", "", "10.0.0.1") for key in ("first-key", "a2", "b1", "lone", "own")
    }
    assert clients["first-key"] == clients["a2"] == "team-a"
    assert clients["b1"] == "team-b"
    assert len(set(clients.values())) == 4
    assert access.client_of("Bearer wrong", "", "10.0.0.1") == "10.0.0.1"
    assert access.key_of("", "a2") == "team-a"
    assert access.tenant_of("Bearer first-key", "") == "team-a"
    assert access.tenant_of("Bearer own", "") is None
    assert "first-key" not in repr(access)


def test_only_tenant_is_still_a_tenant_and_a_lone_key_no_client(tmp_path):
    access = Access.of([], AccessSettings(api_key_file=written(tmp_path / "keys", "k: team-a")))
    assert access.client_of("Bearer k", "", "10.0.0.1") == "team-a"
    access = Access.of([], AccessSettings(api_key_file=written(tmp_path / "keys", "k:")))
    assert access.client_of("Bearer k", "", "10.0.0.1") == "10.0.0.1"


def test_file_is_read_again_once_a_second_and_keys_that_stay_keep_their_names(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path, now = written(tmp_path / "keys", "k1:\nk2:\n"), [0.0]
    keys = ApiKeys([], file=KeyFile(path), now_s=lambda: now[0])
    names = {key: keys.find(f"Bearer {key}", "").name for key in ("k1", "k2")}
    written(path, "k2:\nk3: team\n")
    assert keys.find("Bearer k1", "") is not None
    now[0] += 1.1
    assert keys.find("Bearer k1", "") is None
    assert keys.find("Bearer k2", "").name == names["k2"]
    assert keys.find("Bearer k3", "").tenant == "team"
    for _ in range(3):
        written(path, "k9: [")
        now[0] += 1.1
        assert keys.find("Bearer k2", "").name == names["k2"]
    assert caplog.text.count("the API keys stay as they are") == 1
    path.unlink()
    now[0] += 1.1
    keys.find("", "")
    now[0] += 1.1
    assert keys.find("Bearer k2", "") is not None
    written(path, "k1:\nk2: team\n")
    now[0] += 1.1
    assert keys.find("Bearer k1", "").name not in names.values()
    assert keys.find("Bearer k2", "").tenant == "team"
    assert not any(f"k{number}" in caplog.text for number in range(1, 10))


def test_list_of_keys_that_is_being_written_takes_no_key_away(tmp_path):
    path, now = written(tmp_path / "keys", "k1:\nk2:\n"), [0.0]
    keys = ApiKeys([], file=KeyFile(path), now_s=lambda: now[0])
    with path.open("w") as out:
        out.write("k1:\n")
        out.flush()
        now[0] += 1.1
        assert keys.find("Bearer k2", "") is not None
        out.write("k2:\n")
    now[0] += 1.1
    assert keys.find("Bearer k2", "") is not None


@looped
async def test_route_takes_keys_of_a_file_with_their_tenants_and_limits(tmp_path):
    path = written(tmp_path / "keys", "k1: team-a\nk2: team-a\nk3: team-b\n")
    engine = FakeEngine("e", say_ok)
    record = tmp_path / "record"
    given = {"api_key_file": path, "max_requests_per_minute_per_key": 3, "record": record, "engine_api_key": "engine"}
    async with rig(engine, **given) as it, it.app.record.writing():
        assert (await it.call(Authorization="Bearer k9")).status == 401
        caller = await it.caller()
        statuses = []
        for key in ("k1", "k2", "k1", "k2"):
            caller.ask(body={"messages": [], "user": key}, Authorization=f"Bearer {key}")
            statuses.append((await caller.answer()).status)
        assert statuses == [200, 200, 200, 429]
        assert [request.header("x-moestro-client") for request in engine.received] == ["team-a"] * 3
        assert [request.header("authorization") for request in engine.received] == ["Bearer engine"] * 3
    text = record.read_text()
    assert text.count('"tenant":"team-a"') == 6, "the arrival and the trace of three requests"
    assert not any(f'"k{number}"' in text.replace(f'"user":"k{number}"', "") for number in (1, 2, 3))


@looped
async def test_a_key_that_is_taken_away_is_refused_also_for_a_head_that_is_cached(tmp_path):
    path = written(tmp_path / "keys", "k1: team-a\nk3: team-b\n")
    async with rig(FakeEngine("e", say_ok), api_key_file=path) as it:
        caller = await it.caller()
        for _ in range(2):
            caller.ask(body={"messages": []}, X_Api_Key="k3")
            assert (await caller.answer()).status == 200
        written(path, "k1: team-a\n")
        await asyncio.sleep(1.1)
        caller.ask(body={"messages": []}, X_Api_Key="k3")  # the same bytes, without limits that look the key up again
        assert (await caller.answer()).status == 401


@looped
async def test_tenants_are_the_clients_of_the_queue(tmp_path):
    """A tenant that has its places waits, whatever keys its requests have, and another one does not."""
    path = written(tmp_path / "keys", "a1: team-a\na2: team-a\nb1: team-b\n")
    ends = asyncio.Event()

    async def hold(engine: FakeEngine, wire, request) -> None:
        await ends.wait()
        wire.reply()

    busy = b"vllm:num_requests_running 4\nvllm:num_requests_waiting 9\nvllm:kv_cache_usage_perc 0.5\n"
    engine = FakeEngine("e", hold)
    engine.metrics = busy
    given = {"queue_policy": "weighted_fair", "queue_max_requests": 1, "metrics_interval": 0.05}
    async with rig(engine, api_key_file=path, **given) as it:
        await it.until(lambda: it.app.shared.fleet.router.table.num_waiting.values[0] == 9)
        waiting = await it.caller()
        waiting.ask(body={"messages": []}, Authorization="Bearer a1")
        await it.until(lambda: it.app.shared.queue.needs_figures)
        assert (await it.call(Authorization="Bearer a2")).status == 429
        other = await it.caller()
        other.ask(body={"messages": []}, Authorization="Bearer b1")
        await it.until(lambda: b"route_queue_requests 2.0" in it.app.exposition.text())
        engine.metrics = busy.replace(b"waiting 9", b"waiting 0")
        ends.set()
        assert (await waiting.answer()).status == (await other.answer()).status == 200


def test_serve_takes_keys_of_a_file_and_shares_go_by_tenant(fake_command, tmp_path):
    path, record = written(tmp_path / "keys", "k1: team-a\nk2: team-a\nk3: team-b\n"), tmp_path / "record"
    flags = ("--api-key-file", str(path), "--max-requests-per-minute-per-key", "4", "--record", str(record))
    server = Running((*fake_command, *flags, "--scheduling-policy", "weighted_fair"), tmp_path)

    def body(user: str) -> dict:
        return {"prompt": "x", "max_tokens": 1, "user": user}

    try:
        assert call(server, "POST", "/v1/completions", body("u"), X_Api_Key="k9").status == 401
        for key, user in (("k1", "u1"), ("k2", "u2"), ("k3", "u1")):
            assert call(server, "POST", "/v1/completions", body(user), X_Api_Key=key).status == 200
        statuses = [call(server, "POST", "/v1/completions", body("u"), X_Api_Key="k1").status for _ in range(3)]
        assert statuses == [200, 200, 429]
        written(path, "k1: team-a\n")
        wait_until(lambda: call(server, "GET", "/v1/models", X_Api_Key="k3").status == 401)
        assert "1 keys are valid now (3 before)" in server.text
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
    finally:
        server.kill()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    users = [line["user"] for line in lines if "user" in line]
    assert [line["tenant"] for line in lines if line.get("type") == "Story"][:3] == ["team-a", "team-a", "team-b"]
    assert len(set(users)) == 2, "the body's user does not matter beside a tenant"
    assert users[0] == users[1] != users[2]
    assert not any(key in server.text + record.read_text() for key in ('"k1"', '"k2"', '"k3"'))
