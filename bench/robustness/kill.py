"""Checks the requests of a server under load when an engine is killed, and after one and two SIGTERMs to the server.

    # Starts `moestro serve --engines 2` itself
    python bench/robustness/kill.py [--rounds 5] [--json bench/results/robustness/kill.json]

The loads are open Poisson loads, half of them streams. An engine gets SIGKILL in three configurations:

* float32: every answer, stream or not, equals one of an undisturbed server to the character.
* bfloat16: streams that had begun on the dead engine end with an error event; all other answers are complete.
* bfloat16 with --resume-streams: every answer is complete; the text after the kill may differ.

The script also prints the pause of the streams that continued. Answers are compared with those of the same requests
alone and under an undisturbed load. Both are needed, because even in float32 a token depends on the batch size where
two candidates are within about 1e-5 of each other.

After SIGTERM the server answers every accepted request and refuses later ones. After a second SIGTERM it ends at once,
and leaves no process behind.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.completions import TOKENS, Answer, ask, bodies, judge, session
from shared.results import make_parser, save
from shared.server import Server, moestro

PORT, ENGINES, RATE, SECONDS = 8194, 2, 12.0, 5.0
HANGS_S = 60
BODIES = bodies()
WAYS = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "bfloat16_resume_streams": ("--dtype", "bfloat16", "--resume-streams"),
}


async def undisturbed(url: str, seed: int) -> list[set[str]]:
    """Return the undisturbed texts of each body, alone and under the load of `seed`."""
    async with session(HANGS_S) as client:
        texts = [{(await ask(client, url, body, stream=False)).text} for body in BODIES]
    for which, answer in await load(url, seed):
        texts[which].add(answer.text)
    return texts


async def load(url: str, seed: int) -> list[tuple[int, Answer]]:
    """Send one load, and return its answers, each with the number of its body."""
    rng, sent = random.Random(seed), []
    async with session(HANGS_S) as client:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            which = rng.randrange(len(BODIES))
            task = asyncio.create_task(ask(client, url, BODIES[which], stream=rng.random() < 0.5))
            sent.append((which, task))
            await asyncio.sleep(rng.expovariate(RATE))
        return [(which, await task) for which, task in sent]


async def disturbed(
    server: Server, seed: int, disturb: Callable[[], None]
) -> tuple[list[tuple[int, Answer]], float, float]:
    """Send one load, and run `disturb` in a thread in its middle.

    Returns:
        The answers, the start of `disturb`, and its duration in seconds.
    """

    async def later() -> tuple[float, float]:
        await asyncio.sleep(SECONDS / 2)
        began = time.monotonic()
        await asyncio.to_thread(disturb)
        return began, time.monotonic() - began

    answers, (began, took_s) = await asyncio.gather(load(server.url, seed), later())
    return answers, began, took_s


def start(*flags: str) -> object:
    return moestro(PORT, "--engines", str(ENGINES), "--log-level", "error", *flags, OMP_NUM_THREADS="1")


def kill_an_engine(seed: int, way: str) -> dict[str, object]:
    """Kill one engine under load; report the ends of requests and the time until the engine is replaced."""
    with start(*WAYS[way]) as server:
        victim = server.engines()[seed % ENGINES]
        texts = asyncio.run(undisturbed(server.url, seed))

        def kill() -> None:
            victim.kill()
            while victim in (left := server.engines()) or len(left) < ENGINES or not server.all_ready():
                time.sleep(0.05)

        answers, killed_at, restarted_s = asyncio.run(disturbed(server, seed, kill))
        server.wait_until_idle()
        num_resumed = int(sum(server.samples("moestro:streams_resumed_total")))
        num_moved = int(sum(server.samples("moestro:requests_moved_total")))
    ends = Counter(judge(answer, texts[which] if way == "float32" else None) for which, answer in answers)
    # The streams with the longest pause are those that continued on another engine.
    stalls = sorted((answer.longest_gap_s(killed_at) for _, answer in answers), reverse=True)[:num_resumed]
    return {
        "ends": dict(ends),
        "texts_of_a_body_undisturbed": max(map(len, texts)),
        "requests_moved": num_moved,
        "streams_resumed": num_resumed,
        "stall_s": {"median": round(stalls[len(stalls) // 2], 2), "max": round(stalls[0], 2)} if stalls else None,
        "engine_back_after_s": round(restarted_s, 1),
    }


def stop(seed: int, *, twice: bool) -> dict[str, object]:
    """Send SIGTERM under load, once or twice; report the ends of requests and the time until all processes end."""
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

        answers, _, gone_s = asyncio.run(disturbed(server, seed, terminate))
        ends = Counter(judge(answer, None) for _, answer in answers)
        return {"ends": dict(ends), "exit_code": server.process.wait(), "gone_after_s": round(gone_s, 2)}


def broken_promises(result: dict[str, Any]) -> list[str]:
    """Return the ends that break a promise of the server."""
    never = ("LOST", "DIFFERS", "refused", "not connected", "cut off")
    found = []
    for way in WAYS:
        bad = never if way == "bfloat16" else (*never, "error event")
        found += [f"{way}: {end}" for run in result["sigkill"][way] for end in run["ends"] if end.startswith(bad)]
    return found + [end for run in result["sigterm"] for end in run["ends"] if end.startswith(("LOST", "cut off"))]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    conditions = run_record("measured")
    result: dict[str, Any] = {
        "engines": ENGINES,
        "requests_per_s": RATE,
        "max_tokens": TOKENS,
        "sigkill": {way: [kill_an_engine(seed, way) for seed in range(args.rounds)] for way in WAYS},
        "sigterm": [stop(seed, twice=False) for seed in range(args.rounds)],
        "sigterm_twice": [stop(seed, twice=True) for seed in range(args.rounds)],
    }
    print(json.dumps(result, indent=1))
    assert not (broken := broken_promises(result)), broken
    save(args.json, conditions, result)


if __name__ == "__main__":
    main()
