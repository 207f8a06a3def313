"""Checks that clients that disconnect at random moments leave no state in the server.

    # Starts `moestro serve`
    python bench/robustness/disconnects.py [--clients 1000] [--json bench/results/robustness/disconnects.json]

Each client disconnects at a random moment: within its headers or body, while its prompt is prepared, while it waits,
between two tokens, or just after the end. Afterwards no request may run or wait, and no KV block may be held.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save
from shared.server import moestro

PORT, ENGINES = 8193, 2


def request(rng: random.Random) -> bytes:
    fields = {
        "prompt": "def f(x):\n" * rng.choice([1, 10, 40]),
        "max_tokens": rng.choice([1, 20, 200]),
        "stream": rng.random() < 0.7,
        "ignore_eos": True,
    }
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def leave_early(host: str, port: int, rng: random.Random) -> str:
    """Send a request, wait, disconnect, and return how far the exchange came."""
    data = request(rng)
    num_sent = rng.choice([10, len(data) // 2, len(data) - 1, *[len(data)] * 7])
    patience_s = rng.choice([0.0, 0.001, 0.01, 0.1, 0.5, 2.0])
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(data[:num_sent])
    answer = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while piece := await reader.read(4096):
                answer += piece
    writer.transport.abort()
    if num_sent < len(data):
        return "left before its request was whole"
    if not answer:
        return "left before the first byte"
    is_whole = answer.endswith((b"0\r\n\r\n", b"}"))
    return "left after the end" if is_whole else "left in mid-answer"


async def leave_all(url: str, count: int, at_once: int, seed: int) -> Counter:
    place, rng = urlsplit(url), random.Random(seed)
    slots, ends = asyncio.Semaphore(at_once), Counter()

    async def one(own: random.Random) -> None:
        async with slots:
            ends[await leave_early(place.hostname or "", place.port or 80, own)] += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(one(random.Random(rng.random())))
    return ends


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    conditions = run_record("measured")
    with moestro(PORT, "--engines", str(ENGINES), "--log-level", "warning", OMP_NUM_THREADS="1") as server:
        began = time.monotonic()
        ends = asyncio.run(leave_all(server.url, args.clients, args.at_once, args.seed))
        left = time.monotonic()
        server.wait_until_idle()
        idle = time.monotonic()
    result = {
        "engines": ENGINES,
        "clients": args.clients,
        "at_once": args.at_once,
        "seed": args.seed,
        "ends": dict(ends.most_common()),
        "seconds": round(left - began, 1),
        "idle_after_s": round(idle - left, 3),
    }
    print(json.dumps(result, indent=1))
    save(args.json, conditions, result)


if __name__ == "__main__":
    main()
