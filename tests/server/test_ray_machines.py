"""`moestro serve --launcher ray` between network namespaces: three machines, whose wire is listened to and cut."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.namespaces import Namespaces, why_not
from support.ray_servers import node_addresses, ray_token
from support.running import Running, complete, is_idle, wait_until

pytest.importorskip("ray")

PORT = 6379
# By default Ray takes up to half a minute to find that a machine has gone.
FAST_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
PROMPT = list(range(100, 140))  # token ids, which nothing but this prompt has in a row


@pytest.fixture
def _token() -> Iterator[None]:
    with ray_token():
        yield


@pytest.fixture
def machines(tmp_path, _token) -> Iterator[Namespaces]:
    """A head without cores, and two nodes with three each."""
    if reason := why_not():
        pytest.skip(reason)
    namespaces = Namespaces(3, tmp_path)
    nodes = []
    try:
        for machine, address in enumerate(namespaces.addresses):
            nodes.append(start_node(namespaces, machine, address, tmp_path))
        yield namespaces
    finally:
        left = [each for node in nodes for each in psutil.Process(node.pid).children(recursive=True)]
        for node in nodes:
            node.terminate()
        psutil.wait_procs(left, 5)  # a machine without a network ends slowly
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        for node in nodes:
            node.kill()
            node.wait()
        namespaces.close()


def start_node(namespaces: Namespaces, machine: int, address: str, directory: Path) -> subprocess.Popen[bytes]:
    """Start Ray on a machine as an operator does, and wait until it runs."""
    head = ("--head", f"--port={PORT}", "--include-dashboard=false", "--num-cpus=0")
    other = (f"--address={namespaces.addresses[0]}:{PORT}", "--num-cpus=3")
    ray = (str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", "--num-gpus=0")
    store = f"--object-store-memory={80 << 20}"
    command = (*ray, store, f"--node-ip-address={address}", *(other if machine else head))
    log = directory / f"ray-{machine}.log"
    with log.open("wb") as output:
        node = subprocess.Popen(
            namespaces.command(machine, command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | FAST_CHECKS,
        )
    wait_until(lambda: b"will now block" in log.read_bytes() or node.poll() is not None)
    assert node.poll() is None, log.read_text()
    return node


def test_machines_answer_as_one_while_the_wire_shows_nothing_and_a_machine_vanishes(
    server, real_command, machines, tmp_path
):
    def ask(where: Running) -> str:
        reply = complete(where, prompt=PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
        assert reply.status == 200
        return reply.json["choices"][0]["text"]

    fused = ask(server)
    head = machines.addresses[0]
    group = ("--mode", "async", "--attention", "1", "--experts", "2")
    ray = ("--launcher", "ray", "--ray-address", f"{head}:{PORT}")
    command = machines.command(0, (*real_command, "--dtype", "float32", *group, *ray, "--host", head))
    capture = machines.capture(0)
    directory = tmp_path / "server"
    directory.mkdir()
    running = Running(command, directory)
    try:
        assert ask(running) == fused
        packets = b"".join(capture.stop())
        assert b"CURVE" in packets  # the name of the mechanism, which each connection begins with
        assert np.array(PROMPT, np.int32).tobytes() not in packets
        assert b"num_steps" not in packets  # a field of each heartbeat
        before = node_addresses(running)
        # Ray prefers the node that has most to spare, by reports that may be late: either one may be beside the engine.
        name = next(each for each in ("expert worker 0", "expert worker 1") if before[each] != before["engine 0"])
        lost = before[name]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, running)
            wait_until(lambda: not is_idle(running) or answer.done())
            machines.cut(machines.addresses.index(lost))
            while node_addresses(running)[name] == lost:
                assert answer.result() == fused
                answer = pool.submit(ask, running)
            assert answer.result() == fused
        assert running.stop() == 0
    finally:
        running.kill()
