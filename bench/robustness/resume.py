"""Kills the engines behind `moestro route --resume-streams` one after another, under streams.

    # Starts the engines and the router itself
    python bench/robustness/resume.py [--streams 200] [--kills 20] [--json bench/results/robustness/resume.json]
    python bench/robustness/resume.py --vllm /path/to/venv/bin/vllm [--json bench/results/robustness/resume_vllm.json]

Ten clients send greedy streams, completions and chats in turn, to servers of the demo model on one CPU: three of
Moestro, or two of vLLM in float32. All processes of a server with running streams get SIGKILL; when all servers are
there again, the next one does. Each stream is compared with the same request on a calm server: its text, its number of
tokens, its finish reason, one id and one [DONE]. The script also prints the longest pause of each stream that went on
elsewhere; the pause has the prefill of prompt and answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
import shared.vllm
from shared.results import make_parser, package_version, save, spread
from shared.server import MOESTRO, Server

ROUTE_PORT, ADMIN_PORT, PORT = 8240, 8241, 8242
NUM_OWN, NUM_VLLM, NUM_CLIENTS, TOKENS = 3, 2, 10, 200
WAIT_S = 300
PATHS = ("/v1/completions", "/v1/chat/completions")


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Return the requests, each with its path; their prompts have characters of several bytes."""
    made = []
    for number in range(12):
        text = f"def naïve_{number}(日本, größe): return '€{number}"
        prompt = {"messages": [{"role": "user", "content": text}]} if number % 2 else {"prompt": text}
        sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        made.append((PATHS[number % 2], prompt | sampling | options))
    return made


@dataclass
class Stream:
    """What a client reads of one stream."""

    end: str = "BROKEN: no last event"
    text: str = ""
    ids: set[str] = field(default_factory=set)
    finish: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_done: int = 0
    longest_pause_s: float = 0.0

    def take(self, data: str) -> None:
        """Read one event."""
        if data == "[DONE]":
            self.num_done, self.end = self.num_done + 1, "complete"
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.end = f"BROKEN: {chunk['error']['message'][:80]}"
            return
        self.ids.add(chunk["id"])
        for choice in chunk["choices"]:
            self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.finish += [choice["finish_reason"]] if choice["finish_reason"] else []
        self.num_tokens = (chunk.get("usage") or {}).get("completion_tokens", self.num_tokens)

    def verdict(self, calm: Stream) -> str:
        """Return how the stream ended, compared with a calm one."""
        if self.end != "complete":
            return self.end
        if (self.text, self.finish) != (calm.text, calm.finish):
            return "DIFFERS: text or finish reason"
        if self.num_tokens != calm.num_tokens:
            return "DIFFERS: number of tokens"
        return "equal" if len(self.ids) == self.num_done == 1 else "DIFFERS: ids or last events"


async def read(client: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> Stream:
    """Send one request, and read its stream."""
    stream, last_s = Stream(), time.monotonic()
    try:
        async with client.post(url + path, json=body) as answer:
            if answer.status != 200:
                stream.end = f"refused with {answer.status}"
                return stream
            async for line in answer.content:
                if line.startswith(b"data: "):
                    now_s = time.monotonic()
                    stream.longest_pause_s, last_s = max(stream.longest_pause_s, now_s - last_s), now_s
                    stream.take(line[6:].decode().strip())
    except aiohttp.ClientError as error:
        if stream.end == "BROKEN: no last event":
            stream.end = f"BROKEN: {type(error).__name__}"
    return stream


class Engine:
    """One server, which can be killed and started again."""

    def __init__(self, number: int, vllm: str | None, logs: Path) -> None:
        self.name, self.port, self.log = f"e{number}", PORT + number, logs / f"e{number}.log"
        if vllm:
            self.command = shared.vllm.command(vllm, self.port, "--dtype", "float32")
            self.environment = os.environ | shared.vllm.environment(vllm, str(number))
        else:
            self.command = [MOESTRO, "serve", "--port", str(self.port), "--log-level", "error"]
            self.command += ["--kv-cache-memory-bytes", "100000000"]
            self.environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.start()

    def start(self) -> None:
        """Start the server without waiting for it."""
        with self.log.open("w") as out:
            self.process = subprocess.Popen(self.command, env=self.environment, stdout=out, stderr=out)
        self.server = Server(self.process, f"http://127.0.0.1:{self.port}")

    def kill(self) -> None:
        """End all processes of the server by SIGKILL."""
        server = psutil.Process(self.process.pid)
        for process in (server, *server.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def samples(name: str) -> dict[str, float]:
    """Return the router's samples of a metric by their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ROUTE_PORT}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [line.removeprefix(name).rpartition(" ") for line in lines if line.startswith(f"{name}{{")]
    return {labels: float(value) for labels, _, value in found}


@contextlib.contextmanager
def running(vllm: str | None, logs: Path) -> Iterator[list[Engine]]:
    """Run the engines and the router, and end them afterwards."""
    engines = [Engine(number, vllm, logs) for number in range(NUM_VLLM if vllm else NUM_OWN)]
    flags = [part for engine in engines for part in ("--engine", f"{engine.name}={engine.server.url}")]
    command = [MOESTRO, "route", "--port", str(ROUTE_PORT), "--admin-port", str(ADMIN_PORT), *flags]
    router = subprocess.Popen([*command, "--resume-streams", "--log-level", "error"], stdout=subprocess.DEVNULL)
    try:
        for engine in engines:
            engine.server.wait_until_healthy(WAIT_S)
        Server(router, f"http://127.0.0.1:{ROUTE_PORT}").wait_until_healthy(WAIT_S)
        yield engines
    finally:
        router.kill()
        for engine in engines:
            engine.kill()


async def until(name: str, engine: Engine, least: float) -> None:
    """Wait until a metric of an engine has at least a value."""
    deadline = time.monotonic() + WAIT_S
    while (await asyncio.to_thread(samples, name)).get(f'{{engine="{engine.name}"}}', 0.0) < least:
        fails = time.monotonic() > deadline or engine.process.poll() is not None
        assert not fails, f"{engine.name} is not at {name} {least}: {engine.log.read_text()[-2000:]}"
        await asyncio.sleep(0.2)


async def kill_in_turn(engines: list[Engine], num_kills: int) -> None:
    """Kill an engine with running streams, wait until all are there again, and go on with the next one."""
    for number in range(num_kills):
        victim = engines[number % len(engines)]
        for engine in engines:
            await asyncio.to_thread(engine.server.wait_until_healthy, WAIT_S)  # which the router may not know
            await until("moestro:route_engine_ready", engine, 1)
        await until("moestro:route_in_flight", victim, 2)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(victim.kill)
        victim.start()
        print(f"kill {number + 1}: {victim.name}", flush=True)


async def disturbed(engines: list[Engine], num_streams: int, num_kills: int) -> list[tuple[int, Stream]]:
    """Send streams until all kills are over, `num_streams` at least."""
    streams: list[tuple[int, Stream]] = []
    requests, url = bodies(), f"http://127.0.0.1:{ROUTE_PORT}"
    killing = asyncio.create_task(kill_in_turn(engines, num_kills))

    async def work(number: int) -> None:
        while not killing.done() or len(streams) < num_streams:
            which = number % len(requests)
            stream = await read(client, url, *requests[which])
            streams.append((which, stream))
            if stream.end != "complete":
                await asyncio.sleep(1)
            number += 7

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WAIT_S)) as client:
        await asyncio.gather(*(work(number) for number in range(NUM_CLIENTS)))
    await killing
    return streams


async def calm_streams(engine: Engine) -> list[Stream]:
    async with aiohttp.ClientSession() as client:
        return [await read(client, engine.server.url, path, body) for path, body in bodies()]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--vllm", help="the vllm command; without it, the servers are Moestro's")
    args = parser.parse_args()
    conditions = run_record("measured")
    with tempfile.TemporaryDirectory() as logs, running(args.vllm, Path(logs)) as engines:
        calm = asyncio.run(calm_streams(engines[0]))
        streams = asyncio.run(disturbed(engines, args.streams, args.kills))
        resumed, obstacles = (
            samples("moestro:route_streams_resumed_total"),
            samples("moestro:route_streams_not_resumable_total"),
        )
    pauses = sorted((stream.longest_pause_s for _, stream in streams), reverse=True)[: int(sum(resumed.values()))]
    result: dict[str, Any] = {
        "engines": len(engines),
        "vllm": package_version(Path(args.vllm).with_name("python"), "vllm") if args.vllm else None,
        "clients": NUM_CLIENTS,
        "max_tokens": TOKENS,
        "streams": len(streams),
        "kills": args.kills,
        "ends": dict(Counter(stream.verdict(calm[which]) for which, stream in streams)),
        "streams_resumed": resumed,
        "streams_not_resumable": obstacles,
        "longest_pauses_s": spread(pauses) if pauses else None,
    }
    print(json.dumps(result, indent=1))
    save(args.json, conditions, result)
    assert set(result["ends"]) == {"equal"}, result["ends"]


if __name__ == "__main__":
    main()
