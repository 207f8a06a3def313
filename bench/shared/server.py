"""A server for benches: it is started, asked whether anything is left in it, and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MOESTRO = str(Path(sys.executable).with_name("moestro"))
_START_S = 300


@dataclass
class Server:
    """A server by its address. `process` is None where the script did not start it."""

    process: subprocess.Popen[bytes] | None
    url: str
    key: str = ""

    def get(self, path: str) -> bytes:
        """The body of an answer that is no error."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=5) as answer:
            return answer.read()

    def load(self) -> dict:
        """`GET /load`: requests in hand, and what each engine holds."""
        return json.loads(self.get("/load"))

    def samples(self, name: str) -> list[float]:
        """Return the samples of the metric `name`, one for each engine."""
        lines = self.get("/metrics").decode().splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")]

    def engines(self) -> list[psutil.Process]:
        """The processes of the engines that run now; the server has others too."""
        assert self.process is not None, "the server was not started here"
        return engines_of(psutil.Process(self.process.pid))

    def all_ready(self) -> bool:
        """Whether every engine takes requests."""
        return all(self.samples("moestro:engine_ready"))

    def wait_until_healthy(self, patience_s: float) -> None:
        """Wait for an answer of /health; AssertionError if the process ends or the time passes before it comes."""
        deadline = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            assert self.process is None or self.process.poll() is None, f"{self.url} ended; its log says why"
            assert time.monotonic() < deadline, f"{self.url} is not ready after {patience_s:g} s"
            time.sleep(0.2)

    def wait_until_idle(self, patience_s: float = 10) -> dict:
        """The last `load`, once nothing runs or waits and no block is held; AssertionError if that does not come."""
        deadline = time.monotonic() + patience_s
        while not is_idle(load := self.load()):
            assert time.monotonic() < deadline, f"after {patience_s:g} s something is left: {load}"
            time.sleep(0.01)
        return load


def engines_of(server: psutil.Process) -> list[psutil.Process]:
    """Return the processes of a server's engines that run now; it has other children too."""
    found = []
    for child in server.children():
        with contextlib.suppress(psutil.Error):
            if {"moestro.worker.worker", "moestro.worker.paced_worker"}.intersection(child.cmdline()):
                found.append(child)
    return found


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
    """`moestro serve` with the demo model, unless `flags` name another."""
    return started([MOESTRO, "serve", "--port", str(port), *flags], port, log, **environment)
