"""One stranger takes all that it can of what clients share; honest clients of another address must keep their part.

    python bench/robustness/strangers/shares.py [--only KIND ...]
    python bench/robustness/strangers/shares.py --source OTHER/src

The stranger has the address 127.0.0.2, and the honest clients have 127.0.0.1. Kinds:

- `retries`: requests that all engines refuse use up a router's retries. Each of two engines refuses one in four honest
  requests, so that one in sixteen ends with 503; beside the stranger it may not be more.
- `connections`: 4,096 connections with half a head, to each of the two products. All honest requests must be answered.
- `grammars`: 96 clients with a new grammar in each request. Honest clients, each with a new small schema, wait for
  their turn alone, and none is refused.
- `choices`: 32 requests of 128 long choices each, under several schedules. With `--share-policy none`, honest requests
  wait behind all of them; without it they wait for none. An older checkout lacks this flag, and runs `fcfs` alone.
- `unread`: four streams of 1,024 choices with 20 log probabilities, which are not read, from a paced engine, which is
  faster than a CPU. The memory of the API server must stay bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import resource
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

import aiohttp
from frame import STRANGER, Neighbours, Place, from_stranger, resident_bytes, run, sending
from poison import engines

NUM_CONNECTIONS = 4096
PATH = "/v1/completions"
LONG = {"max_tokens": 1900, "ignore_eos": True, "stream": True}
SCHEDULES = {
    "none": ("--share-policy", "none"),
    "fcfs": (),
    "sjf": ("--scheduling-policy", "sjf"),
    "preemptive": ("--mode", "preemptive"),
}
Body = Callable[[int], dict[str, object]]


@contextlib.asynccontextmanager
async def flooding(url: str, num_clients: int, body: Body) -> AsyncIterator[Counter[str]]:
    """Send requests of the stranger, one after the other on each connection, while the block runs."""
    ends: Counter[str] = Counter()
    serial = itertools.count()

    async def forever(session: aiohttp.ClientSession, _: int) -> None:
        while True:
            try:
                async with session.post(url + PATH, json=body(next(serial))) as got:
                    ends[str(got.status)] += 1
                    async for _ in got.content.iter_any():
                        pass
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                ends[type(error).__name__] += 1
            await asyncio.sleep(0.01)

    async with sending(forever, num_clients, connector=from_stranger(), timeout=aiohttp.ClientTimeout(total=600)):
        yield ends


async def retries(place: Place) -> dict[str, object]:
    with engines(2, "--busy") as servers, place.routing(*servers) as router:
        alone = await Neighbours(router.url, 4, pause_s=0.3).for_(place.seconds / 2)
        async with flooding(router.url, 8, lambda n: {"prompt": f"poison 503 {n}"}) as ends:
            await asyncio.sleep(2)
            honest = await Neighbours(router.url, 4, pause_s=0.3).for_(place.seconds / 2)
        return {"alone": alone.figures(), "honest": honest.figures(), "stranger": dict(ends)}


async def connections(place: Place) -> dict[str, object]:
    wanted = NUM_CONNECTIONS + 512
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    found: dict[str, object] = {}
    with place.serving() as server, place.routing(server) as router:
        for name, product in (("route", router), ("serve", server)):
            port = int(product.url.rpartition(":")[2])
            with contextlib.ExitStack() as stack:
                for _ in range(NUM_CONNECTIONS):
                    held = socket.create_connection(("127.0.0.1", port), 10, source_address=(STRANGER, 0))
                    stack.enter_context(held).sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
                honest = await Neighbours(product.url, 4).for_(place.seconds / 4)
            found[name] = honest.figures()
            await asyncio.sleep(1)
    return found


def schema(_number: int) -> dict[str, object]:
    properties = {f"k{random.random()}": {"type": "string"}}
    named = {"name": "a", "schema": {"type": "object", "properties": properties}}
    return {"prompt": "hi", "max_tokens": 2, "response_format": {"type": "json_schema", "json_schema": named}}


def regex(_number: int) -> dict[str, object]:
    return {"prompt": "hi", "max_tokens": 1, "guided_regex": f"({random.random()}|[a-z]{{50}}){{30}}"}


class Schemas(Neighbours):
    """Honest clients, each with a new schema in every request."""

    async def _forever(self, session: aiohttp.ClientSession, _: int) -> None:
        while True:
            self.body = schema(0)
            began = time.monotonic()
            async with session.post(self.url + self.path, json=self.body) as got:
                await got.read()
                self.ends[str(got.status)] += 1
                self.seconds.append(time.monotonic() - began)
            await asyncio.sleep(self.pause_s)


async def grammars(place: Place) -> dict[str, object]:
    with place.serving() as server:
        alone = await Schemas(server.url).for_(place.seconds / 2)
        async with flooding(server.url, 96, regex) as ends:
            await asyncio.sleep(2)
            honest = await Schemas(server.url).for_(place.seconds / 2)
        return {"alone": alone.figures(), "honest": honest.figures(), "stranger": dict(ends)}


async def choices(place: Place) -> dict[str, object]:
    has_shares = (place.source / "moestro/engine/policies/sharing.py").exists()
    schedules = SCHEDULES if has_shares else {"fcfs": ()}
    return {name: await many_choices(place, *flags) for name, flags in schedules.items()}


async def many_choices(place: Place, *flags: str) -> dict[str, object]:
    with place.serving(*flags) as server:
        alone = await Neighbours(server.url, 3).for_(place.seconds / 4)
        async with flooding(server.url, 32, lambda _: {"prompt": "def f(x):", "n": 128, **LONG}) as ends:
            await asyncio.sleep(2)
            honest = await Neighbours(server.url, 3).for_(place.seconds)
        return {"alone": alone.figures(), "honest": honest.figures(), "stranger": dict(ends)}


async def unread(place: Place) -> dict[str, object]:
    body = json.dumps({"prompt": ["def f(x):"] * 8, "n": 128, "logprobs": 20, **LONG}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    flags = ("--device", "paced:h100", "--max-num-seqs", "1024")
    with place.serving(*flags) as server, contextlib.ExitStack() as stack:
        assert server.process is not None, "the server was started here"
        port, pid = int(server.url.rpartition(":")[2]), server.process.pid
        before = most = resident_bytes(pid)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.bind((STRANGER, 0))
            client.connect(("127.0.0.1", port))
            client.sendall(head % len(body) + body)
        ends_at_s = time.monotonic() + place.seconds
        while time.monotonic() < ends_at_s:
            most = max(most, resident_bytes(pid))
            await asyncio.sleep(0.2)
        return {"mb_before": before >> 20, "most_mb": most >> 20}


KINDS = {
    "retries": retries, "connections": connections, "grammars": grammars, "choices": choices, "unread": unread,
}  # fmt: skip


async def attack(place: Place) -> dict[str, object]:
    """Run each kind in turn, on new servers."""
    return {name: await KINDS[name](place) for name in place.only or KINDS}


if __name__ == "__main__":
    run(attack, __doc__)
