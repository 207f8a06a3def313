"""Kills one of three routers under load: what its clients notice, where sessions go, and what the exchange costs.

    python bench/routing/fleet.py --json bench/results/routing/fleet.json

Three runs of the same sessions before six imitated engines: one router; three routers that know nothing of each other;
three routers with `--peer`. A session sends its turns through any router, and its prompt grows. A client whose
connection is refused or ends before the first byte tries the next router. In the middle of the runs with three, one is
killed (SIGKILL). At the end, single requests show how long the others take to count them.
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
from pathlib import Path

import aiohttp
from aiohttp import web

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

MOESTRO = str(Path(sys.executable).with_name("moestro"))
CHAT = "/v1/chat/completions"
NUM_ENGINES, NUM_ROUTERS = 6, 3
SYSTEM_BYTES, TURN_BYTES = 4096, 1024
FIRST_S, GAP_S, NUM_CHUNKS = 0.05, 0.02, 12
KILL_WINDOW_S = 1.0
START_S = 120.0


@dataclass
class Turn:
    """One request of a session.

    Attributes:
        at_s: time since the begin of the run.
        engine: engine that answered; empty means that none did.
        num_tries: routers that the client tried.
        is_whole: whether the answer came to its end.
    """

    session: int
    number: int
    at_s: float
    engine: str = ""
    num_tries: int = 0
    is_whole: bool = False


@dataclass
class Load:
    """Sessions and the time for which they last."""

    num_sessions: int = 60
    num_turns: int = 20
    pause_s: float = 1.0
    seconds: float = 40.0
    policy: str = "moestro"


@dataclass
class Routers:
    """Running routers.

    Attributes:
        urls: clients' ports.
        admin: operators' ports.
    """

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    admin: list[str] = field(default_factory=list)


# --- engines, in this process


async def _chat(http: web.Request) -> web.StreamResponse:
    await http.read()
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await asyncio.sleep(FIRST_S)
    with contextlib.suppress(ConnectionError):  # the router was killed
        await answer.prepare(http)
        for _ in range(NUM_CHUNKS):
            await answer.write(b'data: {"choices": [{"delta": {"content": "word "}}]}\n\n')
            await asyncio.sleep(GAP_S)
        await answer.write(b"data: [DONE]\n\n")
    return answer


@contextlib.asynccontextmanager
async def engines() -> AsyncIterator[list[str]]:
    """Serve imitated engines, and yield their URLs."""

    async def health(_http: web.Request) -> web.Response:
        return web.Response()

    async def models(_http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for _ in range(NUM_ENGINES):
            app = web.Application()
            app.add_routes([web.get("/health", health), web.get("/v1/models", models), web.post(CHAT, _chat)])
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
async def routers(
    num: int, urls: list[str], directory: Path, policy: str, *, is_shared: bool
) -> AsyncIterator[Routers]:
    """Run routers before the engines at `urls`."""
    made = Routers()
    logs = [directory / f"router-{num}-{is_shared}-{at}.log" for at in range(num)]
    _start(made, urls, logs, policy, is_shared=is_shared)
    try:
        for log in logs:
            text = await _text_with(log, r"curl (http://[\d.]+:\d+)")
            made.urls.append(re.search(r"curl (http://[\d.]+:\d+)", text)[1])
            made.admin.append(re.search(r"(http://[\d.]+:\d+)/admin/engines", text)[1])
        yield made
    finally:
        for process in made.processes:
            process.terminate()
        for process in made.processes:
            await asyncio.to_thread(process.wait)


def _start(made: Routers, urls: list[str], logs: list[Path], policy: str, *, is_shared: bool) -> None:
    ports = _free_ports(len(logs))
    environment = os.environ | {"MOESTRO_PEER_KEY": "secret", "COLUMNS": "120"}
    for log, own in zip(logs, ports, strict=True):
        command = [MOESTRO, "route", "--port", "0", "--admin-port", "0", "--route-policy", policy]
        command += [part for url in urls for part in ("--engine", url)]
        if is_shared:
            command += ["--peer-port", str(own)]
            command += [part for port in ports for part in ("--peer", f"http://127.0.0.1:{port}")]
        with log.open("wb") as file:
            made.processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))


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
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))


# --- clients


def _prompt(session: int, number: int) -> str:
    rng = random.Random(session)
    turns = ["".join(rng.choices("abcdefghij ", k=TURN_BYTES)) for _ in range(number + 1)]
    return "system " * (SYSTEM_BYTES // 7) + "".join(turns)


async def _ask(http: aiohttp.ClientSession, urls: list[str], turn: Turn, rng: random.Random) -> None:
    """Send a turn to any router, and to the next one while there is no answer."""
    body = {"messages": [{"role": "user", "content": _prompt(turn.session, turn.number)}], "stream": True}
    for url in rng.sample(urls, len(urls)):
        turn.num_tries += 1
        try:
            async with http.post(f"{url}{CHAT}", json=body) as answer:
                if answer.status != 200:
                    return
                turn.engine = answer.headers["x-moestro-engine"]
                turn.is_whole = (await answer.read()).endswith(b"[DONE]\n\n")
                return
        except (aiohttp.ClientError, ConnectionError):
            if turn.engine:
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


async def measure(num: int, load: Load, directory: Path, *, is_shared: bool, num_probes: int = 20) -> dict[str, object]:
    """Run the sessions through routers, kill one of several in the middle, and return what happened."""
    async with (
        engines() as engine_urls,
        routers(num, engine_urls, directory, load.policy, is_shared=is_shared) as them,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        if is_shared:

            async def are_connected() -> bool:
                return all([await _metric(http, url, "moestro:route_peers") == num - 1 for url in them.admin])

            await _until(are_connected)
        began_s = time.monotonic()
        sessions = [
            asyncio.create_task(_session(each, load, http, them.urls, began_s)) for each in range(load.num_sessions)
        ]
        killed_s = load.seconds / 2
        num_bytes = num_requests = 0.0
        if num > 1:
            await asyncio.sleep(killed_s)
            num_bytes, num_requests = await _exchanged(http, them.admin)
            killed_s = time.monotonic() - began_s
            them.processes[0].send_signal(signal.SIGKILL)
        turns = [turn for each in await asyncio.gather(*sessions) for turn in each]
        found: dict[str, object] = {
            "routers": num,
            "shared": is_shared,
            "requests": len(turns),
            "failed_before_first_byte": sum(not turn.engine for turn in turns),
            "tried_again": sum(turn.num_tries > 1 for turn in turns),
            "cut_after_first_byte": sum(bool(turn.engine) and not turn.is_whole for turn in turns),
            "kept_engine": _kept(turns),
        }
        if num > 1:
            late = [turn for turn in turns if turn.at_s >= killed_s - KILL_WINDOW_S]
            found["kept_engine_after_kill"] = _kept(late)
        if is_shared:
            found["bytes_per_request"] = round(num_bytes / num_requests)
            found["converged_ms"] = spread(await _probe(http, them, num_probes))
        return found


async def _exchanged(http: aiohttp.ClientSession, admin: list[str]) -> tuple[float, float]:
    """Return the bytes that all routers have sent to others, and the requests that they have taken."""
    sent = [await _metric(http, url, r'moestro:route_peer_bytes_total\{direction="sent"\}') for url in admin]
    taken = [await _metric(http, url, "moestro:route_requests_total") for url in admin]
    return sum(sent), sum(taken)


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


async def measure_all(load: Load) -> dict[str, object]:
    """Measure one router, three that know nothing of each other, and three that share their state."""
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, num, is_shared in (("one", 1, False), ("apart", NUM_ROUTERS, False), ("shared", NUM_ROUTERS, True)):
            found[name] = await measure(num, load, Path(directory), is_shared=is_shared)
            print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--policy", default=Load.policy)
    parser.add_argument("--seconds", type=float, default=Load.seconds)
    options: argparse.Namespace = parser.parse_args()
    load = Load(policy=options.policy, seconds=options.seconds)
    record = run_record("measured", "three routers, clients and imitated engines on a loaded machine of two cores")
    save(options.json, record, {"runs": asyncio.run(measure_all(load))})


if __name__ == "__main__":
    main()
