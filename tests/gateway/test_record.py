"""What `moestro route --record` writes replays to the same decisions, and explains them."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
import time
from base64 import b64encode
from pathlib import Path

import pytest
from gateway.rig import FakeEngine, Received, Wire, looped, rig
from rich.console import Console
from support.routers import request

from moestro.cli.recorded.explain import _attempt_lines, find_trace, tell
from moestro.cli.recorded.replay import replay_records
from moestro.core.hashing import hash_text, keyed_names, split_hashes
from moestro.errors import ConfigError
from moestro.gateway.app import _record
from moestro.gateway.clients.request_body import BYTES_PER_TOKEN, BodyMessage, RequestBody, plain_text, prompt_key
from moestro.gateway.settings import RecordSettings
from moestro.routing.decision_log import Attempt, RequestTrace, ScoredEngine
from moestro.routing.decision_record import Gap, PolicyText, RecordedRouter, Submitted, decode_entry, replay
from moestro.routing.settings import RouterSettings
from moestro.web.record_file import RecordFile, record_key

TURN = "A router writes down what it receives, word by word. " * 40
BUSY = b"vllm:num_requests_running 3.0\nvllm:num_requests_waiting 2.0\nvllm:kv_cache_usage_perc 0.5\n"


async def answer(engine: FakeEngine, wire: Wire, request: Received) -> None:
    await asyncio.sleep(0.001)
    usage = {"prompt_tokens": 500, "completion_tokens": 9}
    wire.reply(json.dumps({"from": engine.name, "usage": usage}).encode())


async def fail_now_and_then(engine: FakeEngine, wire: Wire, request: Received) -> None:
    if len(engine.received) % 3 == 0:
        wire.reply(b"{}", 503, headers="Retry-After: 0\r\n")
    elif len(engine.received) % 5 == 0:
        wire.transport.abort()
    else:
        await answer(engine, wire, request)


def fields(i: int) -> dict:
    answered = [{"role": "user", "content": f"Session {i % 4}. {TURN}"}]
    return {"model": "m", "messages": answered, "max_tokens": 9, "user": f"u{i % 3}", "session_id": f"s{i % 4}"}


async def run(record, policy: str, num_requests: int = 40, **more) -> list[str]:
    """A life of a router: engines that fail and come back, drains, polled figures. Returns the ids of the answers."""
    engines = [FakeEngine("a", answer), FakeEngine("b", fail_now_and_then), FakeEngine("c", answer)]
    engines[0].metrics = BUSY
    settings = {"record": record, "route_policy": policy, "metrics_interval": 0.005, "retry_share": 1.0} | more
    async with rig(*engines, **settings) as it:
        answers = []
        for i in range(0, num_requests, 4):
            answers += await asyncio.gather(*(it.call(body=fields(i + j)) for j in range(4)))
            it.app.engine_admin.drain(it.engine("c"), is_draining=i % 16 == 8)
        assert {each.status for each in answers} == {200}
        await it.until_idle()
        await it.app.record.close()
    return [each.headers["x-request-id"] for each in answers]


def reported(record) -> tuple[bool, str]:
    text = io.StringIO()
    return replay_records([record], Console(file=text, width=200)), text.getvalue()


@pytest.mark.parametrize(
    "policy",
    ["moestro", "lmetric", "least_loaded", "power_of_two", "gimbal-v1", "bounded_hash", "llm-d", "preble"],
)
@looped
async def test_a_record_of_a_live_router_replays_to_the_same_decisions(policy, tmp_path):
    record = tmp_path / "record.jsonl"
    await run(record, policy)
    await run(record, policy)  # another start writes on in the same file
    entries = [decode_entry(line) for line in record.read_bytes().splitlines() if line]
    num_decisions = sum(isinstance(entry, Submitted) for entry in entries)
    assert num_decisions > 80, "some were sent elsewhere"
    assert sum(isinstance(entry, RequestTrace) for entry in entries) == 80
    is_equal, text = reported(record)
    assert text.startswith(f"{num_decisions} of {num_decisions} decisions are reproduced\n")
    assert is_equal


@looped
async def test_every_story_is_written_be_none_remembered(tmp_path):
    record = tmp_path / "record.jsonl"
    ids = await run(record, "moestro", remember=0)
    entries = [decode_entry(line) for line in record.read_bytes().splitlines() if line]
    assert sorted(entry.request_id for entry in entries if isinstance(entry, RequestTrace)) == sorted(ids)


@looped
async def test_each_decision_has_its_regret_and_its_story_tells_the_same(tmp_path):
    record = tmp_path / "record.jsonl"
    ids = await run(record, "moestro")
    entries = [decode_entry(line) for line in record.read_bytes().splitlines() if line]
    decisions: dict[str, list] = {}
    for entry in entries:
        if isinstance(entry, Submitted):
            decisions.setdefault(entry.request.request_id, []).append(entry.decision)
    for story in entries:
        if isinstance(story, RequestTrace):
            made = [(each.regret, each.score, each.hit_tokens) for each in decisions[story.request_id]]
            assert [(each.regret, each.score, each.hit_tokens) for each in story.attempts] == made
    assert any(each[0].regret is not None and each[0].regret < 0 for each in decisions.values())
    text = io.StringIO()
    console = Console(file=text, width=200)
    tell(find_trace(ids[-1], admin_url="", admin_api_key=None, record=record), console)
    assert ids[-1] in text.getvalue()
    assert "answered 200" in text.getvalue()


@looped
async def test_a_record_that_does_not_come_out_the_same_says_where_it_differs(tmp_path):
    record = tmp_path / "record.jsonl"
    await run(record, "moestro")
    text = record.read_text()
    record.write_text(text.replace('"policy":"moestro"', '"policy":"round_robin"', 1))
    is_equal, answered = reported(record)
    assert not is_equal
    assert "first difference: request req-" in answered
    assert "recorded: engine" in answered
    assert "replayed: engine" in answered


def test_what_has_no_decision_is_no_record(tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(ConfigError, match="no decision"):
        reported(empty)
    with pytest.raises(ConfigError, match="cannot be read"):
        reported(tmp_path / "missing")


def opened(path: Path) -> RecordFile:
    record, _ = _record(RecordSettings(record=path))
    assert record is not None
    return record


def recorded_router(record: RecordFile) -> RecordedRouter:
    router = RecordedRouter(PolicyText("least_loaded"), RouterSettings(), record.write)
    router.set_routable(router.add_engine(), routable=True)
    return router


@looped
async def test_what_comes_while_a_write_fails_is_behind_the_gap_too(tmp_path, monkeypatch, caplog):
    path = tmp_path / "record.jsonl"
    record = opened(path)
    router, append, fails = recorded_router(record), record._append, threading.Event()

    def fail_when_set(entries):
        assert fails.wait(300)
        raise OSError(28, "No space left on device")

    router.submit(request("r0"), 0)
    await record._flush()
    monkeypatch.setattr(record, "_append", fail_when_set)
    router.submit(request("r1"), 1)
    writing = asyncio.create_task(record._flush())
    await asyncio.sleep(0.01)
    router.ended("r1", 2)
    router.submit(request("r2"), 3)
    fails.set()
    await writing
    monkeypatch.setattr(record, "_append", append)
    router.ended("r0", 4)
    await record.close()
    assert [line.split("record.jsonl")[1] for line in caplog.messages] == [
        ": [Errno 28] No space left on device; lines are lost until they can be written again",
        " goes on; lines lost in the gap: 1",
    ]
    entries = [decode_entry(line) for line in path.read_bytes().splitlines() if line]
    assert [type(entry).__name__ for entry in entries[4:]] == ["Gap", "RequestEnded", "Submitted", "RequestEnded"]
    assert record.num_lost == entries[4].num_lost == 1
    assert len(list(replay(path.read_bytes().splitlines()))) == 1  # up to the gap


@looped
async def test_a_write_that_runs_when_the_router_stops_is_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "record.jsonl"
    record = opened(path)
    router, append, may_write = recorded_router(record), record._append, threading.Event()
    num_writing = 0

    def slow(entries):
        nonlocal num_writing
        num_writing += 1
        assert num_writing == 1, "two threads write to one file"
        assert may_write.wait(300)
        append(entries)
        num_writing -= 1

    monkeypatch.setattr(record, "_append", slow)
    monkeypatch.setattr("moestro.web.record_file.FLUSH_S", 0.0)
    forever = asyncio.create_task(record._flush_forever())
    await asyncio.sleep(0.02)
    forever.cancel()
    router.submit(request("r0"), 0)
    closing = asyncio.create_task(record.close())
    await asyncio.sleep(0.02)
    may_write.set()
    await closing
    assert len(list(replay(path.read_bytes().splitlines()))) == 1


@looped
async def test_what_has_no_place_is_counted_and_the_record_goes_on_behind_a_gap(tmp_path, monkeypatch, caplog):
    path = tmp_path / "record.jsonl"
    await run(path, "least_loaded", num_requests=4)
    entries = [decode_entry(line) for line in path.read_bytes().splitlines() if line]
    assert len(entries) > 8
    record = opened(tmp_path / "other.jsonl")
    monkeypatch.setattr("moestro.web.record_file._MAX_PENDING", 3)
    for entry in entries:
        record.write(entry)
    await record._flush()
    for entry in entries[:2]:
        record.write(entry)
    await record._flush()
    await record.close()
    written = [decode_entry(line) for line in (tmp_path / "other.jsonl").read_bytes().splitlines() if line]
    kinds = [type(entry) for entry in entries]
    assert [type(entry) for entry in written] == [*kinds[:3], Gap, *kinds[:2]]
    assert record.num_lost == written[3].num_lost == len(entries) - 3
    assert [line.split("other.jsonl")[1] for line in caplog.messages if "other.jsonl" in line] == [
        ": the disk does not keep up; lines are lost until they can be written again",
        f" goes on; lines lost in the gap: {len(entries) - 3}",
    ]


@looped
async def test_a_record_tests_no_guess_and_names_the_key_that_it_lacks(tmp_path):
    """The names of blocks follow from the model and the text, so the file must have neither them nor their key."""
    path = tmp_path / "record.jsonl"
    await run(path, "least_loaded", num_requests=4)
    text = path.read_bytes()
    body = RequestBody(model="m", messages=[BodyMessage("user", f"Session 0. {TURN}")])
    key = prompt_key("m", None)
    guesses = split_hashes(hash_text(key, plain_text(body), BYTES_PER_TOKEN * 16))
    submitted = next(each for each in map(decode_entry, filter(None, text.splitlines())) if isinstance(each, Submitted))
    assert submitted.request.block_hashes
    assert submitted.request.hash_key == b""
    secret = record_key(None)
    assert all(b64encode(guess)[:20] not in text for guess in [key, *guesses])
    assert secret.secret not in text
    assert decode_entry(text.splitlines()[0]).key_id == secret.key_id
    assert set(split_hashes(keyed_names(secret.secret, b"".join(guesses)))) & set(
        split_hashes(submitted.request.block_hashes)
    )  # the same guess with the key: the guess itself is right


@looped
async def test_the_head_says_the_time_on_both_clocks_and_one_of_an_older_version_is_read(tmp_path):
    path = tmp_path / "record.jsonl"
    before_ns = time.time_ns()
    await run(path, "least_loaded", num_requests=4)
    head = decode_entry(path.read_bytes().splitlines()[0])
    assert before_ns <= head.clocks.wall_ns <= time.time_ns()
    assert 0 <= time.monotonic_ns() - head.clocks.monotonic_ns < time.time_ns() - before_ns
    path.write_bytes(re.sub(rb',"clocks":{[^}]*}', b"", path.read_bytes(), count=1))
    assert decode_entry(path.read_bytes().splitlines()[0]).clocks is None
    assert reported(path)[0]


def test_a_trace_shows_hits_in_host_memory_and_speeds_where_there_are_any(capsys):
    plain = ScoredEngine("a", 1.5, 640)
    rich = [ScoredEngine("a", 1.5, 640, 320, 1.25, 0.5), ScoredEngine("b", 2.5, 0)]
    for candidates, shown in (([plain], False), (rich, True)):
        attempt = Attempt(
            engine="a", score=1.5, reason="delay", because="", hit_tokens=640, candidates=candidates,
            num_candidates=len(candidates), regret=None,
        )  # fmt: skip
        console = Console(width=200)
        for line in _attempt_lines(attempt):
            console.print(line)
        text = capsys.readouterr().out
        assert all((word in text) == shown for word in ("on the host", "320", "prompt speed", "1.25", "0.50"))
