"""Kills one of three routers under load: what its clients notice, where sessions go, and what the exchange costs.

    python bench/routing/fleet.py --peers DIR --json bench/results/routing/fleet.json

Three runs of the same sessions before six imitated engines: one router; three routers that know nothing of each other;
three routers with `--peer`. With DIR, a virtual environment that holds `smg`, a fourth run has three of its routers
with `--enable-mesh` and its own policy. A session sends its turns through any router, and its prompt grows. A client
whose connection is refused or ends before the first byte tries the next router. In the middle of the runs with three,
one is killed (SIGKILL). At the end, new prompts go through a second router and, some time after their answers, through
the third one: how many of them get the engine that has them. Single requests show how long the other routers of
`--peer` take to count them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import psutil
from aiohttp import web

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, package_version, save, spread

MOESTRO = str(Path(sys.executable).with_name("moestro"))
CHAT = "/v1/chat/completions"
MODEL = "m"
NUM_ENGINES, NUM_ROUTERS = 6, 3
SYSTEM_BYTES, TURN_BYTES = 4096, 1024
FIRST_S, GAP_S, NUM_CHUNKS = 0.05, 0.02, 12
KILL_WINDOW_S, IDLE_S = 1.0, 5.0
FOLLOW_S = (0.0, 0.2, 1.0, 5.0)
START_S = 120.0


@dataclass
class Turn:
    """One request of a session.

    Attributes:
        at_s: time since the begin of the run.
        engine: engine that answered; empty means that none did.
        num_tries: routers that the client tried.
        has_begun: whether the head of an answer came.
        is_whole: whether the answer came to its end.
    """

    session: int
    number: int
    at_s: float
    engine: str = ""
    num_tries: int = 0
    has_begun: bool = False
    is_whole: bool = False


@dataclass
class Load:
    """Sessions and the time for which they last."""

    num_sessions: int = 60
    num_turns: int = 20
    pause_s: float = 1.0
    seconds: float = 40.0
    policy: str = "moestro"


@dataclass(frozen=True)
class Kind:
    """A group of routers.

    Attributes:
        num: number of routers.
        is_shared: whether they exchange what they know.
        smg: Python of an environment that holds smg, whose routers these are; None means `moestro route`.
    """

    num: int
    is_shared: bool = False
    smg: Path | None = None


@dataclass
class Routers:
    """Running routers.

    Attributes:
        urls: clients' ports.
        admin: ports with `/metrics`.
        peer_ports: ports of the routers for each other.
    """

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    admin: list[str] = field(default_factory=list)
    peer_ports: list[int] = field(default_factory=list)


# --- engines, in this process


async def _chat(name: str, http: web.Request) -> web.StreamResponse:
    await http.read()
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await asyncio.sleep(FIRST_S)
    with contextlib.suppress(ConnectionError):  # the router was killed
        await answer.prepare(http)
        for _ in range(NUM_CHUNKS):
            await answer.write(b'data: {"id": "%b", "choices": [{"delta": {"content": "word "}}]}\n\n' % name.encode())
            await asyncio.sleep(GAP_S)
        await answer.write(b"data: [DONE]\n\n")
    return answer


@contextlib.asynccontextmanager
async def engines() -> AsyncIterator[list[str]]:
    """Serve imitated engines, and yield their URLs."""

    async def health(_http: web.Request) -> web.Response:
        return web.Response()

    async def models(_http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for number in range(NUM_ENGINES):
            app, chat = web.Application(), partial(_chat, f"engine-{number}")
            app.add_routes([web.get("/health", health), web.get("/v1/models", models), web.post(CHAT, chat)])
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            urls.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        yield urls


# --- routers


def _free_ports(num: int) -> list[int]:

    sockets = [socket.socket() for _ in range(num)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextlib.asynccontextmanager
async def routers(kind: Kind, urls: list[str], directory: Path, policy: str) -> AsyncIterator[Routers]:
    """Run routers before the engines at `urls`."""
    made = Routers()
    name = "smg" if kind.smg else f"router-{kind.num}-{kind.is_shared}"
    logs = [directory / f"{name}-{at}.log" for at in range(kind.num)]
    try:
        if kind.smg is None:
            await _start(made, kind, urls, logs, policy)
        else:
            await _start_smg(made, kind.smg, urls, logs)
        yield made
    finally:
        for process in made.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in made.processes:
            await asyncio.to_thread(process.wait)


async def _start(made: Routers, kind: Kind, urls: list[str], logs: list[Path], policy: str) -> None:
    ports = _free_ports(len(logs))
    environment = os.environ | {"MOESTRO_PEER_KEY": "secret", "COLUMNS": "120"}
    for log, own in zip(logs, ports, strict=True):
        command = [MOESTRO, "route", "--port", "0", "--admin-port", "0", "--route-policy", policy]
        command += [part for url in urls for part in ("--engine", url)]
        if kind.is_shared:
            made.peer_ports.append(own)
            command += ["--peer-port", str(own)]
            command += [part for port in ports for part in ("--peer", f"http://127.0.0.1:{port}")]
        made.processes.append(_process(command, log, environment))
    for log in logs:
        text = await _text_with(log, r"curl (http://[\d.]+:\d+)")
        made.urls.append(re.search(r"curl (http://[\d.]+:\d+)", text)[1])
        made.admin.append(re.search(r"(http://[\d.]+:\d+)/admin/engines", text)[1])


async def _start_smg(made: Routers, python: Path, urls: list[str], logs: list[Path]) -> None:
    ports = iter(_free_ports(3 * len(logs)))
    for at, log in enumerate(logs):
        port, figures, mesh = next(ports), next(ports), next(ports)
        command = [str(python), "-m", "smg", "launch", "--policy", "cache_aware"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-startup-timeout-secs", "20", "--log-level", "warn", "--worker-urls", *urls]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(figures)]
        command += ["--enable-mesh", "--mesh-host", "127.0.0.1", "--mesh-port", str(mesh)]
        command += ["--mesh-server-name", f"router-{at}"]
        command += ["--mesh-peer-urls", f"127.0.0.1:{made.peer_ports[0]}"] if at else []
        made.processes.append(_process(command, log, dict(os.environ)))
        made.urls.append(f"http://127.0.0.1:{port}")
        made.admin.append(f"http://127.0.0.1:{figures}")
        made.peer_ports.append(mesh)


def _process(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


async def _text_with(log: Path, pattern: str) -> str:
    async def is_there() -> bool:
        return re.search(pattern, log.read_text()) is not None  # noqa: ASYNC240 (a short file)

    await _until(is_there)
    return log.read_text()  # noqa: ASYNC240 (a short file)


async def _until(condition: Callable[[], Awaitable[bool]], pause_s: float = 0.05) -> None:
    async with asyncio.timeout(START_S):
        while not await condition():  # noqa: ASYNC110 (the condition is another process's)
            await asyncio.sleep(pause_s)


async def _metric(session: aiohttp.ClientSession, url: str, name: str) -> float:
    return sum(await _samples(session, url, name))


async def _samples(session: aiohttp.ClientSession, url: str, name: str) -> list[float]:
    try:
        async with session.get(f"{url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
    except aiohttp.ClientConnectionError:  # a router that starts
        return []
    return [float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line)]


# --- clients


def _prompt(session: int, number: int) -> str:
    rng = random.Random(session)
    turns = ["".join(rng.choices("abcdefghij ", k=TURN_BYTES)) for _ in range(number + 1)]
    return "system " * (SYSTEM_BYTES // 7) + "".join(turns)


async def _ask(http: aiohttp.ClientSession, urls: list[str], turn: Turn, rng: random.Random) -> None:
    """Send a turn to any router, and to the next one while there is no answer."""
    messages = [{"role": "user", "content": _prompt(turn.session, turn.number)}]
    body = {"model": MODEL, "messages": messages, "stream": True}
    for url in rng.sample(urls, len(urls)):
        turn.num_tries += 1
        try:
            async with http.post(f"{url}{CHAT}", json=body) as answer:
                if answer.status != 200:
                    return
                turn.has_begun, text = True, b""
                async for part in answer.content.iter_any():
                    text += part
                    if found := re.search(rb'"id": ?"(engine-\d+)"', text):
                        turn.engine = found[1].decode()
                turn.is_whole = text.endswith(b"[DONE]\n\n")
                return
        except (aiohttp.ClientError, ConnectionError):
            if turn.has_begun:
                return  # an answer that has begun is not repeated


async def _session(number: int, load: Load, http: aiohttp.ClientSession, urls: list[str], began_s: float) -> list[Turn]:
    rng, turns = random.Random(number), []
    await asyncio.sleep(rng.random() * load.pause_s)
    for at in range(load.num_turns):
        now_s = time.monotonic() - began_s
        if now_s >= load.seconds:
            break
        turn = Turn(number, at, now_s)
        turns.append(turn)
        await _ask(http, urls, turn, rng)
        await asyncio.sleep(load.pause_s * (0.5 + rng.random()))
    return turns


def _kept(turns: list[Turn]) -> float | None:
    """Return the share of the turns that went to the engine of their session's turn before."""
    last: dict[int, str] = {}
    num = num_kept = 0
    for turn in sorted(turns, key=lambda turn: (turn.session, turn.number)):
        if turn.engine and turn.session in last:
            num += 1
            num_kept += turn.engine == last[turn.session]
        if turn.engine:
            last[turn.session] = turn.engine
    return round(num_kept / num, 4) if num else None


async def measure(kind: Kind, load: Load, directory: Path, num_probes: int = 20) -> dict[str, object]:
    """Run the sessions through routers, kill one of several in the middle, and return what happened."""
    async with (
        engines() as engine_urls,
        routers(kind, engine_urls, directory, load.policy) as them,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        await _until(partial(_are_ready, http, kind, them))
        before = _bytes_between(them.peer_ports)
        await asyncio.sleep(IDLE_S)
        num_idle_bytes, began_cpu_s = _bytes_between(them.peer_ports) - before, _cpu_s(them)
        began_s = time.monotonic()
        sessions = [
            asyncio.create_task(_session(each, load, http, them.urls, began_s)) for each in range(load.num_sessions)
        ]
        killed_s = load.seconds / 2
        num_bytes = num_requests = cpu_s = 0.0
        if kind.num > 1:
            await asyncio.sleep(killed_s)
            num_bytes, num_requests = await _exchanged(http, kind, them)
            num_bytes, cpu_s = num_bytes - before - num_idle_bytes, _cpu_s(them) - began_cpu_s
            killed_s = time.monotonic() - began_s
            os.killpg(them.processes[0].pid, signal.SIGKILL)
        turns = [turn for each in await asyncio.gather(*sessions) for turn in each]
        found: dict[str, object] = {
            "routers": kind.num,
            "shared": kind.is_shared,
            "requests": len(turns),
            "failed_before_first_byte": sum(not turn.has_begun for turn in turns),
            "tried_again": sum(turn.num_tries > 1 for turn in turns),
            "cut_after_first_byte": sum(turn.has_begun and not turn.is_whole for turn in turns),
            "kept_engine": _kept(turns),
        }
        if kind.num > 1:
            late = [turn for turn in turns if turn.at_s >= killed_s - KILL_WINDOW_S]
            found["kept_engine_after_kill"] = _kept(late)
            found["cpu_ms_per_request"] = round(1e3 * cpu_s / num_requests, 3)
            found["followed_after_s"] = await _followed(http, them, num_probes)
        if kind.is_shared:
            found["bytes_per_request"] = round(num_bytes / num_requests)
            found["bytes_per_s_without_requests"] = round(num_idle_bytes / IDLE_S)
        if kind.is_shared and kind.smg is None:
            found["converged_ms"] = spread(await _probe(http, them, num_probes))
        return found


def _cpu_s(them: Routers) -> float:
    """Return the processor time of all routers and their child processes, seconds."""
    processes = [psutil.Process(process.pid) for process in them.processes]
    times = [each.cpu_times() for one in processes for each in (one, *one.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def _are_ready(http: aiohttp.ClientSession, kind: Kind, them: Routers) -> bool:
    """Return whether each router answers and knows the others."""
    if kind.smg is None:
        known = [await _metric(http, url, "moestro:route_peers") for url in them.admin] if kind.is_shared else []
        return all(each == kind.num - 1 for each in known)
    known = [await _samples(http, url, r'router_mesh_peer_connections\{peer="router-\d+"\}') for url in them.admin]
    return sum(map(sum, known)) == kind.num * (kind.num - 1) / 2  # one of each two has the connection


async def _followed(http: aiohttp.ClientSession, them: Routers, num: int) -> dict[str, float]:
    """Return the share of new prompts that a router sends where another one sent them, by the time since the answer."""

    async def are_alike(session: int, start_s: float, pause_s: float) -> bool:
        await asyncio.sleep(start_s)
        first, second = Turn(session, 1, 0.0), Turn(session, 1, 0.0)
        await _ask(http, [them.urls[1]], first, random.Random(0))
        await asyncio.sleep(pause_s)
        await _ask(http, [them.urls[2]], second, random.Random(0))
        return bool(first.engine) and first.engine == second.engine

    found = {}
    for at, pause_s in enumerate(FOLLOW_S, 1):
        tries = [are_alike(1000 * at + number, number / 10, pause_s) for number in range(num)]
        found[f"{pause_s:g}"] = sum(await asyncio.gather(*tries)) / num
    return found


async def _exchanged(http: aiohttp.ClientSession, kind: Kind, them: Routers) -> tuple[float, float]:
    """Return the bytes that all routers have sent to others, and the requests that they have taken."""
    taken = "smg_router_requests_total" if kind.smg else "moestro:route_requests_total"
    return _bytes_between(them.peer_ports), sum([await _metric(http, url, taken) for url in them.admin])


def _bytes_between(ports: list[int]) -> int:
    """Return the bytes that the kernel has sent on the open connections to these ports, in both directions."""
    if not ports:
        return 0
    query = " or ".join(f"sport = :{port} or dport = :{port}" for port in ports)
    command = ["ss", "--tcp", "--info", "--no-header", "state", "established", f"( {query} )"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(each) for each in re.findall(r"bytes_sent:(\d+)", shown))


async def _probe(http: aiohttp.ClientSession, them: Routers, num: int) -> list[float]:
    """Return times from the sending of a single request until another router counts it, milliseconds."""
    found = []
    taker, other = them.urls[1], them.admin[2]

    async def is_idle() -> bool:
        return not await _metric(http, other, "moestro:route_peer_in_flight")

    async def is_known() -> bool:
        return asking.done() or not await is_idle()

    for number in range(num):
        await _until(is_idle)
        turn = Turn(number, 0, 0.0)
        sent_s = time.monotonic()
        asking = asyncio.create_task(_ask(http, [taker], turn, random.Random(number)))
        await _until(is_known, 0.0)
        if not asking.done():
            found.append((time.monotonic() - sent_s) * 1e3)
        await asking
    return found


async def measure_all(load: Load, smg: Path | None) -> dict[str, object]:
    """Measure one router, three that know nothing of each other, three that share their state, and those of smg."""
    kinds = {"one": Kind(1), "apart": Kind(NUM_ROUTERS), "shared": Kind(NUM_ROUTERS, is_shared=True)}
    if smg is not None:
        kinds["smg_mesh"] = Kind(NUM_ROUTERS, is_shared=True, smg=smg)
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, kind in kinds.items():
            found[name] = await measure(kind, load, Path(directory))
            print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--policy", default=Load.policy)
    parser.add_argument("--seconds", type=float, default=Load.seconds)
    parser.add_argument("--peers", type=Path, help="a virtual environment with smg")
    options: argparse.Namespace = parser.parse_args()
    load = Load(policy=options.policy, seconds=options.seconds)
    record = run_record("measured", "three routers, clients and imitated engines on a loaded machine of two cores")
    smg = options.peers and options.peers / "bin" / "python"
    versions = {"smg": package_version(smg, "smg")} if smg else {}
    save(options.json, record, {"peers": versions, "runs": asyncio.run(measure_all(load, smg))})


if __name__ == "__main__":
    main()
