"""`moestro serve --record` on a disk that is full, and over restarts."""

from __future__ import annotations

import time

import pytest
from gateway.rig import looped
from support.running import Running, complete, metrics, wait_until

from moestro.errors import ConfigError
from moestro.web.record_file import RecordFile
from moestro.workload.request_record import read_request_record


def test_a_full_disk_ends_the_record_and_neither_requests_nor_engines(fake_command, tmp_path):
    server = Running((*fake_command, "--record", "/dev/full"), tmp_path)
    try:
        ranks = server.ranks()
        assert [complete(server, max_tokens=2).status for _ in range(3)] == [200] * 3
        wait_until(lambda: "/dev/full" in server.text)
        assert [complete(server, max_tokens=2).status for _ in range(3)] == [200] * 3
        assert server.ranks() == ranks
        figures = metrics(server)
        assert figures["moestro:record_lines_lost_total"] > 7  # six requests, the header, and all decisions
        assert figures['moestro:engine_restarts_total{engine="0"}'] == 0
        assert server.stop() == 0
        [line] = [line for line in server.text.splitlines() if "--record" in line]
        assert line.endswith("--record /dev/full: [Errno 28] No space left on device; the record ends here")
    finally:
        server.kill()


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
async def test_a_record_ends_at_its_largest_size(tmp_path, caplog):
    path = tmp_path / "record.jsonl"
    record: RecordFile = RecordFile(path, max_bytes=1000)
    for _ in range(5):
        record.write({"text": "x" * 300})
        await record._flush()
    await record.close()
    assert len(path.read_bytes()) < 1000
    assert record.num_lost == 2
    assert sum("it would be larger than" in line for line in caplog.text.splitlines()) == 1


def test_a_record_that_cannot_be_opened_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordFile(tmp_path / "nowhere" / "record.jsonl")
