"""A stranger sends requests that an engine fails: 8 connections at full rate through `moestro route`.

The engine answers a poisoned body with a 500, cuts the connection, cuts the answer after its first event, says nothing
until the router's time limit, begins a stream with an error, or refuses it with 429 or 503 for a minute. It serves all
other bodies. One engine and three are attacked. The stranger has one key, or eight, or no key and the address of the
honest clients. What must hold: every request of the honest clients ends with 200.

    python bench/robustness/strangers/poison.py [--source OTHER/src]
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
from frame import Neighbours, Place, Server, free_port, run, sending

KINDS = ("500", "cut", "cut-late", "hang", "error-event", "429", "503")
NUM_STRANGERS = 8
SECONDS = 1.2
KEYS = {"one key": ("stranger",), "eight keys": tuple(f"stranger-{i}" for i in range(8)), "one address": ()}
_FLAGS = ("--first-byte-timeout", "1", "--idle-timeout", "1")
_ENGINE = Path(__file__).with_name("poisoned_engine.py")


@contextlib.contextmanager
def engines(num: int, *flags: str) -> Iterator[list[Server]]:
    """Start fake engines in processes of their own."""
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(num):
            port = free_port()
            process = subprocess.Popen([sys.executable, str(_ENGINE), str(port), *flags])
            stack.callback(process.wait)
            stack.callback(process.kill)
            servers.append(Server(process, f"http://127.0.0.1:{port}"))
            servers[-1].wait_until_healthy(30)
        yield servers


@contextlib.asynccontextmanager
async def strangers(url: str, kind: str, keys: tuple[str, ...]) -> AsyncIterator[Counter[str]]:
    """Send poison from all connections, each body different, while the block runs; yields the ends."""
    ends: Counter[str] = Counter()

    async def send_forever(session: aiohttp.ClientSession, number: int) -> None:
        headers = {"Authorization": f"Bearer {keys[number % len(keys)]}"} if keys else {}
        for serial in itertools.count():
            body = {"prompt": f"poison {kind} {number} {serial}", "stream": kind in ("cut-late", "error-event")}
            try:
                async with session.post(f"{url}/v1/completions", json=body, headers=headers) as got:
                    await got.read()
                    ends[str(got.status)] += 1
            except (aiohttp.ClientError, OSError) as error:
                ends[type(error).__name__] += 1

    async with sending(send_forever, NUM_STRANGERS):
        yield ends


async def on_router(place: Place, num_engines: int, who: str) -> dict[str, dict[str, object]]:
    """Attack one router with each kind of poison in turn, and return how the requests of both sides ended."""
    keys = KEYS[who]
    flags = [part for key in ("honest", *keys) if keys for part in ("--api-key", key)]
    name, found = f"route-{num_engines}-{who.replace(' ', '-')}", {}
    with engines(num_engines) as servers, place.routing(*servers, flags=(*_FLAGS, *flags), name=name) as router:
        for kind in KINDS:
            honest = Neighbours(router.url, headers={"Authorization": "Bearer honest"})
            async with strangers(router.url, kind, keys) as ends:
                await honest.for_(SECONDS)
            found[kind] = {"honest": dict(honest.ends), "stranger": dict(ends)}
        return found


async def attack(place: Place) -> dict[str, object]:
    """Attack routers before one engine and before three."""
    figures = {(num, who): await on_router(place, num, who) for num in (1, 3) for who in KEYS}
    ends = Counter[str]()
    for by_kind in figures.values():
        for found in by_kind.values():
            ends.update(found["honest"])
    return {
        "num_honest": ends.total(),
        "num_honest_failed": ends.total() - ends["200"],
        "each": {f"{num} engines, {who}": by_kind for (num, who), by_kind in figures.items()},
    }


if __name__ == "__main__":
    run(attack, __doc__)
