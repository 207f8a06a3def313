"""A server for benches: start it, check that it is idle, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MOESTRO = str(Path(sys.executable).with_name("moestro"))
# The command, or the same from the package's sources, where nothing is installed.
_FROM_SOURCES = (sys.executable, "-c", "import sys; from moestro.cli import main; sys.exit(main())")
COMMAND = (MOESTRO,) if Path(MOESTRO).exists() else _FROM_SOURCES
_START_S = 300
_PRIORITY = 20  # any real-time one
_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True:
    pass
"""


@dataclass
class Server:
    """A server by its address. A `process` of None means that the script did not start it."""

    process: subprocess.Popen[bytes] | None
    url: str
    key: str = ""

    def get(self, path: str) -> bytes:
        """Return the body of a successful answer."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=5) as answer:
            return answer.read()

    def load(self) -> dict:
        """Return `GET /load`: requests in flight, and the state of each engine."""
        return json.loads(self.get("/load"))

    def samples(self, name: str) -> list[float]:
        """Return the samples of the metric `name`, one for each engine."""
        lines = self.get("/metrics").decode().splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")]

    def engines(self) -> list[psutil.Process]:
        """Return the processes of the running engines; the server has other children too."""
        assert self.process is not None, "the server was not started here"
        return engines_of(psutil.Process(self.process.pid))

    def workers(self) -> dict[str, psutil.Process]:
        """Return the processes of engines and other workers by name, without the one on standby."""
        found = {}
        for process in self.engines():
            with contextlib.suppress(psutil.Error):
                if re.search(r"-\d+$", name := process.name()):
                    found[name] = process
        return found

    @contextlib.contextmanager
    def engines_first(self) -> Iterator[None]:
        """Schedule the engines before all other processes (SCHED_RR), and keep the cores awake.

        Paced engines sleep most of the time, and must wake up at the modelled moment. A kernel that does not preempt
        lets them wait for milliseconds behind the client and the API server, and so does the idle core of a virtual
        machine, which gives it back to its host.
        """
        try:
            for engine in self.engines():
                for thread in engine.threads():
                    os.sched_setscheduler(thread.id, os.SCHED_RR, os.sched_param(_PRIORITY))
        except PermissionError:
            print("the engines run beside other processes: this user may not give real-time priorities")
        with awake_cores():
            yield

    def all_ready(self) -> bool:
        """Whether every engine accepts requests."""
        return all(self.samples("moestro:engine_ready"))

    def wait_until_healthy(self, patience_s: float) -> None:
        """Wait until /health answers. Raise AssertionError if the process ends or `patience_s` pass before."""
        deadline = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            assert self.process is None or self.process.poll() is None, f"{self.url} ended; its log says why"
            assert time.monotonic() < deadline, f"{self.url} is not ready after {patience_s:g} s"
            time.sleep(0.2)

    def wait_until_idle(self, patience_s: float = 10) -> dict:
        """Wait until no request runs or waits and no block is held; return `load`, or raise AssertionError."""
        deadline = time.monotonic() + patience_s
        while not is_idle(load := self.load()):
            assert time.monotonic() < deadline, f"after {patience_s:g} s something is left: {load}"
            time.sleep(0.01)
        return load


def engines_of(server: psutil.Process) -> list[psutil.Process]:
    """Return the processes of a server's running engines; the server has other children too."""
    found = []
    for child in server.children():
        with contextlib.suppress(psutil.Error):
            if {"moestro.worker.worker", "moestro.worker.paced_worker"}.intersection(child.cmdline()):
                found.append(child)
    return found


def free_port() -> int:
    """Return a port of this machine without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextlib.contextmanager
def awake_cores() -> Iterator[list[psutil.Process]]:
    """Keep every core busy with a process that runs only where no other one wants to (SCHED_IDLE).

    Yields these processes. A core of a virtual machine that never idles is not given back to its host, and has the
    same busy neighbour whether or not another process works there.
    """
    spinners = [subprocess.Popen([sys.executable, "-c", _SPIN, str(core)]) for core in os.sched_getaffinity(0)]
    try:
        yield [psutil.Process(spinner.pid) for spinner in spinners]
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def is_idle(load: dict) -> bool:
    gauges = ("num_running", "num_waiting", "kv_usage")
    return not load["server_load"] and not any(engine[name] for engine in load["engines"] for name in gauges)


@contextlib.contextmanager
def started(command: list[str], port: int, log: Path | None = None, **environment: str) -> Iterator[Server]:
    """Run `command`, wait until it answers /health on `port`, and stop it afterwards."""
    url = f"http://127.0.0.1:{port}"
    with log.open("w") if log else contextlib.nullcontext() as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment})
        try:
            server = Server(process, url)
            server.wait_until_healthy(_START_S)
            yield server
        finally:
            process.terminate()
            process.wait(60)


def moestro(port: int, *flags: str, log: Path | None = None, **environment: str) -> contextlib.AbstractContextManager:
    """Start `moestro serve` with the demo model, unless `flags` name another."""
    return started([MOESTRO, "serve", "--port", str(port), *flags], port, log, **environment)
