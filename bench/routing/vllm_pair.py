"""Measures the value of KV events and the cost of a kill, with two real vLLM servers behind `moestro route`.

    python bench/routing/vllm_pair.py --vllm /path/to/venv/bin/vllm [--rounds 5] \\
        [--json bench/results/routing/vllm_pair.json]

The load is conversations of four turns, several at a time; the KV cache of one server holds about half of them. Each
policy has a separate router in front of the same two servers. In every round the routers take turns, and the servers'
caches are emptied before each turn. The conversations of a round are the same for every policy. The hit ratio is vLLM's
own (prefix_cache_hits over prefix_cache_queries), and TTFT is the client's. The router's predictions are listed too, as
predicted over found tokens.

Then all processes of one server get SIGKILL in mid-run. No request may fail whose answer had not begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
import shared.vllm
from shared.models import DEMO
from shared.results import make_parser, save
from shared.server import MOESTRO, Server, started
from shared.vllm import BLOCK_SIZE

POLICIES = ("round_robin", "lmetric", "moestro")
ROUTE_PORT, ADMIN_PORT, VLLM_PORT, EVENTS_PORT, REPLAY_PORT = 8140, 8150, 8160, 8162, 8164
NUM_BLOCKS = 330
NUM_CONVERSATIONS, NUM_AT_A_TIME, NUM_TURNS, NUM_WORDS, NUM_ANSWER_TOKENS = 10, 4, 4, 400, 32
WORDS = ("def", "return", "class", "self", "value", "list", "index", "name", "path", "import", "raise", "error", "text")
FIGURES = {"hit_ratio": "hit ratio", "ttft_p50_ms": "TTFT p50, ms", "ttft_mean_ms": "TTFT mean, ms"}


@dataclass(frozen=True)
class Turn:
    """The end of one request, and its times."""

    outcome: str
    ttft_s: float = 0.0
    text: str = ""


def vllm(command: str, i: int, log: Path, *more: str) -> contextlib.AbstractContextManager:
    """Start server `i`, with KV events, a small cache and further flags."""
    port, flags = VLLM_PORT + i, shared.vllm.kv_events(EVENTS_PORT + i, REPLAY_PORT + i)
    flags += ["--dtype", "bfloat16", "--num-gpu-blocks-override", str(NUM_BLOCKS), *more]
    return started(
        shared.vllm.command(command, port, *flags),
        port,
        log / f"vllm{i}.log",
        **shared.vllm.environment(command, str(i)),
    )


def router(at: int, policy: str, log: Path, *more: str) -> contextlib.AbstractContextManager:
    """Start `moestro route` with one policy and further flags, in front of both servers."""
    flags = [MOESTRO, "route", "--port", str(ROUTE_PORT + at), "--admin-port", str(ADMIN_PORT + at)]
    flags += ["--tokenizer", str(DEMO), "--block-size", str(BLOCK_SIZE), "--route-policy", policy]
    flags += ["--record", str(log / f"route_{policy}.jsonl")]
    for i in range(2):
        flags += ["--engine", f"e{i}=http://127.0.0.1:{VLLM_PORT + i}"]
        flags += ["--kv-events", f"e{i}=tcp://*:{EVENTS_PORT + i}", "--kv-replay", f"e{i}=tcp://*:{REPLAY_PORT + i}"]
    return started([*flags, *more], ROUTE_PORT + at, log / f"route_{policy}.log")


def read(url: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def figures(url: str) -> dict[str, float]:
    """Read `/metrics`, summed over labels."""
    totals: dict[str, float] = {}
    for name, value in re.findall(r"^([a-z_:]+)(?:\{.*\})? ([0-9.e+-]+)$", read(f"{url}/metrics"), re.MULTILINE):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def prefix_figures() -> tuple[float, float]:
    """Return the hits and queries of both servers since their start, in tokens."""
    both = [figures(f"http://127.0.0.1:{VLLM_PORT + i}") for i in range(2)]
    return tuple(sum(one[f"vllm:prefix_cache_{name}_total"] for one in both) for name in ("hits", "queries"))


def empty_caches() -> None:
    """Empty the caches of both servers. A request follows each, because vLLM reports the change with its next step."""
    for i in range(2):
        url = f"http://127.0.0.1:{VLLM_PORT + i}"
        read(f"{url}/reset_prefix_cache", b"")
        read(f"{url}/v1/completions", json.dumps({"model": "m", "prompt": "x", "max_tokens": 1}).encode())


async def ask(session: aiohttp.ClientSession, url: str, messages: list[dict]) -> Turn:
    """Send one request, and read its stream."""
    body = {
        "model": "m", "messages": messages, "max_tokens": NUM_ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, ttft_s, pieces = time.perf_counter(), 0.0, []
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                return Turn(f"LOST: refused with {answer.status}")
            async for line in answer.content:
                if line.startswith(b'data: {"error"'):
                    return Turn("cut off after it had begun" if pieces else "LOST: an error before it had begun")
                if line.strip() == b"data: [DONE]":
                    return Turn("answered", ttft_s, "".join(pieces))
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    pieces += [choice["delta"].get("content") or "" for choice in choices]
                    ttft_s = ttft_s or ((time.perf_counter() - began) if any(pieces) else 0.0)
    except aiohttp.ClientError as error:
        return Turn("cut off after it had begun" if pieces else f"LOST: {type(error).__name__}")
    return Turn("cut off after it had begun" if pieces else "LOST: a stream without an end")


async def conversations(url: str, seed: int) -> list[Turn]:
    """Run all conversations of a round, and return their turns."""
    at_a_time = asyncio.Semaphore(NUM_AT_A_TIME)

    async def converse(number: int) -> list[Turn]:
        draw, messages, turns = random.Random(1000 * seed + number), [], []
        async with at_a_time:
            for _ in range(NUM_TURNS):
                messages.append({"role": "user", "content": " ".join(draw.choices(WORDS, k=NUM_WORDS))})
                turns.append(await ask(session, url, messages))
                messages.append({"role": "assistant", "content": turns[-1].text})
                if turns[-1].outcome != "answered":
                    break
                await asyncio.sleep(0.05 + 0.2 * draw.random())
        return turns

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        return [turn for turns in await asyncio.gather(*map(converse, range(NUM_CONVERSATIONS))) for turn in turns]


def visit(url: str, seed: int) -> dict[str, float]:
    """Measure one policy in a round."""
    empty_caches()
    time.sleep(0.5)
    hits, queries = prefix_figures()
    before = figures(url)
    turns = asyncio.run(conversations(url, seed))
    assert {turn.outcome for turn in turns} == {"answered"}, Counter(turn.outcome for turn in turns)
    hits, queries = (after - earlier for after, earlier in zip(prefix_figures(), (hits, queries), strict=True))
    after = figures(url)
    ttft_ms = [1e3 * turn.ttft_s for turn in turns]
    foretold, found = (
        after[f"moestro:route_{name}_total"] - before[f"moestro:route_{name}_total"]
        for name in ("predicted_hit_tokens", "hit_tokens")
    )
    return {
        "hit_ratio": hits / queries,
        "ttft_mean_ms": statistics.fmean(ttft_ms),
        "ttft_p50_ms": statistics.median(ttft_ms),
        "ttft_p90_ms": statistics.quantiles(ttft_ms, n=10)[-1],
        "foretold_over_found_tokens": foretold / found if found else 0.0,
        "kv_batches": after["moestro:route_kv_batches_total"] - before["moestro:route_kv_batches_total"],
        "kv_losses": after["moestro:route_kv_losses_total"] - before["moestro:route_kv_losses_total"],
    }


def compare(urls: dict[str, str], rounds: int) -> dict:
    """Measure every policy in every round, in another order each time."""
    runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in urls}
    for seed in range(rounds):
        order = list(urls)[seed % len(urls) :] + list(urls)[: seed % len(urls)]
        for policy in order:
            runs[policy].append(visit(urls[policy], seed))
    first = runs[POLICIES[0]]
    return {
        policy: {
            "rounds": [{name: round(value, 4) for name, value in one.items()} for one in run],
            "over_round_robin": {
                name: _spread([one[name] / base[name] for one, base in zip(run, first, strict=True)])
                for name in FIGURES
            },
        }
        | {name: _spread([one[name] for one in run]) for name in run[0]}
        for policy, run in runs.items()
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def kill_one(url: str, victim: psutil.Process) -> dict:
    """Kill a server in mid-run, and count the ends of the requests."""
    family = [victim, *victim.children(recursive=True)]

    async def disturbed() -> list[Turn]:
        load = asyncio.create_task(conversations(url, 99))
        await asyncio.sleep(2.0)
        for process in family:
            process.kill()
        return await load

    turns = asyncio.run(disturbed())
    return {"ends": dict(Counter(turn.outcome for turn in turns))}


@contextlib.contextmanager
def running(command: str, log: Path) -> Iterator[tuple[list[Server], dict[str, str]]]:
    """Start both servers at once, and a router for each policy."""
    log.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(vllm(command, i, log)) for i in range(2)]
        urls = {policy: stack.enter_context(router(at, policy, log)).url for at, policy in enumerate(POLICIES)}
        time.sleep(2.0)  # until all routers have subscribed
        yield servers, urls


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm", required=True, help="the vllm command")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--logs", type=Path, help="keep what servers and routers say here")
    options = parser.parse_args()
    conditions = run_record("measured")
    with tempfile.TemporaryDirectory() as own, running(options.vllm, options.logs or Path(own)) as (servers, urls):
        result: dict[str, object] = {
            "pinning": "servers, routers and clients share all cores",
            "model": "the demo model, bfloat16, vLLM 0.32 on the CPU, one thread a server",
            "workload": {
                "conversations": NUM_CONVERSATIONS,
                "at_a_time": NUM_AT_A_TIME,
                "turns": NUM_TURNS,
                "words_a_turn": NUM_WORDS,
                "answer_tokens": NUM_ANSWER_TOKENS,
                "block_size": BLOCK_SIZE,
                "blocks_a_server": NUM_BLOCKS,
            },
            "policies": compare(urls, options.rounds),
        }
        result["kill"] = kill_one(urls["lmetric"], psutil.Process(servers[1].process.pid))
    for policy, run in result["policies"].items():  # type: ignore[attr-defined]
        print(policy, {name: run[name] for name in (*FIGURES, "foretold_over_found_tokens", "kv_losses")})
    print(result["kill"])
    save(options.json, conditions, result)


if __name__ == "__main__":
    main()
