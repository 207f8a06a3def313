"""An engine's API server is stopped (SIGSTOP): it accepts connections and answers nothing.

Two `moestro serve` stand behind `moestro route`, and honest clients send small requests. What must hold: every request
is answered with 200, none waits for longer than the time until the engine is down and an answer; from its suspicion on
the stopped engine gets no new request; it is down within 5 s, and back after SIGCONT. The figures of the idle router
follow: checks and CPU of 100 engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time

import psutil
from frame import Neighbours, Place, Server, run

BEFORE_S, STOPPED_S, AFTER_S = 3.0, 25.0, 5.0
LOOK_S = 0.05
IDLE_ENGINES, IDLE_S = 100, 20.0
FLAGS = ("--kv-cache-memory-bytes", "100000000", "--dtype", "float32")
OUT = {"suspected", "down"}


def engine_figures(router: Server, engine: Server) -> tuple[str, int]:
    """Return the condition of an engine, and the number of requests that it was given."""
    name, text = engine.url.removeprefix("http://"), router.get("/metrics").decode()
    condition = re.search(rf'engine_condition{{condition="(\w+)",engine="{name}"}} 1', text)
    decisions = re.search(rf'route_decisions_total{{engine="{name}"}} ([\d.]+)', text)
    assert decisions
    return condition[1] if condition else "", int(float(decisions[1]))


async def watch(router: Server, engine: Server, seconds: float) -> list[tuple[float, str, int]]:
    """Return time since now, condition and requests of an engine, at every look."""
    began, seen = time.monotonic(), []
    while (passed := time.monotonic() - began) < seconds:
        seen.append((passed, *await asyncio.to_thread(engine_figures, router, engine)))
        await asyncio.sleep(LOOK_S)
    return seen


def first(seen: list[tuple[float, str, int]], conditions: set[str]) -> tuple[float, int] | None:
    """Return time and requests of the first look at which the engine was in one of these conditions."""
    return next(((at, count) for at, condition, count in seen if condition in conditions), None)


async def stopped(place: Place) -> dict[str, object]:
    """Stop one of two engines under load, and continue it."""
    with (
        place.serving(*FLAGS, name="a") as a,
        place.serving(*FLAGS, name="b") as b,
        place.routing(a, b, flags=("--route-policy", "round_robin")) as router,
    ):
        clients = Neighbours(router.url, num_clients=16, pause_s=0.2)
        async with clients.busy():
            await asyncio.sleep(BEFORE_S)
            undisturbed, clients.seconds = clients.figures(), []
            a.process.send_signal(signal.SIGSTOP)
            try:
                seen = await watch(router, a, STOPPED_S)
            finally:
                a.process.send_signal(signal.SIGCONT)
            back = first(await watch(router, a, AFTER_S), {"up"})
        out, down, last = first(seen, OUT), first(seen, {"down"}), seen[-1][2]
        retries = re.findall(r'route_retries_total{reason="([^"]+)"} ([\d.]+)', router.get("/metrics").decode())
    return {
        "undisturbed": undisturbed,
        "stopped": clients.figures(),
        "out_s": out and round(out[0], 2),
        "down_s": down and round(down[0], 2),
        "back_s": back and round(back[0], 2),
        "sent_to_the_stopped_engine": last - seen[0][2],
        "of_these_after_it_was_out": out and last - out[1],
        "retries": {reason: int(float(count)) for reason, count in retries},
    }


async def idle(place: Place) -> dict[str, object]:
    """Count the checks and the CPU of a router before many idle engines, which answer at once."""
    counts = {"/health": 0, "/metrics": 0}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode()
                if path in counts:
                    counts[path] += 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(IDLE_ENGINES)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    engines = [Server(None, f"http://127.0.0.1:{port}") for port in ports]
    routing = place.routing(*engines, name="idle")
    router = await asyncio.to_thread(routing.__enter__)
    try:
        await asyncio.sleep(3.0)
        process, before, begun = psutil.Process(router.process.pid), dict(counts), time.monotonic()
        cpu_s = sum(process.cpu_times()[:2])
        await asyncio.sleep(IDLE_S)
        seconds = time.monotonic() - begun
        cpu_s = sum(process.cpu_times()[:2]) - cpu_s
        rates = {path: round((count - before[path]) / seconds / IDLE_ENGINES, 2) for path, count in counts.items()}
    finally:
        await asyncio.to_thread(routing.__exit__, None, None, None)
        for server in servers:
            server.close()
    return {"per_engine_and_s": rates, "cores": round(cpu_s / seconds, 4)}


async def attack(place: Place) -> dict[str, object]:
    """Measure a stopped engine, and then the checks of idle ones."""
    return {"hung": await stopped(place), f"{IDLE_ENGINES}_idle_engines": await idle(place)}


if __name__ == "__main__":
    run(attack, __doc__)
