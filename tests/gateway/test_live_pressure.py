"""`moestro route` before two real servers, of which one has a skewed gate: its expert pressure turns decisions."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from rich.console import Console
from support.running import MOESTRO, REAL, Running, call_admin, complete, free_port, metrics, wait_until

from moestro.cli.recorded.replay import replay_records
from moestro.core.experts.expert_load import expert_pressures
from moestro.core.experts.expert_table import DISTANCES, spread_evenly
from moestro.routing.decision_record import Reported, decode_entry, encode_entry, replay

# Real processes and messages; the devices are modelled and answer without torch. The network has 8 experts, top-1.
PACED = ("--device", "paced:h200", "--model", "mixtral-8x7b-mqa-top1", "--paced-arithmetic", "none")
GROUP = ("--mode", "ep", "--engines", "2", "--route-policy", "gimbal-v2")
CALM, PRESSED = 0, 1
NUM_REQUESTS = 8
INTERVAL_S = 0.05  # between the router's looks at the servers' figures


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[list[Running]]:
    """A server with an even gate, and one whose tokens mostly visit one expert of a layer."""

    def start(override: str) -> Running:
        directory = tmp_path_factory.mktemp(override.partition(":")[0])
        command = (*REAL, *PACED, *GROUP, "--gate-override", override)
        return Running(command, directory, admin_port=free_port())

    running = [start("uniform"), start("exponential:2")]
    yield running
    for server in running:
        server.stop()
        server.kill()


def pressures(server: Running) -> list[float]:
    return [value for name, value in metrics(server).items() if name.startswith("moestro:expert_pressure{")]


def all_known(servers: list[Running]) -> bool:
    """Whether all engines have a pressure, those of the server with the even gate a low one."""
    calm, pressed = (pressures(server) for server in servers)
    return len(calm) == len(pressed) == 2 and max(calm) < 1.1 < 1.2 < min(pressed)


def work(servers: list[Running]) -> None:
    """All engines compute, so that each server has a fresh pressure of both."""
    for server in servers:
        with ThreadPoolExecutor(8) as pool:
            replies = pool.map(lambda i: complete(server, prompt=f"{i} " * 100, max_tokens=8), range(8))  # noqa: B023
            assert {reply.status for reply in replies} == {200}
    wait_until(lambda: all_known(servers))
    time.sleep(5 * INTERVAL_S)  # the router reads them


def test_operators_see_the_pressure_and_how_near_the_experts_are(servers):
    def agrees() -> bool:
        """Whether the figures are those of all tokens, which are recent ones; they are known for 5 s."""
        found = call_admin(servers[PRESSED], "GET", "/admin/experts?arrays=true").json
        if None in [each["visits"] for each in found["near"]]:
            work(servers)
            return False
        visits = np.array(found["arrays"]["counts"], float)
        table = spread_evenly(*visits.shape[1:], [0, 1], 2)
        pressures = expert_pressures(visits, table.parts)
        local = (visits * table.parts).sum(axis=(1, 2)) / visits.sum(axis=(1, 2))
        assert found["table_version"] == 0
        for near in found["near"]:
            assert near["experts"] == {name: [part] * 32 for name, part in zip(DISTANCES, (0.5, 0.5, 0), strict=True)}
            assert near["visits"]["other"] == 0
        seen = [(near["pressure"], near["visits"]["device"]) for near in found["near"]]
        return np.allclose(seen, np.stack([pressures, local], axis=1), atol=0.05)

    work(servers)
    wait_until(agrees)


def test_the_balancer_of_a_server_takes_the_engine_with_less_pressure(servers):
    """Nothing else distinguishes its idle engines under `gimbal-v2`, which otherwise takes one at random."""

    def answered() -> list[float]:
        name = 'moestro:request_success_total{engine="%d",finished_reason="length"}'
        return [metrics(server)[name % engine] for engine in (0, 1)]

    server, chosen, expected = servers[PRESSED], [], []
    work(servers)
    for _ in range(60):
        seen, before = pressures(server), answered()
        assert complete(server, prompt="x", max_tokens=2, ignore_eos=True).status == 200
        if len(seen) == 2 and pressures(server) == seen:  # The figures did not change meanwhile.
            chosen.append(answered()[1] > before[1])
            expected.append(seen[1] < seen[0])
        if len(chosen) == 8:
            break
    assert len(chosen) == 8
    assert chosen == expected


def without_pressure(line: bytes) -> bytes:
    entry = decode_entry(line)
    if isinstance(entry, Reported):
        figures = msgspec.structs.replace(entry.figures, expert_pressure=None)
        entry = msgspec.structs.replace(entry, figures=figures)
    return encode_entry(entry)


@pytest.mark.parametrize("policy", ["gimbal-v2", "moestro"])
def test_requests_avoid_the_pressed_server_and_the_replay_agrees(servers, tmp_path, policy):
    record = tmp_path / "record.jsonl"
    flags = ("--route-policy", policy, "--admin-port", "0", "--record", str(record))
    urls = (part for server in servers for part in ("--engine", server.url))
    router = Running((MOESTRO, "route", *urls, *flags, "--metrics-interval", str(INTERVAL_S)), tmp_path)
    try:
        for i in range(NUM_REQUESTS):
            if i % 4 == 0:  # A figure lives for 5 s, and the machine may be slow.
                work(servers)
            assert complete(router, prompt=f"{i} {policy} " * 8, max_tokens=4).status == 200
            time.sleep(5 * INTERVAL_S)  # the router learns that the server is idle again
        assert router.stop() == 0
    finally:
        router.kill()
    text = io.StringIO()
    assert replay_records([record], Console(file=text)), text.getvalue()
    assert f"{NUM_REQUESTS} of {NUM_REQUESTS} decisions are reproduced" in text.getvalue()
    lines = [line for line in record.read_bytes().splitlines() if line]
    chosen = [recorded.decision.engine for recorded, _ in replay(lines)]
    otherwise = [again.decision.engine for _, again in replay(map(without_pressure, lines))]
    assert otherwise.count(PRESSED) > chosen.count(PRESSED)
    assert (CALM, PRESSED) in zip(chosen, otherwise, strict=True)
