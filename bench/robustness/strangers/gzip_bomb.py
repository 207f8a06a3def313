"""A stranger sends 1.5 MB of gzip that unpacks to 1.5 GB, without a key and to any path, once and three times at once.

    python bench/robustness/strangers/gzip_bomb.py [--source /path/to/older/src] [--json FILE]

Bombs go to all four ports: clients and operators of the server and of the router. What must hold: each is refused with
a 4xx, a neighbour's `GET /health` waits no longer than without bombs (a few milliseconds), the processes stay as small
as they are, and no log has a traceback. A neighbour with a key sends bombs too; they cost less than 1 MiB of unpacking.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import zlib
from collections import Counter

import aiohttp
from frame import Neighbours, Place, resident_bytes, run
from shared.server import Server, free_port

KEY = "key"
ROUNDS = 2
_BOMB_BYTES = 1536 << 20
JUNK = b"x" * 4096


def bomb() -> bytes:
    """Return gzip of zeros, made piece by piece."""
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    block = bytes(1 << 20)
    return b"".join([*(packer.compress(block) for _ in range(_BOMB_BYTES >> 20)), packer.flush()])


def bodies() -> dict[str, tuple[str, bytes]]:
    """Return what is sent: Content-Encoding and body, by name."""
    big = bomb()
    return {
        "bomb": ("gzip", big),
        "deflate bomb": ("deflate", zlib.compress(bytes(256 << 20))),
        "members": ("gzip", gzip.compress(b"") * 50_000),
        "cut off": ("gzip", big[: len(big) // 2]),
        "junk": ("gzip", JUNK),
        "twice": ("gzip, gzip", gzip.compress(gzip.compress(b"{}"))),
        "not offered": ("br", JUNK),
    }


async def post(session: aiohttp.ClientSession, url: str, coding: str, body: bytes, key: str | None) -> str:
    """Send one body, and return the status of its answer or the kind of failure."""

    async def pieces():
        yield body

    headers = {"Content-Type": "application/json", "Content-Encoding": coding, "Content-Length": str(len(body))}
    headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        async with session.post(url, data=pieces(), headers=headers) as got:
            await got.read()
            return str(got.status)
    except aiohttp.ClientError as error:  # the server may close before it has read a body that it refused
        return type(error).__name__


async def attacked(server: Server, targets: dict[str, str], at_once: int, sent: dict[str, tuple[str, bytes]]):
    """Return the longest wait of a neighbour beside bodies to all targets, and the answers by target and body."""
    assert server.process is not None
    before = resident_bytes(server.process.pid)
    ends: Counter[str] = Counter()
    neighbours = Neighbours(server.url, num_clients=1, pause_s=0.002, path="/health", body=None)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session, neighbours.busy():
        await asyncio.sleep(0.2)
        for (coding, body), (target, url) in itertools.product([*sent.values()] * ROUNDS, targets.items()):
            key = KEY if "with a key" in target else None
            posts = [post(session, url, coding, body, key) for _ in range(at_once)]
            for end in await asyncio.gather(*posts):
                ends[f"{target}: {end}"] += 1
    return {
        "health": neighbours.figures(),
        "answers": dict(sorted(ends.items())),
        "num_5xx": sum(count for end, count in ends.items() if end.rpartition(": ")[2].startswith("5")),
        "grown_mib": (resident_bytes(server.process.pid) - before) >> 20,
    }


def targets_of(url: str, admin_port: int, admin_path: str) -> dict[str, str]:
    """Return what is attacked of a product, by name."""
    return {
        "no key": f"{url}/v1/completions",
        "unknown path": f"{url}/nothing",
        "with a key": f"{url}/v1/completions",
        "operators, no key": f"http://127.0.0.1:{admin_port}{admin_path}",
        "operators, with a key": f"http://127.0.0.1:{admin_port}{admin_path}",
    }


async def attack(place: Place) -> dict[str, object]:
    """Attack a server, then a router before it."""
    sent, port = await asyncio.to_thread(bodies), free_port()
    keys = ("--api-key", KEY, "--admin-api-key", KEY)
    flags = ("--max-num-seqs", "16", "--kv-cache-memory-bytes", "100000000", *keys, "--admin-port", str(port))
    found: dict[str, object] = {"packed_bytes": len(sent["bomb"][1]), "unpacked_bytes": _BOMB_BYTES}
    with place.serving(*flags) as server:
        server.key = KEY
        targets = targets_of(server.url, port, "/admin/placement/apply")
        for at_once in (1, 3):
            found[f"server_{at_once}_at_once"] = await attacked(server, targets, at_once, sent)
        router_port = free_port()
        routed = (*keys, "--admin-port", str(router_port), "--engine-api-key", KEY)
        with place.routing(server, flags=routed) as router:
            targets = targets_of(router.url, router_port, "/admin/engines")
            for at_once in (1, 3):
                found[f"router_{at_once}_at_once"] = await attacked(router, targets, at_once, sent)
    return found


if __name__ == "__main__":
    run(attack, __doc__)
