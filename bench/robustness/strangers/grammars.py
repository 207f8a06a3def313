"""Strangers send grammars that cost seconds a mask, or gigabytes, while others send small requests.

    python bench/robustness/strangers/grammars.py
    python bench/robustness/strangers/grammars.py --source OTHER/src

Each kind of grammar comes from `CLIENTS` clients at once, each time with other letters: repeats of repeats, repeats
behind a cheap start, long literals, long lists of choices, and deep schemas. Requests without a grammar beside them
must keep 1.3 times their undisturbed median, those with a small schema must all be answered, and the memory of the
server's processes must stay bounded.
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

import aiohttp
import psutil
from frame import Neighbours, Place, run

sys.path.insert(0, str(Path(__file__).parents[2]))
from shared.server import Server

CLIENTS, UNDISTURBED_S, ATTACK_S, NUM_TOKENS = 16, 5.0, 9.0, 12
SMALL = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


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


async def hostile(session: aiohttp.ClientSession, url: str, kind: str, seed: int, ends: Counter[str]) -> None:
    rng = random.Random(f"{kind} {seed}")
    while True:
        body = {"prompt": "x", "max_tokens": NUM_TOKENS, "temperature": 1.0, **KINDS[kind](rng)}
        try:
            async with session.post(f"{url}/v1/completions", json=body) as got:
                await got.read()
                ends[str(got.status)] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            ends[type(error).__name__] += 1
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def attacking(url: str, kind: str, ends: Counter[str]):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        tasks = [asyncio.create_task(hostile(session, url, kind, i, ends)) for i in range(CLIENTS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


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
        await asyncio.sleep(0.25)
    return most


async def attack(place: Place) -> dict[str, object]:
    figures: dict[str, object] = {}
    with place.serving() as server:
        structured = {"prompt": "x", "max_tokens": 20, "guided_json": SMALL}
        for kind in (None, *KINDS):
            plain, schema, ends, over = (
                Neighbours(server.url),
                Neighbours(server.url, 1),
                Counter[str](),
                asyncio.Event(),
            )
            schema.body = structured
            watch = asyncio.create_task(largest_mb(server, over))
            async with attacking(server.url, kind, ends) if kind else contextlib.nullcontext():
                await asyncio.gather(plain.for_(UNDISTURBED_S if kind is None else ATTACK_S), schema.for_(ATTACK_S))
            over.set()
            figures[kind or "undisturbed"] = {
                "plain": plain.figures(),
                "small_schema": schema.figures(),
                "hostile_ends": dict(ends),
                "most": await watch,
            }
            print(json.dumps({kind or "undisturbed": figures[kind or "undisturbed"]}), file=sys.stderr, flush=True)
    return figures


if __name__ == "__main__":
    run(attack, __doc__)
