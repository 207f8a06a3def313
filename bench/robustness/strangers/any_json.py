"""A stranger sends whatever JSON allows, and what it does not, to every path that reads JSON.

    python bench/robustness/strangers/any_json.py [--seconds 20] [--seed 0] [--source /path/to/older/src] [--json FILE]

The bodies are valid but for a few parts: integers beyond 64 bits and beyond 4,300 digits, numbers beyond a double,
lone surrogates, deep nesting, repeated keys, control characters, JSON within strings. They go to a server with a real
model, to a router that reads prompts as text, to one that reads them as tokens, and to the operators' ports. What must
hold: each is answered with a status below 500, no stream ends with an internal error, and no log has a traceback.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from random import Random

import aiohttp
from frame import Place, run
from nasty_json import BODIES, nasty_body
from shared.server import free_port

NUM_CLIENTS = 6
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1")
ERROR = re.compile(r"^(\w*(?:Error|Exception)\b[^\n]{0,80})", re.MULTILINE)


async def attack(place: Place) -> dict[str, object]:
    """Send bodies to all ports for `place.seconds`."""
    server_admin, router_admin = free_port(), free_port()
    flags = (
        "--max-num-seqs",
        "16",
        "--kv-cache-memory-bytes",
        "100000000",
        "--admin-port",
        str(server_admin),
        *PARSERS,
    )
    with place.serving(*flags) as server, place.routing(server, flags=("--admin-port", str(router_admin))) as router:
        tokenizer = str(place.source / "moestro" / "assets" / "demo")
        with place.routing(server, flags=("--tokenizer", tokenizer), name="tokenizing") as tokenizing:
            local = "http://127.0.0.1"
            urls = {
                "server": server.url,
                "router": router.url,
                "tokenizing router": tokenizing.url,
                "server's operators": f"{local}:{server_admin}",
                "router's operators": f"{local}:{router_admin}",
            }
            ends = await sent_to(urls, place)
    logs = "\n".join(place.log(name) for name in ("serve", "route", "tokenizing"))
    by_port: dict[str, dict[str, int]] = {}
    for (port, end), count in sorted(ends.items()):
        by_port.setdefault(port, {})[end] = count
    return {
        "seed": place.seed,
        "num_requests": ends.total(),
        "num_5xx": sum(count for (_, end), count in ends.items() if not end.startswith(("2", "4"))),
        "answers": by_port,
        "errors_in_logs": dict(Counter(ERROR.findall(logs)).most_common(10)),
    }


async def sent_to(urls: dict[str, str], place: Place) -> Counter[tuple[str, str]]:
    """Send requests by several clients; return their ends by port."""
    ends: Counter[tuple[str, str]] = Counter()
    until = time.monotonic() + place.seconds

    async def client(number: int) -> None:
        rng = Random(f"{place.seed}-{number}")
        while time.monotonic() < until:
            port = rng.choice(list(urls))
            path = rng.choice([path for path in BODIES if path.startswith("/admin/") == ("operators" in port)])
            ends[port, await post(session, urls[port] + path, nasty_body(rng, path))] += 1

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        await asyncio.gather(*map(client, range(NUM_CLIENTS)))
    return ends


async def post(session: aiohttp.ClientSession, url: str, body: bytes) -> str:
    """Return the status of the answer, or how the request failed."""
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as got:
            text = await got.read()
            return f"{got.status} internal_error" if b"internal_error" in text else str(got.status)
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__


if __name__ == "__main__":
    run(attack, __doc__)
