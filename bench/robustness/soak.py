"""Runs servers for half an hour under kills, stops and bad input, and checks for leaks, hangs and unexplained failures.

    # And a picture beside it, soak.png
    python bench/robustness/soak.py [--minutes 30] [--json bench/results/robustness/soak.json]
    # Three routers that share their state; all but the first are also killed
    python bench/robustness/soak.py --routers 3 [--json bench/results/robustness/soak_routers.json]

The script starts two `moestro serve` with the demo model in float32 and `moestro route` in front of them. Server A has
two engines, and its record is on a full disk; server B is preemptive. Honest clients compare each answer with that of
an undisturbed server. Bad clients send broken bodies, broken HTTP, packed bombs, nasty JSON and costly grammars, and
disconnect. A traceback in a log is a finding. Faults happen at random moments:
SIGKILL and SIGSTOP of engines, SIGSTOP of the API server and of the router, SIGTERM and SIGKILL of B. Every end of a
request that no fault explains is printed and counted. At the end the routers count no request in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
from soak_clients import KEY, Clients, End, Findings, ask, cases
from soak_picture import draw_soak

import moestro
from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save
from shared.server import MOESTRO, Server, engines_of

ROUTER, A, B, ADMIN = 8300, 8301, 8302, 8303
NUM_PORTS = 10  # from a router's ports to those of the next router
PEER = 8304
ENGINE_TIMEOUT_S = 4.0
SAMPLE_S = 10.0
# Time for which a fault can still affect requests: a request waits 60 s for an engine, a restart may wait 60 s too.
AFTERMATH_S = 150.0
ROUTER_AFTERMATH_S = 30.0  # the same for the kill of a router, which starts again at once


class Process:
    """One of the servers, which can be started again."""

    def __init__(self, name: str, port: int, command: list[str], directory: Path) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._command, self._directory = command, directory
        self.log = directory / f"{name}.log"
        self.start()

    def start(self) -> None:
        own = str(self._directory)
        environment = {"TMPDIR": own, "XDG_STATE_HOME": own, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        environment["PYTHONPATH"] = str(Path(moestro.__file__).parents[1])  # a later start finds this code too
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        self.family = psutil.Process(self._process.pid)

    def workers(self) -> list[psutil.Process]:
        """Return the processes of its engines."""
        return engines_of(self.family)

    def end(self, number: int) -> int:
        """Send a signal and wait until every process of the server has ended. Return the exit status."""
        family = [self.family, *self.family.children(recursive=True)]
        self._process.send_signal(number)
        status = self._process.wait(60)
        _, left = psutil.wait_procs(family, timeout=20)
        assert not left, f"{self.name} left processes behind: {left}"
        return status

    def wait_until_healthy(self) -> None:
        """Wait until it answers `GET /health`."""
        Server(None, self.url).wait_until_healthy(120)


def _concerns(name: str, target: str) -> bool:
    """Return whether a fault of one server can affect requests to `target`: routers need A and B."""
    return target == name or (target.startswith("router") and not name.startswith("router"))


@dataclass(slots=True)
class Faults:
    """Injects faults at random moments, and records them to explain failures.

    Attributes:
        done: (time, kind, name of the affected server).
    """

    servers: dict[str, Process]
    findings: Findings
    rng: random.Random
    done: list[tuple[float, str, str]] = field(default_factory=list)

    async def forever(self, stop: asyncio.Event) -> None:
        harms: list[Callable[[], None]] = [
            self._kill_engine, self._kill_engine, self._kill_engine, self._stop_engine, self._pause_server,
            self._pause_router, self._restart_b, self._kill_b,
        ]  # fmt: skip
        harms += [self._kill_router] * (2 * (len(self._routers()) - 1))
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), self.rng.uniform(15, 45))
                return
            await asyncio.to_thread(self.rng.choice(harms))

    def explain(self, end: End) -> bool:
        """Whether a fault during the request or shortly before it explains its end."""
        hit = [kind for at, kind, name in self.done if at > end.began - AFTERMATH_S and _concerns(name, end.target)]
        if self._is_killed_router(end):
            return True
        if end.how == "refused 503" or (end.how in ("error event", "cut off") and not end.resumes):
            return bool(hit)  # a stream that cannot resume ends with an error event and a cut connection
        if end.how in ("refused 500", "error event") and self._num_deaths(end) > 1:
            return True  # a request moves again only if its last engine generated a token (docs/failures.md)
        is_server_fault = any(kind in ("SIGTERM of B", "SIGKILL of B") for kind in hit)
        return is_server_fault and end.how in ("error event", "cut off", "not connected", "refused 502", "closed")

    def _is_killed_router(self, end: End) -> bool:
        """Return whether the request ended with its router."""
        is_killed = any(
            kind.startswith("SIGKILL") and name == end.target and at > end.began - ROUTER_AFTERMATH_S
            for at, kind, name in self.done
            if name.startswith("router")
        )
        return is_killed and end.how in ("cut off", "not connected", "closed")

    def _num_deaths(self, end: End) -> int:
        """Return how many engines of the request's target have ended while the request may have been on them."""
        since = end.began - 2 * ENGINE_TIMEOUT_S  # it may have been sent to an engine that stands still
        return sum(
            "of an engine of" in kind and _concerns(name, end.target) for at, kind, name in self.done if at > since
        )

    def _note(self, kind: str, name: str) -> None:
        self.done.append((time.monotonic(), kind, name))
        print(time.strftime("%H:%M:%S"), kind, flush=True)

    def _engine(self) -> tuple[str, psutil.Process] | None:
        name = self.rng.choice(["A", "A", "B"])
        workers = self.servers[name].workers()
        return (name, self.rng.choice(workers)) if workers else None

    def _kill_engine(self) -> None:
        if found := self._engine():
            self._note(f"SIGKILL of an engine of {found[0]}", found[0])
            with contextlib.suppress(psutil.Error):
                found[1].kill()

    def _stop_engine(self) -> None:
        if found := self._engine():
            self._note(f"SIGSTOP of an engine of {found[0]}", found[0])
            with contextlib.suppress(psutil.Error):
                found[1].suspend()
                with contextlib.suppress(psutil.TimeoutExpired):
                    found[1].wait(ENGINE_TIMEOUT_S + 3)
                    return
                self.findings.blame(kind="an engine that stands still was not noticed", server=found[0])
                found[1].resume()

    def _pause_server(self) -> None:
        server = self.servers["A"]
        before = {worker.pid for worker in server.workers()}
        self._note("SIGSTOP of A's API server", "A")
        server.family.suspend()
        time.sleep(ENGINE_TIMEOUT_S * 2)
        server.family.resume()
        time.sleep(2)
        after = {worker.pid for worker in server.workers()}
        if before - after:
            self.findings.blame(kind="a pause of the API server killed engines", before=len(before), after=len(after))

    def _routers(self) -> list[str]:
        return [name for name in self.servers if name.startswith("router")]

    def _pause_router(self) -> None:
        name = self.rng.choice(self._routers())
        self._note(f"SIGSTOP of the {name}", name)
        self.servers[name].family.suspend()
        time.sleep(12)
        self.servers[name].family.resume()

    def _kill_router(self) -> None:
        """Kill any router but the first, whose memory shows leaks."""
        name = self.rng.choice(self._routers()[1:])
        self._note(f"SIGKILL of the {name}", name)
        self.servers[name].end(signal.SIGKILL)
        self.servers[name].start()
        self.servers[name].wait_until_healthy()

    def _restart_b(self) -> None:
        self._end_b(signal.SIGTERM)

    def _kill_b(self) -> None:
        self._end_b(signal.SIGKILL)

    def _end_b(self, number: signal.Signals) -> None:
        self._note(f"{number.name} of B", "B")
        status = self.servers["B"].end(number)
        if status != (0 if number is signal.SIGTERM else -number):
            self.findings.blame(kind=f"B ended with status {status} after {number.name}")
        self.servers["B"].start()
        self.servers["B"].wait_until_healthy()


def start_all(directory: Path, num_routers: int) -> dict[str, Process]:
    flags = ["--dtype", "float32", "--kv-cache-memory-bytes", "200000000", "--engine-timeout", str(ENGINE_TIMEOUT_S)]
    keys = ["--api-key", KEY]
    serve = [MOESTRO, "serve", *flags, *keys]
    commands = {
        "A": (A, [*serve, "--port", str(A), "--engines", "2", "--record", "/dev/full"]),
        "B": (B, [*serve, "--port", str(B), "--mode", "preemptive", "--record", str(directory / "b.jsonl")]),
    }
    shifts = [NUM_PORTS * number for number in range(num_routers)]
    peers = [part for shift in shifts for part in ("--peer", f"http://127.0.0.1:{PEER + shift}")]
    for number, shift in enumerate(shifts):
        route = [
            MOESTRO, "route", "--port", str(ROUTER + shift), "--admin-port", str(ADMIN + shift), *keys,
            "--engine-api-key", KEY, "--engine", f"a=http://127.0.0.1:{A}", "--engine", f"b=http://127.0.0.1:{B}",
            "--record", str(directory / f"route{number or ''}.jsonl"),
        ]  # fmt: skip
        if num_routers > 1:
            route += ["--peer-port", str(PEER + shift), *peers, "--peer-key", KEY]
        commands[f"router{number or ''}"] = ROUTER + shift, route
    servers = {name: Process(name, port, command, directory) for name, (port, command) in commands.items()}
    for server in servers.values():
        server.wait_until_healthy()
    return servers


async def expected_answers(targets: dict[str, str]) -> dict[int, dict[int, str]]:
    """Return the answers of all servers without faults; they must agree."""
    found = {}
    async with aiohttp.ClientSession() as session:
        for number, case in enumerate(cases()):
            answers = [await ask(session, url, case) for url in targets.values()]
            assert all(answer.end == "answered" for answer in answers), (case, answers)
            assert all(answer.text == answers[0].text for answer in answers), (case, answers)
            found[number] = answers[0].text
    return found


async def sample(servers: dict[str, Process], samples: list[dict[str, object]], stop: asyncio.Event) -> None:
    """Sample the memory, files and threads of the servers until `stop`."""
    began = time.monotonic()
    while not stop.is_set():
        now = time.monotonic()
        row: dict[str, object] = {"at": now, "s": round(now - began)}
        for name, server in servers.items():
            with contextlib.suppress(psutil.Error):
                process = server.family
                row[name] = [round(process.memory_info().rss / 2**20, 1), process.num_fds(), process.num_threads()]
        samples.append(row)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), SAMPLE_S)


async def soak(servers: dict[str, Process], seconds: float, seed: int) -> tuple[Findings, Faults, list[dict]]:
    findings, stop, samples = Findings(), asyncio.Event(), []
    faults = Faults(servers, findings, random.Random(seed))
    targets = {name: server.url for name, server in servers.items()}
    expected = await expected_answers(targets)
    clients = Clients(targets, expected, faults.explain, findings, stop)
    async with asyncio.TaskGroup() as tasks:
        for user in range(6):
            tasks.create_task(clients.honest(seed + user))
        for work in (clients.broken_bodies, clients.strangers, clients.leavers, clients.garbage):
            tasks.create_task(work(seed))
        tasks.create_task(sample(servers, samples, stop))
        tasks.create_task(faults.forever(stop))
        await asyncio.sleep(seconds)
        stop.set()
    return findings, faults, samples


def settle(servers: dict[str, Process], samples: list[dict], findings: Findings) -> dict[str, object]:
    """Wait until the servers are idle, take a last sample of the long-lived processes, and stop all."""
    for name in ("A", "B"):
        Server(None, servers[name].url, KEY).wait_until_idle(90)
    time.sleep(5)
    for number, name in enumerate(name for name in servers if name.startswith("router")):
        admin = Server(None, f"http://127.0.0.1:{ADMIN + NUM_PORTS * number}")
        if num := sum(admin.samples("moestro:route_in_flight")):
            findings.blame(kind="requests that have ended count as in flight", router=name, count=num)
    last = {name: [servers[name].family.num_fds(), servers[name].family.num_threads()] for name in servers}
    growth = {}
    for name in ("A", "router"):  # the others were started again many times
        memory = [row[name][0] for row in samples if name in row]
        third = len(memory) // 3
        growth[name] = {"mb_after_a_third": memory[third], "mb_at_the_end": memory[-1], "mb_most": max(memory)}
        growth[name] |= {"files_and_threads_first": samples[0][name][1:], "files_and_threads_idle": last[name]}
    status = {name: server.end(signal.SIGTERM) for name, server in servers.items()}
    return {"memory": growth, "exit_status": status}


def log_lines(servers: dict[str, Process]) -> dict[str, int]:
    """Count the warnings and errors of all logs, with numbers left out."""
    found: Counter[str] = Counter()
    for name, server in servers.items():
        for line in server.log.read_text(errors="replace").splitlines():
            if re.search(r"\b(WARNING|ERROR|CRITICAL|Traceback)\b", line):
                plain = re.sub(r"[0-9a-f]{8,}|\d+(\.\d+)?", "#", line.partition(" ")[2])
                found[f"{name}: {plain[:160]}"] += 1
    return dict(found.most_common())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--routers", type=int, default=1)
    args = parser.parse_args()
    conditions = run_record("measured")
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        directory = Path(name)
        servers = start_all(directory, args.routers)
        try:
            findings, faults, samples = asyncio.run(soak(servers, args.minutes * 60, args.seed))
            settled = settle(servers, samples, findings)
            left = sorted(path.name for path in directory.iterdir() if path.name.startswith("moestro-"))
            lines = log_lines(servers)
            for server in servers.values():
                if num_tracebacks := server.log.read_text(errors="replace").count("Traceback"):
                    findings.blame(kind="tracebacks in a log", server=server.name, count=num_tracebacks)
        finally:
            for server in servers.values():
                for process in [*server.workers(), server.family] if server.family.is_running() else []:
                    process.kill()
    result = {
        "minutes": args.minutes,
        "seed": args.seed,
        "routers": args.routers,
        "faults": dict(Counter(kind for _, kind, _ in faults.done)),
        "honest": dict(sorted(findings.ends.items())),
        "bad": dict(sorted(findings.bad.items())),
        "unexplained": findings.unexplained,
        **settled,
        "socket_directories_left": left,
        "log": lines,
    }
    print(json.dumps(result, indent=1))
    save(args.json, conditions, result)
    if args.json:
        began = samples[0]["at"]
        draw_soak(samples, [(at - began, kind) for at, kind, _ in faults.done], args.json.with_suffix(".png"))
    sys.exit(bool(findings.unexplained or left))


if __name__ == "__main__":
    main()
