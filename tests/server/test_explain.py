"""`moestro explain` and `moestro replay` on what real servers did: engine, queue, preempter, devices of experts."""

from __future__ import annotations

import io
import json
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from support.running import PATIENCE_S, REAL, Running, call_admin, complete, free_port, load, wait_until

from moestro.cli import main
from moestro.workload.traces.request_record import read_request_record

ONE_EACH = ("--engines", "2", "--route-policy", "round_robin", "--max-num-seqs", "1")
# Orders and preemptions do not depend on tokens. Steps are so long that a request lasts some seconds.
PACED = ("qwen3-30b-a3b", "--device", "paced:h20", "--paced-arithmetic", "none", "--pace-dilation", "2")
NUM_TOKENS = 150  # of a request during which experts move
QLLM = ("--scheduling-policy", "qllm", "--evict-policy", "least_computed_be_first")


def started(command: tuple[str, ...], directory: Path) -> Iterator[tuple[Running, Path]]:
    record = directory / "record.jsonl"
    command = (*command, "--dtype", "float32", "--record", str(record))
    server = Running(command, directory, admin_port=free_port())
    try:
        yield server, record
        assert server.stop() == 0
    finally:
        server.kill()


@pytest.fixture(scope="module")
def classes(tmp_path_factory) -> Iterator[tuple[Running, Path]]:
    yield from started((*REAL, *PACED, *ONE_EACH, *QLLM), tmp_path_factory.mktemp("classes"))


@pytest.fixture(scope="module")
def spread(real_command, tmp_path_factory) -> Iterator[tuple[Running, Path]]:
    yield from started((*real_command, "--mode", "ep", "--engines", "2"), tmp_path_factory.mktemp("spread"))


@pytest.fixture(scope="module")
def apart(real_command, tmp_path_factory) -> Iterator[tuple[Running, Path]]:
    flags = ("--mode", "async", "--attention", "1", "--experts", "2")
    yield from started((*real_command, *flags), tmp_path_factory.mktemp("apart"))


def ask(server: Running, service_class: str, max_tokens: int, ids: list[str]) -> None:
    prompt = f"def fibonacci(n):  # {service_class} {max_tokens}\n"
    reply = complete(
        server, prompt=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, service_class=service_class
    )
    assert reply.status == 200, reply.body
    ids.append(reply.json["id"])


def moestro(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which has loaded its libraries."""
    status: int | str | None = 0
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code
    return subprocess.CompletedProcess(arguments, int(status or 0), output.getvalue(), errors.getvalue())


def is_written(record: Path, request_id: str) -> bool:
    return any(request_id in line and '"Story"' in line for line in record.read_text().splitlines())


def test_explain_tells_engine_queue_and_preempter_and_the_record_replays(classes):
    server, record = classes
    batch: list[str] = []
    urgent: list[str] = []
    threads = [threading.Thread(target=ask, args=(server, "be", 400 + i, batch)) for i in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: [(each["num_running"], each["num_waiting"]) for each in load(server)] == [(1, 1)] * 2)
    ask(server, "ls", 4, urgent)
    for thread in threads:
        thread.join(PATIENCE_S)
    wait_until(lambda: all(is_written(record, each) for each in batch + urgent))

    reported = moestro("explain", urgent[0], "--record", str(record))
    assert reported.returncode == 0, reported.stderr
    text = " ".join(reported.stdout.split())
    assert re.search(r"to engine [01]: .*queue by qllm; class ls on engine [01]", text), text
    assert "waits at place 1 of 2, class (0 is ls or aged): 0" in text
    victim = re.search(r"preempted (cmpl-\w+)-0, because it is latency-sensitive", text)
    assert victim, text
    assert "not computed: the devices are modelled" in text
    assert "answered 200" in text

    passed = moestro("explain", victim[1], "--record", str(record)).stdout
    assert f"preempted by {urgent[0]}-0, which waits and is latency-sensitive" in passed
    assert "waits again at place" in passed
    assert "admitted again" in passed
    live_outputs = [moestro("explain", each, "--admin-url", f"http://127.0.0.1:{server.admin_port}") for each in batch]
    assert [each.returncode for each in live_outputs] == [0] * 4, live_outputs
    waited = [each.stdout for each in live_outputs]
    assert any("it was never preempted" in each for each in waited)
    assert any(re.search(r"waits at place \d of \d", each) for each in waited)

    replayed = moestro("replay", str(record))
    assert replayed.returncode == 0, replayed.stdout
    assert "5 of 5 decisions are reproduced" in replayed.stdout
    assert re.search(r"(\d+) of \1 decisions of schedulers", replayed.stdout)
    assert len(read_request_record(record)) == 5, "moestro sim reads its part of the same file"


def test_an_unknown_id_is_an_error_that_says_where_it_was_looked_for(classes):
    server, record = classes
    for where in (("--record", str(record)), ("--admin-url", f"http://127.0.0.1:{server.admin_port}")):
        reported = moestro("explain", "cmpl-unknown", *where)
        assert reported.returncode != 0
        assert "cmpl-unknown" in reported.stderr
        assert "Traceback" not in reported.stderr


def swap_experts(server: Running) -> None:
    """Move the first expert of each of two engines to the other one, in all layers, while requests run."""
    table = call_admin(server, "GET", "/admin/placement?arrays=true").json["table"]
    for first, second in table:
        first[0], second[0] = second[0], first[0]
    slots = [[expert for worker in layer for expert in worker] for layer in table]
    body = json.dumps({"physical_to_logical_map": slots}).encode()
    url = f"http://127.0.0.1:{server.admin_port}/admin/placement/apply"
    with urllib.request.urlopen(urllib.request.Request(url, body, method="POST"), timeout=300) as answer:
        assert answer.status == 202
    wait_until(lambda: not call_admin(server, "GET", "/admin/placement").json["progress"]["is_running"])


def num_pairs(trace: dict[str, Any]) -> int:
    return sum(sum(map(sum, by_version["num_pairs"])) for visits in trace["visits"] for by_version in visits["visits"])


def test_explain_tells_which_experts_moved_while_a_request_ran(spread):
    server, record = spread
    ids: list[str] = []
    asking = threading.Thread(target=ask, args=(server, "ls", NUM_TOKENS, ids))
    asking.start()
    wait_until(lambda: any(each["num_running"] for each in load(server)))
    swap_experts(server)
    asking.join(PATIENCE_S)
    wait_until(lambda: is_written(record, ids[0]))
    trace = call_admin(server, "GET", f"/admin/explain/{ids[0]}").json
    assert num_pairs(trace) == (trace["usage"]["prompt_tokens"] + NUM_TOKENS - 1) * 2 * 7
    assert sum(change["num_moves"] for change in trace["moves"]) == 2 * 7, "two experts of each layer"
    assert len(trace["visits"][0]["visits"]) > 1, "before and after the moves"
    specs = [line for line in record.read_text().splitlines() if '"type":"SpecSet"' in line]
    assert len(specs) == 2
    assert all('"group":0' in line for line in specs), "the router knows that the engines step together"
    text = moestro("explain", ids[0], "--record", str(record)).stdout
    assert re.search(r"table version \d+: expert \d+ of layer \d from engine [01] to engine [01]", text), text


def test_explain_tells_which_expert_workers_computed_a_requests_experts(apart):
    server, record = apart
    ids: list[str] = []
    ask(server, "ls", 6, ids)
    wait_until(lambda: is_written(record, ids[0]))
    trace = call_admin(server, "GET", f"/admin/explain/{ids[0]}").json
    assert num_pairs(trace) == (trace["usage"]["prompt_tokens"] + 6 - 1) * 2 * 7
    text = moestro("explain", ids[0], "--record", str(record)).stdout
    assert re.search(r"layers\s+expert worker 0\s+expert worker 1\s", text), text


def test_explain_tells_which_ranks_computed_a_requests_experts(spread):
    server, record = spread
    ids: list[str] = []
    ask(server, "ls", 6, ids)
    trace = call_admin(server, "GET", f"/admin/explain/{ids[0]}").json
    (visits,) = trace["visits"]
    (by_version,) = visits["visits"]
    num_tokens = trace["usage"]["prompt_tokens"] + 6 - 1
    num_layers = by_version["ends"][-1]
    pairs = by_version["num_pairs"]
    assert sum(map(sum, pairs)) == num_tokens * 2 * num_layers
    assert all(sum(ranks) for ranks in zip(*pairs, strict=True)), "both ranks have experts that some token chose"

    wait_until(lambda: is_written(record, ids[0]))
    text = moestro("explain", ids[0], "--record", str(record)).stdout
    assert re.search(r"layers\s+engine 0\s+engine 1", text), text
    assert f"0  {pairs[0][0]}  {pairs[0][1]}" in re.sub(" +", "  ", text)
    assert "no expert moved meanwhile" in text
    as_json = moestro("explain", ids[0], "--record", str(record), "--json")
    assert json.loads(as_json.stdout) == {"type": "Story"} | trace
