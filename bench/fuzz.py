"""Random requests, valid and broken, against a server: no 500, nothing hangs, and nothing is left running at the end.

    python bench/fuzz.py [--requests 10000] [--json bench/results/fuzz.json]      # starts `moestro serve` itself

Every request is a function of (seed, number): fields drawn from values that are right, at the edge, of a wrong type or
out of range, some left out, some invented; some bodies are then cut, flipped or not JSON at all; some clients hang up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path

import aiohttp
import serving

from moestro.serve.protocol import ChatFields, CompletionFields
from moestro.serve.text_api import DetokenizeFields, TokenizeFields

PORT, USERS = 8191, 16
URL = f"http://127.0.0.1:{PORT}"
JUNK = [None, True, False, -1, 0, 1, 1.5, 2**31, 2**63, -(2**70), "", "x", "\ud7ff", [], {}, [[]], [None], {"a": 1}]
GOOD: dict[str, list[object]] = {
    "model": ["moestro-demo"],
    "max_tokens": [1, 2, 4],
    "temperature": [0, 0.7, 2],
    "top_p": [0.1, 1],
    "top_k": [-1, 0, 5],
    "min_p": [0, 0.2],
    "seed": [0, -5, 2**63 - 1],
    "stop": ["a", ["x", "yz"], None],
    "n": [1, 2],
    "stream": [True, False],
    "presence_penalty": [-2, 0.5],
    "frequency_penalty": [0, 2],
    "repetition_penalty": [1, 1.3],
    "logit_bias": [{"5": 10}, {}],
    "min_tokens": [0, 1],
    "ignore_eos": [True, False],
    "stop_token_ids": [[1], []],
    "cache_salt": ["tenant"],
    "user": ["me"],
    "priority": [0],
    "service_class": ["ls", "be"],
    "response_format": [{"type": "text"}],
    "best_of": [1, 2],
    "stream_options": [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}],
    "prompt_logprobs": [0, 2],
}
ONLY = {
    "/v1/completions": {
        "prompt": ["def f(", "é😀\u202e", [5, 6, 7], ["a", "b"], [[5], [6, 7]]],
        "logprobs": [0, 3],
        "echo": [True, False],
    },
    "/v1/chat/completions": {
        "messages": [
            [{"role": "user", "content": "hi"}],
            [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}],
        ],
        "logprobs": [True, False],
        "top_logprobs": [2],
        "max_completion_tokens": [2],
    },
    "/tokenize": {
        "prompt": ["abc"],
        "messages": [[{"role": "user", "content": "hi"}]],
        "return_token_strs": [True],
        "add_generation_prompt": [True, False],
        "add_special_tokens": [True, False],
    },
    "/detokenize": {"tokens": [[5, 6]]},
}
FIELDS = {
    "/v1/completions": CompletionFields,
    "/v1/chat/completions": ChatFields,
    "/tokenize": TokenizeFields,
    "/detokenize": DetokenizeFields,
}
for path, fields in FIELDS.items():  # a field that the API gains is fuzzed, or this ends here
    assert set(fields.__struct_fields__) <= GOOD.keys() | ONLY[path].keys(), path


def make_request(seed: int, number: int) -> tuple[str, bytes, bool]:
    """(path, body, whether the client hangs up early)."""
    rng = random.Random(f"{seed}-{number}")
    path = rng.choices(list(ONLY), [6, 5, 1, 1])[0]
    needed = next(iter(ONLY[path]))
    fields = {needed: rng.choice(ONLY[path][needed]), "max_tokens": 2}
    broken = rng.random() < 0.5
    for name, values in {**GOOD, **ONLY[path]}.items():
        if rng.random() < 0.25:
            fields[name] = rng.choice(JUNK) if broken and rng.random() < 0.4 else rng.choice(values)
    if broken and rng.random() < 0.3:
        fields.pop(rng.choice(list(fields)))
    if broken and rng.random() < 0.2:
        fields[rng.choice(["tools", "suffix", "guided_json", "surprise"])] = rng.choice(JUNK)
    body = json.dumps(fields).encode()
    if broken and rng.random() < 0.3:
        body = spoil(body, rng)
    return path, body, rng.random() < 0.03


def spoil(body: bytes, rng: random.Random) -> bytes:
    match rng.randrange(5):
        case 0:
            return body[: rng.randrange(len(body))]
        case 1:
            at = rng.randrange(len(body))
            return body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
        case 2:
            return b"[" * rng.randrange(1, 5000)
        case 3:
            return body.replace(b"2", b"NaN")
        case _:
            return rng.randbytes(rng.randrange(64))


async def user(numbers: asyncio.Queue[int], seed: int, session: aiohttp.ClientSession, seen: Counter[str]) -> None:
    while not numbers.empty():
        number = numbers.get_nowait()
        path, body, leaves = make_request(seed, number)
        timeout = aiohttp.ClientTimeout(total=0.01 if leaves else 60)
        headers = {"Content-Type": "application/json"}
        try:
            async with session.post(URL + path, data=body, headers=headers, timeout=timeout) as answer:
                text = await answer.text()
        except TimeoutError:
            assert leaves, f"request {number} hangs: {body!r}"
            seen["left"] += 1
            continue
        assert answer.status < 500, f"request {number}: {answer.status} {text[:300]} for {body!r}"
        if answer.status >= 400:
            error = json.loads(text)["error"]
            assert set(error) == {"message", "type", "param", "code"}, f"request {number}: {text[:300]}"
        elif "data: " in text[:6]:
            assert text.rstrip().endswith("data: [DONE]"), f"request {number}: a broken stream"
        seen[str(answer.status)] += 1


async def fuzz(num_requests: int, seed: int) -> Counter[str]:
    numbers: asyncio.Queue[int] = asyncio.Queue()
    for number in range(num_requests):
        numbers.put_nowait(number)
    seen: Counter[str] = Counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(user(numbers, seed, session, seen) for _ in range(USERS)))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="store the result here")
    args = parser.parse_args()
    with serving.moestro(PORT) as server:
        started = time.monotonic()
        seen = asyncio.run(fuzz(args.requests, args.seed))
        seconds = time.monotonic() - started
        server.wait_until_idle()
        assert server.process.poll() is None, "the server ended"
    result = {"kind": "measured", "requests": args.requests, "seed": args.seed, "seconds": round(seconds, 1), **seen}
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
