"""What becomes of requests when an engine is killed under load, when the server is told to stop, and when told twice.

    # Starts `moestro serve --engines 2` itself
    python bench/robustness/kill.py [--rounds 5] [--json bench/results/robustness/kill.json]

Open Poisson loads, half of them streams. SIGKILL of an engine, in three ways of serving:

* float32: every answer, stream or not, is one that is given when nothing happens, to the character.
* bfloat16: streams that had begun on the dead engine end with an error event; all others are answered whole.
* bfloat16 with --resume-streams: every answer is whole; what follows the kill may differ.

How long the streams that went on stood still is printed too. Answers are compared with those of the same requests
alone and under a load in which nothing happens: even in float32 a token depends on the size of the batch where two
candidates are within about 1e-5 of each other, and then there are two answers.

SIGTERM: whatever was accepted is answered, later requests are refused. A second SIGTERM: the server is gone at once,
and no process is left.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save
from shared.server import Server, moestro

PORT, ENGINES, RATE, SECONDS = 8194, 2, 12.0, 5.0
TOKENS, HANGS_S = 200, 60
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "presence_penalty": 0.5},
]
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **sampling}
    for prompt in ("import", "def f(x):", "class A:")
    for sampling in SAMPLING
]
WAYS = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "bfloat16_resume_streams": ("--dtype", "bfloat16", "--resume-streams"),
}


@dataclass
class Answer:
    """What came back for one request: how it ended, its text, its tokens by the server's count, when chunks came."""

    end: str = "LOST: a stream that ends without an end"
    text: str = ""
    num_tokens: int = 0
    chunk_times: list[float] = field(default_factory=list)


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], *, stream: bool) -> Answer:
    """Send one request."""
    answer = Answer()
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    try:
        async with session.post(f"{url}/v1/completions", json=body | options) as response:
            if response.status != 200:
                answer.end = f"refused with {response.status}"
            elif stream:
                await read(response, answer)
            else:
                take(answer, await response.json())
                answer.end = "answered whole"
    except TimeoutError:
        answer.end = "LOST: it hangs"
    except aiohttp.ClientError:
        answer.end = "cut off after it had begun" if answer.chunk_times else "not connected"
    return answer


async def read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Collect a stream."""
    async for line in response.content:
        if line.startswith(b'data: {"error"'):
            had_begun = bool(answer.chunk_times)
            answer.end = "error event after it had begun" if had_begun else "LOST: an error before it had begun"
            return
        if line.strip() == b"data: [DONE]":
            answer.end = "answered whole"
        elif line.startswith(b"data: "):
            answer.chunk_times.append(time.monotonic())
            take(answer, json.loads(line[6:]))


def take(answer: Answer, said: dict[str, Any]) -> None:
    """Add a chunk, or a whole answer."""
    answer.text += "".join(choice["text"] for choice in said["choices"])
    answer.num_tokens = (said.get("usage") or {}).get("completion_tokens", answer.num_tokens)


def judge(answer: Answer, expected: set[str] | None) -> str:
    """How a request ended, in words that are counted. `expected`: its undisturbed texts; None: it may differ."""
    if answer.end != "answered whole":
        return answer.end
    if answer.num_tokens != TOKENS:
        return f"LOST or DOUBLED: {answer.num_tokens} tokens of {TOKENS}"
    if expected is not None and answer.text not in expected:
        return "DIFFERS from all undisturbed answers"
    return answer.end


def session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=HANGS_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def undisturbed(url: str, seed: int) -> list[set[str]]:
    """The texts of each body when nothing happens, alone and under the load of `seed`."""
    async with session() as client:
        texts = [{(await ask(client, url, body, stream=False)).text} for body in BODIES]
    for which, answer in await load(url, seed):
        texts[which].add(answer.text)
    return texts


async def load(url: str, seed: int) -> list[tuple[int, Answer]]:
    """The answers to one load, each with the number of its body."""
    rng, asked = random.Random(seed), []
    async with session() as client:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            which = rng.randrange(len(BODIES))
            task = asyncio.create_task(ask(client, url, BODIES[which], stream=rng.random() < 0.5))
            asked.append((which, task))
            await asyncio.sleep(rng.expovariate(RATE))
        return [(which, await task) for which, task in asked]


async def disturbed(
    server: Server, seed: int, disturb: Callable[[], None]
) -> tuple[list[tuple[int, Answer]], float, float]:
    """One load, in whose middle `disturb` runs in a thread; the answers, when that began, and the seconds it took."""

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
    """SIGKILL of one of the engines; how requests ended, and how long it took until there were as many as before."""
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
    # Of the streams that were open, those that went on elsewhere stood still for longest.
    stalls = sorted((stall_s(answer, killed_at) for _, answer in answers), reverse=True)[:num_resumed]
    return {
        "ends": dict(ends),
        "texts_of_a_body_undisturbed": max(map(len, texts)),
        "requests_moved": num_moved,
        "streams_resumed": num_resumed,
        "stall_s": {"median": round(stalls[len(stalls) // 2], 2), "max": round(stalls[0], 2)} if stalls else None,
        "engine_back_after_s": round(restarted_s, 1),
    }


def stall_s(answer: Answer, moment: float) -> float:
    """The longest gap between two chunks of which the second came after `moment`; 0 without such."""
    gaps = zip(answer.chunk_times, answer.chunk_times[1:], strict=False)
    return max((after - before for before, after in gaps if after > moment), default=0.0)


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

        answers, _, gone_s = asyncio.run(disturbed(server, seed, terminate))
        ends = Counter(judge(answer, None) for _, answer in answers)
        return {"ends": dict(ends), "exit_code": server.process.wait(), "gone_after_s": round(gone_s, 2)}


def broken_promises(result: dict[str, Any]) -> list[str]:
    """Ends that should not be."""
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
