"""`moestro serve --launcher ray` through the real command, on several nodes and on several machines.

The nodes are of one cluster on this machine. The machines are network namespaces, whose wire is captured and cut. All
are in one file, so that only one cluster runs at a time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.namespaces import Namespaces, why_not
from support.ray_servers import node_addresses, node_ids, ray_token
from support.running import EXACT, PATIENCE_S, REAL, Reply, Running, complete, has_ended, is_idle, metrics, wait_until

pytest.importorskip("ray")

PROMPTS = ("def fibonacci(n):", "class Stack:\n    def", "import os\n", "for i in range(10):\n")

PORT = 6379
# By default Ray takes up to half a minute to find that a machine has gone.
FAST_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
TOKEN_IDS = list(range(100, 140))  # token ids, which nothing but this prompt has in a row
# A cluster that shares its cores with other tests starts slowly.
PATIENT = ("--ray-timeout", str(PATIENCE_S))


class RayNodes:
    """The cluster of `support.ray_nodes`, in a process of its own."""

    def __init__(self) -> None:
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
        script = Path(__file__).parents[1] / "support" / "ray_nodes.py"
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.address = self._process.stdout.readline().strip()
        assert ":" in self.address

    def remove(self, node_id: str) -> None:
        self._process.stdin.write(node_id + "\n")
        self._process.stdin.flush()

    def workers(self) -> list[psutil.Process]:
        """The processes of Moestro's workers on all nodes."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(part.startswith("moestro.worker.") for part in process.cmdline()):
                    found.append(process)
        return found

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.wait(300)
        self._process.stdout.close()


@pytest.fixture(scope="module", autouse=True)
def _token() -> Iterator[None]:
    with ray_token():
        yield


@pytest.fixture(scope="module")
def nodes(_token) -> Iterator[RayNodes]:
    cluster = RayNodes()
    yield cluster
    cluster.stop()


def ask_many(server: Running, num: int, max_tokens: int) -> list[Reply]:
    def ask(i: int) -> Reply:
        sampling = {"temperature": 0.8, "seed": i} if i % 3 == 1 else {"temperature": 0}
        return complete(server, prompt=PROMPTS[i % 4] * (1 + i % 2), max_tokens=max_tokens, ignore_eos=True, **sampling)

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(ask, range(num)))


def texts(replies: list[Reply]) -> list[str]:
    assert [reply.status for reply in replies] == [200] * len(replies)
    return [reply.json["choices"][0]["text"] for reply in replies]


def test_workers_on_several_nodes_answer_as_fused_mode_while_a_node_is_lost(server, real_command, nodes, tmp_path):
    fused = texts(ask_many(server, 6, 12))
    group = ("--mode", "async", "--attention", "2", "--experts", "2", "--launcher", "ray", *PATIENT)
    address = ("--ray-address", nodes.address)
    running = Running((*real_command, *EXACT, *group, *address), tmp_path)
    try:
        assert texts(ask_many(running, 6, 12)) == fused
        before = node_ids(running)
        assert sorted(before) == ["engine 0", "engine 1", "expert worker 0", "expert worker 1"]
        with_engines = {before["engine 0"], before["engine 1"]}
        lost = min((before["expert worker 0"], before["expert worker 1"]), key=with_engines.__contains__)
        victims = [worker for worker, node in before.items() if node == lost]
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(ask_many, running, 6, 12)
            wait_until(lambda: not is_idle(running) or answers.done())
            nodes.remove(lost)
            while any(node_ids(running)[victim] == lost for victim in victims):
                assert texts(answers.result()) == fused
                answers = pool.submit(ask_many, running, 6, 12)
            assert texts(answers.result()) == fused
        values = metrics(running)
        assert all(values[f'moestro:worker_restarts_total{{worker="{victim}"}}'] >= 1 for victim in victims)
        num_moved = sum(value for name, value in values.items() if name.startswith("moestro:requests_moved_total"))
        assert lost in with_engines or not num_moved
        assert values["moestro:worker_connections_refused_total"] == 0
        wait_until(lambda: is_idle(running))
        assert running.stop() == 0
        assert running.left_behind() == []
    finally:
        running.kill()


def test_replicas_run_on_nodes_restart_there_and_end_with_the_api_server(nodes, tmp_path):
    paced = ("--device", "paced:h200", "--model", "mixtral-8x7b-mqa-top1", "--paced-arithmetic", "none")
    ray = ("--engines", "2", "--launcher", "ray", "--ray-address", nodes.address, *PATIENT)
    running = Running((*REAL, *paced, *ray), tmp_path)
    try:
        assert len(set(node_ids(running).values())) == 2
        expected = texts(ask_many(running, 6, 8))
        before = nodes.workers()
        assert len(before) == 2
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(ask_many, running, 6, 8)
            wait_until(lambda: not is_idle(running) or answers.done())
            before[0].send_signal(signal.SIGKILL)
            assert texts(answers.result()) == expected
        wait_until(lambda: "was killed by SIGKILL" in running.text)
        wait_until(lambda: len([each for each in nodes.workers() if each not in before]) == 1)
        assert texts(ask_many(running, 6, 8)) == expected
        left = nodes.workers()
        running.kill()
        wait_until(lambda: all(has_ended(each) for each in left))
    finally:
        running.kill()


@pytest.fixture
def machines(tmp_path) -> Iterator[Namespaces]:
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
        reply = complete(where, prompt=TOKEN_IDS, max_tokens=40, temperature=0, ignore_eos=True)
        assert reply.status == 200
        return reply.json["choices"][0]["text"]

    fused = ask(server)
    head = machines.addresses[0]
    group = ("--mode", "async", "--attention", "1", "--experts", "2")
    ray = ("--launcher", "ray", "--ray-address", f"{head}:{PORT}", *PATIENT)
    command = machines.command(0, (*real_command, *EXACT, *group, *ray, "--host", head))
    capture = machines.capture(0)
    directory = tmp_path / "server"
    directory.mkdir()
    running = Running(command, directory)
    try:
        assert ask(running) == fused
        packets = b"".join(capture.stop())
        assert b"CURVE" in packets  # the name of the mechanism, which each connection begins with
        assert np.array(TOKEN_IDS, np.int32).tobytes() not in packets
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
