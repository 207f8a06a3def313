"""Compares each answer of a busy server, to the last bit, with that of the same request alone.

    # Starts the servers itself; about half a minute for each way
    python bench/robustness/equal_bits.py [--requests 120] [--seed 0] [--ways NAME ...] [--model DIRECTORY] \\
        [--json bench/results/robustness/equal_bits.json]

A reference server computes one request at a time, without a prefix cache, in one engine. Then each way serves the same
requests in another order, with random arrivals and clients that leave early: in batches, in chunks, with scarce blocks,
in all modes, while experts move, and while engines and workers get SIGKILL. Whole answers are compared as JSON, except
for ids, times and cached tokens: texts, token ids, log probabilities of answers and prompts, and reasons of ends. Of
streams, texts and token ids are compared.

Requests draw their prompts (token ids and texts, 1 to 300 tokens, many with a common beginning), lengths, sampling
parameters, penalties, `n`, `echo`, log probabilities and structured output from the seed. The kernels are Moestro's own
in bfloat16, and the script demands a banner without exceptions; --dtype float32 with near-ties would prove less.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.completions import session
from shared.results import make_parser, save
from shared.server import Server, free_port, moestro

PATIENCE_S, RETRY_S = 300, 0.5
LONGEST_PROMPT, VOCABULARY, FIRST_TOKEN = 300, 4000, 3
EXACT = "a request's logits do not depend on the batch"
BASE = ("--kernels", "own", "--dtype", "bfloat16", "--log-level", "error")
SCARCE = ("--num-gpu-blocks-override", "25", "--max-model-len", "400", "--max-num-seqs", "24")
PLACING = ("--placement-policy", "eplb", "--placement-interval", "20", "--placement-payback-horizon", "0",
           "--placement-max-bytes-per-step", "40000")  # fmt: skip
Request = tuple[str, dict[str, Any]]  # path and body
DIFFERS_BY_NATURE = {"id", "created", "created_at", "request_id", "prompt_tokens_details", "system_fingerprint"}
REQUESTS_A_SECOND, REQUESTS_A_SECOND_UNDER_KILLS = 30.0, 4.0
KILL_EVERY_S = (6.0, 9.0)  # an engine loads in about 5 s


@dataclass(frozen=True, slots=True)
class Way:
    """A server that is compared.

    Attributes:
        flags: its flags.
        victims: beginning of the names of processes that get SIGKILL; None means none.
    """

    flags: tuple[str, ...] = ()
    victims: str | None = None


WAYS = {
    "batches": Way(),
    "chunks": Way(("--max-num-batched-tokens", "17", "--max-num-seqs", "16")),
    "small blocks": Way(("--block-size", "4", "--max-num-batched-tokens", "70", "--max-num-seqs", "64")),
    "two threads": Way(("--threads", "2")),
    "scarce blocks": Way(SCARCE),
    "scarce blocks, host memory": Way((*SCARCE, "--kv-offloading-size", "0.05")),
    "prefill first": Way(("--batch-policy", "prefill_first", "--scheduling-policy", "sjf")),
    "preemptive": Way(("--mode", "preemptive", "--step-policy", "defrag:max_attention_rows=7,max_expert_rows=5")),
    "layered prefill": Way(("--mode", "preemptive", "--step-policy", "layered_prefill:num_groups=3")),
    "engines killed": Way(("--engines", "2", "--max-num-seqs", "8"), victims=""),
    "ep, moving": Way(("--mode", "ep", "--engines", "2", "--num-redundant-experts", "4", *PLACING)),
    "async, moving": Way(("--mode", "async", "--experts", "2", "--num-redundant-experts", "8", *PLACING)),
    "async, experts killed": Way(("--mode", "async", "--experts", "2", "--expert-copies", "2"), victims="experts-"),
}


def make_requests(seed: int, count: int) -> list[Request]:
    """Make requests: path and body of each."""
    rng = random.Random(seed)
    stems = [[rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length)] for length in (40, 90, 160, 250)]
    return [make_request(rng, stems) for _ in range(count)]


def make_request(rng: random.Random, stems: list[list[int]]) -> Request:
    body: dict[str, Any] = {
        "max_tokens": rng.choice([1, 3, 8, 17, 40, 80]),
        "temperature": rng.choice([0, 0.7, 1]),
        "seed": rng.randrange(1 << 31),
        "ignore_eos": rng.random() < 0.8,
        "return_token_ids": True,
    }
    wishes = {
        "top_p": (0.5, 0.9, 0.99),
        "top_k": (2, 5, 40, 1000),
        "min_p": (0.05,),
        "presence_penalty": (0.5, -0.7),
        "frequency_penalty": (0.4,),
        "repetition_penalty": (1.2,),
        "n": (2, 3),
        "prompt_logprobs": (0, 5),
    }
    body |= {name: rng.choice(values) for name, values in wishes.items() if rng.random() < 0.2}
    if rng.random() < 0.2:
        words = " ".join(rng.choices(("import", "def", "class", "return", "self"), k=rng.randrange(1, 60)))
        body |= {
            "messages": [{"role": "user", "content": words}],
            "logprobs": True,
            "top_logprobs": rng.choice([0, 20]),
        }
        if rng.random() < 0.3:
            body |= {"response_format": {"type": "json_object"}, "ignore_eos": False}
        return "/v1/chat/completions", body
    if rng.random() < 0.7:
        body["logprobs"] = rng.choice([0, 1, 5, 20])
        body["echo"] = rng.random() < 0.2
    shared = rng.choice(stems)[: rng.randrange(1, 250)] if rng.random() < 0.5 else []
    length = rng.choice([1, 2, 7, 15, 16, 17, 32, 33, 100, LONGEST_PROMPT - len(shared)])
    own = [rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(min(length, LONGEST_PROMPT - len(shared)))]
    body["prompt"] = shared + own
    if rng.random() < 0.1 and not body.get("echo"):
        body |= {"structured_outputs": {"regex": "[a-z]{1,8}( [a-z]{1,8}){0,6}"}, "ignore_eos": False}
    return "/v1/completions", body


def essence(answer: Any) -> Any:
    """Return an answer without what differs between two runs."""
    if isinstance(answer, dict):
        return {name: essence(value) for name, value in answer.items() if name not in DIFFERS_BY_NATURE}
    return [essence(each) for each in answer] if isinstance(answer, list) else answer


def first_difference(one: Any, other: Any, at: str = "answer") -> str | None:
    """Name the first place where two answers differ, with both values; None where they are equal."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = [(f"{at}.{name}", one[name], other[name]) for name in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{at}[{i}]", *pair) for i, pair in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other else f"{at}: {str(one)[:200]} and {str(other)[:200]}"
    return next((found for name, *pair in pairs if (found := first_difference(*pair, name))), None)


def streamed(answer: dict[str, Any]) -> dict[int, list[Any]]:
    """Return what a stream can show of a whole answer: text, token ids and reason of the end of each choice."""
    return {
        choice["index"]: [
            choice["text"] if "text" in choice else choice["message"]["content"] or "",
            choice["token_ids"],
            choice["finish_reason"],
        ]
        for choice in answer["choices"]
    }


async def ask(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    """Return the essence of an answer; a request that finds no engine ready is sent again."""
    while True:
        async with client.post(url, json=body) as answer:
            if answer.status != 503:
                return essence(await answer.json())
        await asyncio.sleep(RETRY_S)


async def ask_stream(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    """As `ask`, by a stream whose parts are joined as `streamed` has them; an error event is an answer, too."""
    found: dict[int, list[Any]] = {}
    while True:
        async with client.post(url, json=body | {"stream": True}) as answer:
            if answer.status == 503:
                await asyncio.sleep(RETRY_S)
                continue
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return chunk
                for choice in chunk["choices"]:
                    joined = found.setdefault(choice["index"], ["", [], None])
                    joined[0] += (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""
                    joined[1] += choice.get("token_ids") or []
                    joined[2] = choice.get("finish_reason") or joined[2]
            return found


@contextlib.contextmanager
def start(*flags: str) -> Iterator[Server]:
    """Start a server whose banner promises equal bits."""
    with (
        tempfile.TemporaryDirectory() as folder,
        moestro(free_port(), *BASE, *flags, log=Path(folder) / "log", OMP_NUM_THREADS="1") as server,
    ):
        banner = (Path(folder) / "log").read_text()
        assert EXACT in banner, f"the server does not promise equal bits: {banner}"
        yield server


async def answers_alone(url: str, requests: list[Request]) -> list[Any]:
    async with session(PATIENCE_S) as client:
        return [await ask(client, url + path, body) for path, body in requests]


class Comparison:
    """Serves requests at once, and compares their answers with those alone.

    Attributes:
        num_streams, num_kills: what has happened.
        differences: a line for each answer that differs.
    """

    def __init__(self, server: Server, way: Way, requests: list[Request], alone: list[Any], seed: int) -> None:
        self._server, self._way, self._requests, self._alone = server, way, requests, alone
        self._rng = random.Random(seed)
        self.num_streams = self.num_kills = 0
        self.differences: list[str] = []

    async def run(self) -> None:
        rng, tasks = self._rng, []
        rate = REQUESTS_A_SECOND if self._way.victims is None else REQUESTS_A_SECOND_UNDER_KILLS
        async with session(PATIENCE_S) as client:
            killing = asyncio.create_task(self._kill())
            for number in rng.sample(range(len(self._requests)), len(self._requests)):
                tasks.append(asyncio.create_task(self._compare(client, number)))
                if rng.random() < 0.1:
                    tasks.append(asyncio.create_task(self._leave_early(client, rng.randrange(len(self._requests)))))
                await asyncio.sleep(rng.expovariate(rate) * (rng.random() < 0.5))  # some come together
            await asyncio.gather(*tasks)
            killing.cancel()

    async def _compare(self, client: aiohttp.ClientSession, number: int) -> None:
        path, body = self._requests[number]
        expected, send = self._alone[number], ask
        can_stream = "n" not in body and "prompt_logprobs" not in body and not body.get("echo")
        if can_stream and self._rng.random() < 0.5:
            # A stream with log probabilities or several choices ends when its engine does, as documented.
            body = {name: value for name, value in body.items() if name not in {"logprobs", "top_logprobs"}}
            expected, send = streamed(expected), ask_stream
            self.num_streams += 1
        found = await send(client, self._server.url + path, body)
        if difference := first_difference(expected, found):
            self.differences.append(f"request {number}: {difference}")

    async def _leave_early(self, client: aiohttp.ClientSession, number: int) -> None:
        path, body = self._requests[number]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ask(client, self._server.url + path, body), self._rng.uniform(0.005, 0.3))

    async def _kill(self) -> None:
        while self._way.victims is not None:
            await asyncio.sleep(self._rng.uniform(*KILL_EVERY_S) if self.num_kills else 1.0)
            workers = self._server.workers().items()
            alive = [process for name, process in workers if name.startswith(self._way.victims)]
            if len(alive) > 1:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._rng.choice(alive).kill()
                    self.num_kills += 1


def run_way(name: str, flags: tuple[str, ...], requests: list[Request], alone: list[Any], seed: int) -> dict[str, Any]:
    """Start the server of a way, and compare."""
    way = WAYS[name]
    with start(*flags, *way.flags) as server:
        began = time.monotonic()
        comparison = Comparison(server, way, requests, alone, seed)
        asyncio.run(comparison.run())
        seconds = time.monotonic() - began
        num_preemptions = int(sum(server.samples("vllm:num_preemptions_total")))
        num_hits = int(sum(server.samples("vllm:prefix_cache_hits_total")))
    return {
        "requests": len(requests),
        "streams": comparison.num_streams,
        "differences": comparison.differences,
        "kills": comparison.num_kills,
        "preemptions": num_preemptions,
        "cached_tokens": num_hits,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--model", default="moestro-demo", help="checkpoint with at least 4,000 tokens")
    args = parser.parse_args()
    conditions = run_record("measured")
    flags, requests = ("--model", args.model), make_requests(args.seed, args.requests)
    with start(*flags, "--max-num-seqs", "1", "--no-enable-prefix-caching") as server:
        alone = asyncio.run(answers_alone(server.url, requests))
    refused = [answer for answer in alone if "choices" not in answer]
    assert not refused, refused[0]
    ways = {}
    for name in args.ways:
        ways[name] = run_way(name, flags, requests, alone, args.seed)
        print(f"{name}: {json.dumps(ways[name])}")
    save(args.json, conditions, {"model": args.model, "seed": args.seed, "ways": ways})
    assert not any(way["differences"] for way in ways.values()), "some answers differ"


if __name__ == "__main__":
    main()
