"""What becomes of requests when an engine is killed under load, when the server is told to stop, and when told twice.

    python bench/kill.py [--rounds 5] [--json bench/results/kill.json]      # starts `moestro serve --engines 2` itself

Open Poisson loads of streams. SIGKILL: of the requests in hand, those that had begun on the dead engine end with an
error event, all others are answered whole, and none hangs. SIGTERM: whatever was accepted is answered, later ones are
refused. A second SIGTERM: the server is gone at once, and no process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil
import serving

PORT, ENGINES, RATE, SECONDS = 8194, 2, 12.0, 5.0
ASKED = {"prompt": "import", "max_tokens": 200, "stream": True, "ignore_eos": True}
HANGS_S = 60


async def ask(session: aiohttp.ClientSession, url: str) -> str:
    """Send one request; returns how it ended."""
    has_begun = False
    try:
        async with session.post(f"{url}/v1/completions", json=ASKED) as answer:
            if answer.status != 200:
                return f"refused with {answer.status}"
            async for line in answer.content:
                if line.startswith(b'data: {"error"'):
                    return "error event after it had begun" if has_begun else "LOST: an error before it had begun"
                if line.strip() == b"data: [DONE]":
                    return "answered whole"
                has_begun |= line.startswith(b"data: ")
    except TimeoutError:
        return "LOST: it hangs"
    except aiohttp.ClientError:
        return "cut off after it had begun" if has_begun else "not connected"
    return "LOST: a stream that ends without an end"


async def load(url: str, seed: int) -> Counter[str]:
    rng, ends = random.Random(seed), []
    timeout = aiohttp.ClientTimeout(total=HANGS_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            ends.append(asyncio.create_task(ask(session, url)))
            await asyncio.sleep(rng.expovariate(RATE))
        return Counter(await asyncio.gather(*ends))


async def disturbed(server: serving.Server, seed: int, disturb: Callable[[], None]) -> tuple[Counter[str], float]:
    """One load, in the middle of which `disturb` runs in a thread; how requests ended, and the seconds that it took."""

    async def later() -> float:
        await asyncio.sleep(SECONDS / 2)
        began = time.monotonic()
        await asyncio.to_thread(disturb)
        return time.monotonic() - began

    return tuple(await asyncio.gather(load(server.url, seed), later()))


def start() -> object:
    return serving.moestro(PORT, "--engines", str(ENGINES), "--log-level", "error", OMP_NUM_THREADS="1")


def kill_an_engine(seed: int) -> dict[str, object]:
    """SIGKILL of one of the engines; how requests ended, and how long it took until there were as many as before."""
    with start() as server:
        front = psutil.Process(server.process.pid)
        victim = front.children(recursive=True)[seed % ENGINES]

        def kill() -> None:
            victim.kill()
            while victim in (left := front.children(recursive=True)) or len(left) < ENGINES or not server.all_ready():
                time.sleep(0.05)

        ends, restarted_s = asyncio.run(disturbed(server, seed, kill))
        server.wait_until_idle()
    return {"ends": dict(ends), "engine_back_after_s": round(restarted_s, 1)}


def stop(seed: int, *, twice: bool) -> dict[str, object]:
    """SIGTERM in mid-load, and a second one at once; how requests ended, and how long the processes stayed."""
    with start() as server:
        front = psutil.Process(server.process.pid)
        family = [front, *front.children(recursive=True)]

        def terminate() -> None:
            front.terminate()
            if twice:
                time.sleep(0.02)
                front.terminate()
            _, alive = psutil.wait_procs(family, timeout=30)
            assert not alive, f"processes are left: {alive}"

        ends, gone_s = asyncio.run(disturbed(server, seed, terminate))
        return {"ends": dict(ends), "exit_code": server.process.wait(), "gone_after_s": round(gone_s, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="store the result here")
    args = parser.parse_args()
    result: dict[str, object] = {
        "kind": "measured",
        "engines": ENGINES,
        "requests_per_s": RATE,
        "max_tokens": ASKED["max_tokens"],
        "sigkill": [kill_an_engine(seed) for seed in range(args.rounds)],
        "sigterm": [stop(seed, twice=False) for seed in range(args.rounds)],
        "sigterm_twice": [stop(seed, twice=True) for seed in range(args.rounds)],
    }
    print(json.dumps(result, indent=1))
    assert not [end for run in result["sigkill"] for end in run["ends"] if end.startswith("LOST")]
    assert not [end for run in result["sigterm"] for end in run["ends"] if end.startswith(("LOST", "cut off"))]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
