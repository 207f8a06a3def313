"""Requests that are as large as the server allows, a few clients at full rate, of one kind after the other.

    python bench/robustness/strangers/heavy_requests.py [--source OTHER/src] [--only bad_words stop]

What grows with a request is its sender's alone: beside the largest of each kind, the honest clients' median stays
within 1.3 times the median beside requests of the same shape without the kind's field, and `/health` answers at once.
Kinds of long prompts have no such shape; they are compared with small requests of as many bytes. Many choices are
compared with as many sequences in requests of their own. Both are measured in turn, and the ratio is the median of
those of all rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import shutil
import statistics
import sys
from collections import Counter
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))
from frame import Neighbours, Place, from_stranger, run, sending

sys.path.insert(0, str(Path(__file__).parents[2]))
from shared.server import Server

import moestro

SETTLE_S, ROUND_S, ROUNDS, NUM_STRANGERS = 0.5, 2.0, 5, 2
VOCABULARY, CONTEXT = 4096, 32_768
DEMO = Path(moestro.__file__).parent / "assets" / "demo"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """Largest requests of one kind.

    Attributes:
        body: body of a request.
        path: path of the request.
        plain: body of a completion of the same shape without what makes it heavy; None stands for a small completion
            with as many bytes.
        num_plain: clients of the stranger that send `plain`.
    """

    body: Body
    path: str = COMPLETIONS
    plain: Body | None = None
    num_plain: int = NUM_STRANGERS

    def harmless(self, url: str) -> tuple[str, bytes, int]:
        """Return the URL and the body of the request with which this one is compared, and how many clients send it."""
        small = {"prompt": "import os\n", "max_tokens": 1}
        data = json.dumps(self.plain or small).encode()
        return url + COMPLETIONS, data if self.plain else data.ljust(len(json.dumps(self.body))), self.num_plain


def _answer(**fields: Any) -> Body:
    return {"prompt": "import os\n", "max_tokens": 512, "ignore_eos": True, **fields}


def _kinds(vocabulary: int, context: int) -> dict[str, Kind]:
    many = _answer(n=16, max_tokens=256)
    tokens = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    letter, byte = str(tokens["a"]), str(tokens["\u00e2"])  # the second begins a character of three bytes
    words = [f"{i:08d}" for i in range(256)]  # each digit is a token
    long = [i % (vocabulary - 300) + 300 for i in range(1000)]
    messages = [{"role": "user", "content": "hi"}] * 8000
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "description": "d" * 900, "parameters": {"type": "object"}}}
        for i in range(512)
    ]
    few = _answer(prompt=long, n=4, max_tokens=256)
    scored = {"prompt": [long] * 4, "max_tokens": 1}
    stops = ["a" * (508 + i) + "b" + "a" * 511 for i in range(4)]
    return {
        "long_text": Kind({"prompt": "word17 " * 160_000, "max_tokens": 1}),
        "long_word": Kind({"prompt": "a" * 130_000, "max_tokens": 1}),
        "tokenize": Kind({"prompt": "x1 " * 40_000}, path="/tokenize"),
        "detokenize": Kind({"tokens": [301] * context}, path="/detokenize"),
        "messages": Kind({"messages": messages, "max_tokens": 1}, path=CHATS),
        "tools": Kind({"messages": messages[:1], "tools": tools, "max_tokens": 1}, path=CHATS),
        "bad_words": Kind({**many, "bad_words": words, "logit_bias": {}}, plain=many),
        "penalties": Kind(
            {**few, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
            plain=few,
        ),
        "logit_bias": Kind({**many, "logit_bias": {str(300 + i): 1.0 for i in range(300)}}, plain=many),
        "allowed_token_ids": Kind({**many, "allowed_token_ids": list(range(256, vocabulary)) * 12}, plain=many),
        "stop_token_ids": Kind({**many, "stop_token_ids": list(range(300, 1324)), "min_tokens": 256}, plain=many),
        "stop": Kind(
            {**many, "stop": stops, "logit_bias": {letter: 100}, "stream": True}, plain={**many, "stream": True}
        ),
        "logprobs": Kind({**many, "logprobs": 20, "stream": True}, plain={**many, "stream": True}),
        "logprobs_whole": Kind({**many, "logprobs": 20}, plain=many),
        "prompt_logprobs": Kind({**scored, "prompt_logprobs": 20}, plain={**scored, "prompt_logprobs": 0}),
        "unfinished_characters": Kind(
            _answer(logit_bias={byte: 100}, max_tokens=context - 64, stream=True),
            plain=_answer(max_tokens=context - 64, stream=True),
        ),
        "usage_of_each_chunk": Kind(
            _answer(
                n=16,
                max_tokens=128,
                stream=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            ),
            plain=_answer(n=16, max_tokens=128, stream=True),
        ),
        "choices": Kind(  # twice the places of the server
            {"prompt": [long] * 8, "n": 128, "max_tokens": 4}, plain={"prompt": long, "max_tokens": 4}, num_plain=128
        ),
        "salts": Kind(_answer(cache_salt="s" * 1024, user="u" * 1024, max_tokens=16), plain=_answer(max_tokens=16)),
    }


def send_for(url: str, data: bytes, num_clients: int, seconds: float) -> Counter[str]:
    """Send a body again and again from the stranger's clients for `seconds`; returns how the requests ended.

    It runs in a process of its own: sending megabytes would delay the honest clients.
    """
    ends = Counter[str]()

    async def send(session: aiohttp.ClientSession, _: int) -> None:
        while True:
            try:
                async with session.post(url, data=data) as got:
                    text = await got.read()
                    end = str(got.status) if got.status == 200 else f"{got.status} {text[:120]!r}"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                end = type(error).__name__
            ends[end] += 1
            await asyncio.sleep(0.001)

    async def main() -> None:
        options = {"timeout": aiohttp.ClientTimeout(total=60), "headers": {"Content-Type": "application/json"}}
        async with sending(send, num_clients, connector=from_stranger(), **options):
            await asyncio.sleep(seconds)

    asyncio.run(main())
    return ends


async def attack(place: Place) -> dict[str, object]:
    """Run all kinds against one server."""
    model = _long_model(place.directory / "model")
    found: dict[str, object] = {}
    spawning = multiprocessing.get_context("spawn")
    with (
        place.serving("--model", str(model), "--served-model-name", "long") as server,
        ProcessPoolExecutor(1, mp_context=spawning) as sender,
    ):
        for name, kind in _kinds(VOCABULARY, CONTEXT).items():
            if place.only and name not in place.only:
                continue
            found[name] = await _figures(server, kind, sender)
            print(name, found[name], file=sys.stderr, flush=True)
    return found


async def _figures(server: Server, kind: Kind, sender: Executor) -> dict[str, object]:
    base, beside, health = Neighbours(server.url), Neighbours(server.url), _probes(server.url)
    ends, ratios = Counter[str](), list[float]()
    for _ in range(ROUNDS):
        before, _ = await _round(sender, kind.harmless(server.url), base, _probes(server.url))
        await _until_idle(server)
        heavy = (server.url + kind.path, json.dumps(kind.body).encode(), NUM_STRANGERS)
        during, ended = await _round(sender, heavy, beside, health)
        await _until_idle(server)
        ends += ended
        if before and during:
            ratios.append(round(during / before, 2))
    found: dict[str, object] = {"base": base.figures(), "beside": beside.figures(), "health": health.figures()}
    found |= {"strangers": dict(ends), "ratios": sorted(ratios)}
    if ratios:
        found["ratio"] = statistics.median(ratios)
    return found


async def _round(
    sender: Executor, request: tuple[str, bytes, int], honest: Neighbours, probes: Neighbours
) -> tuple[float | None, Counter[str]]:
    """Send honest requests beside the strangers' `request`: its URL, its body and how many clients send it.

    Returns:
        The median duration of the honest requests in seconds, None if none is answered, and the strangers' ends.
    """
    num_before = len(honest.seconds)
    sent = asyncio.get_running_loop().run_in_executor(sender, send_for, *request, SETTLE_S + ROUND_S)
    await asyncio.sleep(SETTLE_S)
    await asyncio.gather(honest.for_(ROUND_S), probes.for_(ROUND_S))
    ends = await sent
    answered = honest.seconds[num_before:]
    return (statistics.median(answered) if answered else None), ends


async def _until_idle(server: Server) -> None:
    """Wait until the strangers' requests are gone; a server that stands still is given a minute."""
    for _ in range(60):
        with contextlib.suppress(OSError, AssertionError):
            await asyncio.to_thread(server.wait_until_idle, 1)
            return
        await asyncio.sleep(1)


def _probes(url: str) -> Neighbours:
    return Neighbours(url, num_clients=1, pause_s=0.02, path="/health", body=None)


def _long_model(directory: Path) -> Path:
    """Make a copy of the demo model with a longer context; its text is nonsense there."""
    shutil.copytree(DEMO, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return directory


if __name__ == "__main__":
    run(attack, __doc__)
