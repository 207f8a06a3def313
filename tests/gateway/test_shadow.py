"""A router as a shadow: what it sees of the router in use, records and reports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from gateway.rig import CHAT, Caller, FakeEngine, Received, Rig, Wire, looped, rig
from support.running import envoy_binary, free_port

from moestro.cli import main
from moestro.cli.recorded.explain import find_trace
from moestro.errors import ConfigError
from moestro.gateway import shadow
from moestro.gateway.part_settings import ShadowSettings
from moestro.gateway.settings import EngineSettings, RecordSettings, RouteSettings
from moestro.gateway.shadow import LogFollower, LoggedAnswer, read_line
from moestro.routing.decision_record import EngineCounted, Served, Submitted, Uncopied, decode_entry, replay
from moestro.sim.records import is_shadow_record, read_shadow_record
from moestro.sim.replay import WhatIfSettings, shadow_what_if

DEPLOY = Path(__file__).parents[2] / "deploy" / "proxies"
TURN = "A shadow sees what passes, and says nothing. " * 60
TOKENS, EVENT = 8, b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'
LINE = {"request_id": "r1", "upstream": "10.0.0.1:80", "status": 200, "seconds": 0.25, "bytes": 900}


# --- the access log


def line(**fields: Any) -> bytes:
    return json.dumps(LINE | fields).encode()


def test_a_line_of_nginx_names_the_engine_that_answered_last():
    answer = read_line(line(upstream="10.0.0.1:80, 10.0.0.2:80", content_type="text/event-stream; charset=utf-8"))
    assert answer == LoggedAnswer(
        request_id="r1", upstream="10.0.0.2:80", status=200, seconds=0.25, first_s=None, num_bytes=900, is_stream=True
    )
    assert read_line(line(upstream="10.0.0.1:80 : 10.0.0.3:80")).upstream == "10.0.0.3:80"
    assert read_line(line(upstream="-")).upstream == ""
    assert not read_line(line(content_type="application/json")).is_stream


def test_a_line_of_envoy_has_milliseconds_and_may_have_the_first_byte():
    answer = read_line(line(seconds=None, milliseconds=1500, first_milliseconds="250", status="200"))
    assert (answer.seconds, answer.first_s, answer.status) == (1.5, 0.25, 200)
    assert read_line(line(first_milliseconds="-")).first_s is None


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", line(seconds=None), line(request_id=""), line(status="x"), line(bytes=[]), b"\xff{}"]
)
def test_a_line_of_another_form_is_no_answer(text):
    assert read_line(text) is None


def ids(follower: LogFollower) -> list[str | None]:
    return [None if answer is None else answer.request_id for answer in follower.answers()]


def test_the_follower_reads_whole_new_lines_through_rotation_and_truncation(tmp_path):
    path = tmp_path / "access.log"
    path.write_bytes(line(request_id="old") + b"\n")
    follower = LogFollower(path)
    with path.open("ab") as log:
        log.write(line(request_id="a") + b"\n" + line(request_id="b")[:20])
        log.flush()
        assert ids(follower) == ["a"], "neither old lines nor halves"
        log.write(line(request_id="b")[20:] + b"\nno json\n")
        log.flush()
        assert ids(follower) == ["b", None]
        path.rename(tmp_path / "access.log.1")
        log.write(line(request_id="c") + b"\n")  # the writer still has the old file
    path.write_bytes(line(request_id="d") + b"\n")
    assert ids(follower) == ["c", "d"]
    path.write_bytes(b"")
    assert ids(follower) == []
    path.write_bytes(line(request_id="e") + b"\n")
    assert ids(follower) == ["e"]
    assert ids(follower) == []
    follower.close()


def test_a_log_that_appears_later_is_read_from_its_beginning(tmp_path):
    follower = LogFollower(tmp_path / "access.log")
    assert ids(follower) == []
    (tmp_path / "access.log").write_bytes(line() + b"\n")
    assert ids(follower) == ["r1"]
    follower.close()


# --- settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shadow": ShadowSettings(shadow=True, access_log=Path("x"))}, "needs --record"),
        ({"engines": EngineSettings(dp_ranks="2")}, "leave --dp-ranks out"),
        ({"engines": EngineSettings(metrics_interval=0)}, "set --metrics-interval above 0"),
    ],
)
def test_a_shadow_that_could_not_report_is_refused(given, words):
    whole = {"shadow": ShadowSettings(shadow=True, access_log=Path("x"))}
    if "needs --record" not in words:
        whole["record"] = RecordSettings(record=Path("y"))
    with pytest.raises(ConfigError, match=words):
        RouteSettings(**whole | given)


@pytest.mark.parametrize("flags", ["--workers 2", "--peer b", "--resume-streams", "--queue-policy sjf"])
def test_a_shadow_takes_no_flag_of_a_router_that_sends(flags, capsys):
    with pytest.raises(SystemExit):
        main(["route", "--engine", "http://a:1", "--shadow", "--access-log", "x", "--record", "y", *flags.split()])
    assert f"--shadow sends no request, so {flags.split()[0]} has no meaning" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_shadow_without_a_log_is_refused():
    with pytest.raises(ConfigError, match="--shadow needs --access-log"):
        ShadowSettings(shadow=True)


# --- a log without copies


@looped
async def test_a_log_without_copies_of_requests_is_reported_once_and_gives_no_figures(tmp_path, caplog):
    log, record = tmp_path / "access.log", tmp_path / "shadow.jsonl"
    settings = {"shadow": True, "access_log": log, "record": record, "metrics_interval": 0.02}
    async with rig(FakeEngine("a"), **settings) as it:
        num_lines = 0
        for num in (9, 10, 30):
            with log.open("ab") as lines:
                lines.writelines(line(request_id=f"{num} {i}", upstream="a") + b"\n" for i in range(num))
            num_lines += num
            await it.until(lambda: value(it, "shadow_log_lines_total", result="no_copy") == num_lines)  # noqa: B023
            found = [each for each in caplog.messages if "the shadow got no copy of a request" in each]
            assert len(found) == (num > 9)
    await it.app.record.close()
    entries = [decode_entry(line) for line in record.read_bytes().splitlines() if line.strip()]
    assert [each.num_answers for each in entries if isinstance(each, Uncopied)][-1] == 49
    assert list(replay(record.read_bytes().splitlines())) == []
    assert is_shadow_record(record)
    with pytest.raises(ConfigError, match="got no copy of any, and the 49 answers in its access log say nothing"):
        read_shadow_record(record)


@looped
async def test_copies_without_a_line_are_bounded_in_number(tmp_path, monkeypatch):
    monkeypatch.setattr(shadow, "_MAX_OPEN", 3)
    settings = {"shadow": True, "access_log": tmp_path / "none.log", "record": tmp_path / "r", "metrics_interval": 0.02}
    async with rig(FakeEngine("a"), **settings) as it:
        for at in range(5):
            assert (await it.call(X_Request_Id=f"copy-{at}")).status == 202
        await it.until(lambda: value(it, "shadow_copies_total", result="no_line") == 2)
        assert list(it.app.shadow._open) == ["copy-2", "copy-3", "copy-4"]
        assert it.num_in_flight == 3
        monkeypatch.setattr(shadow, "_MAX_OPEN", 0)
        await it.until_idle()


# --- beside nginx


class CountingEngine(FakeEngine):
    """An engine that streams, and counts what a server counts in /metrics."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self.stream)
        self.num_first = self.num_prompt = 0

    async def stream(self, engine: FakeEngine, wire: Wire, request: Received) -> None:
        self.num_first += 1
        self.num_prompt += 700
        wire.open_stream()
        for _ in range(TOKENS):
            wire.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            await asyncio.sleep(0.001)
        wire.write(b"0\r\n\r\n")

    @property
    def metrics(self) -> bytes | None:
        return (
            f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="2000"}} 1\n'
            f"vllm:time_to_first_token_seconds_count {self.num_first}\n"
            f"vllm:time_to_first_token_seconds_sum {self.num_first * 0.05}\n"
            f"vllm:prefix_cache_queries_total {self.num_prompt}\nvllm:prefix_cache_hits_total {self.num_prompt // 2}\n"
            f"vllm:generation_tokens_total {self.num_first * TOKENS}\nvllm:num_requests_running 1\n"
        ).encode()

    @metrics.setter
    def metrics(self, value: bytes | None) -> None:
        assert value is None


Proxy = Callable[[Path, str], list[str]]  # (folder, configuration) -> command


def nginx(folder: Path, text: str) -> list[str]:
    """Write a whole configuration of nginx, and return its command."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    user = "user root;\n" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user}daemon off;\npid {folder}/pid;\nevents {{}}\nhttp {{\n{folders}{text}\n}}\n"
    )
    return ["nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]


def envoy(folder: Path, text: str) -> list[str]:
    """Write a configuration of Envoy, and return its command."""
    program = envoy_binary()
    assert program is not None
    (folder / "envoy.yaml").write_text(text)
    quiet = ("--concurrency", "1", "--use-dynamic-base-id", "-l", "off", "--file-flush-interval-msec", "100")
    return [str(program), "-c", str(folder / "envoy.yaml"), *quiet]


@contextlib.asynccontextmanager
async def in_use(proxy: Proxy, folder: Path, ports: dict[int, int]) -> AsyncIterator[None]:
    """The router in use, by its file in deploy/ with other `ports`, and its access log in `folder`."""
    text = (DEPLOY / ("nginx_shadow.conf" if proxy is nginx else "envoy_shadow.yaml")).read_text()
    text = re.sub(r"/var/log/\w+/moestro.log", str(folder / "access.log"), text)
    for known, number in ports.items():
        text = re.sub(rf"(127.0.0.1:|port_value: ){known}\b", rf"\g<1>{number}", text)
        text = text.replace(f"listen {known};", f"listen 127.0.0.1:{number};")
    process = await asyncio.create_subprocess_exec(*proxy(folder, text))
    try:
        async with asyncio.timeout(30):
            while process.returncode is None:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", ports[8000])
                    writer.close()
                    break
                await asyncio.sleep(0.01)
        yield
    finally:
        process.terminate()
        await process.wait()


def chat(i: int) -> dict[str, Any]:
    """A turn of one of three conversations, which fall on both engines in turn."""
    content = f"Session {i % 3}. {TURN}"
    fields = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS}
    return fields | {"stream": True, "session_id": f"s{i % 3}"}


async def call(port: int, i: int, key: str) -> int:
    caller = Caller(*await asyncio.open_connection("127.0.0.1", port))
    caller.ask(CHAT, chat(i), authorization=f"Bearer {key}")
    answer = await caller.answer()
    assert answer.body.count(b"word") == TOKENS
    caller.hang_up()
    return answer.status


def value(it: Rig, name: str, **labels: str) -> float:
    text = it.app.exposition.text().decode()
    shown = "".join(f'{key}="{label}"' for key, label in labels.items())
    start = f"moestro:route_{name}" + (f"{{{shown}}}" if shown else "") + " "
    return float(next(line for line in text.splitlines() if line.startswith(start)).rpartition(" ")[2])


async def shadowed(tmp_path: Path, proxy: Proxy, num_requests: int = 48) -> tuple[Path, list[CountingEngine]]:
    """Let clients use a proxy with a shadow beside it. Returns the shadow's record and the engines."""
    port = free_port()
    keys, log, record = tmp_path / "keys", tmp_path / "access.log", tmp_path / "shadow.jsonl"
    keys.write_text("key-a: alice\nkey-b: bob\n")
    engines = [CountingEngine("a"), CountingEngine("b")]
    for engine in engines:
        await engine.start()
    urls = tuple(f"{engine.name}=http://127.0.0.1:{engine.port}" for engine in engines)
    settings = {"engine": urls, "shadow": True, "access_log": log, "record": record, "api_key_file": keys}
    try:
        async with (
            rig(**settings, metrics_interval=0.02, route_policy="session_affinity") as it,
            in_use(proxy, tmp_path, {8000: port, 8001: engines[0].port, 8002: engines[1].port, 8080: it.port}),
        ):
            await it.until(lambda: all(each.totals.num_first_tokens == 0 for each in it.app.shared.fleet))
            await asyncio.sleep(0.3)  # a look notes these counts
            for i in range(0, num_requests, 4):
                calls = (call(port, i + j, ("key-a", "key-b")[j % 2]) for j in range(4))
                assert set(await asyncio.gather(*calls)) == {200}
            await it.until(lambda: value(it, "shadow_log_lines_total", result="matched") == num_requests)
            assert value(it, "shadow_copies_total", result="decided") == num_requests
            assert value(it, "shadow_open") == 0
            assert it.num_in_flight == 0
            num_first = [engine.num_first for engine in engines]
            await it.until(lambda: [each.totals.num_first_tokens for each in it.app.shared.fleet] == num_first)
        await it.app.record.close()
    finally:
        for engine in engines:
            engine.die()
    return record, engines


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
@looped
async def test_a_shadow_beside_nginx_sends_nothing_and_records_who_served_what(tmp_path, capsys):
    record, engines = await shadowed(tmp_path, nginx)
    assert [len(engine.received) for engine in engines] == [24, 24], "nginx alone sent requests, in turn"
    entries = [decode_entry(line) for line in record.read_bytes().splitlines() if line.strip()]
    served = [entry for entry in entries if isinstance(entry, Served)]
    assert len(served) == len([entry for entry in entries if isinstance(entry, Submitted)]) == 48
    assert all(each.is_stream and each.status == 200 and each.seconds >= 0.001 * TOKENS for each in served)
    assert sum(isinstance(entry, EngineCounted) for entry in entries) >= 4
    assert all(was == again for was, again in replay(record.read_bytes().splitlines()))
    trace = find_trace(served[0].request_id, admin_url="", admin_api_key=None, record=record)
    assert trace.served_by in ("a", "b")
    assert trace.tenant in ("alice", "bob")
    assert is_shadow_record(record)
    shadow = read_shadow_record(record)
    assert [each.engine for each in shadow.record.requests].count(0) == 24
    assert {each.num_output_tokens for each in shadow.record.requests} == {TOKENS}, "by the mean that engines counted"
    assert sum(each.num_prompt_tokens for each in shadow.record.requests) / 48 == pytest.approx(700, rel=0.02)
    whole = shadow.gain()
    assert (whole.num_first_tokens, whole.ttft_ms, whole.hit_ratio) == (48, pytest.approx(50), 0.5)
    report = tmp_path / "report.json"
    with pytest.raises(SystemExit) as ended:
        main(["sim", "--replay", str(record), "--cost", "h20/qwen3-30b-a3b", "--json", str(report)])
    assert not ended.value.code
    text = " ".join(capsys.readouterr().out.split())
    assert "What session_affinity (simulated) would change" in text
    (groups,) = json.loads(report.read_text())["changes"].values()
    assert [group["name"] for group in groups if "UTC" not in group["name"]] == ["all", "tenant alice", "tenant bob"]
    assert groups[0]["ttft_ms"]["measured"] == pytest.approx(50)
    assert groups[0]["ttft_ms"]["half_width"] > 0
    assert groups[0]["hit_ratio"]["simulated_after"] > groups[0]["hit_ratio"]["simulated_before"]


@pytest.mark.skipif(envoy_binary() is None, reason="Envoy is not installed")
@looped
async def test_a_shadow_beside_envoy_has_the_first_byte_of_each_tenants_answers(tmp_path):
    record, engines = await shadowed(tmp_path, envoy, 16)
    assert sorted(len(engine.received) for engine in engines) == [8, 8], "Envoy alone sent requests, in turn"
    entries = [decode_entry(line) for line in record.read_bytes().splitlines() if line.strip()]
    served = [entry for entry in entries if isinstance(entry, Served)]
    assert len(served) == 16
    assert all(each.is_stream and each.num_answer_bytes >= TOKENS * len(EVENT) for each in served)
    assert all(each.first_s is not None and each.first_s <= each.seconds for each in served)
    shadow = read_shadow_record(record)
    answer = shadow_what_if(shadow, WhatIfSettings(policies=("least_loaded",), cost="h20/qwen3-30b-a3b"))
    (groups,) = answer.report.changes.values()
    assert all(group.ttft_ms.measured is not None for group in groups), "by the log, which knows tenants"
