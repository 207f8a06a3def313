"""Strangers send grammars that cost seconds a mask, or gigabytes, while others send small requests.

    python bench/robustness/strangers/grammars.py
    python bench/robustness/strangers/grammars.py --source OTHER/src

Each kind of grammar comes from `CLIENTS` clients at once, each time with other letters: repeats of repeats, repeats
behind a cheap start, long literals, long lists of choices, and deep schemas. In each round honest clients run alone,
beside as many clients that send as many bytes without a grammar, and beside the grammars. Requests without a
grammar must keep 1.3 times the median that they have beside the harmless clients, those with a small schema must all be
answered, and the memory of the server's processes must stay bounded. `--seconds` is the time of each kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import string
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from frame import Neighbours, Place, from_stranger, run, sending

sys.path.insert(0, str(Path(__file__).parents[2]))
from shared.server import Server

CLIENTS, ROUNDS, NUM_TOKENS = 16, 5, 12
BESIDE = ("alone", "harmless", "grammars")
JSON = {"Content-Type": "application/json"}
SMALL = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
STRUCTURED = {"prompt": "x", "max_tokens": 20, "guided_json": SMALL}


LETTERS = "".join(random.Random(0).choices(string.ascii_lowercase, k=1 << 20))


def word(rng: random.Random, length: int) -> str:
    """Cut letters out of many: the clients share a thread, and to draw each letter would delay the honest ones."""
    first = rng.randrange(len(LETTERS) - length)
    return LETTERS[first : first + length]


def repeats(rng: random.Random) -> dict[str, object]:
    return {"guided_regex": f"((((({word(rng, 6)}){{100}}){{100}}){{100}}){{100}})"}


def late_repeats(rng: random.Random) -> dict[str, object]:
    """Repeats behind a letter, so that the first mask is a cheap one."""
    return {"guided_regex": f"x((((({word(rng, 6)}){{100}}){{100}}){{100}}){{100}})"}


def literals(rng: random.Random) -> dict[str, object]:
    return {"guided_regex": "|".join(word(rng, 4100) for _ in range(24))}


def choices(rng: random.Random) -> dict[str, object]:
    return {"guided_choice": [word(rng, 20) for _ in range(4096)]}


def deep_schema(rng: random.Random) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string", "maxLength": rng.randrange(1000, 9000)}
    for _ in range(60):
        schema = {"type": "object", "properties": {word(rng, 30): schema, "q": {"type": "string", "maxLength": 500}}}
    return {"guided_json": schema}


KINDS: dict[str, Callable[[random.Random], dict[str, object]]] = {
    "repeats": repeats,
    "late_repeats": late_repeats,
    "literals": literals,
    "choices": choices,
    "deep_schema": deep_schema,
}


async def hostile(
    session: aiohttp.ClientSession, url: str, kind: str, seed: int, ends: Counter[str], *, is_harmless: bool
) -> None:
    """Send requests with grammars, or as many bytes without one."""
    rng = random.Random(f"{kind} {seed}")
    while True:
        grammar = KINDS[kind](rng)
        body = {"prompt": "x", "max_tokens": NUM_TOKENS, "temperature": 1.0}
        data = json.dumps(body | grammar).encode()
        if is_harmless:
            data = json.dumps(body).encode().ljust(len(data))
        try:
            async with session.post(f"{url}/v1/completions", data=data, headers=JSON) as got:
                await got.read()
                ends[str(got.status)] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            ends[type(error).__name__] += 1
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def attacking(url: str, kind: str, ends: Counter[str], *, is_harmless: bool):
    async def send(session: aiohttp.ClientSession, number: int) -> None:
        await hostile(session, url, kind, number, ends, is_harmless=is_harmless)

    async with sending(send, CLIENTS, connector=from_stranger(), timeout=aiohttp.ClientTimeout(total=60)):
        yield


async def largest_mb(server: Server, until: asyncio.Event) -> dict[str, int]:
    """Watch the memory and the number of the server's processes."""
    most = {"mb": 0, "processes": 0}
    root = psutil.Process(server.process.pid)
    while not until.is_set():
        sizes = []
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                sizes.append(memory.pss if hasattr(memory, "pss") else memory.rss)
        most = {"mb": max(most["mb"], round(sum(sizes) / 1e6)), "processes": max(most["processes"], len(sizes))}
        await asyncio.sleep(1)  # To add up pages takes the kernel time.
    return most


async def period(server: Server, seconds: float, kind: str, beside: str) -> dict[str, object]:
    """Send honest requests for a while. `beside`: one of `BESIDE`."""
    plain, schema = Neighbours(server.url), Neighbours(server.url, 1, body=STRUCTURED)
    ends, is_over = Counter[str](), asyncio.Event()
    watch = asyncio.create_task(largest_mb(server, is_over))
    strangers = attacking(server.url, kind, ends, is_harmless=beside == "harmless")
    async with contextlib.nullcontext() if beside == "alone" else strangers:
        await asyncio.gather(plain.for_(seconds), schema.for_(seconds))
    is_over.set()
    return {
        "plain": plain.figures(),
        "small_schema": schema.figures(),
        "strangers_ends": dict(ends),
        "most": await watch,
    }


def ratios(rounds: list[dict[str, dict[str, Any]]], whose: str, to: str) -> list[float]:
    """Return the median duration of honest requests beside grammars over that beside `to`, by round, in order."""
    found = [(each["grammars"][whose].get("p50_s"), each[to][whose].get("p50_s")) for each in rounds]
    return sorted(round(hostile / other, 2) for hostile, other in found if hostile and other)


async def attack(place: Place) -> dict[str, object]:
    figures: dict[str, object] = {}
    with place.serving() as server:
        for kind in place.only or KINDS:
            rounds = [
                {beside: await period(server, place.seconds / ROUNDS, kind, beside) for beside in BESIDE}
                for _ in range(ROUNDS)
            ]
            figures[kind] = {
                f"{whose}_over_{to}": ratios(rounds, whose, to)
                for whose in ("plain", "small_schema")
                for to in BESIDE[:2]
            } | {"rounds": rounds}
            print(json.dumps({kind: figures[kind]}), file=sys.stderr, flush=True)
    return figures


if __name__ == "__main__":
    run(attack, __doc__)
