"""`moestro serve --record` on a disk that is full, and over restarts."""

from __future__ import annotations

import json
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from gateway.rig import looped
from support.running import Running, complete, metrics, wait_until

from moestro.errors import ConfigError
from moestro.routing.decision_record import replay
from moestro.web.record_file import RecordFile, record_key
from moestro.workload.traces.request_record import read_request_record


def test_a_disk_that_stays_full_ends_neither_requests_nor_engines(fake_command, tmp_path):
    server = Running((*fake_command, "--record", "/dev/full"), tmp_path)
    try:
        ranks = server.ranks()
        assert [complete(server, max_tokens=2).status for _ in range(3)] == [200] * 3
        wait_until(lambda: "/dev/full" in server.text)
        assert [complete(server, max_tokens=2).status for _ in range(3)] == [200] * 3
        assert server.ranks() == ranks
        wait_until(lambda: metrics(server)["moestro:record_lines_lost_total"] > 7)  # six requests, and all decisions
        assert metrics(server)['moestro:engine_restarts_total{engine="0"}'] == 0
        assert server.stop() == 0
        begin, end = [line for line in server.text.splitlines() if "--record" in line]
        assert begin.endswith("[Errno 28] No space left on device; lines are lost until they can be written again")
        assert "--record /dev/full ends in a gap; lines lost in it:" in end
    finally:
        server.kill()


def test_a_record_goes_on_after_a_full_disk_with_a_gap_and_no_torn_line(fake_command, tmp_path):
    """A limit on file sizes stands for the disk: a write is cut in the middle of a line, and later there is room."""
    path = tmp_path / "record.jsonl"
    path.write_bytes(b"\n" * 100_000)  # the log must stay below the limit
    path.chmod(0o600)
    server = Running((*fake_command, "--record", str(path)), tmp_path)

    def num_lost() -> float:
        return metrics(server)["moestro:record_lines_lost_total"]

    try:
        assert complete(server, max_tokens=2).status == 200
        wait_until(lambda: b'\n{"request_id"' in path.read_bytes())
        free = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        full = path.stat().st_size + 300
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (full, free[1]))
        assert [complete(server, max_tokens=2).status for _ in range(2)] == [200] * 2
        wait_until(lambda: num_lost() > 4)
        assert path.stat().st_size <= full - 300
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, free)
        assert complete(server, max_tokens=5).status == 200
        wait_until(lambda: "goes on; lines lost in the gap:" in server.text)
        num = num_lost()
        assert server.stop() == 0
    finally:
        server.kill()
    lines = [json.loads(line) for line in path.read_bytes().splitlines() if line]  # each is whole
    [gap] = [line for line in lines if line.get("type") == "Gap"]
    assert gap["num_lost"] == num
    read = read_request_record(path)
    assert [each.num_output_tokens for each in read.requests] == [2, 5]
    assert f"{int(num)} lines are missing" in read.notes[0]
    assert len(list(replay(path.read_bytes().splitlines()))) == 1
    assert [line.count("--record") for line in server.text.splitlines()].count(1) == 2


@pytest.mark.parametrize("mode", [None, 0o644])
def test_a_record_and_its_key_are_for_their_owner_alone(tmp_path, mode, caplog):
    path, key = tmp_path / "record.jsonl", tmp_path / "own" / "key"
    if mode is not None:
        path.touch(mode)
        path.chmod(mode)
    RecordFile(path, lambda entry: entry, lambda _: [])
    record_key(key)
    assert [each.stat().st_mode & 0o777 for each in (path, key, key.parent)] == [0o600, 0o600, 0o700]
    assert ("was open to other users (mode 0644); its mode is now 0600" in caplog.text) is (mode is not None)


def test_one_key_is_made_by_however_many_processes_begin_at_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: record_key(tmp_path / "key"), range(40)))
    assert len(keys) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "key"]


def test_a_key_file_that_holds_no_key_is_refused_in_words(tmp_path):
    (tmp_path / "short").write_text("hunter2")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("short", "has 7 bytes"), ("pipe", "no regular file"), (".", "no regular file|cannot be used")):
        with pytest.raises(ConfigError, match=words):
            record_key(tmp_path / name)


def test_a_key_that_cannot_be_kept_is_used_once_with_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "moestro").touch()  # a file where the folder should be
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert record_key(None) != record_key(None)
    assert "give --record-key-file" in caplog.text


def test_a_restart_appends_and_what_a_killed_server_wrote_is_joined_with_it(fake_command, tmp_path):
    record = tmp_path / "record.jsonl"
    started_ns = time.time_ns()
    for run in (1, 2):
        (tmp_path / str(run)).mkdir()
        server = Running((*fake_command, "--record", str(record)), tmp_path / str(run))
        try:
            assert [complete(server, max_tokens=3).status for _ in range(2)] == [200] * 2
            wait_until(lambda run=run: record.exists() and record.read_bytes().count(b'\n{"request_id"') == 2 * run)
        finally:
            server.kill()
    with record.open("ab") as file:
        file.write(b'{"request_id":"cmpl-')  # as if the last one had been killed in the middle of a line
    read = read_request_record(record)
    assert [each.num_output_tokens for each in read.requests] == [3] * 4
    times = [each.arrival_ns for each in read.requests]
    assert started_ns < times[0] < times[1] < times[2] < times[3] < time.time_ns()


@looped
async def test_a_record_does_not_exceed_its_largest_size(tmp_path, caplog):
    path = tmp_path / "record.jsonl"
    record: RecordFile = RecordFile(path, lambda entry: entry, lambda num_lost: [{"gap": num_lost}], max_bytes=1000)
    for _ in range(5):
        record.write({"text": "x" * 300})
        await record._flush()
    assert len(path.read_bytes()) < 1000
    assert record.num_lost == 2
    assert sum("it would be larger than" in line for line in caplog.text.splitlines()) == 1
    os.truncate(path, 0)  # as a log rotation with copytruncate does
    record.write({"text": "y"})
    await record.close()
    assert path.read_text() == '{"gap":2}\n{"text":"y"}\n'


def test_a_record_that_cannot_be_opened_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordFile(tmp_path / "nowhere" / "record.jsonl", lambda entry: entry, lambda _: [])
