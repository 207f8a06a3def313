"""Cuts the network between two routers, and measures how long they take to agree again once it is repaired.

    python bench/robustness/partition.py [--seconds 5 20 60] [--json bench/results/robustness/partition.json]

The script runs itself in a network of its own (`unshare --net`, Linux), whose firewall drops each packet between the
routers' ports, so that no end learns of the cut. They agree when each has messages of the other, and the one counts
the stream that the other one's client reads all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
from aiohttp import web

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread
from shared.server import COMMAND, free_port

CHAT = "/v1/chat/completions"
POLL_S, START_S = 0.02, 120.0
_INSIDE = "MOESTRO_BENCH_PARTITION"


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[str]:
    """Serve an imitated engine whose streams do not end, and yield its URL."""

    async def chat(http: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(http)
        with contextlib.suppress(ConnectionError):
            while True:
                await answer.write(b'data: {"choices": [{"delta": {"content": "word "}}]}\n\n')
                await asyncio.sleep(0.2)
        return answer

    async def health(_http: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/health", health), web.post(CHAT, chat)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def router(url: str, own: int, peers: tuple[int, ...], log: Path) -> Iterator[None]:
    """Run a router."""
    command = [*COMMAND, "route", "--engine", f"e={url}", "--port", "0", "--admin-port", "0", "--peer-port", str(own)]
    command += [part for port in peers for part in ("--peer", f"http://127.0.0.1:{port}")]
    with log.open("wb") as file:
        environment = os.environ | {"COLUMNS": "120"}
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


async def address(log: Path, pattern: str) -> str:
    """Return what a router says of itself once it serves."""
    async with asyncio.timeout(START_S):
        while (found := re.search(pattern, log.read_text())) is None:  # noqa: ASYNC110, ASYNC240 (another process's file)
            await asyncio.sleep(POLL_S)
    return found[1]


async def value(http: aiohttp.ClientSession, admin: str, name: str) -> float:
    async with http.get(f"{admin}/metrics") as answer:
        found = re.search(rf"^moestro:route_{name} (\S+)", await answer.text(), re.MULTILINE)
    return float(found[1]) if found else 0.0


async def until(http: aiohttp.ClientSession, admins: list[str], num_peers: int) -> float:
    """Return the seconds until both routers know so many others, and the second one counts as many streams."""
    began_s = time.monotonic()
    async with asyncio.timeout(START_S):
        while True:
            known = [await value(http, admin, "peers") for admin in admins]
            if known == [num_peers] * 2 and await value(http, admins[1], "peer_in_flight") == num_peers:
                return time.monotonic() - began_s
            await asyncio.sleep(POLL_S)


def firewall(change: str, ports: tuple[int, ...]) -> None:
    """Drop all packets between the ports (`-A`), or let them pass again (`-D`)."""
    for port in ports:
        for side in ("--dport", "--sport"):
            subprocess.run(["iptables", change, "INPUT", "-p", "tcp", side, str(port), "-j", "DROP"], check=True)


async def measure(seconds: list[float], num_rounds: int) -> dict[str, dict[str, float]]:
    """Return the seconds from the repair to the agreement, by the seconds of the cut."""
    ports = free_port(), free_port()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        logs = [Path(directory) / f"{at}.log" for at in range(2)]
        async with engine() as url, aiohttp.ClientSession() as http:
            with router(url, ports[0], ports, logs[0]), router(url, ports[1], ports, logs[1]):
                admins = [await address(log, r"(http://[\d.]+:\d+)/admin/engines") for log in logs]
                clients = await address(logs[0], r"curl (http://[\d.]+:\d+)")
                async with http.post(f"{clients}{CHAT}", json={"messages": [], "stream": True}) as stream:
                    assert stream.status == 200, await stream.text()
                    await until(http, admins, 1)
                    for cut_s in seconds:
                        times = []
                        for _ in range(num_rounds):
                            firewall("-A", ports)
                            await asyncio.sleep(cut_s)
                            await until(http, admins, 0)
                            firewall("-D", ports)
                            times.append(await until(http, admins, 1))
                            await asyncio.sleep(2)
                        found[f"{cut_s:g}"] = spread(times)
                        print(f"a cut of {cut_s:g} s: they agree {found[f'{cut_s:g}']} s after the repair", flush=True)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, nargs="+", default=[5, 20, 60], help="lengths of the cuts")
    parser.add_argument("--rounds", type=int, default=3, help="cuts of each length")
    given = parser.parse_args()
    if _INSIDE not in os.environ:
        shell = 'ip link set lo up && exec "$@"'
        inside = ["unshare", "--net", "--map-root-user", "sh", "-c", shell, "sh", sys.executable, *sys.argv]
        sys.exit(subprocess.run(inside, env=os.environ | {_INSIDE: "1"}, check=False).returncode)
    agreed_s = asyncio.run(measure(given.seconds, given.rounds))
    save(given.json, run_record("measured"), {"agreed_after_s": agreed_s})


if __name__ == "__main__":
    main()
